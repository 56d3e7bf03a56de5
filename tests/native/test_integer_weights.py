"""Targets of integer products (`--weights native` and `int8`): near full weights, and exact for their drafts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import text_of, trees_differ
from compiled_code import needs_code
from gguf_files import write
from small import BASE, build
from transformers import LlamaConfig, LlamaForCausalLM

import outrider
from outrider import InputError
from outrider.backends.native.abi import INTEGER
from outrider.backends.native.target import NativeTarget, load
from outrider.backends.native.weights import Matrix
from outrider.backends.torch.validate import validate
from outrider.proofs.audit import audit

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}  # of superblocks
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")

pytestmark = needs_code


@pytest.fixture(autouse=True, params=["own", "avx2"])
def processor(request: pytest.FixtureRequest) -> None:
    """The code of this processor, and of one with AVX2 alone, which computes in float32."""
    if request.param == "avx2":
        request.getfixturevalue("avx2")


def stock(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 1, "max_position_embeddings": 2048, **more}
    return LlamaForCausalLM(LlamaConfig(**{**BASE, **SIZES, **sizes})).eval()


def kinds_of(target: NativeTarget) -> list[int]:
    """Of the matrices, in the order in which they are read."""
    return [one.kind for one in target.forward.weights.kept if isinstance(one, Matrix)]


def logits(target: NativeTarget) -> np.ndarray:
    """float64 [8, vocab], after eight prompts."""
    results = {}
    for chunk in target.open(64).prefill([text_of(b, 50) for b in range(8)]):
        results |= {b: chunk.output.logits[b, 0] for b, last in enumerate(chunk.last) if last}
    return np.array([results[b] for b in range(8)], np.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_have_the_bits_of_single_tokens(tmp_path: Path, kind: str) -> None:
    target = load(write(tmp_path / "m.gguf", stock(**WIDE), kind), way="native")
    assert (target.integers, target.forward.weights.integers) == (True, (kind,))
    assert kind in target.arithmetic
    assert trees_differ(target, [text_of(b, 40 + 9 * b) for b in range(3)], [20, 29, 3], 12) == 0


@pytest.mark.parametrize(("kind", "way"), [("Q4_K", "native"), ("Q6_K", "native"), ("Q4_K", "int8"), ("F32", "int8")])
def test_logits_are_near_those_of_full_weights(tmp_path: Path, kind: str, way: str) -> None:
    """Of usual initial weights: five times larger ones make attention so sharp that it amplifies rounding."""
    file = write(tmp_path / "m.gguf", stock(**WIDE, initializer_range=0.04), kind)
    full, quantised = logits(load(file)), logits(load(file, way=way))
    assert 0 < np.linalg.norm(full - quantised) < 0.05 * np.linalg.norm(full)


def test_safetensors_are_rounded_to_int8(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        build("qwen3", dtype, hidden_size=64, intermediate_size=96, head_dim=32).save_pretrained(tmp_path)
        target = load(tmp_path, way="int8")
        assert set(kinds_of(target)) == {INTEGER + 8}
        with pytest.raises(InputError, match=r"the B?F(16|32) matrices of .* have no form for native"):
            load(tmp_path, way="native")


def test_validation_holds_them_to_their_own_single_tokens(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", stock(), "Q4_1")
    target = outrider.load(file, "none", weights="native").target
    report = validate(target)
    assert (report.verdict, report.worst) == ("PASS bits", 0)
    assert "integer products" in report.sentence
    assert report.control > 100 * report.allowed


# -- what stays full, and what is refused ------------------------------------------------------------------------------


def test_matrices_without_an_integer_form_stay_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And so does the other half of a gated layer, which reads the same rows."""
    file = write(tmp_path / "m.gguf", stock(**WIDE), "MXFP4")
    data, target = bytearray(file.read_bytes()), load(file)
    (up,) = (one for name, one in target.checkpoint.parameters.items() if name == "model.layers.0.mlp.up_proj.weight")
    at = bytes(data).index(up.tensor.data.tobytes())
    data[at] = 200  # an exponent beyond float16's
    file.write_bytes(bytes(data))
    with caplog.at_level(logging.WARNING):
        results = kinds_of(load(file, way="native"))
    assert [kind >= INTEGER for kind in results[:8]] == [True] * 4 + [False] * 2 + [True] * 2
    assert "2 of the 22 matrices of m.gguf (MXFP4) have no form for native weights and stay full" in caplog.text
    caplog.clear()
    assert kinds_of(load(file, way="auto")) == results
    assert not caplog.text, "nobody asked for them"


