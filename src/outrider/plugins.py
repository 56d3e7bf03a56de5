"""Parts by name: files of this package, and modules of other packages.

    kind         our files                    group of entry points      a module has
    drafters     drafters/NAME.py             outrider.drafters          load, and NETWORK if it has weights
    objectives   training/objectives/NAME.py  outrider.objectives        OPTIMISER, build
    peers        bench/peers/NAME.py          outrider.bench.peers       load

The file's name is the part's name (`draft_lm.py` is `draft-lm`); an entry point's name is that of its module. A file of
ours takes precedence over an entry point of the same name, and of several entry points the first. Entry points are read
from the metadata that is written when a package is installed, so an editable install must be installed again after its
entry points were changed. They are read once in a process, for each `sys.path`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from .params import InputError

Kind = Literal["drafters", "objectives", "peers"]

FOLDERS: dict[Kind, str] = {"drafters": "drafters", "objectives": "training.objectives", "peers": "bench.peers"}
GROUPS: dict[Kind, str] = {
    "drafters": "outrider.drafters",
    "objectives": "outrider.objectives",
    "peers": "outrider.bench.peers",
}
MIX = " + "  # between the SPECs of a mix
NEEDS: dict[Kind, tuple[str, ...]] = {"drafters": ("load",), "objectives": ("OPTIMISER", "build"), "peers": ("load",)}


def names(kind: Kind) -> list[str]:
    """The parts there are, ours and those of installed packages, in order of the alphabet. Nothing is imported."""
    return sorted({*_files(kind), *_entries(kind)})


def parts(spec: str) -> list[str]:
    """The SPECs of a mix, `SPEC + SPEC`; of any other SPEC itself alone.

    Raises:
        InputError: one of them is empty.
    """
    specs = [part.strip() for part in spec.split(MIX)]
    if not all(specs):
        raise InputError(f"{spec!r} names no drafter beside a +; write a mix as in 'lookup + model:DIR'")
    return specs


def lacking(drafter: str) -> str:
    """The sentence for an unknown drafter."""
    if "+" in drafter:
        return f"there is no drafter {drafter!r}; a mix has spaces around its +, as in 'lookup + model:DIR'"
    if (Path(drafter) / "best" / "config.json").is_file():
        return f"{drafter} is the folder of a training; its drafter is {drafter}/best"
    return f"there is no drafter {drafter!r}; choose one of {', '.join(names('drafters'))}, as in lookup or model:DIR"


def unnamed(drafter: str) -> str:
    """The sentence for a drafter that is named without its weights."""
    return f"{drafter} needs trained weights; name their folder, as in {drafter}:DIR or {drafter}:demo"


def module(kind: Kind, name: str) -> Any:
    """The module of a part.

    Raises:
        InputError: there is no such part, or another package's module cannot be imported or lacks what it must have.
    """
    if name in _files(kind):
        return importlib.import_module(f"outrider.{FOLDERS[kind]}.{name.replace('-', '_')}")
    entry = _entry(kind, name)
    try:
        loaded: Any = entry.load()
    except (ImportError, AttributeError) as error:
        raise InputError(f"{name} of the entry points {GROUPS[kind]} cannot be imported ({error})") from None
    if lacking := [need for need in NEEDS[kind] if not hasattr(loaded, need)]:
        raise InputError(f"{entry.value}, an entry point of {GROUPS[kind]}, lacks {', '.join(lacking)}")
    return loaded


def ours(kind: Kind) -> list[str]:
    """The parts that are files of this package."""
    return sorted(_files(kind))


def check(kind: Kind, name: str) -> None:
    """Raises InputError if there is no such part."""
    if name not in _files(kind):
        _entry(kind, name)


def check_options(kind: Kind, name: str, options: Iterable[str]) -> None:
    """Refuse an option that a part does not have, by the arguments of its function, read from its source.

    Nothing is imported. A function that is not written out there is left to the check that follows its import.
    """
    of = {"drafters": "load", "objectives": "build", "peers": "load"}[kind]
    made = [f for f in _source(kind, name).body if isinstance(f, ast.FunctionDef) and f.name == of]
    if not made:
        return
    arguments = made[0].args.args + made[0].args.kwonlyargs
    known = [a.arg for a in arguments if a.arg not in ("target", "tokenizer", "path", "models", "documents")]
    for option in options:
        if option not in known:
            raise InputError(f"{name} has no option {option!r}; it has {', '.join(known) or 'none'}")


def summary(kind: Kind, name: str) -> str:
    """The first sentence of a part's docstring, read from its source."""
    text = ast.get_docstring(_source(kind, name))
    sentence = re.split(r"(?<!et al)\.\s", (text or "").split("\n\n")[0] + " ", maxsplit=1)[0]
    return " ".join(sentence.split()).rstrip(".")


def _source(kind: Kind, name: str) -> ast.Module:
    """A part's source; an empty one where there is none to read."""
    file = _files(kind).get(name)
    if file is None:
        with suppress(Exception):  # a package that is gone, or fails while it is imported
            spec = importlib.util.find_spec(_entry(kind, name).module)
            file = Path(spec.origin) if spec is not None and spec.origin else None
    try:
        return ast.parse(file.read_text(encoding="utf-8") if file is not None else "")
    except (OSError, ValueError, SyntaxError):  # compiled
        return ast.parse("")


def _files(kind: Kind) -> dict[str, Path]:
    folder = Path(__file__).parent.joinpath(*FOLDERS[kind].split("."))
    return {file.stem.replace("_", "-"): file for file in folder.glob("[!_]*.py")}


def _entries(kind: Kind) -> dict[str, EntryPoint]:
    return _read(kind, tuple(sys.path))


@cache  # it reads a file of every package that is installed
def _read(kind: Kind, path: tuple[str, ...]) -> dict[str, EntryPoint]:
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUPS[kind]):
        entries.setdefault(entry.name, entry)
    return entries


def _entry(kind: Kind, name: str) -> EntryPoint:
    if name in _entries(kind):
        return _entries(kind)[name]
    one = {"drafters": "drafter", "objectives": "method", "peers": "peer"}[kind]
    raise InputError(f"there is no {one} {name!r}; choose one of {', '.join(names(kind))}")
