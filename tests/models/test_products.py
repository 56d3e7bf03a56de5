"""Weights in the order or the precision that this processor multiplies fastest: the same numbers."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_world import CONTEXT, PROMPTS, VOCAB, WIDE, needs, outputs
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider import drafters
from outrider.backends.torch import kernels, load, probe, products
from outrider.backends.torch.hf import HFTarget
from outrider.backends.torch.load import from_pretrained, load_target
from outrider.backends.torch.recorded import Recorded
from outrider.budgets.budgeter import FixedBudget
from outrider.budgets.calibration import inside
from outrider.core.noise import GumbelNoise
from outrider.engine import Engine, Request
from outrider.params import Sampling

here = pytest.mark.skipif(not products.can_halve(), reason="FBGEMM's products are for x86 processors")

# FBGEMM's groups of rows are those of its kernels for AVX2; where it has others, the probe decides.
groups = pytest.mark.skipif(
    not products.can_halve() or torch.backends.cpu.get_cpu_capability() != "AVX2", reason="it is about FBGEMM on AVX2"
)


orders = pytest.mark.skipif(not products.can_order(), reason="this processor has no products of bfloat16")


def weights(scale: float = 0.05, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(300, 96, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)


@orders
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of recording
@pytest.mark.parametrize("bias", [False, True])
def test_weights_in_another_order_give_the_same_bits(bias: bool) -> None:
    weight, shift = weights(), torch.randn(300).bfloat16() if bias else None
    made = products.ordered(weight, shift)
    assert made is not None
    assert (made.in_features, made.out_features) == (96, 300)
    assert (made.weight.shape, made.weight.dtype, made.weight.device.type) == ((300, 96), torch.bfloat16, "cpu")
    assert made.weight.isnan().all()
    assert not list(made.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorded = torch.jit.freeze(torch.jit.trace(made.eval(), (weights()[:2, None],), check_trace=False))
    for shape in ((1, 96), (2, 7, 96), (33, 1, 96), (3, 5, 40, 96)):
        x = torch.randn(shape).bfloat16()
        right = nn.functional.linear(x, weight, shift)
        assert torch.equal(made(x), right)
        assert torch.equal(copy.deepcopy(made)(x), right)
        assert torch.equal(recorded(x), right)
    assert torch.equal(made(x.transpose(0, 1)), right.transpose(0, 1))
    before = made(x)
    weight.zero_()
    assert torch.equal(made(x), before), "it has weights of its own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_precisions_keep_their_order(dtype: torch.dtype) -> None:
    assert products.ordered(weights(dtype=dtype)) is None


@orders
@pytest.mark.parametrize("tied", [False, True])
def test_a_target_in_bfloat16_has_its_weights_in_order(tmp_path: Path, tied: bool) -> None:
    folder = small(tmp_path, tie_word_embeddings=tied)
    held, plain = load_target(folder, dtype="bfloat16"), load_target(folder, dtype="bfloat16", training=True)
    kinds = [type(m) for m in held.model.modules()]
    assert kinds.count(products.OrderedLinear) == 2 * 7 + 1
    assert nn.Linear not in kinds
    assert products.OrderedLinear not in {type(m) for m in plain.model.modules()}
    text = torch.randint(1, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.equal(held.model(text).logits, plain.model(text).logits)
    mine = from_pretrained(folder, "bfloat16", "cpu", False, {})
    assert products.OrderedLinear not in {type(m) for m in load_target(mine).model.modules()}, "it is somebody else's"


@here
@pytest.mark.parametrize("scale", [0.05, 1e-3, 1e-6, 300.0, 1e6])
@pytest.mark.parametrize("bias", [False, True])
def test_a_checkpoints_weights_survive(scale: float, bias: bool) -> None:
    weight, shift = weights(scale), torch.randn(300) * scale if bias else None
    made = products.halved(weight, shift)
    assert made is not None
    assert (made.in_features, made.out_features) == (96, 300)
    for rows in (1, 2, 3, 7, 33):
        x = torch.randn(2, rows, 96)
        right = nn.functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
        near = nn.functional.linear(x, weight.float(), shift)
        worst = (near - right).abs().max().clamp(min=1e-7 * float(right.abs().max()))
        assert (made(x) - right).abs().max() <= 4 * worst, "as near to the truth as float32 is"


@here
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of recording
def test_strided_inputs_copies_and_recordings_give_the_same() -> None:
    made = products.halved(weights())
    assert made is not None
    x = torch.randn(4, 96, 5).transpose(1, 2)
    right = made(x.contiguous())
    assert torch.equal(made(x), right)
    assert torch.equal(copy.deepcopy(made)(x), right)
    recorded = torch.jit.freeze(torch.jit.trace(made.eval(), (x[:2],), check_trace=False))
    assert torch.equal(recorded(x), right)


@pytest.mark.parametrize(
    "weight",
    [
        weights(dtype=torch.float32),
        torch.cat([weights()[:299], weights()[299:] * 2.0**-60]),
        torch.zeros(4, 8),
        torch.full((4, 8), torch.inf),
        torch.full((4, 8), torch.nan),
    ],
    ids=["float32", "a tiny row", "zeros", "infinite", "not numbers"],
)
def test_weights_that_would_change_stay(weight: torch.Tensor) -> None:
    assert products.halved(weight) is None
    layer = products.product(weight.float())
    x = torch.randn(3, weight.shape[1])
    assert torch.equal(layer(x).nan_to_num(), nn.functional.linear(x, weight.float()).nan_to_num())


@here
def test_its_weight_says_what_it_is_and_gives_no_wrong_numbers() -> None:
    made = products.halved(weights())
    assert made is not None
    assert (made.weight.shape, made.weight.dtype, made.weight.device.type) == ((300, 96), torch.float32, "cpu")
    assert made.weight.isnan().all()
    assert not list(made.parameters())


@groups
def test_in_threes_a_row_has_its_own_bits() -> None:
    x, pairs = kernels._inputs(96)
    half = products.HalfLinear(kernels._opposed(torch.randn(300, 96), pairs), None)
    counts = [*range(1, 70), 127, 200, 256]
    right = half(x[:255])
    assert any(not torch.equal(half(x[:n])[:255], right[:n]) for n in counts)
    half.threes = True
    for n in counts:
        assert torch.equal(half(x[:n])[:255], right[:n]), n
    assert half(x[:8].view(2, 4, 96)).shape == (2, 4, 300)


def small(folder: Path, width: int = WIDE, **more: bool) -> str:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.25, eos_token_id=None,
        bos_token_id=None, pad_token_id=0, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@here
@pytest.mark.parametrize("tied", [False, True])
def test_a_target_on_a_processor_without_such_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    monkeypatch.setattr(load, "multiplies_halves", lambda: False)
    folder = small(tmp_path, tie_word_embeddings=tied)
    held, plain = load_target(folder), load_target(folder, dtype="float32")
    assert held.dtype == plain.dtype == torch.float32
    kinds = [type(m) for m in held.model.modules()]
    assert kinds.count(products.HalfLinear) == 2 * 7 + 1
    assert nn.Linear not in kinds
    text = torch.randint(1, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        a, b = held.model(text).logits, plain.model(text).logits
        assert (a - b).abs().max() < 1e-5 * b.abs().max()
        wrote = [t.model.generate(text, max_new_tokens=20, do_sample=False) for t in (held, plain)]
    assert torch.equal(*wrote)
    assert (held.vocab, held.hidden) == (plain.vocab, plain.hidden)


@here
def test_compiled_passes_leave_the_models_own_weights_unordered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "multiplies_halves", lambda: False)
    folder = small(tmp_path, width=128)
    load_target(folder)  # proves the compiled pass by the model's own
    target, plain = load_target(folder), load_target(folder, native=False)
    if target.native is None:
        pytest.skip("this machine has no compiled passes")

    def held(of: Any) -> list[products.HalfLinear]:
        return [m for m in of.model.modules() if isinstance(m, products.HalfLinear)]

    assert len(held(target)) == len(held(plain)) == 2 * 7 + 1
    assert all(one.source is None and one.packed is not None for one in held(plain))
    assert all(one.source is not None and one.packed is None for one in held(target))
    assert products.has_halves(target.model)
    text = torch.randint(1, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.equal(target.model(text).logits, plain.model(text).logits)
    assert all(one.source is None and one.packed is not None for one in held(target))


@here
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of recording
def test_weights_are_ordered_before_a_recording(tmp_path: Path) -> None:
    stock = from_pretrained(small(tmp_path), "bfloat16", "cpu", False, {})
    assert products.halve(stock)
    target = HFTarget(stock.float())
    target.compile()
    target.warm()
    assert target.graphs is not None
    recordings = [one for one in target.graphs.made.values() if one is not None]
    assert recordings
    assert not any("prepack" in str(one.made.inlined_graph) for one in recordings)
    layer = products.halved(weights())
    assert layer is not None
    body = Recorded(Step(layer), patience=0)
    right = nn.functional.linear(torch.ones(2, 96), weights().float())
    for _ in range(3):
        torch.testing.assert_close(body("kind", torch.ones(2, 96))[0], right)
    assert "prepack" not in str(body.made["kind"].inlined_graph)


class Step(nn.Module):
    """A network's step, as recordings have it: of tensors, to a tuple of them."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.layer(x),)


