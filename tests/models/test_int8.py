"""Weights in eight bits: near the model they were, and a target of their own that drafts are exact for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small import PROMPTS, build, saved
from torch import nn

from outrider import InputError
from outrider.bench.models import Models
from outrider.budgets.adaptive import FixedBudget
from outrider.llm import LLM
from outrider.targets.int8 import Int8Linear, quantise

IDS = torch.tensor(PROMPTS[:1])


def whole(layer: Int8Linear) -> nn.Linear:
    """A stock layer of the same numbers."""
    out, size = layer.weight.shape
    made = nn.Linear(size, out, bias=layer.bias is not None, dtype=layer.scale.dtype)
    with torch.no_grad():
        made.weight.copy_(layer.weight.to(layer.scale.dtype) * layer.scale[:, None])
        if layer.bias is not None:
            made.bias.copy_(layer.bias)
    return made


# -- one layer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 5), (1, 1), (48, 32), (33, 40), (16, 272)], ids=str)
@torch.no_grad()
def test_a_layer_is_its_weights_rounded(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows of every length, in every precision: torch's kernel for bfloat16 reads beyond some."""
    torch.manual_seed(1)
    linear = nn.Linear(shape[1], shape[0]).to(dtype)
    linear.weight *= torch.logspace(0, 2, shape[0])[:, None]  # a scale for each row
    layer = Int8Linear(linear)
    fine = torch.finfo(dtype).eps
    assert layer.weight.dtype == torch.int8
    assert (layer.weight.abs().amax(1) >= 126).all(), "every row uses its whole range"
    error = (linear.weight.double() - layer.weight.double() * layer.scale.double()[:, None]).abs()
    assert (error <= layer.scale.double()[:, None] * (0.5 + 127 * fine / 2)).all()
    stock = whole(layer).double()
    for x in (torch.randn(6, shape[1]), torch.randn(2, 3, shape[1]), torch.randn(shape[1]), torch.randn(0, shape[1])):
        x = x.to(dtype)
        found, wanted = layer(x), stock(x.double())
        assert found.dtype == dtype
        assert found.shape == wanted.shape
        size = nn.functional.linear(x.double().abs(), stock.weight.abs(), stock.bias.abs())
        assert ((found - wanted).abs() <= (4 + shape[1] / 16) * fine * size).all(), "rounding alone"


@torch.no_grad()
def test_a_row_of_zeros_stays_zero() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        linear = nn.Linear(32, 3, bias=False).to(dtype)
        linear.weight[1] = 0
        y = Int8Linear(linear)(torch.ones(2, 32, dtype=dtype))
        assert (y[:, 1] == 0).all()
        assert (y[:, 0] != 0).all()


@torch.no_grad()
def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """Activations keep their precision, whatever stands beside them."""
    torch.manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16):
        layer, x = Int8Linear(nn.Linear(192, 64).to(dtype)), torch.randn(9, 192).to(dtype)
        x[4] *= 1e6
        assert torch.allclose(layer(x)[2], layer(x[2:3])[0], rtol=0, atol=16 * torch.finfo(dtype).eps)


# -- models ------------------------------------------------------------------------------------------------------------


