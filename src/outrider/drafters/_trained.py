"""Trained drafters in compiled code, from a folder of the native layout, without torch.

Other layouts, and networks with what compiled code lacks, are read by torch (`_weights.py`), which also says what is
wrong with a folder that is damaged.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from .. import schema
from ..backends.native.drafts import Weights, float32
from ..backends.native.files import open_safetensors
from ..backends.native.grow import EagleParts, eagle
from ..backends.native.weights import rounded
from ..core.protocols import Drafter, Target
from ..core.types import Array
from ..nets.configs import INPUTS, Eagle3Config, EagleConfig, LayerShape
from ..params import InputError
from ..shipped import folder_of, placed
from ._compiled import CompiledEagle, code_for
from ._growth import STATIC, Growth

logger = logging.getLogger(__name__)
FLAGS = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "parallel"  # that compiled code lacks
EXPONENT = np.uint16(0x7F80)  # of a bfloat16; all ones: it is infinite or NaN
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Options:
    """The fields of `Growth` that a SPEC may set; `scale` 0: the folder's."""

    tree: str = "dynamic"
    shape: tuple[int, ...] = ()
    depth: int = 8
    width: int = 0
    top_k: int = 10
    nodes: int = 60
    scale: float = 0.0
    value: bool = True
    rerank: bool = True
    replacement: bool = False

    def growth(self, scale: float) -> Growth:
        """With the scale of a folder. Without a shape, the static tree is EAGLE-1's."""
        return Growth(
            self.tree, self.shape, () if self.shape else STATIC, self.depth, self.width, self.top_k, self.nodes,
            self.scale or scale, self.value, self.rerank, self.replacement,
        )  # fmt: skip


def loader(method: str) -> Callable[..., Drafter]:
    """The function `load` of a drafter that is compiled where its target is (`compiled`), else in tensors
    (`_METHOD.py`, imported when it is needed)."""

    def load(
        target: Target | None,
        tokenizer: Any = None,
        path: str | None = None,
        tree: str = "dynamic",
        shape: tuple[int, ...] = (),
        depth: int = 8,
        width: int = 0,
        top_k: int = 10,
        nodes: int = 60,
        scale: float = 0.0,
        value: bool = True,
        rerank: bool = True,
        replacement: bool = False,
    ) -> Drafter:
        """A trained drafter from its folder.

        The options are the fields of `Options`. Raises InputError where the folder is damaged, holds another drafter,
        or belongs to another target.
        """
        options = Options(tree, shape, depth, width, top_k, nodes, scale, value, rerank, replacement)
        made = compiled(method, target, path, options)
        return in_tensors(method).load(target, path, options) if made is None else made

    return load


def in_tensors(method: str) -> Any:
    """The module with the network, and with how it drafts in tensors."""
    return import_module(f"._{method}", __package__)


def compiled(method: str, target: Target | None, path: str | None, options: Options) -> Drafter | None:
    """The drafter in a folder, in compiled code; None where torch must read it."""
    code = None if target is None else code_for(target, target.precision)
    if target is None or path is None or code is None:
        return None
    found = _folder(method, placed(path, method))
    config = None if found is None else _config(method, found[0])
    if found is None or config is None:
        return None
    weights = {name: _cast(x, target.precision) for name, x in found[1].items()}
    if {name: x.shape for name, x in weights.items()} != _shapes(config) or not _finite(weights):
        return None
    taps = config.taps if isinstance(config, Eagle3Config) else (-1,)
    fits(path, target, config.vocab, config.target_hidden, taps)
    names = _names(weights, config)
    head = weights["lm_head.weight"] if isinstance(config, Eagle3Config) else target.head_rows(names)
    table = target.embeddings
    if head is None or table is None or table.shape[1] != config.layer.hidden:
        return None
    if found[2] and target.mark and found[2] != target.mark:
        tell(path, target.mark)
    three = isinstance(config, Eagle3Config)
    cap = 0.0 if three else target.logit_cap
    parts = EagleParts(weights, config.layer, "midlayer." if three else "layers.0.", three, head, table, names, cap)
    made = eagle(code, parts)
    return None if made is None else CompiledEagle(made, options.growth(config.scale), target.vocab, tuple(taps))


def _folder(method: str, path: str) -> tuple[Mapping[str, Any], Mapping[str, Array], str] | None:
    """Config, tensors and mark of a folder of the native layout on this machine; None: it is another, or damaged."""
    folder = folder_of(path)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.pop("outrider_method") != method or config.pop("format", 1) != 1:
            return None
        mark = str(config.pop("target_weights", None) or "")
        tensors = open_safetensors(folder / "model.safetensors").tensors
        return config, {name: one.array() for name, one in tensors.items()}, mark
    except (OSError, ValueError, KeyError, AttributeError, InputError):
        return None


