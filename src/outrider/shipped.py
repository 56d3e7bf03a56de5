"""The models and drafters that ship with the package, by name: `demo/target`, `demo/hass`, `smollm2/eagle3`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from .params import InputError

DEMO, SMOLLM2 = "demo", "smollm2"


def is_shipped(name: str) -> bool:
    """Is this such a name? A folder of that name takes precedence."""
    model, slash, _ = name.partition("/")
    return bool(slash) and model in (DEMO, SMOLLM2) and not Path(name).exists()


def shipped(name: str) -> str:
    """The folder of the package's data that has this name.

    Raises:
        InputError: there is none.
    """
    folder = files("outrider").joinpath(*name.split("/"))
    if not (folder / "config.json").is_file():
        model, _, what = name.partition("/")
        there = sorted(f.parent.name for f in Path(str(files("outrider"))).joinpath(model).glob("*/config.json"))
        here = f"there are {', '.join(there)}; or" if there else "so"
        raise InputError(f"no {what!r} for {model} is installed; {here} name a folder")
    return str(folder)


def placed(name: str, part: str) -> str:
    """`demo` and `smollm2` alone are the part that ships for that model by this name; any other name as it is."""
    return f"{name}/{part}" if name in (DEMO, SMOLLM2) and not Path(name).exists() else name


def folder_of(name: str | Path) -> Path:
    """The folder of what ships by this name; any other path as it is. Raises as `shipped` does."""
    return Path(place_of(str(name)))


def place_of(name: str) -> str:
    """The same for what may be a hub id, or a folder that is spelled like one: ./name."""
    return str(shipped(name)) if is_shipped(name) else name


def drafter_at(name: str) -> str:
    """`place_of` a drafter. Raises InputError where the name alone is a model's."""
    if name in (DEMO, SMOLLM2) and not Path(name).exists():
        raise InputError(f"{name} is a model; name a drafter, such as {name}/eagle3")
    return place_of(name)
