"""Every dense family in native passes: held to the stock forward, with drafts and without, from safetensors and GGUF;
and each option that a family has is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import text_of, trees_differ
from compiled_code import needs_code
from gguf_files import write
from small import build
from test_target import TAPS, outputs, text

from outrider.backends.native.checkpoint import open_checkpoint
from outrider.backends.native.description import Description
from outrider.backends.native.target import NativeTarget, load
from outrider.backends.native.weights import rounded
from outrider.backends.torch import gguf
from outrider.backends.torch.mark import mark_of
from outrider.backends.torch.module import ModuleTarget
from outrider.core.protocols import Target
from outrider.core.tree import chain

SIZES = {
    "hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "initializer_range": 0.1,
}  # fmt: skip
HEADS = {"hidden_size": 128, "head_dim": None}  # of families whose heads share the hidden states' width
ALONE = {**HEADS, "num_key_value_heads": None, "intermediate_size": None}  # keys for every head
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 128, "short_factor": [1.0 + i / 8 for i in range(12)],
    "long_factor": [2.0 + i for i in range(12)],
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}

# test -> (the model of `small.ZOO`, what differs from SIZES, the architecture of its GGUF)
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma": ("gemma", {}, "gemma"),
    "gemma-untied": ("gemma", {"tie_word_embeddings": False, "attention_bias": True}, ""),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}, "gemma2"),
    "gemma2-scaled": ("gemma2", {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}, ""),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 32}, "gemma3"),
    "gemma3-linear": (
        "gemma3", {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}}, "",
    ),
    "phi3": ("phi3", HEADS, "phi3"),
    "phi3-sliding": ("phi3-sliding", HEADS, "phi3"),
    "phi3-longrope": ("phi3", {**HEADS, "rope_parameters": LONGROPE, "original_max_position_embeddings": 128}, "phi3"),
    "phi": ("phi", {**HEADS, "num_key_value_heads": None}, "phi2"),
    "phi-normed": ("phi", {**HEADS, "qk_layernorm": True}, ""),
    "granite": ("granite", {}, ""),
    "granite-biases": ("granite", {**HEADS, "attention_bias": True, "mlp_bias": True}, "granite"),
    "olmo2": ("olmo2", HEADS, "olmo2"),
    "olmo3": ("olmo3", HEADS, "olmo2"),
    "olmo3-yarn": ("olmo3", {**HEADS, "rope_parameters": {"full_attention": YARN, "sliding_attention": LOCAL}}, ""),
    "cohere": ("cohere", HEADS, "command-r"),
    "cohere-normed": ("cohere", {**HEADS, "use_qk_norm": True}, "command-r"),
    "cohere2": ("cohere2", HEADS, "cohere2"),
    "stablelm": ("stablelm", HEADS, "stablelm"),
    "stablelm-parallel": (
        "stablelm",
        {**HEADS, "use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}, "stablelm",
    ),
    "starcoder2": ("starcoder2", HEADS, "starcoder2"),
    "gpt2": ("gpt2", ALONE, "gpt2"),
    "gpt_neox": ("gpt_neox", {**ALONE, "intermediate_size": 160}, "gptneox"),
    "gpt_neox-sequential": ("gpt_neox", {**ALONE, "intermediate_size": 160, "use_parallel_residual": False}, "gptneox"),
    "falcon": ("falcon-rotary", ALONE, "falcon"),
    "falcon-groups": ("falcon-rotary", {**ALONE, "new_decoder_architecture": True, "num_kv_heads": 2}, "falcon"),
    "falcon-biases": (
        "falcon-rotary", {**ALONE, "multi_query": False, "parallel_attn": False, "bias": True}, "",
    ),
}  # fmt: skip
SPLIT = {"head_dim": None, "intermediate_size": 100}  # heads of 24, where nothing else is said
# The same with heads and MLPs whose widths are no multiples of 32, which are padded.
PADDED: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama-8": ("llama", {"head_dim": 8, "intermediate_size": 36}, "llama"),
    "llama-48": ("llama", {**SPLIT, "num_attention_heads": 2, "attention_bias": True, "mlp_bias": True}, ""),
    "qwen3-48": ("qwen3", {"head_dim": 48}, "qwen3"),
    "phi-80": (
        "phi", {**SPLIT, "hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": None}, "phi2",
    ),
    "phi-80-normed": ("phi", {"hidden_size": 160, "num_attention_heads": 2, "qk_layernorm": True, **SPLIT}, ""),
    "stablelm-24": ("stablelm", {**SPLIT, "qk_layernorm": True}, "stablelm"),
    "phi3-24": ("phi3", SPLIT, "phi3"),
    "olmo2-24": ("olmo2", SPLIT, "olmo2"),
    "cohere-24": ("cohere", {**SPLIT, "use_qk_norm": True}, "command-r"),
    "gpt2-24": ("gpt2", {**ALONE, "hidden_size": 96, "n_inner": 100}, "gpt2"),
    "gpt_neox-24": ("gpt_neox", {**SPLIT, "num_key_value_heads": None}, "gptneox"),
    "falcon-24": ("falcon-rotary", {**ALONE, "hidden_size": 96}, "falcon"),
}  # fmt: skip
FAMILIES |= PADDED
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}

pytestmark = needs_code


def family(name: str, dtype: torch.dtype, **more: Any) -> Any:
    """A tiny random model."""
    zoo, differing, _ = FAMILIES[name]
    model = build(zoo, dtype, **{k: v for k, v in {**SIZES, **differing, **more}.items() if v is not None})
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if n.endswith("_norm.weight") and p.dim() > 1):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def right(model: Any, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [len, v] of the stock forward."""
    return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1).numpy()


