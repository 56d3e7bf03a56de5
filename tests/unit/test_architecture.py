"""The house holds: imports run one way, the public names are the documented ones."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
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


Parts = tuple[str, ...]


@lru_cache
def parsed() -> dict[Parts, ast.Module]:
    """Every file of the package, by the parts of its name below it."""
    return {
        file.relative_to(SOURCE).with_suffix("").parts: ast.parse(file.read_text(encoding="utf-8"))
        for file in SOURCE.rglob("*.py")
    }


def imported(parts: Parts, nodes: Iterable[ast.AST]) -> Iterator[Parts]:
    """The dotted names that these nodes of a file import, `from a import b` as (a, b)."""
    package = ("outrider", *parts[:-1])
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            path = (*base, *(node.module.split(".") if node.module else ()))
            yield from ((*path, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)


@lru_cache
def edges() -> set[tuple[str, str]]:
    """(room, room) for every import inside the package; a room is a file or folder of src/outrider."""
    results = {
        (room(parts), room(name[1:]))
        for parts, tree in parsed().items()
        for name in imported(parts, ast.walk(tree))
        if name[0] == "outrider" and len(name) > 1
    }
    return {(a, b) for a, b in results if a != b}


# --- torch at the edge

HEAVY = {"torch", "transformers"}
# Rooms, and the drafters' modules but for networks and tensors, that are imported without torch and transformers.
LIGHT = {
    "core", "engine", "budgets", "backends/native", "serve", "bench", "commands", "llm", "names", "plugins", "encoding",
    "cli", "machine", "testing", "params", "files", "kept", "hub", "shipped", "schema", "prompts", "__init__",
}  # fmt: skip
LIGHT_DRAFTERS = {
    "__init__", "none", "lookup", "suffix", "ngram", "lookahead", "eagle", "eagle3", "medusa", "hydra", "block",
    "mamba", "model", "_mix", "_choice", "_gate", "_common", "_trained", "_eagles", "_compiled", "_growth",
    "_lattice", "_ranks", "_logits", "_text", "_words", "_calibrated", "_chain",
}  # fmt: skip
PEERS = ("bench", "peers")  # each is the other library's own caller


def executed(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: no function's body, and nothing for type checkers alone."""
    for node in nodes:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            children = iter(node.orelse)
        yield from executed(children)


@lru_cache
def runs(parts: Parts) -> frozenset[Parts]:
    """What importing this module imports at once: names outside of the package, and its own modules by their parts."""
    result = set()
    for name in imported(parts, executed([parsed()[parts]])):
        if name[0] != "outrider":
            result.add(name[:1])
            continue
        for n in range(len(name) + 1):  # packages on the way, and the module itself
            for own in (name[1:n], (*name[1:n], "__init__")):
                if own in parsed():
                    result.add(("outrider", *own))
    return frozenset(result)


def way_to_torch(parts: Parts) -> list[Parts]:
    """The chain of imports by which importing this module imports torch or transformers; [] where there is none."""
    before: dict[Parts, Parts] = {parts: ()}
    waiting = [parts]
    for here in waiting:
        for name in sorted(runs(here)):
            if name[0] in HEAVY:
                chain = [name, here]
                while before[chain[-1]]:
                    chain.append(before[chain[-1]])
                return chain[::-1]
            if name[0] == "outrider" and name[1:] not in before:
                before[name[1:]] = here
                waiting.append(name[1:])
    return []


def light(parts: Parts) -> bool:
    if parts[0] == "drafters":
        return parts[-1] in LIGHT_DRAFTERS
    return room(parts) in LIGHT and parts[:2] != PEERS


def test_torch_stays_at_the_edge() -> None:
    wrong = [way for parts in sorted(parsed()) if light(parts) and (way := way_to_torch(parts))]
    assert not wrong, "\n".join(" -> ".join(map("/".join, way)) for way in wrong)


def test_an_import_chain_to_torch_is_reported() -> None:
    assert way_to_torch(("backends", "torch", "hf"))[-1] in (("torch",), ("transformers",))
    assert len(way_to_torch(("training", "__init__")) or way_to_torch(("training", "features"))) > 1


IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    heavy = {"torch", "transformers"} & set(sys.modules)
    assert not heavy, f"import {name} brings {heavy}"
"""


@pytest.mark.process
def test_importing_light_modules_does_not_import_torch() -> None:
    """All of it in one process, by Python itself."""
    names = [".".join(("outrider", *parts)).removesuffix(".__init__") for parts in sorted(parsed()) if light(parts)]
    done = subprocess.run([sys.executable, "-c", IMPORTS, *names], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_room_stands_in_the_table() -> None:
    there = {p.stem for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()} - {"backends"}
    there |= {f"backends/{name[1]}" for name in parsed() if name[0] == "backends"} - {"backends/__init__"}
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


# --- functions that fit on a screen

LINES, PARAMETERS = 60, 8
# Where options are parameters, so that they are read off the function: a command's, a drafter's, an objective's.
OPTIONS = (("commands",), ("drafters", "load"), ("drafters", "loader.load"), ("training", "build"))
# file, function: why it is longer, or has more parameters
EXCEPTIONS = {
    "bench/choose.py recommend": "the options of a command",
    "checkpoints/safeailab.py eagle3_of": "the fields of a foreign configuration",
    "core/growth.py grow": "EAGLE-2 with its ablations",
    "integrations/transformers.py custom_generate": "the signature that transformers calls",
    "llm.py LLM.generate": "the public face",
    "llm.py LLM.stream": "the public face",
    "llm.py load": "the public face",
    "nets/scan.py _Scan.forward": "the operands of a scan",
    "proofs/audit.py audit": "the options of a command",
    "proofs/parity.py certify": "the options of a command",
    "serve/service.py Service.call": "the fields of a request",
    "training/answering.py answer": "the options of a command",
    "training/generate.py write": "the options of a command",
    "training/loop.py _train": "the one loop",
    "training/loop.py _evaluate": "what the loop measures",
    "training/objectives/eagle.py EagleObjective.__init__": "the options of an objective",
}


def functions(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function below a node, by its dotted name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}" if name else child.name
            if not isinstance(child, ast.ClassDef):
                yield inner, child
            yield from functions(child, inner)


def is_long(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    given = function.args
    names = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self", "cls"}
    return (function.end_lineno or 0) - function.lineno + 1 > LINES or len(names) > PARAMETERS


def test_functions_fit_on_a_screen() -> None:
    long = {
        f"{'/'.join(parts)}.py {name}": (parts[0], name)
        for parts, tree in parsed().items()
        for name, function in functions(tree)
        if is_long(function)
    }
    free = {key for key, (top, name) in long.items() if (top,) in OPTIONS or (top, name) in OPTIONS}
    assert set(long) - free == set(EXCEPTIONS), "split it, or say here why not; what fits needs no exception"


PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
NAMED = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|h|c))(?::[\w.]+)?`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_that_exist(page: Path) -> None:
    """Pages only: notes/ may name files that are gone."""
    named = set(NAMED.findall(page.read_text(encoding="utf-8")))
    assert not [name for name in sorted(named) if not any((home / name).exists() for home in (ROOT, SOURCE))]
