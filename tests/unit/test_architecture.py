"""The house holds: imports run one way, the public names are the documented ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pytest
from tools import pages
from tools.rooms import ROOMS, may

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "outrider"


def room(parts: Sequence[str]) -> str:
    """The room of a module, by the parts of its name below the package."""
    return "/".join(parts[:2]) if parts[0] == "backends" else parts[0]


@lru_cache
def edges() -> set[tuple[str, str]]:
    """(room, room) for every import inside the package; a room is a file or folder of src/outrider."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        package = ["outrider", *parts[:-1]]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                path = [*base, *(node.module or "").split(".")] if node.module or node.level else []
                names = [[*path, alias.name] for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name.split(".") for alias in node.names]
            else:
                continue
            for name in names:
                name = [part for part in name if part]
                if name[0] == "outrider" and len(name) > 1:
                    found.add((room(parts), room(name[1:])))
    return {(a, b) for a, b in found if a != b}


def test_every_room_stands_in_the_table() -> None:
    there = {p.stem for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()} - {"backends"}
    there |= {f"backends/{p.name}" for p in (SOURCE / "backends").iterdir() if (p / "__init__.py").is_file()}
    assert there - {"__init__", "__main__"} == set(ROOMS)


def test_imports_run_one_way() -> None:
    wrong = sorted(f"{a} -> {b}" for a, b in edges() if a in ROOMS and b in ROOMS and b not in may(a))
    assert not wrong, f"imports against tools/rooms.py: {', '.join(wrong)}"


def test_a_room_stands_below_all_that_it_may_import() -> None:
    order = list(ROOMS)
    assert not [(a, b) for a in order for b in may(a) if order.index(b) >= order.index(a)]


@pytest.mark.parametrize("page", pages.PARTS)
def test_generated_parts_of_pages_are_up_to_date(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert pages.filled(text, pages.PARTS[page]) == text, "run python -m tools.pages"


def test_an_old_part_would_be_seen() -> None:
    text = "before\n<!-- a -->\nold\n<!-- /a -->\nafter\n"
    assert pages.filled(text, {"a": lambda: "new"}) == text.replace("old", "new")
    with pytest.raises(ValueError, match="no place for b"):
        pages.filled(text, {"b": lambda: "new"})


def test_there_are_edges_to_hold() -> None:
    assert ("engine", "core") in edges()
    assert ("drafters", "backends/torch") in edges()


def test_public_names_are_the_documented_ones() -> None:
    import outrider

    structure = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    line = re.search(r"^Public names: (.*)$", structure, re.MULTILINE)
    assert line, "docs/structure.md lists the public names on a line 'Public names: ...'"
    assert sorted(re.findall(r"`(\w+)`", line[1])) == sorted(outrider.__all__)
    assert all(hasattr(outrider, name) for name in outrider.__all__)
