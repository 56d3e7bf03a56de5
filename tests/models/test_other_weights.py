"""A drafter that was trained beside other weights than those it drafts for: it works, with a warning."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from small import PROMPTS, VOCAB, build

from outrider import drafters
from outrider.backends import choose
from outrider.backends.native.target import load
from outrider.backends.torch import HFTarget, load_target
from outrider.budgets.budgeter import FixedBudget
from outrider.checkpoints import native, read
from outrider.checkpoints.write import keep
from outrider.core.noise import GumbelNoise
from outrider.drafters import _weights
from outrider.engine import Engine, generate
from outrider.engine.request import Request
from outrider.names import find
from outrider.params import InputError, Sampling
from outrider.shipped import folder_of
from outrider.training import objectives
from outrider.training.data import Document

DOCUMENTS = [Document(tuple(range(1, 25)), (False,) * 4 + (True,) * 20, "a")]


def loaded(dtype: torch.dtype = torch.bfloat16, change: float = 0.0) -> HFTarget:
    """Weights that bfloat16 holds, in this precision; with one of the layers' moved a little."""
    model = build("llama", torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(change)
    result = load_target(model.to(dtype))
    assert isinstance(result, HFTarget)
    return result


def trained(target: HFTarget, folder: Path, method: str = "eagle") -> str:
    """A drafter's folder as a training of this target leaves it."""
    objectives.build(method, target, DOCUMENTS, {}).save(folder)
    return str(folder)


def said(spec: str, target: HFTarget, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    _weights.warn_of_other_weights.cache_clear()
    with caplog.at_level(logging.WARNING):
        drafters.load(spec, target)
    return [record.getMessage() for record in caplog.records]


def texts(target: HFTarget, spec: str) -> list[list[int]]:
    engine = Engine(target, drafters.load(spec, target), FixedBudget(6, 3), GumbelNoise(VOCAB))
    requests = [Request(p, i, 12, Sampling(0.7)) for i, p in enumerate(PROMPTS)]
    rows = {piece.row.index: piece.row for piece in generate(engine, requests)}
    return [rows[i].output for i in range(len(PROMPTS))]


@pytest.mark.parametrize("method", ["eagle", "medusa", "hydra"])
def test_other_weights_are_reported_and_drafted_for(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = trained(loaded(torch.float32), tmp_path / "d", method)
    assert not said(spec, loaded(torch.float32), caplog)
    other = loaded(torch.float32, 0.25)
    (line,) = said(spec, other, caplog)
    assert line.startswith(f"{tmp_path / 'd'} was trained for other weights")
    with caplog.at_level(logging.WARNING):
        drafters.load(spec, other)
    assert len(caplog.records) == 1, "once for each drafter and model"
    assert texts(other, spec) == texts(other, "none")


def test_a_drafter_of_another_size_is_refused_and_not_promised_the_text_first(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match="was trained for a target of width"):
        said("eagle:demo/hass", loaded(), caplog)
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_another_precision_is_not_another_model(dtype: torch.dtype) -> None:
    assert loaded(dtype).mark == loaded().mark != loaded(change=0.25).mark


def test_float16_weights_are_not_compared() -> None:
    assert not loaded(torch.float16).mark


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_however_it_is_loaded_it_is_one_model(family: str, dtype: str, tmp_path: Path) -> None:
    model = build(family, torch.bfloat16, hidden_size=64, intermediate_size=96, head_dim=32, num_attention_heads=2)
    model.save_pretrained(tmp_path / "m")
    stock = load_target(tmp_path / "m")
    assert len(stock.mark) == 16
    assert load_target(tmp_path / "m", dtype=dtype).mark == stock.mark
    assert choose.readable(find(str(tmp_path / "m")), "cpu") is None or load(tmp_path / "m", dtype).mark == stock.mark


def test_a_folder_without_a_mark_is_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = trained(loaded(torch.float32), tmp_path / "d")
    file = tmp_path / "d" / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("target_weights") == loaded().mark
    file.write_text(json.dumps(config))
    assert not said(spec, loaded(torch.float32, 0.25), caplog)


def test_an_import_keeps_the_mark(tmp_path: Path) -> None:
    target = loaded(torch.float32)
    keep(read(trained(target, tmp_path / "d"), target), tmp_path / "kept")
    assert native.read(tmp_path / "kept").mark == target.mark != ""


def test_heads_of_a_target_that_learns_too_have_no_mark(tmp_path: Path) -> None:
    spec = trained(loaded(torch.float32), tmp_path / "d", "medusa2")
    assert not native.read(spec).mark


@pytest.mark.parametrize("name", ["demo/eagle", "demo/hass", "demo/medusa", "demo/hydra", "demo/eagle3", "demo/block"])
def test_drafters_for_the_demo_are_marked(name: str) -> None:
    demo = load_target("demo")
    assert isinstance(demo, HFTarget)
    assert native.read(folder_of(name)).mark == demo.mark