def logits_of(target: Target, tokens: list[int]) -> np.ndarray:
    """The same after most of the tokens, and after each of the others, which are a chain of drafts."""
    first, session = len(tokens) // 2, target.open(64)
    logits = [chunk.output.logits[0, 0] for chunk in session.prefill([tokens[:first]])][-1:]
    logits += list(session.forward(chain([tokens[first:]])).logits[0])
    return torch.from_numpy(np.stack(logits)).log_softmax(-1).numpy()


def apart(target: Target, reference: np.ndarray, tokens: list[int]) -> float:
    return float(np.abs(logits_of(target, tokens) - reference[len(tokens) // 2 - 1 :]).max())


@cache
def reference(name: str) -> tuple[Any, np.ndarray]:
    model = family(name, torch.float32)
    return model, right(model, text(1, 100))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_stock_forward_in_float32(tmp_path: Path, name: str) -> None:
    """Across sliding windows, of eight tokens."""
    model, expected = reference(name)
    target = load(saved(model, tmp_path))
    assert apart(target, expected, text(1, 100)) < 1e-5
    assert target.mark == mark_of(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_stock_forward_in_bfloat16(tmp_path: Path, name: str) -> None:
    """No further from the stock forward in float32, over the same weights, than that in bfloat16 is."""
    model = family(name, torch.bfloat16)
    target, tokens = load(saved(model, tmp_path)), text(1, 60)
    rough = right(model, tokens)
    expected = right(model.float(), tokens)
    rounding = float(np.abs(rough - expected).max())
    assert apart(target, expected, tokens) < 1.5 * rounding < 0.5


@pytest.mark.parametrize("name", FAMILIES)
def test_one_layer_of_one_head(tmp_path: Path, name: str) -> None:
    one = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "num_kv_heads": 1}
    zoo = build(FAMILIES[name][0], torch.float32).config
    if getattr(zoo, "layer_types", None):
        one["layer_types"] = zoo.layer_types[:1]
    one = {key: value for key, value in one.items() if key in FAMILIES[name][1] or hasattr(zoo, key)}
    if "head_dim" in FAMILIES[name][1]:
        one["hidden_size"] = 32
    model = family(name, torch.float32, **one)
    assert apart(load(saved(model, tmp_path)), right(model, text(2, 40)), text(2, 40)) < 1e-5


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_change_no_bit(tmp_path: Path, name: str, dtype: str) -> None:
    """Of logits and features: trees in a ragged batch against one token at a time, across windows."""
    target = load(saved(family(name, PRECISIONS[dtype]), tmp_path))
    assert trees_differ(target, [text_of(1, 60), text_of(2, 26), text_of(3, 40)], [40, 6, 20], deep=6, taps=TAPS) == 0


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", ["gemma3", "granite", "gpt2", "cohere"])
def test_embeddings_are_those_of_the_pass(tmp_path: Path, name: str, dtype: str) -> None:
    """Scaled ones too, and given ones as looked-up ones."""
    target, tree = load(saved(family(name, PRECISIONS[dtype]), tmp_path)), chain([[1, 2, 3]])
    session = target.open(8)
    (chunk,) = session.prefill([text(10, 30)], (0, -1))
    assert np.array_equal(target.head(chunk.output.features[-1])[:, -1:], chunk.output.logits)
    read = session.forward(tree)
    given = session.forward(tree, embeds=target.embed([[1, 2, 3]]))
    assert np.array_equal(read.logits, given.logits)
    rows = target.embeddings.rows(np.array([1, 2, 3]))
    assert np.array_equal(rounded(rows) if dtype == "bfloat16" else rows, target.embed([1, 2, 3]))
    if name != "gpt2":  # whose positions are added
        assert np.array_equal(target.embed([text(10, 30)]), chunk.output.features[0])


GGUFS = [name for name, (_, _, arch) in FAMILIES.items() if arch]
WIDE = {"hidden_size": 256, "intermediate_size": 512}


@pytest.mark.parametrize("name", GGUFS)
def test_a_gguf_is_the_model_it_was_made_of(tmp_path: Path, name: str) -> None:
    model, _ = reference(name)
    ours = load(write(tmp_path / "m.gguf", model, "F32", arch=FAMILIES[name][2]))
    theirs = load(saved(model, tmp_path / "folder"))
    equal(ours, theirs)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("name", GGUFS)
def test_a_quantised_gguf_is_the_stock_model_of_its_dequantised_weights(tmp_path: Path, name: str, kind: str) -> None:
    wide = {key: value for key, value in WIDE.items() if FAMILIES[name][1].get(key, 1) is not None}
    if "head_dim" not in FAMILIES[name][1]:
        wide["head_dim"] = 64
    if name == "phi3-longrope":  # whose factors are of heads of 32
        wide["num_attention_heads"] = 8
    if name in PADDED:  # to heads of 8, or those of the name
        wide |= {"num_attention_heads": 32, **({"n_inner": 512} if name.startswith("gpt2") else {})}
    file = write(tmp_path / "m.gguf", family(name, torch.float32, **wide), kind, arch=FAMILIES[name][2])
    equal(load(file, "bfloat16"), load(saved(gguf.read(file, "bfloat16")[0], tmp_path / "folder"), "bfloat16"))


def equal(ours: NativeTarget, theirs: NativeTarget) -> None:
    """Equal bits and marks."""
    texts = [text(1, 90), text(2, 20), text(3, 40)]
    assert all(np.array_equal(a, b) for a, b in zip(outputs(ours, texts), outputs(theirs, texts), strict=True))
    assert ours.mark == theirs.mark
    assert ours.context == theirs.context


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_in_memory_is_its_files(tmp_path: Path, name: str) -> None:
    """Also after its weights were changed."""
    model = family(name, torch.float32)
    ours = ModuleTarget(model)
    equal(ours, load(saved(model, tmp_path / "a")))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    del ours.mark
    equal(ours, load(saved(model, tmp_path / "b")))


def without(option: str) -> Callable[[Description], Description]:
    """With an option as Llama has it."""
    return lambda made: replace(made, **{option: Description.__dataclass_fields__[option].default})


def unbiased(part: str) -> Callable[[Description], Description]:
    return lambda made: replace(made, biases=made.biases - {part})


def layers(**options: int) -> Callable[[Description], Description]:
    return lambda made: replace(made, layers=tuple(replace(one, **options) for one in made.layers))


def renamed(old: str, new: str) -> Callable[[Description], Description]:
    """With a norm at another place."""

    def change(made: Description) -> Description:
        names = {new if part == old else part: name for part, name in made.names.layer.items()}
        return replace(made, names=replace(made.names, layer=names))

    return change


MUTANTS: list[tuple[str, str, Callable[[Description], Description]]] = [
    *((name, option, without(option)) for name, options in {
        "gemma": ["norm_offset", "embedding_scale", "activation"],
        "gemma2-scaled": ["attention_scale", "score_cap", "logit_cap"],
        "phi": ["layer_norm", "parallel", "activation"],
        "granite": ["attention_scale", "embedding_scale", "residual_scale", "logit_scale"],
        "olmo2": ["qk_norm"],
        "cohere-normed": ["qk_norm", "adjacent", "parallel", "layer_norm", "logit_scale"],
        "gpt_neox": ["by_group", "activation"],
        "gpt2": ["layer_norm"],
    }.items() for option in options),
    *(("phi-normed", f"bias of {part}", unbiased(part)) for part in (
        "q", "k", "v", "o", "up", "down", "attention_norm", "norm", "head", "q_norm", "k_norm",
    )),
    ("granite-biases", "bias of gate", unbiased("gate")),
    ("gemma3", "window", layers(window=0)),
    ("gemma3", "rope by layer", layers(rope=1)),
    ("cohere2", "no rope", layers(rope=1)),
    ("olmo2", "norm after attention", renamed("attention_post_norm", "attention_norm")),
    ("olmo2", "norm after the MLP", renamed("mlp_post_norm", "mlp_norm")),
    ("gemma2", "norm before the MLP", renamed("mlp_norm", "none")),
    ("gemma3", "norm of queries", renamed("q_norm", "none")),
    ("gpt2", "positions", lambda made: replace(made, names=replace(made.names, positions=""))),
    ("phi", "part of a head", lambda made: replace(made, rotary_dim=8)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "option", "change"), MUTANTS)
def test_every_option_is_needed(
    tmp_path: Path, name: str, option: str, change: Callable[[Description], Description]
) -> None:
    """The control of the tests above: one wrong option, and logits are far off."""
    model, expected = reference(name)
    files = open_checkpoint(saved(model, tmp_path))
    made = files.description
    files.__dict__["description"] = change(made)
    assert files.description != made, option
    assert apart(NativeTarget(files), expected, text(1, 100)) > 1e-3


@pytest.mark.parametrize("name", ["qwen3-48", "phi-80-normed", "stablelm-24", "olmo2-24"])
def test_the_padding_of_heads_is_not_in_the_means_of_their_norms(tmp_path: Path, name: str) -> None:
    """The control: where it is, logits are far off."""
    model, expected = reference(name)
    target = load(saved(model, tmp_path))
    target.forward.weights.model.unpadded_head_dim = 0
    assert apart(target, expected, text(1, 100)) > 1e-3


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere"])
def test_logits_that_are_capped_or_scaled_do_not_depend_on_threads(tmp_path: Path, name: str) -> None:
    target, before = load(saved(reference(name)[0], tmp_path)), torch.get_num_threads()
    logits = set()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            logits.add(logits_of(target, text(1, 100)).tobytes())
    finally:
        torch.set_num_threads(before)
    assert len(logits) == 1


def test_configs_of_transformers_4(tmp_path: Path) -> None:
    """A Gemma 3 in the names of before, and one that also reads images."""
    model, expected = reference("gemma3")
    saved(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ropes = config.pop("rope_parameters")
    del config["layer_types"]
    config |= {
        "rope_theta": ropes["full_attention"]["rope_theta"], "sliding_window_pattern": 2,
        "rope_local_base_freq": ropes["sliding_attention"]["rope_theta"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert apart(load(tmp_path), expected, text(1, 100)) < 1e-5
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    assert apart(load(tmp_path), expected, text(1, 100)) < 1e-5