def linears(model: Any) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize(
    ("name", "tied"), [("llama", False), ("llama", True), ("gpt_neox", False), ("qwen2", True), ("phi", False)]
)
@torch.no_grad()
def test_all_layers_but_the_head(name: str, tied: bool) -> None:
    model = build(name, torch.float32, tie_word_embeddings=tied)
    full, before = copy.deepcopy(model), linears(model)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    saved = quantise(model)
    made = {n: m for n, m in model.named_modules() if isinstance(m, Int8Linear)}
    assert list(linears(model).values()) == [head]
    assert len(made) == len(before) - 1 > 10
    assert saved == sum(3 * m.weight.numel() for m in made.values())
    assert model.get_output_embeddings() is head
    assert model.get_input_embeddings() is embeddings
    assert torch.equal(embeddings.weight, full.get_input_embeddings().weight)
    assert torch.equal(head.weight, full.get_output_embeddings().weight)
    assert (head.weight is embeddings.weight) == tied
    for layer_name, layer in made.items():
        assert layer.bias is before[layer_name].bias
        assert (layer.bias is not None) == (
            name in ("gpt_neox", "phi") or (layer_name.endswith(("q_proj", "k_proj", "v_proj")) and name == "qwen2")
        )
        error = (before[layer_name].weight - layer.weight * layer.scale[:, None]).abs()
        assert (error <= 0.5001 * layer.scale[:, None]).all()
    theirs, mine = full(IDS).logits, model(IDS).logits
    assert not torch.equal(theirs, mine)
    assert (theirs - mine).norm() < 0.06 * theirs.norm()
    for layer_name, layer in made.items():
        full.set_submodule(layer_name, whole(layer))
    assert torch.allclose(full(IDS).logits, mine, atol=1e-4), "exactly the model of the rounded weights"
    assert quantise(model) == 0, "once is enough"


def test_a_model_without_linear_layers_is_not_called_int8(tmp_path: Path) -> None:
    """GPT-2 has layers of another class: its int8 row would be the full model under another name."""
    with pytest.raises(InputError, match="leave the variant int8 out"):
        Models(saved(tmp_path, "gpt2"), device="cpu").llm("int8")


def written(llm: LLM, batch: int, temperature: float, tokens: int = 12) -> list[list[int]]:
    prompts = ["Once upon a time there was a", "Question: what is 12 * 12?", "def add(a, b):\n    return"]
    given = llm.generate(
        prompts, max_new_tokens=tokens, seed=5, batch_size=batch, temperature=temperature, budget=FixedBudget(16, 4),
        ignore_eos=True,
    )  # fmt: skip
    return [output.tokens for output in given]


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(device="cpu")


@pytest.mark.slow
@pytest.mark.trained
@torch.no_grad()
def test_the_demo_is_quantised_apart_from_the_full_one(models: Models) -> None:
    full, small = (models.llm(v).target for v in ("plain", "int8"))
    assert not any(isinstance(m, Int8Linear) for m in full.model.modules())  # type: ignore[attr-defined]
    assert sum(isinstance(m, Int8Linear) for m in small.model.modules()) == 24 * 7  # type: ignore[attr-defined]
    assert models.llm("int8") is models.llm("int8")
    theirs, mine = (t.model(IDS).logits for t in (full, small))  # type: ignore[attr-defined]
    assert 0 < (theirs - mine).norm() < 0.1 * theirs.norm()


@pytest.mark.slow
@pytest.mark.trained
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_writes_the_int8_targets_own_text(models: Models, temperature: float) -> None:
    plain = written(models.llm("int8"), 1, temperature)
    assert written(models.llm("int8"), 3, temperature) == plain
    for spec in ("eagle:demo/hass", "lookup"):
        llm = models.with_drafter("int8", spec)
        assert llm.target is models.llm("int8").target
        for batch in (1, 3):
            assert written(llm, batch, temperature) == plain, f"{spec}, {batch} rows"


def test_int8_and_recorded(tmp_path: Path) -> None:
    """A tiny model: recording the demo's passes takes seconds."""
    models = Models(saved(tmp_path, "llama"), device="cpu")
    target: Any = models.llm("compile+int8").target
    assert len(target.graphs.made) > 1
    assert all(target.graphs.made.values()), "all kinds of passes are recorded"
    assert any(isinstance(m, Int8Linear) for m in target.model.modules())
    for temperature in (0.0, 1.0):
        plain = written(models.llm("int8"), 3, temperature)
        for llm in (models.llm("compile+int8"), models.with_drafter("compile+int8", "lookup")):
            for batch in (1, 3):
                assert written(llm, batch, temperature) == plain
    assert written(models.llm("plain"), 3, 1.0) != plain
