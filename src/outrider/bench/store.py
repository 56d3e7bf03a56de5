"""The files of a run: its settings in `run.json`, one answer a line in `samples.jsonl`.

A run resumes where it stopped: what has a sample is not measured again. Settings on which samples depend must stay the
same, and so must the processor and the version; methods, tasks, temperatures and batch sizes may change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import files
from ..params import InputError
from ..schema import from_dict
from .types import VERSION, Sample

# Within a folder, each with the option that names it where that is no `--NAME`.
FIXED = ("model", "dtype", "device", "weights", "compile", "tokens", "seed", "threads")
OPTIONS = {"model": "MODEL", "tokens": "--max-new-tokens", "weights": "SPEC@WEIGHTS"}
BEFORE = {"weights": "full"}  # of runs of versions that knew nothing else
PLACE = ("machine", "processor"), ("versions", "outrider")  # in the header: times and texts are theirs
SAME = {
    "methods": "a different method called {!r}; give this one another label",
    "files": "a run with other files of {}; give another --out",
}  # parts of the header to which a resumed run may add, and what it says where they differ


@dataclass
class Store:
    """A run's folder: its settings and samples, appended one by one."""

    folder: Path
    samples: list[Sample] = field(default_factory=list)
    session: int = 0
    header: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, header: dict[str, Any]) -> Store:
        """A new folder, or one with a run of the same settings. Nothing is written before `begin`."""
        files.fillable(folder)
        if (folder / "run.json").exists():
            old = read_header(folder)
            for name in FIXED:
                was, now = (one["arguments"].get(name, BEFORE.get(name)) for one in (old, header))
                if was != now:
                    raise InputError(
                        f"{folder} holds a run with {name} {was}, not {now}; give another --out, or "
                        f"{OPTIONS.get(name, f'--{name}')} as before"
                    )
            for part, name in PLACE:
                was, now = (one.get(part, {}).get(name) for one in (old, header))
                if was is not None and was != now:
                    raise InputError(f"{folder} holds a run with {name} {was}, not {now}; give another --out")
            if old.get("mark", header.get("mark")) != header.get("mark"):
                raise InputError(f"{folder} holds a run with other weights of {header['target']}; give another --out")
            known = {part: _joined(folder, part, old, header) for part in SAME}
            header = {**header, **known, "started": old["started"], "sessions": old["sessions"] + 1}
        header = {"format": VERSION, "sessions": 1, **header}
        return cls(folder, list(read_samples(folder)), session=header["sessions"], header=header)

    def begin(self) -> None:
        """Write the header, after all arguments are checked. Raises InputError if the folder cannot be written."""
        with files.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        files.write(self.folder / "run.json", json.dumps(self.header, indent=1) + "\n")

    def add(self, sample: Sample) -> None:
        files.append(self.folder / "samples.jsonl", json.dumps(asdict(sample), separators=(",", ":")))
        self.samples.append(sample)


def _joined(folder: Path, part: str, old: dict[str, Any], header: dict[str, Any]) -> dict[str, Any]:
    """A part of both headers. Raises InputError where they differ."""
    made: dict[str, Any] = {**old.get(part, {})}
    for name, meaning in header.get(part, {}).items():
        if made.setdefault(name, meaning) != meaning:
            raise InputError(f"{folder} holds {SAME[part].format(name)}")
    return made


def read_header(folder: Path) -> dict[str, Any]:
    """A run's settings. Raises InputError if they are damaged or if another version wrote them."""
    path = folder / "run.json"
    try:
        header: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = header["format"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise InputError(f"{path} is damaged; give another --out") from None
    if version != VERSION:
        raise InputError(
            f"{folder} holds a run of format {version} and this version writes {VERSION}; give another --out"
        )
    return header


def read_samples(folder: Path) -> Iterator[Sample]:
    """The samples of a run; an incomplete last line is dropped from the file, so that appending can go on."""
    path = folder / "samples.jsonl"
    if not path.exists():
        return
    text = path.read_bytes()
    end = text.rfind(b"\n") + 1
    if end < len(text):
        with path.open("r+b") as file:
            file.truncate(end)
    for number, line in enumerate(text[:end].splitlines(), 1):
        try:
            yield from_dict(Sample, json.loads(line))
        except (ValueError, TypeError, AttributeError):
            raise InputError(f"{path}, line {number}, is not a sample; give another --out") from None
