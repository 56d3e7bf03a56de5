"""What a .gguf file's metadata and tensor names mean: the config.json of the model that it holds, and its parameters.

The names, order and rows of parameters are those of the hub's checkpoint, so that whatever is made
of them (fingerprints, drafters' marks) is the same for every form of a model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...params import InputError, understood
from .description import MATRICES, Description
from .families import OTHER_NAMES, read
from .files import ModelFile, Tensor

PARTS = {  # tensor of a layer -> its part, as `description.Names` has them
    "attn_norm": "attention_norm", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_qkv": "qkv", "attn_output": "o",
    "attn_sinks": "sinks", "attn_q_norm": "q_norm", "attn_k_norm": "k_norm",
    "post_attention_norm": "attention_post_norm",
    "ffn_norm": "mlp_norm", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down", "post_ffw_norm": "mlp_post_norm",
}  # fmt: skip
EXPERTS = {  # tensor of a mixture -> its parameter; "": the router
    "ffn_gate_inp": "", "ffn_gate_exps": "experts.gate_proj", "ffn_up_exps": "experts.up_proj",
    "ffn_down_exps": "experts.down_proj",
}  # fmt: skip
READABLE = {  # kinds of tensors whose numbers `c/formats/gguf.h` makes
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
}  # fmt: skip
FREQUENCIES = "rope_freqs.weight"  # by what each rotary frequency is divided
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"  # the same, of LongRoPE
ENDS = "eos", "eot", "eom"  # of a text, of a turn, of a message
INTERLEAVED = {"llama", "smollm3", "granite"}  # architectures whose files keep rows of queries and keys pair by pair


@dataclass(frozen=True)
class Parameter:
    """Where a parameter's numbers lie.

    Attributes:
        name: in the hub's checkpoint.
        tensor: in the file.
        order: int64 [rows], the file's row (column, where it is transposed) of each row; None where they are the same.
        transposed: does the file keep its columns as rows?
        shift: added to the file's numbers.
    """

    name: str
    tensor: Tensor
    order: np.ndarray | None = None
    transposed: bool = False
    shift: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensor.shape[::-1] if self.transposed else self.tensor.shape
        return shape if self.order is None else (len(self.order), *shape[1:])

    @property
    def plain(self) -> bool:
        """Are its bytes those of the tensor?"""
        return self.order is None and not self.transposed and not self.shift


def picked(one: Parameter, rows: np.ndarray | None) -> Parameter:
    """These rows of a parameter, in this order; None: all. Rows that lie together are read where they lie."""
    if rows is None:
        return one
    if one.plain and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        tensor, own = one.tensor, one.tensor.rows[rows[0] : rows[0] + len(rows)]
        return replace(one, tensor=replace(tensor, shape=(len(rows), *tensor.shape[1:]), data=own.reshape(-1)))
    return replace(one, order=rows if one.order is None else one.order[rows])


def supports(file: ModelFile) -> bool:
    """Can `config_of` and `parameters` read this file?"""
    return not refused(file)


def refused(file: ModelFile) -> str:
    """Why `config_of` and `parameters` cannot read this file; empty where they can."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        return f"its architecture is {architecture!r}, not one of {', '.join(FAMILIES)}"
    if other := sorted({tensor.kind.name for tensor in file.tensors.values()} - READABLE):
        return f"it has tensors of the kind {other[0]}, not only {', '.join(sorted(READABLE))}"
    try:
        with understood("its description"):
            names = unknown(file)
        if names:
            return f"it has the tensor {names[0]!r}, which no model of this architecture has"
    except InputError as error:
        return str(error)
    return ""


def unknown(file: ModelFile) -> list[str]:
    """Names of tensors that are not a parameter of this architecture."""
    made = read(config_of(file))
    return [name for name in file.tensors if name not in (FREQUENCIES, SHORT, LONG) and not _names(made, file, name)]


