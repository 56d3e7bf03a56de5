"""The house holds: imports run one way, files stay small, the public names are the documented ones."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "outrider"

# What each room may import from the others.
MAY = {
    "types": set(),
    "tree": {"types"},
    "growth": {"types", "tree"},
    "nn": {"types"},
    "scan": set(),
    "ssm": {"types", "scan"},
    "noise": {"types"},
    "sampling": {"types", "noise"},
    "stopping": {"types"},
    "prompts": {"types"},
    "theory": {"types"},
    "verify": {"types", "tree", "noise", "sampling"},
    "budget": {"types"},
    "bandit": {"types", "budget"},
    "targets": {"types", "tree"},
    "checkpoints": {"types", "nn"},
    "calibration": {"types"},
    "drafters": {"types", "tree", "growth", "noise", "sampling", "targets", "nn", "ssm", "checkpoints", "calibration"},
    "testing": {"types", "tree", "noise"},
    "training": {"types", "stopping", "nn", "ssm", "noise", "budget", "engine", "targets", "drafters"},
    "engine": {"types", "tree", "noise", "sampling", "verify", "budget"},
    "llm": {"types", "noise", "stopping", "budget", "engine", "targets", "drafters", "bandit"},
    "stock": {"types", "noise", "budget", "engine", "targets", "drafters"},
    "branches": {"types", "tree", "sampling", "verify"},
    "gtest": set(),
    "bench": {"types", "tree", "noise", "budget", "bandit", "calibration", "engine", "stopping", "prompts", "theory"}
    | {"targets", "drafters", "llm"},
    "audit": {"types", "noise", "budget", "engine", "branches", "gtest"},
}


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
                    found.add((parts[0], name[1]))
    return {(a, b) for a, b in found if a != b}


def test_imports_run_one_way() -> None:
    wrong = sorted(f"{a} -> {b}" for a, b in edges() if a in MAY and b not in MAY[a])
    assert not wrong, f"imports against the arrows of docs/structure.md: {', '.join(wrong)}"
    assert not [e for e in edges() if e[1] in ("cli", "commands") and e[0] not in ("cli", "commands", "__main__")]


def test_there_are_edges_to_hold() -> None:
    assert ("engine", "verify") in edges()
    assert ("drafters", "targets") in edges()


def test_files_stay_small() -> None:
    """At most 350 lines, unless the first docstring says why."""
    long = []
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        reason = "lines because" in (ast.get_docstring(ast.parse(text)) or "")
        if len(text.splitlines()) > 350 and not reason:
            long.append(f"{file.relative_to(ROOT)} ({len(text.splitlines())} lines)")
    assert not long, long


def test_public_names_are_the_documented_ones() -> None:
    import outrider

    structure = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    line = re.search(r"^Public names: (.*)$", structure, re.MULTILINE)
    assert line, "docs/structure.md lists the public names on a line 'Public names: ...'"
    assert sorted(re.findall(r"`(\w+)`", line[1])) == sorted(outrider.__all__)
    assert all(hasattr(outrider, name) for name in outrider.__all__)
