"""Block-quantised weights: read in place, equal to their dequantised values bit for bit; and in twelve bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import opened, text_of, trees_differ
from gguf_files import write
from quantised_blocks import random_blocks
from small import BASE
from transformers import LlamaConfig, LlamaForCausalLM
from wrong_code import mutated

from outrider.backends.native import library as native
from outrider.backends.native.abi import PLAIN, address, ffi
from outrider.backends.native.target import NativeTarget, load
from outrider.backends.native.weights import Matrix
from outrider.backends.torch import gguf
from outrider.backends.torch.module import ModuleTarget
from outrider.core.tree import chain

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
READ = {  # how sixteen lanes read them; eight lanes read the first three so, and the others in twelve bits
    "Q4_0": "Q4", "Q4_1": "Q4", "Q8_0": "Q8", "Q5_0": "Q5", "Q5_1": "Q5", "Q2_K": "Q3K", "Q3_K": "Q3K",
    "Q4_K": "Q4K", "Q5_K": "Q5K", "Q6_K": "Q6K", "IQ4_NL": "IQ4", "IQ4_XS": "IQ4K",
    "MXFP4": "MXFP4",
}  # fmt: skip


@pytest.fixture(params=["own", "avx2"], autouse=True)
def lanes(request: pytest.FixtureRequest) -> int:
    """This processor, and one without AVX-512: for how many lanes its code reads blocks."""
    code = native.library("bfloat16", "bfloat16")
    if code is None:
        pytest.skip("native passes need AVX2 or NEON, and a compiler")
    if request.param == "avx2":
        request.getfixturevalue("avx2")
        code = native.library("bfloat16", "bfloat16")
        assert code is not None
    elif not code.block_lanes:
        pytest.skip("with AVX-512, blocks are read where it multiplies bfloat16")
    return int(code.block_lanes)


def model(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**BASE, **SIZES, **more})).eval()


@pytest.fixture(scope="module")
def wide() -> LlamaForCausalLM:
    """Wide enough for blocks of 256."""
    return model(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)


def kinds(target: NativeTarget) -> list[int]:
    """Of all matrices of the pass."""
    return [one.kind for one in target.forward.weights.kept if isinstance(one, Matrix)]


def equal(target: NativeTarget, plain: NativeTarget) -> None:
    """Their bits: of prompts, of one text with 1 to 9 nodes, and of trees in a batch."""
    assert set(kinds(plain)) == {PLAIN}
    prompts = [text_of(1, 150), text_of(2, 30)]
    assert torch.equal(opened(target, prompts)[1], opened(plain, prompts)[1])
    for nodes in range(1, 10):
        (session, _), (other, _) = opened(target, prompts[:1]), opened(plain, prompts[:1])
        tree = chain([text_of(3, nodes)])
        assert np.array_equal(session.forward(tree).logits, other.forward(tree).logits)
    assert trees_differ(target, [text_of(1, 108), text_of(2, 46)], [76, 14], deep=6) == 0


@pytest.mark.parametrize("kind", READ)
@torch.no_grad()
def test_a_pass_reads_a_files_blocks_and_has_the_same_bits(tmp_path: Path, wide: Any, kind: str, lanes: int) -> None:
    file = write(tmp_path / "m.gguf", wide, kind)
    target = load(file, "bfloat16")
    own = READ[kind] if lanes == 16 or kind in ("Q4_0", "Q4_1", "Q8_0") else "BF12"
    assert set(kinds(target)) == {ffi.integer_const(own)}
    equal(target, ModuleTarget(gguf.read(file, "bfloat16")[0]))


def test_every_exponent_of_mxfp4(lanes: int) -> None:
    """A row takes what it takes in the file; weights that bfloat16 holds as subnormals only are zeros."""
    code, width = native.library("bfloat16", "bfloat16"), 96
    if lanes != 16:
        pytest.skip("MXFP4 is read in sixteen lanes")
    assert code is not None
    rows = random_blocks("MXFP4", 256, width, ())
    rows.reshape(256, -1, 17)[..., 0] = np.arange(256)[:, None]
    data = np.empty((256, code.repacked_bytes(39, width)), np.uint8)
    assert data.shape == rows.shape
    assert code.repack(39, address(rows), 256, width, address(None), address(data), 1) == ffi.integer_const("MXFP4")
    made, theirs = np.empty((256, width), np.uint16), np.empty((256, width), np.uint16)
    one = Matrix(ffi.integer_const("MXFP4"), data).struct
    code.unpack_matrix(ffi.addressof(one), 256, width, address(made), 1)
    assert code.dequantise(39, address(rows), 256, width, address(None), address(theirs), 1, 1) == 256
    normal = theirs & 0x7F80 != 0
    assert np.array_equal(made[normal], theirs[normal])
    assert not (made[~normal] & 0x7FFF).any()


@torch.no_grad()
def test_a_pass_reads_twelve_bits_and_has_the_same_bits(tmp_path: Path, lanes: int) -> None:
    """Where the code has eight lanes, of any bfloat16 weights, also with outliers."""
    if lanes != 8:
        pytest.skip("twelve bits are read in eight lanes")
    one = copy.deepcopy(model()).bfloat16()
    for layer in one.model.layers:  # a block of a few rows
        layer.self_attn.o_proj.weight[7:18, 32:64] *= 2.0**-40
    one.save_pretrained(tmp_path)
    target = load(tmp_path, "bfloat16")
    assert set(kinds(target)) == {ffi.integer_const("BF12")}
    equal(target, ModuleTarget(LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)))  # casts round RoPE
    one.model.layers[0].mlp.up_proj.weight.view(torch.int16).random_(0x0080, 0x3B00)  # no two share upper bytes
    one.save_pretrained(tmp_path)
    assert sorted(set(kinds(load(tmp_path, "bfloat16")))) == [PLAIN, ffi.integer_const("BF12")]


MUTANTS = {
    16: {
        "a row has another's numbers": (
            "first = w_and(w_shift_right(words, 4 * r)",
            "first = w_and(w_shift_right(words, WRONG ? 4 * (3 - r) : 4 * r)",
        ),
        "a minimum is its neighbour's": (
            "weight_table(shape, 0, scales + 2 * r)",
            "weight_table(shape, 0, scales + (WRONG ? (2 * r + 2) % 8 : 2 * r))",
        ),
    },
    8: {
        "a row has another's numbers": ("own = row % 2 ?", "own = (WRONG ? row % 2 == 0 : row % 2) ?"),
        "a minimum is its neighbour's": (
            "v_set1(scales[2 * row + 1])",
            "v_set1(scales[WRONG ? (2 * row + 3) % 8 : 2 * row + 1])",
        ),
        "halfway numbers are rounded up": (
            "return v_sub(x, v_mul(x, v_set1(1.0f - 1.0f / ENLARGED)));",
            "if (WRONG)"
            " return v_mul(v_set1(1.0f / ENLARGED), (vec_t)(((ints_t)x + 0x8000) & (int32_t)0xffff0000));"
            " return v_sub(x, v_mul(x, v_set1(1.0f - 1.0f / ENLARGED)));",
        ),
    },
}


@pytest.mark.parametrize("mutant", [*MUTANTS[8], "none"])
def test_code_that_dequantises_otherwise_is_not_used(
    mutant: str, tmp_path: Path, wide: Any, monkeypatch: pytest.MonkeyPatch, lanes: int
) -> None:
    names = [*MUTANTS[lanes]]
    if mutant not in (*names, "none"):
        pytest.skip("this processor rounds by itself")
    file, blocks = write(tmp_path / "m.gguf", wide, "Q4_1"), ffi.integer_const("Q4")
    lines = [(f"formats/open{lanes}.h", *lines) for lines in MUTANTS[lanes].values()]
    with mutated(monkeypatch, tmp_path / "c", lines, names.index(mutant) if mutant in names else -1):
        used = [kind == blocks for kind in kinds(load(file, "bfloat16"))]
        assert all(used) is (mutant == "none")