@groups
@pytest.mark.parametrize("recorded", [False, True])
def test_a_target_with_them_can_promise_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool) -> None:
    monkeypatch.setattr(load, "multiplies_halves", lambda: False)
    folder = small(tmp_path)
    assert load_target(folder, exact="auto").exact == "rounding"
    target = load_target(folder, exact="bits")
    assert (target.exact, target.dtype) == ("bits", torch.float32)
    assert products.has_halves(target.model)
    if recorded:
        target.compile()
    assert probe.same_bits(target)
    for temperature in (0.0, 1.0):
        wrote = []
        for name, rows in (("none", 1), ("none", 3), ("lookup", 1), ("lookup", 3)):
            engine = Engine(target, drafters.load(name, target), FixedBudget(7, 4), GumbelNoise(VOCAB), "coupled")
            asked = [Request(p, 50 + i, 40, Sampling(temperature)) for i, p in enumerate(PROMPTS)]
            wrote.append([row.output for row in outputs(engine, asked, rows)])
        assert wrote[1:] == wrote[:1] * 3
    target.use(replace(target.exactness, step=1), target.blocks)
    products.in_threes(target.model, False)
    assert not probe.same_bits(target)


def test_a_target_that_is_trained_for_keeps_its_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "multiplies_halves", lambda: False)
    target = load_target(small(tmp_path), training=True)
    assert products.HalfLinear not in {type(m) for m in target.model.modules()}
    features = torch.randn(3, WIDE, requires_grad=True)
    target.head(features).sum().backward()
    assert features.grad is not None
    assert features.grad.abs().sum() > 0


