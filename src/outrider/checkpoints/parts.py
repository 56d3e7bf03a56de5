"""Building blocks of layouts: tensors taken by name with none left over, fields of configs, the result."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..nets.layer import LayerShape
from ..params import InputError
from .files import Weights

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's checkpoint in the native layout: the config and tensors by the network's keys."""

    layout: str
    method: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)
    mark: str = ""  # of the target's weights, if known


class Bag:
    """The tensors of a foreign folder. Each must be taken once; `close` raises for the rest."""

    def __init__(
        self, weights: Weights | Mapping[str, Tensor], where: object, keep: Callable[[str], bool] = lambda name: True
    ):
        self.weights, self.where = weights, where
        self.left = {name for name in weights if keep(name)}
        self.names = frozenset(self.left)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def shape(self, name: str) -> Shape:
        weights, name = self.weights, self._have(name)
        return weights.shape(name) if isinstance(weights, Weights) else tuple(weights[name].shape)

    def _have(self, name: str) -> str:
        if name not in self.names:
            raise InputError(f"the weights of {self.where} lack {name}; fetch or export them again")
        return name

    def take(self, name: str, shape: Shape) -> Tensor:
        """A tensor of this shape without NaN."""
        actual = self.shape(name)
        if actual != shape:
            raise InputError(
                f"{name} of {self.where} is {list(actual)}, where its config says {list(shape)}; correct one of them"
            )
        self.left.discard(name)
        tensor = self.weights[name]
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} of {self.where} has entries that are NaN or infinite; fetch or train it again")
        return tensor

    def drop(self, name: str) -> None:
        """Mark a tensor as ignored."""
        self.left.discard(self._have(name))

    def all(self, table: Mapping[str, Shape], name: Callable[[str], str] = str) -> dict[str, Tensor]:
        """The tensors of a native table, under other names in the file."""
        names = {native: name(native) for native in table}
        lacking = sorted(set(names.values()) - self.names)
        if lacking:
            raise InputError(f"the weights of {self.where} lack {', '.join(lacking[:4])}; fetch or export them again")
        return {native: self.take(foreign, table[native]) for native, foreign in names.items()}

    def close(self, ignored: str = r"rotary_emb\.inv_freq$") -> None:
        """Raise InputError for tensors that were not taken, except rotary frequencies, which old folders store."""
        rest = sorted(name for name in self.left if not re.search(ignored, name))
        if rest:
            raise InputError(
                f"the weights of {self.where} hold {', '.join(rest[:4])}, which this layout has not; remove them"
            )


def number(config: Mapping[str, Any], name: str, where: object, default: int | None = None) -> int:
    """A positive integer of a config."""
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise InputError(f"the config of {where} does not say {name}; add it")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} in the config of {where} must be an integer of at least 1, not {value!r}")
    return value


def flag(config: Mapping[str, Any], name: str, where: object, default: bool = False) -> bool:
    """A boolean field of a config. Raises InputError for anything else."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise InputError(f"{name} in the config of {where} must be true or false, not {value!r}")
    return value


def extras(config: Mapping[str, Any], names: Iterable[str], where: object) -> dict[str, Any]:
    """The fields that our export adds to the layout, in a block of their own."""
    block = config.get("outrider") or {}
    if not isinstance(block, dict) or block.keys() - set(names):
        raise InputError(f"the block outrider in the config of {where} holds more than {', '.join(names)}; remove it")
    return dict(block)


# --- the layer, by the fields of Llama's config ----------------------------------------------------------------------


def layer_of(config: Mapping[str, Any], where: object, inputs: int = 1) -> LayerShape:
    """The shape of a layer from a raw Llama config. inputs: input size of its attention, in hidden sizes."""
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise InputError(f"{where} uses {act}; drafters' layers use silu")
    hidden, heads = number(config, "hidden_size", where), number(config, "num_attention_heads", where)
    return LayerShape(
        hidden=hidden,
        heads=heads,
        kv_heads=number(config, "num_key_value_heads", where, heads),
        head_dim=number(config, "head_dim", where, hidden // heads),
        intermediate=number(config, "intermediate_size", where),
        inputs=inputs * hidden,
        rope=rope_of(config, where),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=flag(config, "qkv_bias", where),
    )


def rope_of(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """RoPE as `rope_parameters`; the default base is 10000."""
    nested = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in nested.values()) or "mrope_section" in nested:
        raise InputError(f"the RoPE of {where} differs by layer or by modality; drafters have one kind")
    kind = nested.pop("rope_type", None) or nested.pop("type", None) or "default"
    nested.pop("type", None)
    inner, outer = nested.pop("rope_theta", None), config.get("rope_theta")
    if inner is not None and outer is not None and float(inner) != float(outer):
        raise InputError(f"the config of {where} names two rotary bases, {outer:g} and {inner:g}; remove the wrong one")
    theta = next((float(t) for t in (inner, outer) if t is not None), 10000.0)
    if float(nested.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise InputError(f"{where} has partial RoPE; drafters' layers rotate all of each head")
    if kind in ("yarn", "llama3"):
        nested.setdefault("original_max_position_embeddings", number(config, "max_position_embeddings", where))
    return {"rope_type": str(kind), "rope_theta": theta, **nested}


def llama(layer: LayerShape, vocab: int, context: int) -> dict[str, Any]:
    """The same for readers of Llama configs: old ones read `rope_theta`, new ones `rope_parameters`."""
    rope = dict(layer.rope)
    rope = {"rope_type": rope.pop("rope_type", "default"), "rope_theta": rope.pop("rope_theta", 10000.0), **rope}
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    plain = rope["rope_type"] == "default"
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": layer.hidden,
        "intermediate_size": layer.intermediate,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": layer.eps,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        **({} if plain else {"rope_scaling": {"type": rope["rope_type"], **scaling}}),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
