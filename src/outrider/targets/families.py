"""What the stock models differ in, in one table. A family that is not listed is proved at load (`validate.py`).

Families are named by `config.model_type`. Masks are built once per pass from the tree and given as the family takes
them: one tensor, or one per layer type. Windows count positions, never slots.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..types import InputError


@dataclass(frozen=True)
class Family:
    """How a family's stock forward pass takes a tree."""

    masks: str = "single"  # single: one tensor; typed: a dict by layer type
    attention: str = "outrider"  # outrider: our grouped attention; eager: the model's own, float masks only
    alibi: Callable[[Any, Tensor, Tensor], Tensor] | None = None  # (model, slots' positions, mask) -> mask
    context: str = "max_position_embeddings"
    proved: bool = True  # by tests/models; False: `validate` runs at load


def alibi_slopes(heads: int) -> list[float]:
    """Press et al. 2022: a geometric sequence; between powers of two, every other slope of the next."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return slopes + [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]


def shift_alibi(model: Any, where: Int[Tensor, "b view"], mask: Float[Tensor, "b 1 n view"]) -> Tensor:
    """The stock bias is slope * slot; add slope * (position - slot), which the mask can carry per head."""
    heads = model.config.num_attention_heads
    slopes = torch.tensor(alibi_slopes(heads), dtype=mask.dtype, device=mask.device)
    off = where - torch.arange(where.shape[1], device=where.device)
    return mask + slopes[None, :, None, None] * off[:, None, None].to(mask.dtype)


TABLE: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "qwen3_moe": Family(),
    "phi3": Family(),
    "gpt_neox": Family(),
    "gpt2": Family(context="n_positions"),
    "opt": Family(),
    "granite": Family(),
    "olmo2": Family(),
    "deepseek_v3": Family(),
    "qwen2": Family(masks="typed"),
    "qwen3": Family(masks="typed"),
    "cohere2": Family(masks="typed"),
    "gemma2": Family(masks="typed", attention="eager"),
    "gemma3_text": Family(masks="typed"),
    "bloom": Family(alibi=shift_alibi, context="seq_length"),
    "falcon": Family(),
}

RECURRENT = ("mamba", "rwkv", "recurrent", "jamba", "zamba", "bamba", "xlstm", "lfm2", "qwen3_next", "falcon_h1", "nemotron_h")


def of(model: Any) -> Family:
    """The family of a stock model; refused by name where a tree cannot be right."""
    config = model.config
    kind = config.model_type
    layers = {str(t) for t in getattr(config, "layer_types", None) or ()}
    if any(name in kind for name in RECURRENT) or any("linear" in t or "mamba" in t or "conv" in t for t in layers):
        raise InputError(f"{kind} keeps a recurrent state, which cannot hold a tree; it can draft, but not be a target")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    moving = {k.get("rope_type") for k in kinds} & {"dynamic", "longrope"}
    if moving:
        raise InputError(
            f"this model's {moving.pop()} positions depend on the longest text in the batch, so that a draft would "
            "change the text; set another rope_type in its config to use it within its original context"
        )
    found = TABLE.get(kind)
    if found is not None:
        return found
    source = inspect.getsource(type(model.base_model))
    typed = "causal_mask_mapping" in source
    return Family(masks="typed" if typed else "single", proved=False)


def context_of(model: Any, family: Family) -> int:
    """How many positions the model has; a very large number where it has no bound."""
    config = model.config
    return int(getattr(config, family.context, None) or getattr(config, "max_position_embeddings", None) or 1 << 20)


def pin_experts(model: Any) -> None:
    """Mixtures of experts: one implementation for prompts and trees alike (they differ in rounding)."""
    config = model.config
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or getattr(config, "n_routed_experts", None):
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("batched_mm")
