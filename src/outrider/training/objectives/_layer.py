"""A decoder layer for a drafter, as its target's own layers are."""

from __future__ import annotations

from ...backends.torch import HFTarget
from ...nets.layer import LayerShape


def layer_like(target: HFTarget, inputs: int = 1, hidden: int = 0) -> LayerShape:
    """The shape of the target's own layers, as far as this layer has their parts."""
    config = target.config
    hidden = hidden or int(config.hidden_size)
    heads = int(config.num_attention_heads)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_theta" not in rope:  # several, by layer type, or none: the plain one
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    return LayerShape(
        hidden=hidden,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        intermediate=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        inputs=inputs * hidden,
        rope={k: v for k, v in rope.items() if k in ("rope_type", "rope_theta")} | {"rope_type": "default"},
        eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
    )
