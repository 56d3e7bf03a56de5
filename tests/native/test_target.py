"""Native targets, made of files without torch: the same bits as over a stock model's weights in memory, for
every family and every kind of file; and one sentence for what cannot be had."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from compiled_code import needs_code
from gguf_files import write
from small import BASE, build
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.backends.native import model as gguf_model
from outrider.backends.native.checkpoint import open_checkpoint
from outrider.backends.native.families import read
from outrider.backends.native.passes import as_float
from outrider.backends.native.target import NativeTarget, load
from outrider.backends.native.weights import widened
from outrider.backends.torch import gguf
from outrider.backends.torch.hf import HFTarget
from outrider.backends.torch.mark import mark_of
from outrider.backends.torch.module import ModuleTarget
from outrider.core.protocols import Target
from outrider.core.tree import chain, from_lists
from outrider.params import InputError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 2048}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 40, "head_dim": 64},
    "qwen2": {"hidden_size": 128, "head_dim": None},
    "qwen2-sliding": {"sliding_window": 70, "hidden_size": 128, "head_dim": None},
    "qwen3": {"num_key_value_heads": 4},
    "smollm3": {"num_key_value_heads": 1, "head_dim": 128, "tie_word_embeddings": True},
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
}  # fmt: skip
KINDS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip
TAPS = (0, 1, -1)

pytestmark = needs_code


def family(name: str, dtype: torch.dtype, **more: Any) -> Any:
    """A tiny random model."""
    sizes = {k: v for k, v in {**SIZES, **FAMILIES[name], **more}.items() if v is not None}
    return build(name.removesuffix("-tied"), dtype, **sizes)


def text(seed: int, count: int, vocab: int = 97) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def outputs(target: Target, texts: Sequence[list[int]]) -> list[np.ndarray]:
    """Logits and features, padding left out, of ragged prompts in two chunks, of trees after them, and of a tree
    after the accepted paths."""
    session, results = target.open(64), []
    for chunk in session.prefill(texts, TAPS):
        sizes = chunk.tree.size.tolist()
        results += [chunk.output.logits[b] for b, last in enumerate(chunk.last) if last]
        results += [chunk.output.features[tap][b, :n] for tap in TAPS for b, n in enumerate(sizes)]
    trees = [([9, 5, 6, 7, 8, 1, 2], [0, 0, 1, 1, 0, 4, 5]), ([4, 60, 61], [0, 0, 0]), ([70, 1, 2], [0, 0, 0])]
    paths = [[0, 4, 5, 6], [0], [0, 2]]
    for rows in (trees, [([3, 4], [0, 0]), ([8, 9, 10], [0, 0, 1]), ([77], [0])]):
        tree = from_lists([(*row, [0.0] * len(row[0])) for row in rows[: len(texts)]])
        output = session.forward(tree, TAPS)
        for b, n in enumerate(tree.size.tolist()):
            results += [output.logits[b, :n], *(output.features[tap][b, :n] for tap in TAPS)]
        session.keep(paths[: len(texts)])
        paths = [[0]] * 3
    return [np.ascontiguousarray(array).view(np.uint8) for array in results]


@torch.no_grad()
def test_yarn_stretches_the_context() -> None:
    """Configs have the original length in `max_position_embeddings`, as Qwen's cards advise, or the stretched one."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    for most in (64, 256):
        model = family("llama", torch.float32, rope_parameters=yarn, max_position_embeddings=most)
        target = ModuleTarget(model)
        assert target.context == HFTarget(model).context == 256
        ids = text(1, 200)
        chunk = list(target.open(256).prefill([ids], ()))[-1]
        stock = model(torch.tensor([ids])).logits[0, -1].numpy()
        np.testing.assert_allclose(chunk.output.logits[0, 0], stock, atol=1e-4)


@torch.no_grad()
def test_a_session_goes_back_and_forgets() -> None:
    """Only back; and a wiped row holds nothing, while the row beside it is as before."""
    session = ModuleTarget(family("llama", torch.float32)).open(64)
    for _ in session.prefill([text(1, 30), text(2, 30)]):
        pass
    with pytest.raises(InputError, match="cannot become"):
        session.rewind([31, 30])
    session.rewind([20, 30])
    again = session.forward(chain([text(1, 30)[20:], text(3, 10)])).logits
    slots = session.cache.slots
    beside = slots[:, 1, :30].copy()
    session.wipe([0])
    assert beside.any()
    assert not slots[:, 0].any()
    assert (slots[:, 1, :30] == beside).all()
    fresh = session.target.open(64)
    *_, chunk = fresh.prefill([text(1, 30)])
    assert np.array_equal(again[0, -1], chunk.output.logits[0, 0])