@here
@pytest.mark.parametrize("name", ["block", "eagle", "eagle3", "hydra", "mamba", "medusa", "model", "peagle"])
def test_drafters_do_as_their_target_does_and_the_text_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(load, "multiplies_halves", lambda: False)
    target = load_target(small(tmp_path / "target"))
    drafter = drafters.load(needs(name, str(tmp_path / "target")), target)
    found: Any = inside(drafter)
    net = found.model.model if name == "model" else found.net
    if name not in ("medusa", "mamba"):  # whose heads are multiplied together; whose weights are no 16-bit ones here
        assert products.has_halves(net)
    for temperature in (0.0, 1.0):
        wrote = []
        for each in (drafters.load("none", target), drafter):
            engine = Engine(target, each, FixedBudget(9, 4), GumbelNoise(VOCAB), "coupled")
            asked = [Request(p, 50 + i, 24, Sampling(temperature)) for i, p in enumerate(PROMPTS)]
            wrote.append([row.output for row in outputs(engine, asked, 2)])
        assert wrote[0] == wrote[1]


@pytest.mark.parametrize("name", ["block", "eagle", "eagle3", "hydra", "mamba", "medusa", "model", "peagle"])
def test_drafters_of_a_target_in_bfloat16_draft_in_it(tmp_path: Path, name: str) -> None:
    """Their weights would fit as well, but their passes are not in float32."""
    target = load_target(small(tmp_path / "target"), dtype="bfloat16")
    drafter = drafters.load(needs(name, str(tmp_path / "target")), target)
    found: Any = inside(drafter)
    assert not products.has_halves(found.model.model if name == "model" else found.net)
    engine = Engine(target, drafter, FixedBudget(9, 4), GumbelNoise(VOCAB), "coupled")
    row = outputs(engine, [Request(PROMPTS[0], 1, 12, Sampling(0.0))])[0]
    assert len(row.output) == 12
    assert row.usage.drafted > 0