def test_a_draft_model_of_a_gguf_file_drafts_by_integer_products(tmp_path: Path) -> None:
    """By default; and the text is plain decoding's in any case."""
    file = str(write(tmp_path / "m.gguf", stock(**WIDE), "Q4_K"))
    sampled: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0, "seed": 3}
    (plain,) = outrider.load(file, "none", weights="full").generate([text_of(0, 40)], **sampled)
    for weights, products in (("auto", True), ("native", True), ("int8", True), ("full", False)):
        llm = outrider.load(file, f"model:{file}?weights={weights}&tree=chain", weights="full")
        assert llm.drafter.uncalibrated.models[0].integers == products
        (output,) = llm.generate([text_of(0, 40)], budget="4x3", **sampled)
        assert output.tokens == plain.tokens
        assert output.usage.accepted
    numbers = str(write(tmp_path / "numbers.gguf", stock(**WIDE), "F16"))
    assert not outrider.load(file, f"model:{numbers}").drafter.uncalibrated.models[0].integers
    for model, weights, why in (
        ("demo", "native", "native weights are those of a .gguf file"),
        (file, "q4", "weights are auto, full"),
    ):
        with pytest.raises(InputError, match=why):
            outrider.load(model, f"model:{model}?weights={weights}")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"weights": "int8", "device": "cuda"}, "int8 weights are for CPUs"),
        ({"weights": "int8", "dtype": "float64"}, "leave the dtype out"),
        ({"weights": "native", "compile": False}, "leave compile=False .--no-compile. out"),
        ({"weights": "int8", "revision": "main"}, "which int8 weights need"),
        ({"weights": "int4"}, "weights are auto, full, int8 or native"),
    ],
)
def test_what_they_cannot_be_combined_with(tmp_path: Path, more: dict[str, Any], why: str) -> None:
    file = write(tmp_path / "m.gguf", stock(), "Q4_1")
    with pytest.raises(InputError, match=why):
        outrider.load(file, "none", **more)


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="for models that are loaded by name"):
        outrider.load(stock(), "none", weights="int8")
    build("gpt_neox", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="not served by native passes here, which int8 weights need"):
        outrider.load(tmp_path, "none", weights="int8")
    with pytest.raises(InputError, match=r"native weights are those of a \.gguf file"):
        outrider.load(tmp_path, "none", weights="native")


def test_a_gguf_file_is_multiplied_as_integers_where_nothing_else_is_asked_for(tmp_path: Path) -> None:
    """Files without quants, folders and what torch serves stay full."""
    blocks, numbers = (write(tmp_path / f"{kind}.gguf", stock(**WIDE), kind) for kind in ("Q4_K", "F16"))
    for model, more, kept in (
        (blocks, {}, "native"), (blocks, {"weights": "full"}, "full"), (blocks, {"weights": "int8"}, "int8"),
        (blocks, {"compile": False}, "full"), (numbers, {}, "full"), ("demo", {}, "full"),
    ):  # fmt: skip
        llm = outrider.load(model, "none", **more)
        assert llm.target.integers == (kept != "full")
        assert llm.name.endswith(f", {kept} weights") == (kept != "full")


def test_the_audit_wants_full_weights(tmp_path: Path) -> None:
    llm = outrider.load(write(tmp_path / "m.gguf", stock(), "Q4_1"), "none", weights="native")
    with pytest.raises(InputError, match="load the model with those"):
        audit(llm)