def same(ours: NativeTarget, theirs: ModuleTarget, vocab: int = 97) -> None:
    """Equal descriptions, marks and bits."""
    for name in ("vocab", "context", "hidden", "layers", "precision", "exact", "ragged"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for texts in ([text(1, 600, vocab), text(2, 77, vocab), text(3, 130, vocab)], [text(4, 90, vocab)]):
        pairs = list(zip(outputs(ours, texts), outputs(theirs, texts), strict=True))
        assert all(np.array_equal(a, b) for a, b in pairs)
    assert ours.mark == mark_of(theirs.model)


def dequantised(file: Path, dtype: str) -> ModuleTarget:
    """Passes over a file's dequantised weights."""
    return ModuleTarget(gguf.read(file, dtype)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_from_safetensors(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = family(name, dtype)
    model.save_pretrained(tmp_path)
    theirs = ModuleTarget(model)
    same(load(tmp_path, str(dtype).removeprefix("torch.")), theirs)


@pytest.mark.parametrize("kind", ROPES)
def test_every_rotary_embedding(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    model = family("llama", torch.float32, rope_parameters=rope)
    model.save_pretrained(tmp_path)
    theirs = ModuleTarget(model)
    ours = load(tmp_path)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(2048)[None])
    table = ours.forward.ropes[0].table(2048)
    assert np.abs(table - torch.stack([cos[0], sin[0]], 1).numpy()).max() < 2e-4  # angles of 2,047 differ by one bit
    assert np.abs(table[:16] - torch.stack([cos[0], sin[0]], 1).numpy()[:16]).max() < 2e-6
    same(ours, theirs)


@pytest.fixture(scope="module")
def wide() -> Any:
    """Wide enough for blocks of 256."""
    torch.manual_seed(3)
    sizes = {
        "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "initializer_range": 0.05, "bos_token_id": 1, "eos_token_id": 1, "max_position_embeddings": 2048,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**BASE, **sizes})).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_gguf(tmp_path: Path, wide: Any, kind: str) -> None:
    file = write(tmp_path / "m.gguf", wide, kind)
    dtype = "float32" if kind in ("F32", "F16") else "bfloat16"
    same(load(file, dtype), dequantised(file, dtype))


GGUFS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "head_dim": 64},
    "llama-tied": {"tie_word_embeddings": True, "head_dim": 64},
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "smollm3": {"tie_word_embeddings": True, "head_dim": 64, "num_hidden_layers": 5},
}


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("name", GGUFS)
def test_every_family_of_gguf(tmp_path: Path, name: str, kind: str) -> None:
    """The stock model is the one that the file was made of, or of its dequantised weights."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05, "max_position_embeddings": 2048}
    if name == "smollm3":
        sizes["no_rope_layers"] = None
    model = build(name.removesuffix("-tied"), torch.float32, **{**sizes, **GGUFS[name]})
    file = write(tmp_path / "m.gguf", model, kind, arch=name.removesuffix("-tied"))
    dtype = "float32" if kind == "F32" else "bfloat16"
    same(load(file, dtype), dequantised(file, dtype))
    if kind == "F32":
        same(load(file), ModuleTarget(model))


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_quantised_weights_in_float32(tmp_path: Path, wide: Any, kind: str) -> None:
    file = write(tmp_path / "m.gguf", wide, kind)
    same(load(file, "float32"), dequantised(file, "float32"))


@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_K", "BF16"])
def test_the_same_on_processors_without_avx512(tmp_path: Path, wide: Any, kind: str) -> None:
    file = write(tmp_path / "m.gguf", wide, kind)
    same(load(file, "bfloat16"), dequantised(file, "bfloat16"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> NativeTarget:
    folder = tmp_path_factory.mktemp("llama")
    family("llama", torch.bfloat16).save_pretrained(folder)
    return load(folder)


def after(target: Target, tokens: list[int]) -> np.ndarray:
    """Logits after a text."""
    return [chunk.output.logits[0, 0] for chunk in target.open(64).prefill([tokens])][-1]


def next_logits(session: Any, tokens: list[int]) -> np.ndarray:
    """Logits after one more token of each row."""
    return session.forward(chain([[token] for token in tokens])).logits[:, 0]


def test_rows_come_and_go_without_changing_a_bit(target: NativeTarget) -> None:
    """Forks, rows that move, newcomers, a cache that grows, and rows that are taken back."""
    texts = [text(5, 40), text(6, 700), text(7, 12)]
    session = target.open(8)
    assert len(list(session.prefill(texts, ()))) == 2
    session.select([2, 0, 0, 1])
    other = target.open(8)
    list(other.prefill([text(8, 1100)]))
    session.join(other)
    session.rewind([12, 40, 30, 700, 900])
    session.wipe([2])
    session.select([0, 1, 4, 3])
    assert session.lengths == [12, 40, 900, 700]
    right = [texts[2], texts[0], text(8, 1100)[:900], texts[1]]
    result = next_logits(session, [1, 2, 3, 4])
    for row, (tokens, more) in enumerate(zip(right, [1, 2, 3, 4], strict=True)):
        assert np.array_equal(result[row], after(target, [*tokens, more]))


def test_a_kept_text_is_gone_on_from(target: NativeTarget) -> None:
    first, session = text(9, 620), target.open(8)
    chunks = list(session.prefill([first], TAPS))
    features = {tap: np.concatenate([c.output.features[tap][0] for c in chunks]) for tap in TAPS}
    kept = session.taken(0, first[:600], {tap: f[:600] for tap, f in features.items()})
    assert kept.bytes > 600 * 64
    again = target.open(8)
    results = list(again.resume([*first[:590], 5, 6, 7], TAPS, kept, 590))
    assert again.lengths == [593]
    assert np.array_equal(results[-1].output.logits[0, 0], after(target, [*first[:590], 5, 6, 7]))
    copied = np.concatenate([c.output.features[-1][0] for c in results])[:590]
    assert np.array_equal(copied, features[-1][:590])


def test_the_head_and_the_embeddings_are_the_passes_own(target: NativeTarget) -> None:
    tokens, session = text(10, 30), target.open(8)
    (chunk,) = session.prefill([tokens], (0, -1))
    assert np.array_equal(target.head(chunk.output.features[-1])[:, -1:], chunk.output.logits)
    assert np.array_equal(target.embed([tokens]), chunk.output.features[0])
    assert np.array_equal(target.embeddings.rows(np.array(tokens)), as_float(target.embed(tokens)))
    rows, logits = target.head_rows(np.array([7, 3])), chunk.output.logits[0, 0]
    assert rows is not None
    near = widened(rows) @ widened(chunk.output.features[-1][0, -1])
    assert np.allclose(near, logits[[7, 3]], rtol=1e-3, atol=1e-3)
    tree = chain([[1, 2, 3]])
    read = session.forward(tree, TAPS)
    given = session.forward(tree, TAPS, embeds=target.embed([[1, 2, 3]]))
    assert np.array_equal(read.logits, given.logits)
    session.forward(chain([[1]]))
    last = session.forward(tree, TAPS, since=1)
    assert np.array_equal(read.logits[:, 1:], last.logits)


@pytest.mark.parametrize("way", ["full", "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "phi"])
def test_logits_of_some_tokens(tmp_path: Path, name: str, dtype: str, way: str) -> None:
    """As of a draft model that learned to draft these alone: the same bits, whatever tokens are read."""
    model = build("phi", torch.float32) if name == "phi" else family(name, torch.float32)
    model.save_pretrained(tmp_path)
    some_tokens(open_checkpoint(tmp_path), dtype, way)


@pytest.mark.parametrize("way", ["full", "native"])
def test_logits_of_some_tokens_of_a_gguf_file(tmp_path: Path, wide: Any, way: str) -> None:
    some_tokens(open_checkpoint(write(tmp_path / "m.gguf", wide, "Q4_K")), "bfloat16", way)


def some_tokens(files: Any, dtype: str, way: str) -> None:
    whole = NativeTarget(files, dtype, way)
    for names in (np.array([96, 3, 50, 4, 7]), np.arange(4, 9)):
        some = NativeTarget(files, dtype, way, names)
        assert (whole.vocab, some.vocab) == (97, 5)
        for taps in ((), TAPS):
            for a, b in zip(logits(whole, taps), logits(some, taps), strict=True):
                assert np.array_equal(a[..., names], b)
        assert np.array_equal(some.head_rows(None), whole.head_rows(names)) or "head" in files.description.biases


def logits(target: NativeTarget, taps: tuple[int, ...]) -> list[np.ndarray]:
    """Of two ragged prompts, and of a chain after each."""
    session = target.open(8)
    made = [chunk.output.logits for chunk in session.prefill([text(11, 40), text(12, 7)], taps)]
    return [*made, session.forward(chain([[1, 96], [3, 95]]), taps).logits]


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    """From a file to a text."""
    family("llama", torch.bfloat16).save_pretrained(tmp_path)
    program = """
import sys
from outrider.backends.native.target import load
from outrider.backends.native.text_tokenizer import load_tokenizer
from outrider.core.tree import chain
target = load(sys.argv[1])
session = target.open(64)
(chunk,) = session.prefill([[5, 6, 7]], (-1,))
session.forward(chain([[int(chunk.output.logits[0, 0].argmax()), 3]]))
assert target.mark
heavy = {name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "jaxtyping", "scipy"}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def changed(folder: Path, **values: Any) -> Path:
    """The folder with other values in its config.json; None: left out."""
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model_type": "bloom"}, "bloom is not a family with native passes"),
        ({"hidden_act": "mish"}, "do not support the activation 'mish'"),
        ({"mlp_bias": True}, "lack 9 tensors, model.layers.0.mlp.down_proj.bias among them"),
        ({"hidden_size": -3}, "hidden_size is -3, not a positive whole number"),
        ({"hidden_size": "x"}, "hidden_size is 'x', not a positive whole number"),
        ({"hidden_size": 72}, "hidden sizes that are multiples of 32, not 72"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"num_hidden_layers": 4}, "lack 13 tensors, model.layers.3.input_layernorm.weight among them"),
        ({"vocab_size": 98}, "embed_tokens.weight is [97, 64], not [98, 64]; fetch both again"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 heads"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "the type 'dynamic' are not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "cannot be understood"),
        ({"rope_parameters": {"partial_rotary_factor": 0.01}}, "rotary embeddings of 0 elements of a head"),
        ({"quantization_config": {"quant_method": "awq"}}, "do not support the config's quantization_config"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rope_scaling": "linear"}, "the rotary embeddings of the model's config cannot be understood"),
        ({"original_max_position_embeddings": -5}, "original_max_position_embeddings is -5"),
        ({"original_max_position_embeddings": "x"}, "original_max_position_embeddings is 'x'"),
        ({"original_max_position_embeddings": 0.5}, "original_max_position_embeddings is 0.5"),
        ({"partial_rotary_factor": "half"}, "the model's config cannot be understood (ValueError"),
        ({"partial_rotary_factor": [1]}, "the model's config cannot be understood (TypeError"),
        ({"partial_rotary_factor": float("inf")}, "the model's config cannot be understood (OverflowError"),
        ({"model_type": "qwen2", "max_window_layers": "x"}, "the model's config cannot be understood (TypeError"),
    ],
)
def test_a_config_that_does_not_fit_is_one_sentence(tmp_path: Path, values: dict[str, Any], sentence: str) -> None:
    family("llama", torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(InputError) as refused:
        load(changed(tmp_path, **values))
    assert sentence in str(refused.value)


@pytest.mark.parametrize("bound", [0, 1, 2, 9])
def test_qwens_mixtures_have_windows_in_other_layers(bound: int) -> None:
    """transformers' own rule, where the config names no types of layers."""
    model = build("qwen2_moe", torch.float32, use_sliding_window=True, sliding_window=16, max_window_layers=bound,
                  num_hidden_layers=4, layer_types=None)  # fmt: skip
    wanted = [16 if kind == "sliding_attention" else 0 for kind in model.config.layer_types]
    config = {name: value for name, value in model.config.to_dict().items() if name != "layer_types"}
    assert [layer.window for layer in read({**config, "sliding_window": 16}).layers] == wanted


@pytest.mark.parametrize("arch", ["gptneox", "falcon"])
def test_fused_rows_that_a_file_lacks_are_refused(tmp_path: Path, arch: str) -> None:
    """Before anything reads after them."""
    alone = {"hidden_size": 128, "num_attention_heads": 4}
    known: dict[str, tuple[str, dict[str, Any]]] = {
        "gptneox": ("gpt_neox", {"hidden_size": 64}), "falcon": ("falcon-rotary", alone),
    }  # fmt: skip
    name, sizes = known[arch]
    model = build(name, torch.float32, **sizes)
    file = write(tmp_path / "whole.gguf", model, arch=arch)
    assert open_checkpoint(file).description
    file = write(tmp_path / "cut.gguf", model, arch=arch, change=lambda name, x: x[:1] if "attn_qkv" in name else x)
    with pytest.raises(InputError, match=r"'blk.0.attn_qkv.weight' has not \d+ rows; fetch it again"):
        open_checkpoint(file)


@pytest.mark.parametrize("extra", ["output.bias", "blk.0.attn_output.bias", "blk.1.ffn_up.bias"])
def test_a_files_bias_that_no_pass_adds_is_refused(tmp_path: Path, extra: str) -> None:
    file = write(tmp_path / "m.gguf", build("llama", torch.float32, **SIZES), extra=extra)
    with pytest.raises(InputError, match="bias, which native passes of this family do not read"):
        assert open_checkpoint(file).description


def test_rotary_factors_of_another_kind_are_refused(tmp_path: Path) -> None:
    model, extra = build("llama", torch.float32, **SIZES), "rope_freqs.weight"
    file = write(tmp_path / "m.gguf", model, extra=extra)
    assert open_checkpoint(file).factors is not None
    changed = write(tmp_path / "half.gguf", model, extra=extra, change=lambda n, x: x.astype(np.float16))
    with pytest.raises(InputError, match=r"keeps rope_freqs.weight as F16, not as F32"):
        open_checkpoint(changed)


def test_a_gemma_2_whose_file_leaves_its_caps_out_has_them() -> None:
    """As llama.cpp reads it; Gemma 3 has none."""
    known = {"gemma2": (50.0, 30.0, 4096), "gemma3": (None, None, None)}
    for arch, (score, logit, window) in known.items():
        values = {f"{arch}.{name}": n for name, n in {
            "embedding_length": 64, "attention.head_count": 2, "block_count": 2, "attention.key_length": 32,
            "attention.layer_norm_rms_epsilon": 1e-6, "context_length": 64}.items()}  # fmt: skip
        config = gguf_model._gemma2(gguf_model._Values({"general.architecture": arch, **values}), cast(Any, None))
        assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (score, logit)
        assert config["sliding_window"] == window


def test_trees_may_lie_in_any_order_in_memory(target: NativeTarget) -> None:
    """As a drafter of somebody else's makes them."""
    tree = from_lists([([9, 5, 6], [0, 0, 1], [0.0] * 3), ([4, 60, 61], [0, 0, 0], [0.0] * 3)])
    strided = np.repeat(tree.size, 2)[::2]
    other = replace(tree, depths=np.asfortranarray(tree.depths), size=strided, tokens=np.asfortranarray(tree.tokens))
    made = []
    for one in (tree, other):
        session = target.open(64)
        list(session.prefill([text(1, 10), text(2, 500)]))
        made.append(session.forward(one).logits)
    assert np.array_equal(made[0], made[1])


def test_files_that_are_not_there_or_damaged_are_one_sentence(tmp_path: Path) -> None:
    model = family("llama", torch.bfloat16)
    model.save_pretrained(tmp_path / "a")
    with pytest.raises(InputError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no safetensors weights"):
        open_checkpoint(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text("[1")
    with pytest.raises(InputError, match="is not valid JSON"):
        open_checkpoint(tmp_path / "b")
    with pytest.raises(InputError, match="bfloat16 or float32, not float16"):
        load(tmp_path / "a", "float16")


def test_weights_that_are_nan_are_one_sentence(tmp_path: Path) -> None:
    model = family("llama", torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="cannot be used: the model's logits are NaN or infinite"):
        load(tmp_path)


def test_weights_in_several_files(tmp_path: Path, target: NativeTarget) -> None:
    model = family("llama", torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert np.array_equal(after(load(tmp_path), text(1, 20)), after(target, text(1, 20)))
