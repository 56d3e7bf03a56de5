"""Configs with a wrong field: a folder loads and writes text, or is refused in one sentence, without much memory."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from small import build

import outrider
from outrider import InputError, drafters, shipped
from outrider.backends.torch import load_target
from outrider.checkpoints import native
from outrider.llm import LLM
from outrider.schema import to_dict

MISSING = object()
WRONG = (
    None, True, "x", [1], [-1], {"a": 1}, -1, 0, 3, 0.5, 1e308, float("nan"), float("inf"), 10**6, 2**63, 10**400,
    MISSING,
)  # fmt: skip
NATIVE = "eagle3", "eagle", "hass", "block", "medusa", "hydra"
MUCH = 2**20  # KiB that a test may take beyond what its process has: a config once made it allocate 5 GB


def fields(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The way to every field, nested ones included."""
    for name, value in config.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *below) for below in fields(value))


def mutants(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every config with one wrong field, and what is wrong."""
    for way in fields(config):
        for wrong in WRONG:
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


def check(folder: Path, config: dict[str, Any], run: Callable[[dict[str, Any]], object]) -> None:
    """Every mutant of the folder's config runs, or is refused in one sentence."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    run(config)
    wrong, refused, count, before = [], 0, 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for mutant, made in mutants(config):
        (folder / "config.json").write_text(json.dumps(made), encoding="utf-8")
        count += 1
        try:
            run(made)
        except InputError as error:
            refused += 1
            if not str(error).strip() or "\n" in str(error) or len(str(error)) > 500:
                wrong.append(f"{mutant}: {str(error)!r} is no sentence")
        except Exception as error:
            wrong.append(f"{mutant}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    assert 0 < refused < count
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MUCH


@cache
def plain() -> tuple[LLM, list[int]]:
    llm = outrider.load("demo", "none")
    return llm, llm.generate("Once upon a time", max_new_tokens=6)[0].tokens


def draft(spec: str) -> None:
    llm, text = plain()
    one = LLM(llm.target, llm.tokenizer, drafters.load(spec, llm.target, None), "demo", "mutant", llm.eos, "8x4")
    assert one.generate("Once upon a time", max_new_tokens=6)[0].tokens == text


@pytest.mark.parametrize("name", NATIVE)
def test_a_drafter_with_a_wrong_field_drafts_or_is_refused(name: str, tmp_path: Path) -> None:
    """All fields of its network, also those that the folder leaves out."""
    folder = Path(shipped.shipped(f"demo/{name}"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    head = {key: config.pop(key) for key in ("outrider_method", "format", "target_weights")}
    config = to_dict(native.network(head["outrider_method"]).read(config, folder))
    place = linked(folder, tmp_path / "drafter")
    check(place, {**head, **config}, lambda made: draft(f"{head['outrider_method']}:{place}"))


@pytest.mark.parametrize("name", ["mamba", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_draft_model_with_a_wrong_field_drafts_or_is_refused(name: str, tmp_path: Path) -> None:
    folder = Path(shipped.shipped(f"demo/{name}"))
    place = linked(folder, tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check(place, config, lambda made: draft(f"{'mamba' if name == 'mamba' else 'model'}:{place}"))


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "qwen3_moe", "gemma2"))]
)
def test_a_target_with_a_wrong_field_writes_or_is_refused(name: str, tmp_path: Path) -> None:
    build(name, torch.float32).save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    place = linked(tmp_path / "model", tmp_path / "mutant")

    def run(made: dict[str, Any]) -> None:
        target = load_target(place)
        llm = LLM(target, None, drafters.load("lookup", target, None), "mutant", "lookup", frozenset(), "8x4")
        llm.generate([5, 6, 7, 8, 5, 6, 7], max_new_tokens=4)

    check(place, config, run)