def config_of(file: ModelFile) -> dict[str, Any]:
    """The model's config.json.

    Args:
        file: of a supported architecture (`supports`).

    Returns:
        What the hub's config.json says, as far as it matters for computing, in the names of transformers 5.

    Raises:
        InputError: a value that is needed is missing or damaged.
    """
    known = _Values(file.metadata)
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise InputError("the file has no table of embeddings (token_embd.weight); fetch it again")
    heads, hidden = known.count("attention.head_count"), known.count("embedding_length")
    config = {
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "intermediate_size": known.count("feed_forward_length", known.get("expert_feed_forward_length")),
        "num_hidden_layers": known.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": known.count("attention.head_count_kv", heads),
        "max_position_embeddings": known.count("context_length"),
        "rope_parameters": _rope(known, file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": kept_in(file),
    }
    config |= {
        f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    keys = ENDS if known.architecture != "gpt-oss" else ENDS[:1]  # its eot ends a channel
    ends = dict.fromkeys(file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys)
    if len(ids := [token for token in ends if type(token) is int]) > 1:
        config["eos_token_id"] = ids
    if known.get("attention.key_length") is not None:
        config["head_dim"] = known.count("attention.key_length")
    config |= FAMILIES[known.architecture](known, file)
    for ours, theirs in OTHER_NAMES.get(str(config["model_type"]), {}).items():
        if ours in config:
            config[theirs] = config.pop(ours)
    return config


def kept_in(file: ModelFile) -> str:
    """In what most numbers of matrices are kept: float32, float16, or bfloat16 for all that is quantised, and where
    neither of these two has more than half."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.kind.name] += math.prod(tensor.shape)
    plain = {"float32": sizes["F32"], "float16": sizes["F16"]}
    return next((name for name, size in plain.items() if 2 * size > sizes.total()), "bfloat16")


def parameters(file: ModelFile) -> Iterator[Parameter]:
    """Every parameter that the file holds, in the file's order."""
    made, architecture = read(config_of(file)), file.metadata["general.architecture"]
    for name, tensor in file.tensors.items():
        own_names, part, matrix = _names(made, file, name), _part(made, file, name), name.endswith(".weight")
        order, heads = None, {"q": made.heads, "k": made.kv_heads}.get(part)
        if heads is not None and architecture in INTERLEAVED:
            if tensor.shape[0] != heads * made.head_dim:
                raise InputError(f"{file.path}: tensor {name!r} cannot be divided into {heads} heads; fetch it again")
            order = halves_of_pairs(heads, made.head_dim)
        elif part == "qkv" and made.by_group:  # the file has queries, keys and values in turn
            order = np.argsort(np.concatenate([made.rows_of_fused(each) for each in ("q", "k", "v")]))
            if tensor.shape[0] != len(order):
                raise InputError(f"{file.path}: tensor {name!r} has not {len(order)} rows; fetch it again")
        transposed = made.names.transposed and matrix and part in (*MATRICES, "qkv")
        shift = -made.norm_offset if "norm" in name.split(".")[-2] else 0.0
        for i, own in enumerate(own_names):
            piece = tensor if len(own_names) == 1 else replace(tensor, shape=tensor.shape[1:], data=tensor.rows[i])
            yield Parameter(own, piece, order, transposed, shift)


def frequency_factors(file: ModelFile) -> np.ndarray | None:
    """By what each rotary frequency is divided, float32 [head_dim / 2]; None: by nothing."""
    tensor = file.tensors.get(FREQUENCIES)
    return None if tensor is None else _floats(tensor)


def _floats(tensor: Tensor) -> np.ndarray:
    """The numbers of a vector that is kept in float32."""
    if tensor.kind.name != "F32":
        raise InputError(f"the file keeps {tensor.name} as {tensor.kind.name}, not as F32; fetch it again")
    return tensor.data.reshape(-1).view(np.float32)


def halves_of_pairs(heads: int, width: int) -> np.ndarray:
    """Rows of queries or keys whose rotated pairs are adjacent, in the order where each head's halves are rotated."""
    return np.arange(heads * width).reshape(heads, width // 2, 2).transpose(0, 2, 1).reshape(-1)


def _part(made: Description, file: ModelFile, name: str) -> str:
    """The part of a layer that a tensor is; empty where it is none."""
    block, _, part = (*name.rpartition(".")[0].split(".", 2), "", "")[:3]
    if "blk.0.attn_norm_2.weight" in file.tensors:  # a Falcon with two norms
        part = {"attn_norm": "ffn_norm", "attn_norm_2": "attn_norm"}.get(part, part)
    own = PARTS.get(part, "") if block == "blk" else ""
    fused = {"up": "gate_up", "attention_post_norm": "mlp_norm"}.get(own, own)
    return own if own in made.names.layer else fused if fused in made.names.layer else ""


def _names(made: Description, file: ModelFile, name: str) -> list[str]:
    """The parameters that lie in a tensor, one after another; none: it is not known."""
    stem, _, kind = name.rpartition(".")
    names = made.names
    outside = {
        "token_embd": names.embeddings, "position_embd": names.positions, "output_norm": names.norm,
        "output": names.head,
    }  # fmt: skip
    if kind not in ("weight", "bias"):
        return []
    if outside.get(stem):
        return [f"{outside[stem]}.{kind}"]
    number, part = (*stem.split("."), "", "")[1], _part(made, file, name)
    if made.experts is not None and number.isdecimal() and (last := stem.split(".")[-1]) in EXPERTS:
        return [f"{made.mixture(int(number))}{EXPERTS[last] or made.experts.router}.{kind}"]
    if not part or not number.isdecimal():
        return []
    own = f"{names.layers}{number}.{names.layer[part]}" + ("" if part == "sinks" else f".{kind}")
    heads = made.heads if part == "q_norm" else made.kv_heads
    return [own.format(h) for h in range(heads)] if "{}" in own else [own]


class _Values:
    """The values of one architecture: `embedding_length` is `llama.embedding_length`."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata, self.architecture = metadata, str(metadata["general.architecture"])

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise InputError(
                f"the file's {self.architecture}.{name} is {value!r}, not a positive number; fetch it again"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or not 0 < value < 1e30:
            raise InputError(
                f"the file's {self.architecture}.{name} is {value!r}, not a positive number; fetch it again"
            )
        return float(value)

    def eps(self, kind: str = "rms_") -> float:
        """Of RMS norms, or of layer norms ("")."""
        return self.number(f"attention.layer_norm_{kind}epsilon")


def _rope(known: _Values, file: ModelFile) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": known.number("rope.freq_base", 10000.0)}
    head_dim = known.count(
        "attention.key_length", known.count("embedding_length") // known.count("attention.head_count")
    )
    if (rotated := known.count("rope.dimension_count", head_dim)) != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    factor = known.get("rope.scaling.factor", known.get("rope.scale_linear"))  # older files have the second
    scaled = factor not in (None, 0, 1)
    kind = known.get("rope.scaling.type", "linear" if scaled else "none")
    if SHORT in file.tensors and LONG in file.tensors:
        original = known.count("rope.scaling.original_context_length")
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        factors = {"short_factor": SHORT, "long_factor": LONG}
        read = {key: _floats(file.tensors[name]).tolist() for key, name in factors.items()}
        return rope | read
    if kind == "linear":
        name = "rope.scaling.factor" if known.get("rope.scaling.factor") is not None else "rope.scale_linear"
        return rope | {"rope_type": kind, "factor": known.number(name)}
    if kind == "yarn":
        original = known.count("rope.scaling.original_context_length")
        times = known.number("rope.scaling.factor")
        rope |= {"rope_type": kind, "factor": times, "original_max_position_embeddings": original}
        if (own := known.number("rope.scaling.attn_factor", 1.0)) != 1:  # beside the usual one
            rope["attention_factor"] = own * (0.1 * math.log(max(times, 1.0)) + 1)
        betas = {name: f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
        return rope | {name: known.number(key) for name, key in betas.items() if known.get(key) is not None}
    if kind != "none":
        raise InputError(f"rotary embeddings that are scaled like {kind!r} are not supported in a .gguf file")
    return rope


def _by_type(known: _Values, file: ModelFile, theta: float) -> dict[str, Any]:
    """Rotary embeddings of which those of layers with a window are not scaled."""
    local = {"rope_type": "default", "rope_theta": known.number("rope.freq_base_swa", theta)}
    return {"rope_parameters": {"full_attention": _rope(known, file), "sliding_attention": local}}


def _layer_types(known: _Values) -> dict[str, Any]:
    """Which layers have a window, or that every so many have none, where the file says so."""
    slides = known.get("attention.sliding_window_pattern")
    if slides is None:
        return {}
    if isinstance(slides, int):
        return {"sliding_window_pattern": slides}
    return {"layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides]}


def _has(file: ModelFile, part: str) -> bool:
    return f"blk.0.{part}" in file.tensors


def _flags(file: ModelFile) -> dict[str, Any]:
    return {"attention_bias": _has(file, "attn_q.bias"), "mlp_bias": _has(file, "ffn_down.bias")}


def _llama(known: _Values, file: ModelFile) -> dict[str, Any]:
    if known.get("expert_count"):
        return {"model_type": "mixtral", "rms_norm_eps": known.eps(), **_experts(known)}
    return {"model_type": "llama", "rms_norm_eps": known.eps(), **_flags(file)}


def _qwen2(known: _Values, file: ModelFile) -> dict[str, Any]:
    return {"model_type": "qwen2", "rms_norm_eps": known.eps(), "use_sliding_window": False}


def _qwen3(known: _Values, file: ModelFile) -> dict[str, Any]:
    return {**_qwen2(known, file), **_flags(file), "model_type": "qwen3"}


def _qwen3moe(known: _Values, file: ModelFile) -> dict[str, Any]:
    inner = known.count("expert_feed_forward_length")
    return {**_qwen3(known, file), **_experts(known), "model_type": "qwen3_moe", "moe_intermediate_size": inner}


def _gpt_oss(known: _Values, file: ModelFile) -> dict[str, Any]:
    rope = _rope(known, file)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return {
        **_experts(known), "model_type": "gpt_oss", "rms_norm_eps": known.eps(), "rope_parameters": rope,
        "sliding_window": known.count("attention.sliding_window"),
        "intermediate_size": known.count("expert_feed_forward_length"), "attention_bias": _has(file, "attn_q.bias"),
    }  # fmt: skip


def _experts(known: _Values) -> dict[str, Any]:
    chosen = known.count("expert_used_count")
    return {"num_experts": known.count("expert_count"), "num_experts_per_tok": chosen, "norm_topk_prob": True}


def _smollm3(known: _Values, file: ModelFile) -> dict[str, Any]:
    return {**_qwen2(known, file), "model_type": "smollm3", "no_rope_layer_interval": 4}


def _gemma(known: _Values, file: ModelFile) -> dict[str, Any]:
    return {"model_type": "gemma", "rms_norm_eps": known.eps(), "hidden_act": "gelu_pytorch_tanh"}


def _gemma2(known: _Values, file: ModelFile) -> dict[str, Any]:
    """Of the largest models alone, which are known by their layers, the scale of scores is not a head's."""
    hidden, heads = known.count("embedding_length"), known.count("attention.head_count")
    per_head = known.count("attention.key_length", hidden // heads)
    large = known.count("block_count") == {"gemma2": 46, "gemma3": 62}[known.architecture]
    score_cap, logit_cap, window = (50.0, 30.0, 4096) if known.architecture == "gemma2" else (None, None, None)
    return {
        "model_type": "gemma2", "rms_norm_eps": known.eps(), "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if large else per_head,
        "sliding_window": known.get("attention.sliding_window", window),
        "attn_logit_softcapping": known.get("attn_logit_softcapping", score_cap),
        "final_logit_softcapping": known.get("final_logit_softcapping", logit_cap), **_layer_types(known),
    }  # fmt: skip


def _gemma3(known: _Values, file: ModelFile) -> dict[str, Any]:
    values = {**_gemma2(known, file), **_by_type(known, file, 10000.0), "model_type": "gemma3_text"}
    return values if known.get("attention.sliding_window") else {**values, "sliding_window_pattern": 1}


def _phi2(known: _Values, file: ModelFile) -> dict[str, Any]:
    return {"model_type": "phi", "layer_norm_eps": known.eps(""), "hidden_act": "gelu_new"}


def _phi3(known: _Values, file: ModelFile) -> dict[str, Any]:
    window, original = known.get("attention.sliding_window") or None, "rope.scaling.original_context_length"
    values = {"model_type": "phi3", "rms_norm_eps": known.eps(), "sliding_window": window}
    return values | {"original_max_position_embeddings": known.count(original, known.count("context_length"))}


def _granite(known: _Values, file: ModelFile) -> dict[str, Any]:
    head_dim = known.count("embedding_length") // known.count("attention.head_count")
    return {
        **_llama(known, file), "model_type": "granite", "logits_scaling": known.number("logit_scale"),
        "attention_multiplier": known.number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": known.number("embedding_scale", 1.0),
        "residual_multiplier": known.number("residual_scale", 1.0),
    }  # fmt: skip


def _olmo2(known: _Values, file: ModelFile) -> dict[str, Any]:
    """OLMo 2, or OLMo 3, which has windows."""
    values: dict[str, Any] = {"model_type": "olmo2", "rms_norm_eps": known.eps()}
    if not known.get("attention.sliding_window"):
        return values
    values |= _layer_types(known)
    values |= _by_type(known, file, known.number("rope.freq_base", 10000.0))
    return values | {"model_type": "olmo3", "sliding_window": known.get("attention.sliding_window")}


def _cohere(known: _Values, file: ModelFile) -> dict[str, Any]:
    kind = {"command-r": "cohere", "cohere2": "cohere2"}[known.architecture]
    return {
        "model_type": kind, "layer_norm_eps": known.eps(""), "logit_scale": known.number("logit_scale", 1.0),
        "use_qk_norm": _has(file, "attn_q_norm.weight"), "sliding_window": known.get("attention.sliding_window"),
        **_layer_types(known),
    }  # fmt: skip


def _stablelm(known: _Values, file: ModelFile) -> dict[str, Any]:
    return {
        "model_type": "stablelm", "layer_norm_eps": known.eps(""), "use_qkv_bias": _has(file, "attn_q.bias"),
        "qk_layernorm": _has(file, "attn_q_norm.weight"), "use_parallel_residual": not _has(file, "ffn_norm.weight"),
    }  # fmt: skip


def _starcoder2(known: _Values, file: ModelFile) -> dict[str, Any]:
    return {
        "model_type": "starcoder2", "layer_norm_eps": known.eps(""), "use_bias": _has(file, "attn_q.bias"),
        "sliding_window": known.get("attention.sliding_window"),
    }  # fmt: skip


def _gpt2(known: _Values, file: ModelFile) -> dict[str, Any]:
    return {"model_type": "gpt2", "layer_norm_eps": known.eps("")}


def _gpt_neox(known: _Values, file: ModelFile) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox", "layer_norm_eps": known.eps(""), "attention_bias": _has(file, "attn_qkv.bias"),
        "use_parallel_residual": bool(known.get("use_parallel_residual", True)),
    }  # fmt: skip


def _falcon(known: _Values, file: ModelFile) -> dict[str, Any]:
    new = known.count("attention.head_count_kv", 1) > 1
    return {
        "model_type": "falcon", "layer_norm_eps": known.eps(""), "bias": _has(file, "attn_qkv.bias"),
        "new_decoder_architecture": new, "num_ln_in_parallel_attn": 2 if _has(file, "attn_norm_2.weight") else 1,
    }  # fmt: skip


FAMILIES: dict[str, Callable[[_Values, ModelFile], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gpt-oss": _gpt_oss,
    "smollm3": _smollm3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi2": _phi2,
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "command-r": _cohere,
    "cohere2": _cohere,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "gpt2": _gpt2,
    "gptneox": _gpt_neox,
    "falcon": _falcon,
}
