"""A drafter that was trained beside other weights than those it drafts for: it works, and its user is told."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from small import PROMPTS, VOCAB, build

from outrider import drafters
from outrider.budgets.adaptive import FixedBudget
from outrider.checkpoints import native, read
from outrider.checkpoints.target import mark
from outrider.checkpoints.write import keep
from outrider.core.noise import GumbelNoise
from outrider.engine import Engine, generate
from outrider.request import Request
from outrider.shipped import folder_of
from outrider.targets import HFTarget, load_target
from outrider.training import objectives
from outrider.training.data import Document
from outrider.types import Sampling

DOCUMENTS = [Document(tuple(range(1, 25)), (False,) * 4 + (True,) * 20, "a")]


def loaded(dtype: torch.dtype = torch.bfloat16, change: float = 0.0) -> HFTarget:
    """Weights that bfloat16 holds, in this precision; with one of the layers' moved a little."""
    model = build("llama", torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(change)
    found = load_target(model.to(dtype))
    assert isinstance(found, HFTarget)
    return found


def trained(target: HFTarget, folder: Path, method: str = "eagle") -> str:
    """A drafter's folder as a training of this target leaves it."""
    objectives.build(method, target, DOCUMENTS, {}).save(folder)
    return str(folder)


def said(spec: str, target: HFTarget, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        drafters.load(spec, target)
    return [record.getMessage() for record in caplog.records]


def texts(target: HFTarget, spec: str) -> list[list[int]]:
    engine = Engine(target, drafters.load(spec, target), FixedBudget(6, 3), GumbelNoise(VOCAB))
    requests = [Request(p, i, 12, Sampling(0.7)) for i, p in enumerate(PROMPTS)]
    rows = {piece.row.index: piece.row for piece in generate(engine, requests)}
    return [rows[i].output for i in range(len(PROMPTS))]


@pytest.mark.parametrize("method", ["eagle", "medusa", "hydra"])
def test_other_weights_are_told_and_drafted_for(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = trained(loaded(torch.float32), tmp_path / "d", method)
    assert not said(spec, loaded(torch.float32), caplog)
    other = loaded(torch.float32, 0.25)
    (line,) = said(spec, other, caplog)
    assert line.startswith(f"{tmp_path / 'd'} was trained beside other weights")
    assert texts(other, spec) == texts(other, "none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_another_precision_is_not_another_model(dtype: torch.dtype) -> None:
    assert mark(loaded(dtype)) == mark(loaded()) != mark(loaded(change=0.25))


def test_what_says_nothing_of_its_target_is_taken_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = trained(loaded(torch.float32), tmp_path / "d")
    file = tmp_path / "d" / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("target_weights") == mark(loaded())
    file.write_text(json.dumps(config))
    assert not said(spec, loaded(torch.float32, 0.25), caplog)


def test_an_import_keeps_the_mark(tmp_path: Path) -> None:
    target = loaded(torch.float32)
    keep(read(trained(target, tmp_path / "d"), target), tmp_path / "kept")
    assert native.read(tmp_path / "kept").target == mark(target)


def test_heads_of_a_target_that_learns_too_have_no_mark(tmp_path: Path) -> None:
    spec = trained(loaded(torch.float32), tmp_path / "d", "medusa2")
    assert not native.read(spec).target


@pytest.mark.parametrize("name", ["demo/eagle", "demo/hass", "demo/medusa", "demo/hydra", "demo/eagle3", "demo/block"])
def test_what_ships_for_the_demo_says_so(name: str) -> None:
    assert native.read(folder_of(name)).target == mark(load_target("demo"))
