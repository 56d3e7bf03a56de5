"""What a .gguf file's metadata and tensor names mean: the config.json of the model that it holds, and its parameters.

Only architectures whose layers are Llama's are known here: attention with rotary embeddings and a gated MLP, each
behind an RMS norm. The names, order and rows of parameters are those of the hub's checkpoint, so that whatever is made
of them (fingerprints, drafters' marks) is the same for every form of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...params import InputError
from .files import ModelFile, Tensor

# tensor of a layer -> parameter; `.weight` and `.bias` are kept
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
READABLE = {  # kinds of tensors whose numbers `c/formats/gguf.h` makes
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
}  # fmt: skip
FREQUENCIES = "rope_freqs.weight"  # by what each rotary frequency is divided
MIXTURES = {"llama", "qwen3moe"}  # architectures that may have experts
INTERLEAVED = {"llama", "smollm3"}  # architectures whose files keep the rows of queries and keys pair by pair


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


def picked(one: Parameter, rows: np.ndarray | None) -> np.ndarray | None:
    """The order of these rows of a parameter; None: of all."""
    return one.order if rows is None else rows if one.order is None else one.order[rows]


def supports(file: ModelFile) -> bool:
    """Can `config_of` and `parameters` read this file?"""
    return not refused(file)


def refused(file: ModelFile) -> str:
    """Why `config_of` and `parameters` cannot read this file; empty where they can."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in FAMILIES:
        return f"its architecture is {architecture!r}, not one of {', '.join(FAMILIES)}"
    if file.metadata.get(f"{architecture}.expert_count", 0) and architecture not in MIXTURES:
        return "it is a mixture of experts of another kind than its architecture has"
    if other := sorted({tensor.kind.name for tensor in file.tensors.values()} - READABLE):
        return f"it has tensors of the kind {other[0]}, not only {', '.join(sorted(READABLE))}"
    if names := unknown(file):
        return f"it has the tensor {names[0]!r}, which no model of this architecture has"
    return ""


def unknown(file: ModelFile) -> list[str]:
    """Names of tensors that are not a parameter of these architectures."""
    return [name for name in file.tensors if name != FREQUENCIES and _parameter(name) is None]


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
        "head_dim": known.count("attention.key_length", hidden // heads),
        "max_position_embeddings": known.count("context_length"),
        "rms_norm_eps": known.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(known),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": kept_in(file),
    }
    config |= {
        f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return config | FAMILIES[known.architecture](known, file)


def kept_in(file: ModelFile) -> str:
    """In what most matrices are kept: float32, float16, or bfloat16 for all that is quantised."""
    kinds = [tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1]
    most = max(set(kinds), key=kinds.count, default="")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def parameters(file: ModelFile) -> Iterator[Parameter]:
    """Every parameter that the file holds, in the file's order."""
    known = _Values(file.metadata)
    heads_ = known.count("attention.head_count")
    dims = {"attn_q": heads_, "attn_k": known.count("attention.head_count_kv", heads_)}
    interleaved = known.architecture in INTERLEAVED
    for name, tensor in file.tensors.items():
        parameter = _parameter(name)
        if parameter is not None:
            heads = dims.get(name.split(".")[-2]) if interleaved else None
            if heads is not None and tensor.shape[0] % (2 * heads):
                raise InputError(f"{file.path}: tensor {name!r} cannot be divided into {heads} heads; fetch it again")
            order = None if heads is None else halves_of_pairs(heads, tensor.shape[0] // heads)
            yield Parameter(parameter, tensor, order)


def frequency_factors(file: ModelFile) -> np.ndarray | None:
    """By what each rotary frequency is divided, float32 [head_dim / 2]; None: by nothing."""
    tensor = file.tensors.get(FREQUENCIES)
    return None if tensor is None else tensor.data.view(np.float32)


def halves_of_pairs(heads: int, width: int) -> np.ndarray:
    """Rows of queries or keys whose rotated pairs are adjacent, in the order where each head's halves are rotated."""
    return np.arange(heads * width).reshape(heads, width // 2, 2).transpose(0, 2, 1).reshape(-1)


def _parameter(name: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{kind}"
    block, number, part = (*stem.split(".", 2), "", "")[:3]
    known = block == "blk" and number.isdecimal() and part in LAYER
    return f"model.layers.{number}.{LAYER[part]}.{kind}" if known else None


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


def _rope(known: _Values) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": known.number("rope.freq_base", 10000.0)}
    kind = known.get("rope.scaling.type", "none")
    if kind == "linear":
        return rope | {"rope_type": kind, "factor": known.number("rope.scaling.factor")}
    if kind == "yarn":
        original = known.count("rope.scaling.original_context_length")
        factor = known.number("rope.scaling.factor")
        return rope | {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    if kind != "none":
        raise InputError(f"rotary embeddings that are scaled like {kind!r} are not supported in a .gguf file")
    return rope


def _llama(known: _Values, file: ModelFile) -> dict[str, Any]:
    if known.get("expert_count"):
        return {"model_type": "mixtral", **_experts(known)}
    return {"model_type": "llama", "attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": False}


def _qwen2(known: _Values, file: ModelFile) -> dict[str, Any]:
    return {"model_type": "qwen2", "use_sliding_window": False}


def _qwen3(known: _Values, file: ModelFile) -> dict[str, Any]:
    return {"model_type": "qwen3", "use_sliding_window": False, "attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _qwen3moe(known: _Values, file: ModelFile) -> dict[str, Any]:
    inner = known.count("expert_feed_forward_length")
    return _qwen3(known, file) | _experts(known) | {"model_type": "qwen3_moe", "moe_intermediate_size": inner}


def _experts(known: _Values) -> dict[str, Any]:
    chosen = known.count("expert_used_count")
    return {"num_experts": known.count("expert_count"), "num_experts_per_tok": chosen, "norm_topk_prob": True}


def _smollm3(known: _Values, file: ModelFile) -> dict[str, Any]:
    return {"model_type": "smollm3", "no_rope_layer_interval": 4, "use_sliding_window": False}


FAMILIES: dict[str, Callable[[_Values, ModelFile], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "smollm3": _smollm3,
}
