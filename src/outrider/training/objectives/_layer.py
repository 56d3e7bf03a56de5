"""The shape of a drafter's decoder layer, after its target's layers."""

from __future__ import annotations

from ...checkpoints.target import size_of
from ...core.protocols import Target
from ...nets.layer import LayerShape
from ...params import InputError


def layer_like(target: Target, inputs: int = 1, hidden: int = 0) -> LayerShape:
    """The shape of the target's layers, as far as this layer supports it. Raises InputError where the target's config
    does not say how many heads it has."""
    config = target.config_dict
    hidden = hidden or target.hidden
    heads = size_of(config, "heads")
    if not heads:
        raise InputError(f"the config of {config.get('model_type')} does not say how many attention heads a layer has")
    rope = dict(config.get("rope_parameters") or {})
    if "rope_theta" not in rope:  # a config of transformers 4; several, by layer type, or none: the default one
        rope = {"rope_theta": float(config.get("rope_theta") or 10000.0)}
    return LayerShape(
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate=size_of(config, "inner") or 4 * hidden,
        inputs=inputs * hidden,
        rope={k: v for k, v in rope.items() if k in ("rope_type", "rope_theta")} | {"rope_type": "default"},
        eps=float(config.get("rms_norm_eps") or 1e-6),
    )
