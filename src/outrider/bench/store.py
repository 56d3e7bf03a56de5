"""The files of a run: `run.json` has its settings, `samples.jsonl` one answer a line, appended.

A run resumes where it stopped: what has a sample is not measured again. Settings that change what a sample means must
stay the same; methods, tasks, temperatures and batch sizes may change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import files
from ..params import InputError
from .types import VERSION, Sample

FIXED = ("model", "dtype", "device", "compile", "tokens", "seed", "threads")  # within a folder
OPTIONS = {"model": "MODEL", "tokens": "--max-new-tokens"}  # the others are named alike


@dataclass
class Store:
    """A run's folder: its settings and samples, written as they come."""

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
                was, now = old["arguments"].get(name), header["arguments"].get(name)
                if was != now:
                    raise InputError(
                        f"{folder} holds a run with {name} {was}, not {now}; give another --out, or "
                        f"{OPTIONS.get(name, f'--{name}')} as before"
                    )
            known = old.get("methods", {})
            for name, meaning in header.get("methods", {}).items():
                if known.setdefault(name, meaning) != meaning:
                    raise InputError(f"{folder} holds a different method called {name!r}; give this one another label")
            header = {**header, "methods": known, "started": old["started"], "sessions": old["sessions"] + 1}
        header = {"format": VERSION, "sessions": 1, **header}
        return cls(folder, list(read_samples(folder)), session=header["sessions"], header=header)

    def begin(self) -> None:
        """Write the header, once all arguments are checked. Raises InputError if the folder cannot be written."""
        with files.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        files.write(self.folder / "run.json", json.dumps(self.header, indent=1) + "\n")

    def said(self) -> str:
        """What is kept, in words."""
        count = len(self.samples)
        return f"{count} answers are kept in {self.folder}" if count != 1 else f"1 answer is kept in {self.folder}"

    def add(self, sample: Sample) -> None:
        files.append(self.folder / "samples.jsonl", json.dumps(sample.document(), separators=(",", ":")))
        self.samples.append(sample)


def read_header(folder: Path) -> dict[str, Any]:
    """A run's settings. Raises InputError if the folder has none, or those of another version."""
    place = folder / "run.json"
    try:
        found: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        version = found["format"]
    except FileNotFoundError:
        raise InputError(f"{folder} holds no benchmark run; give the folder that --out named") from None
    except (json.JSONDecodeError, KeyError, TypeError):
        raise InputError(f"{place} is damaged; give another --out") from None
    if version != VERSION:
        raise InputError(
            f"{folder} holds a run of format {version} and this version writes {VERSION}; give another --out"
        )
    return found


def read_samples(folder: Path) -> Iterator[Sample]:
    """The samples of a run; an incomplete last line is dropped from the file, so that appending can go on."""
    place = folder / "samples.jsonl"
    if not place.exists():
        return
    text = place.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        with place.open("r+b") as file:
            file.truncate(whole)
    for number, line in enumerate(text[:whole].splitlines(), 1):
        try:
            yield Sample.read(json.loads(line))
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{place}, line {number}, is not a sample; give another --out") from None
