"""Configs with a wrong field: a folder loads and drafts, or is refused in one sentence. Nothing else, and never late."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider import InputError, shipped
from outrider.llm import LLM
from outrider.checkpoints import native
from outrider.nets.network import to_dict

WRONG: tuple[Any, ...] = (
    None, True, "", "x", "1", [], [1], [-1], [[1]], {}, {"a": 1}, -1, 0, 1, 3, 0.5, -0.5, 1e308, -1e308, float("nan"),
    float("inf"), 10**6, 2**31, 2**63, 10**400,
)  # fmt: skip
MISSING = object()
NATIVE = "eagle3", "eagle", "hass", "block", "medusa", "hydra"


def fields(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The way to every field, nested ones included."""
    for name, value in config.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *below) for below in fields(value))


def mutants(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every config with one wrong field, and what is wrong."""
    for way in fields(config):
        for wrong in (*WRONG, MISSING):
            made = json.loads(json.dumps(config))
            place = made
            for name in way[:-1]:
                place = place[name]
            if wrong is MISSING:
                del place[way[-1]]
            else:
                place[way[-1]] = wrong
            yield f"{'.'.join(way)} = {'missing' if wrong is MISSING else repr(wrong)[:20]}", made


def linked(folder: Path, to: Path) -> Path:
    """The folder with a config of its own."""
    to.mkdir()
    for file in folder.iterdir():
        if file.name != "config.json":
            (to / file.name).symlink_to(file)
    return to


@cache
def plain() -> tuple[LLM, list[int]]:
    llm = outrider.load("demo", "none")
    return llm, llm.generate("Once upon a time", max_new_tokens=6)[0].tokens


def outcome(mutant: str, run: Any) -> str:
    """Empty, or what is wrong about what came of it."""
    try:
        run()
    except InputError as error:
        said = str(error)
        return "" if said.strip() and "\n" not in said else f"{mutant}: {said!r} is no sentence"
    except Exception as error:
        return f"{mutant}: {type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", [f"demo/{name}" for name in NATIVE] + ["smollm2/eagle3", "smollm2/medusa"])
def test_a_drafter_with_a_wrong_field_drafts_or_is_refused(name: str, tmp_path: Path) -> None:
    from outrider import drafters

    folder = Path(shipped.shipped(name))
    llm, text = plain()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = native.network(config["outrider_method"])
    head = {key: config.pop(key) for key in ("outrider_method", "format", "target_weights")}
    config = {**head, **to_dict(own.read(config, folder))}  # with the fields that the folder leaves out
    place = linked(folder, tmp_path / "drafter")

    def run() -> None:
        method = str(made["outrider_method"]) if isinstance(made.get("outrider_method"), str) else "eagle3"
        drafter = drafters.load(f"{method}:{place}", llm.target, None)
        one = LLM(llm.target, llm.tokenizer, drafter, "demo", "mutant", llm.eos, "8x4")
        assert one.generate("Once upon a time", max_new_tokens=6)[0].tokens == text

    wrong = []
    for mutant, made in mutants(config):
        (place / "config.json").write_text(json.dumps(made), encoding="utf-8")
        wrong.append(outcome(mutant, run))
    assert not any(wrong), "\n".join(w for w in wrong if w)
