"""What the stock models differ in, in one table. A family that is not listed is proved at load (`validate.py`).

Families are named by `config.model_type`. All listed ones are held to exactness by tests/models. Masks are built once
per pass from the tree and passed as the family takes them: one tensor, or one per layer type.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from ...params import InputError
from ..native.families import yarn_context
from . import positions
from .session import Pass

Binding = Callable[[Any, Pass], AbstractContextManager[None]]


@dataclass(frozen=True)
class Family:
    """How a family's stock forward pass takes a tree."""

    typed: bool = False  # masks as a dict by layer type, or one tensor for all layers
    windowed: bool = False  # one tensor for all layers, and all have the config's sliding window
    attention: str = "outrider"  # outrider: our grouped attention; sdpa or eager: the model's own code
    binding: Binding | None = None  # what stands in for code that takes slots for positions, during a tree's pass
    context: str = "max_position_embeddings"
    proved: bool = True  # by tests/models; False: `validate` runs at load


TABLE: dict[str, Family] = {
    # one mask for all layers
    "llama": Family(),
    "gpt_neox": Family(),
    "gpt2": Family(),
    "opt": Family(),
    "phi": Family(),
    "granite": Family(),
    "olmo2": Family(),
    "deepseek_v3": Family(),
    "gemma": Family(),
    "cohere": Family(),
    "stablelm": Family(attention="sdpa"),
    # the same with a sliding window
    "mistral": Family(windowed=True),
    "mixtral": Family(windowed=True),
    "qwen3_moe": Family(windowed=True),
    "phi3": Family(windowed=True),
    "starcoder2": Family(windowed=True),
    # one mask per layer type
    "qwen2": Family(typed=True),
    "qwen3": Family(typed=True),
    "gemma2": Family(typed=True, attention="eager"),  # soft-capped scores
    "gemma3_text": Family(typed=True),
    "cohere2": Family(typed=True),
    "olmo3": Family(typed=True),
    "smollm3": Family(typed=True),
    "gpt_oss": Family(typed=True, attention="eager"),
    # positions derived from cache indices
    "bloom": Family(attention="eager", binding=positions.bloom, context="seq_length"),
    "falcon": Family(attention="sdpa", binding=positions.falcon),
    "mpt": Family(attention="eager", binding=positions.mpt, context="max_seq_len"),
    "gpt_neo": Family(attention="eager", binding=positions.gpt_neo),
}

RECURRENT = (
    "mamba", "rwkv", "recurrent", "jamba", "zamba", "bamba", "xlstm", "lfm2", "qwen3_next", "falcon_h1", "nemotron_h",
    "granitemoehybrid",
)  # fmt: skip
LAYERS = {"full_attention", "sliding_attention"}  # whose masks are known


def of(model: Any) -> Family:
    """The family of a stock model; refused by name where a tree cannot be right."""
    config = text_config(model)
    kind = config.model_type
    layers = {str(t) for t in getattr(config, "layer_types", None) or ()}
    if getattr(model, "_is_stateful", False) or any(r in kind for r in RECURRENT) or any("linear" in t for t in layers):
        raise InputError(
            f"{kind} keeps a recurrent state, which cannot hold a tree; such a model can draft, but not be a target"
        )
    if layers - LAYERS:
        unknown = min(layers - LAYERS)
        raise InputError(f"{kind} has layers of type {unknown!r}, whose masks are not known; take another model")
    if "dynamic" in rope_types(config):
        raise InputError(
            f"the dynamic RoPE of this {kind} depends on the longest text of a batch, so that a draft would change the "
            "text; set rope_type to default in its config to use it within its original context"
        )
    if kind not in TABLE:
        return guess(model)
    ours = type(model).__module__.startswith("transformers.models.")
    return replace(TABLE[kind], proved=TABLE[kind].proved and ours)  # a subclass may compute something else


def rope_types(config: Any) -> dict[str, dict[str, Any]]:
    """The rotary embeddings a model has, by type; layer types may have one each."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = (rope, *(v for v in rope.values() if isinstance(v, dict)))
    return {part["rope_type"]: part for part in parts if "rope_type" in part}


def guess(model: Any) -> Family:
    """The likely habits of a family nobody listed, read off its code; `validate` has the last word."""
    source = inspect.getsource(sys.modules[type(model).__module__])
    supports = getattr(model, "_supports_attention_backend", False), getattr(model, "_supports_sdpa", False)
    return Family(
        typed="causal_mask_mapping" in source,
        windowed="create_sliding_window_causal_mask" in source and "causal_mask_mapping" not in source,
        attention="outrider" if all(supports) else "sdpa" if supports[1] else "eager",
        proved=False,
    )


def text_config(model: Any) -> Any:
    """The config of the layers that write text."""
    return model.config.get_text_config(decoder=True)


def width_of(model: Any) -> int:
    """The width of hidden states."""
    return int(getattr(text_config(model), "hidden_size", None) or model.get_input_embeddings().embedding_dim)


def windows(config: Any, family: Family) -> dict[str, int | None]:
    """The sliding window of each layer type; under "" that of all layers, where one mask serves them all."""
    window = getattr(config, "sliding_window", None) or None
    if not family.typed:
        return {"": window if family.windowed else None}
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def context_of(model: Any, family: Family) -> int:
    """How many positions the model has; a very large number where it has no bound.

    Long RoPE chooses its frequencies by the longest position of a batch, so that a draft across the threshold would
    change the text: such a model is used within its original context, where they are constant.
    """
    config = text_config(model)
    most = int(getattr(config, family.context, None) or getattr(config, "max_position_embeddings", None) or 1 << 20)
    stretched = rope_types(config).get("longrope")
    if stretched is not None:
        name = "original_max_position_embeddings"
        most = min(most, int(stretched.get(name) or getattr(config, name, None) or most))
    return max(most, yarn_context(rope_types(config).get("yarn") or {}))


def experts_of(model: Any) -> str | None:
    """Mixtures of experts: one kernel for prompts and trees alike. Grouped products exist in no double precision."""
    implementation = getattr(model.config, "_experts_implementation", None)
    double = "float64" in str(model.dtype)
    return "batched_mm" if double and implementation == "grouped_mm" else implementation
