"""Trained drafters in compiled code, from a folder of the native layout, without torch.

Other layouts, and networks that compiled code does not support, are loaded by torch (`_weights.py`), which also reports
damaged folders.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Generic, TypeVar

import numpy as np

from .. import schema
from ..backends.native.abi import Library
from ..backends.native.drafts import Weights, float32
from ..backends.native.files import open_safetensors
from ..backends.native.weights import rounded
from ..core.protocols import Target
from ..core.types import Array
from ..nets import int8
from ..nets.configs import LayerShape
from ..params import InputError
from ..shipped import folder_of, placed
from ._compiled import code_for

logger = logging.getLogger(__name__)
EXPONENT = np.uint16(0x7F80)  # of a bfloat16; all ones: it is infinite or NaN
Shapes = dict[str, tuple[int, ...]]
Config = TypeVar("Config")


def in_tensors(method: str) -> Any:
    """The module with the network and its drafting in torch."""
    return import_module(f"._{method}", __package__)


@dataclass(frozen=True)
class Method(Generic[Config]):
    """A drafter that compiled code supports.

    Attributes:
        name: as in a SPEC.
        config: the dataclass of its config.json.
        shapes: names and shapes of the tensors of a config; None: compiled code has no such network.
        taps: the hidden states of the target that a config reads.
    """

    name: str
    config: type[Config]
    shapes: Callable[[Config], Shapes | None]
    taps: Callable[[Config], tuple[int, ...]] = lambda _: (-1,)

    def code(self, config: Config, target: Target) -> Library | None:
        """The compiled library for a network of this config beside this target; None: torch computes it."""
        return code_for(target, target.precision) if self.shapes(config) is not None else None

    def opened(self, target: Target | None, path: str | None, **said: Any) -> tuple[Config, Weights] | None:
        """The config of a folder, and its weights in the target's precision; None where torch must read them.

        Args:
            said: fields that replace those of the folder's config.

        Raises:
            InputError: the folder belongs to another target.
        """
        if target is None or path is None or code_for(target, target.precision) is None:
            return None
        contents = _folder(self.name, placed(path, self.name))
        try:
            config = None if contents is None else schema.from_dict(self.config, {**contents[0], **said})
        except (KeyError, TypeError, ValueError):
            return None
        if contents is None or config is None or (wanted := self.shapes(config)) is None:
            return None
        if {name: x.shape for name, x in contents[1].items()} != wanted:
            return None
        weights = {name: cast(x, target.precision) for name, x in contents[1].items()}
        if not finite(weights):
            return None
        own: Any = config
        fits(path, target, own.vocab, getattr(own, "target_hidden", None) or own.hidden, self.taps(config))
        if contents[2] and target.mark and contents[2] != target.mark:
            warn_of_other_weights(path, target.mark)
        return config, weights


def _folder(method: str, path: str) -> tuple[Mapping[str, Any], Mapping[str, Array], str] | None:
    """Config, tensors and mark of a local folder of the native layout; None: another layout, or it is damaged."""
    folder = folder_of(path)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.pop("outrider_method") != method or (version := config.pop("format", 1)) not in (1, 2):
            return None
        mark = str(config.pop("target_weights", None) or "")
        stored = open_safetensors(folder / "model.safetensors").tensors
        tensors = {name: one.array() for name, one in stored.items()}
        return config, int8.restored(tensors, path) if version == 2 else tensors, mark
    except (OSError, ValueError, KeyError, AttributeError, TypeError, InputError):
        return None


def layer_shapes(shape: LayerShape, prefix: str) -> Shapes:
    """Names and shapes of a decoder layer's tensors, but for a norm before its attention."""
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
    named: Shapes = {f"{prefix}{name}.weight": size for name, size in sizes.items()}
    if shape.qkv_bias:
        named |= {
            f"{prefix}self_attn.{name}_proj.bias": (size,)
            for name, size in zip("qkv", (wide, narrow, narrow), strict=True)
        }
    return named


def cast(x: Array, precision: str) -> Array:
    """Weights in the target's precision; integers as they are."""
    if x.dtype.kind in "ib" or (x.dtype == np.uint16 and precision == "bfloat16"):
        return x
    return rounded(float32(x)) if precision == "bfloat16" else float32(x)


def finite(weights: Weights) -> bool:
    numbers = [x for x in weights.values() if x.dtype.kind not in "ib"]
    infinite = (x & EXPONENT == EXPONENT if x.dtype == np.uint16 else ~np.isfinite(x) for x in numbers)
    return not any(part.any() for part in infinite)


@lru_cache
def warn_of_other_weights(path: str, mark: str) -> None:
    """Warn, once per drafter and model, that the drafter was trained for other weights."""
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
