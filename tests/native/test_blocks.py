"""Weights in blocks: read in place of the weights that they are, with the same bits; in twelve bits; and rounded for
drafters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import opened, text_of, trees_differ
from gguf_files import write
from small import BASE
from transformers import LlamaConfig, LlamaForCausalLM
from wrong_code import mutated

from outrider.backends.native import library as native
from outrider.backends.native.abi import Library, ffi
from outrider.backends.torch import HFTarget, blocks, compiled, gguf, load, load_target
from outrider.backends.torch import kernel_blocks as packs
from outrider.core.tree import chain

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}  # fmt: skip


def code() -> Library:
    found = native.library("bfloat16", "bfloat16")
    assert found is not None
    return found


@pytest.fixture(params=["own", "avx2"], autouse=True)
def processor(request: pytest.FixtureRequest) -> int:
    """This processor, and one without AVX-512: for how many lanes its code reads blocks."""
    if native.library("bfloat16", "bfloat16") is None:
        pytest.skip("the compiled pass wants gcc and an x86 processor with AVX2")
    if request.param == "avx2":
        if packs.reads(code()) == 8:
            pytest.skip("this processor's own code is that of one without AVX-512")
        request.getfixturevalue("avx2")
    elif not packs.reads(code()):
        pytest.skip("with AVX-512, blocks are read where it multiplies bfloat16")
    return packs.reads(code())


@pytest.fixture(scope="module")
def stock() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**BASE, **SIZES, "bos_token_id": 1, "eos_token_id": 1})).eval()


def loaded(file: Path) -> HFTarget:
    target = load_target(file, exact="auto", dtype="bfloat16")
    assert isinstance(target, HFTarget)
    assert target.native is not None
    return target


def kinds(target: HFTarget) -> list[int]:
    """Of all matrices of the pass."""
    return [one.kind for one in target.native.weights.kept if isinstance(one, packs.Packed)]


@pytest.fixture
def as_they_are(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], HFTarget]:
    """Loads a model whose weights are read as they are."""

    def made(model: Any) -> HFTarget:
        with monkeypatch.context() as plain:
            plain.setattr(blocks, "twelve", lambda model, packed, code: {})
            target = load_target(model, native=True)
        assert isinstance(target, HFTarget)
        assert set(kinds(target)) == {packs.PLAIN}
        return target

    return made


@pytest.fixture(scope="module")
def wide() -> LlamaForCausalLM:
    """Wide enough for blocks of 256."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes["initializer_range"] = 0.05
    return LlamaForCausalLM(LlamaConfig(**{**BASE, **SIZES, **sizes, "bos_token_id": 1, "eos_token_id": 1})).eval()