def _config(method: str, given: Mapping[str, Any]) -> EagleConfig | Eagle3Config | None:
    """The config, of a network that compiled code has."""
    try:
        if method == "eagle":
            plain = schema.from_dict(EagleConfig, given)
            return plain if plain.inputs == INPUTS[0] else None
        three = schema.from_dict(Eagle3Config, given)
        return None if any(getattr(three, name) for name in FLAGS) or three.own_embedding or three.layers > 1 else three
    except (KeyError, TypeError, ValueError):
        return None


def _shapes(config: EagleConfig | Eagle3Config) -> Shapes:
    """Names and shapes of the network's tensors."""
    h, wide, layer = config.layer.hidden, config.target_hidden, config.layer
    if isinstance(config, EagleConfig):
        trimmed: Shapes = {"d2t": (config.draft_vocab,)} if config.draft_vocab else {}
        bias: Shapes = {"fc.bias": (h,)} if config.bias else {}
        return {"fc.weight": (h, 2 * h), **bias, **_of_layer(layer, "layers.0."), **trimmed}
    norms: Shapes = {f"midlayer.{name}.weight": (h,) for name in ("hidden_norm", "input_layernorm")}
    return {
        "fc.weight": (h, 3 * wide), **_of_layer(layer, "midlayer."), **norms, "norm.weight": (h,),
        "lm_head.weight": (config.draft_vocab, h), "d2t": (config.draft_vocab,), "t2d": (config.vocab,),
    }  # fmt: skip


def _of_layer(shape: LayerShape, prefix: str) -> Shapes:
    h, wide, narrow, inner = (
        shape.hidden,
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        shape.intermediate,
    )
    sizes = {
        "self_attn.q_proj": (wide, shape.inputs), "self_attn.k_proj": (narrow, shape.inputs),
        "self_attn.v_proj": (narrow, shape.inputs), "self_attn.o_proj": (h, wide), "mlp.gate_proj": (inner, h),
        "mlp.up_proj": (inner, h), "mlp.down_proj": (h, inner), "post_attention_layernorm": (h,),
    }  # fmt: skip
    found: Shapes = {f"{prefix}{name}.weight": size for name, size in sizes.items()}
    if shape.qkv_bias:
        found |= {
            f"{prefix}self_attn.{name}_proj.bias": (size,)
            for name, size in zip("qkv", (wide, narrow, narrow), strict=True)
        }
    return found


def _cast(x: Array, precision: str) -> Array:
    """Weights in the target's precision; integers as they are."""
    if x.dtype.kind in "ib" or (x.dtype == np.uint16 and precision == "bfloat16"):
        return x
    return rounded(float32(x)) if precision == "bfloat16" else float32(x)


def _finite(weights: Weights) -> bool:
    infinite = (x & EXPONENT == EXPONENT if x.dtype == np.uint16 else ~np.isfinite(x) for x in weights.values())
    return not any(found.any() for found in infinite)


def _names(weights: Weights, config: EagleConfig | Eagle3Config) -> Array | None:
    """Token ids of the draft vocabulary; None: it is the target's. Raises InputError for what are no token ids."""
    if not config.draft_vocab:
        return None
    ids = weights["d2t"].astype(np.int64) + np.arange(config.draft_vocab)
    if ids.min() < 0 or ids.max() >= config.vocab or np.bincount(ids).max() > 1:
        raise InputError("every draft token must have a token id of its own (with d2t: i + d2t[i]); here it has not")
    return None if len(ids) == config.vocab and bool((ids == np.arange(config.vocab)).all()) else ids


@lru_cache
def tell(path: str, mark: str) -> None:
    """Say once, of a drafter and a model, that the weights are others."""
    logger.warning(
        "%s was trained for other weights than this model's (another file of it, or a fine-tuned one): fewer of its "
        "guesses may be right, and the text is this model's all the same; train it for these weights to get the best",
        path,
    )


def fits(where: object, target: Target, vocab: int, hidden: int, taps: Sequence[int] = ()) -> None:
    """Refuse a drafter that was trained for another target.

    Args:
        where: what the sentence calls the drafter.
        vocab, hidden: the target's size of vocabulary and width of features, as the drafter's config has them.
        taps: the hidden states that it reads.
    """
    if (vocab, hidden) != (target.vocab, width := target.hidden):
        raise InputError(
            f"{where} was trained for a target of width {hidden} and {vocab} tokens, and this one has width {width} "
            f"and {target.vocab} tokens; use its own target, or train it for this one"
        )
    if max(taps, default=0) > target.layers:
        raise InputError(
            f"{where} reads hidden states {list(taps)} of a target that has 0 to {target.layers}; correct its taps"
        )