READ = {  # how sixteen lanes read them; eight lanes read the first three so, and the others in twelve bits
    "Q4_0": "Q4", "Q4_1": "Q4", "Q8_0": "Q8", "Q5_0": "Q5", "Q5_1": "Q5", "Q2_K": "Q3K", "Q3_K": "Q3K",
    "Q4_K": "Q4K", "Q5_K": "Q5K", "Q6_K": "Q6K", "IQ4_NL": "IQ4", "IQ4_XS": "IQ4K",
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
@torch.no_grad()
def test_a_pass_reads_a_files_blocks_and_has_the_same_bits(
    tmp_path: Path, wide: Any, kind: str, as_they_are: Callable[[Any], HFTarget], processor: int
) -> None:
    file = write(tmp_path / "m.gguf", wide, kind)
    target = loaded(file)
    own = READ[kind] if processor == 16 or kind in ("Q4_0", "Q4_1", "Q8_0") else "BF12"
    assert set(kinds(target)) == {ffi.integer_const(own)}
    equal(target, as_they_are(gguf.read(file, "bfloat16")[0]))


@torch.no_grad()
def test_a_pass_reads_twelve_bits_and_has_the_same_bits(
    stock: Any, processor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the code has eight lanes, of any bfloat16 weights, also where numbers are far from the others."""
    if processor != 8:
        pytest.skip("twelve bits are read in eight lanes")
    model = copy.deepcopy(stock).bfloat16()
    for layer in model.model.layers:  # a block of a few rows
        layer.self_attn.o_proj.weight[7:18, 32:64] *= 2.0**-40
        assert own_uppers(layer.self_attn.o_proj.weight) > 0
    target = direct(model)
    assert set(kinds(target)) == {packs.BF12}
    monkeypatch.setattr(blocks, "twelve", lambda model, packed, code: {})
    whole = direct(model)
    assert set(kinds(whole)) == {packs.PLAIN}
    equal(target, whole)


def direct(model: Any) -> HFTarget:
    """Compiled passes over its weights, whatever `validate` says of them."""
    target, weights = HFTarget(model), compiled.weights_of(model)
    assert weights is not None
    target.native = compiled.forward_of(target, weights)
    return target


def own_uppers(weight: torch.Tensor) -> int:
    """Of how many fours of rows some block has upper bytes of its own."""
    made = in_twelve(weight)
    assert made is not None
    ends = made.rows.view(-1, 4 * made.rows.shape[1])[:, -48:-40]
    return int(ends.contiguous().view(torch.int64).count_nonzero())


def in_twelve(weight: torch.Tensor) -> packs.Packed | None:
    return packs.twelve_bits(weight, code(), torch.empty(packs.twelve_size(weight), dtype=torch.uint8))


def test_twelve_bits_are_the_same_numbers(processor: int) -> None:
    if processor != 8:
        pytest.skip("twelve bits are read in eight lanes")
    torch.manual_seed(0)
    normal = torch.randn(42, 576)
    far = normal.clone()
    far[9, 100], far[30, 3], far[33, 575], far[41, 0] = 1e-30, 1e30, -0.0, float("inf")
    for weight in (normal, far, normal * 1e-38, torch.zeros(8, 32), normal.relu()):
        own = weight.bfloat16()
        made = in_twelve(own)
        assert made is not None
        assert made.kind == packs.BF12
        assert made.rows.nbytes < 0.8 * 2 * len(made.rows) * own.shape[1] or own.shape[1] < 64
        found = packs.numbers(code(), made, own.shape[1])
        assert torch.equal(found[: len(own)].view(torch.int16), own.view(torch.int16))
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert in_twelve(every.view(-1, 64)) is not None, "neighbours share upper bytes"
    assert in_twelve(every[torch.randperm(2**16)].view(-1, 64)) is None
    assert packs.twelve_size(normal[:, :48]) == 0, "blocks are of 32"


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@torch.no_grad()
def test_activations_in_float32_meet_the_same_blocks(
    tmp_path: Path, stock: Any, kind: str, processor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no product is of 16 bits."""
    if processor == 16:
        pytest.skip("this processor has products of 16 bits")
    monkeypatch.setattr(load, "multiplies_halves", lambda: False)
    file = write(tmp_path / "m.gguf", stock, kind)
    target = load_target(file, exact="auto")
    assert isinstance(target, HFTarget)
    assert target.dtype == torch.float32
    assert packs.PLAIN not in kinds(target)
    monkeypatch.setattr(blocks, "twelve", lambda model, packed, code: {})
    own = compiled.weights_of(model := gguf.read(file, "bfloat16")[0])
    assert own is not None
    whole = HFTarget(load.widened(model))
    whole.native = compiled.forward_of(whole, own)
    equal(target, whole)


def test_code_that_reads_no_blocks_is_given_none(tmp_path: Path, stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read by one build, and a pass in another precision may be of another."""
    target = loaded(write(tmp_path / "m.gguf", stock, "Q4_1"))
    assert compiled.forward_of(target, target.native.weights) is not None
    monkeypatch.setattr(compiled, "reads", lambda code: 0)
    assert compiled.forward_of(target, target.native.weights) is None


def equal(target: HFTarget, whole: HFTarget) -> None:
    """Their bits: of prompts, of one text with 1 to 9 nodes, and of trees in a batch."""
    prompts = [text_of(1, 150), text_of(2, 30)]
    for mine, right in zip(opened(target, prompts)[1], opened(whole, prompts)[1], strict=True):
        assert torch.equal(mine, right)
    for nodes in range(1, 10):
        (session, _), (other, _) = opened(target, prompts[:1]), opened(whole, prompts[:1])
        tree = chain([text_of(3, nodes)])
        assert np.array_equal(session.forward(tree).logits, other.forward(tree).logits)
    assert trees_differ(target, [text_of(1, 108), text_of(2, 46)], [76, 14], deep=6) == 0


@torch.no_grad()
def test_what_is_not_the_models_weight_is_not_read(tmp_path: Path, stock: Any) -> None:
    """One number of one layer is another: that layer keeps its own weights."""
    file = write(tmp_path / "m.gguf", stock, "Q4_1")
    model: Any = gguf.read(file, "bfloat16")[0]
    whole = blocks.read(model, file, code())
    changed = model.model.layers[0].mlp.up_proj.weight
    changed[3, 5] += 0.5
    assert set(blocks.read(model, file, code())) == set(whole) - {id(changed)}


MUTANTS = {
    "a row has another's numbers": {
        16: (
            "first = w_and(w_shift_right(words, 4 * r)",
            "first = w_and(w_shift_right(words, 4 * (3 - r))",
        ),
        8: ("own = row % 2 ?", "own = row % 2 == 0 ?"),
    },
    "a minimum is its neighbour's": {
        16: ("weight_table(shape, 0, scales + 2 * r)", "weight_table(shape, 0, scales + (2 * r + 2) % 8)"),
        8: ("v_set1(scales[2 * row + 1])", "v_set1(scales[(2 * row + 3) % 8])"),
    },
    "halfway numbers are rounded up": {
        8: (
            "return v_sub(x, v_mul(x, v_set1(1.0f - 1.0f / ENLARGED)));",
            "return v_mul(v_set1(1.0f / ENLARGED), (vec_t)(((ints_t)x + 0x8000) & (int32_t)0xffff0000));",
        ),
    },
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_code_that_reads_other_numbers_is_not_used(
    mutant: str, tmp_path: Path, stock: Any, monkeypatch: pytest.MonkeyPatch, processor: int
) -> None:
    if processor not in MUTANTS[mutant]:
        pytest.skip("this processor rounds by itself")
    line, wrong = MUTANTS[mutant][processor]
    file = write(tmp_path / "m.gguf", stock, "Q4_1")
    model = gguf.read(file, "bfloat16")[0]
    right = blocks.read(model, file, code())
    with mutated(monkeypatch, tmp_path, f"formats/open{processor}.h", line, wrong):
        assert len(blocks.read(model, file, code())) < len(right)


def test_a_drafters_weights_are_rounded_to_the_nearest() -> None:
    torch.manual_seed(0)
    weight = (torch.randn(42, 96) * torch.logspace(-3, 2, 42)[:, None]).bfloat16()
    weight[3] = 0
    made = packs.eights(*packs.rounded(weight))
    found = packs.numbers(code(), made, 96).float()
    assert not found[42:].any(), "rows lie in fours"
    found = found[:42]
    step = weight.float().unflatten(1, (-1, packs.BLOCK)).abs().amax(-1) / 127
    error = (found - weight.float()).abs().unflatten(1, (-1, packs.BLOCK))
    assert (error <= 0.51 * step[..., None] + 0.005 * weight.float().abs().unflatten(1, (-1, packs.BLOCK))).all()
    assert made.kind == packs.Q8
