"""Hydra's layout: `hydra_lm_head.pt` of grounded heads, plain (mlp) or after a decoder layer (prefix-mlp, Hydra++).

hydra_mlp.{i}.1.{linear,res_connection}.*     the first block of head i, [h, h (i + 2)]
hydra_mlp.{i}.{3,5,7}.linear.*                the next blocks
hydra_lm_head.{i}.1.*                         with a bias
prefix_embeding_layer.*                       (sic) a Llama model of one layer with the target's shape
input_embed_fn.weight                         the target's embedding
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..params import InputError
from ..schema import to_dict
from . import native
from .parts import Bag, Checkpoint, layer_of
from .safeailab import fits, same_embedding
from .target import Facts

FILE = "hydra_lm_head.pt"


def read(bag: Bag, config: Mapping[str, Any], facts: Facts | None) -> Checkpoint:
    """Load a Hydra folder. Raises InputError for heads of another kind."""
    where = bag.where
    arch = config.get("hydra_head_arch", "mlp")
    if arch not in ("mlp", "prefix-mlp"):
        raise InputError(f"{where} has heads of kind {arch}; Outrider reads Hydra's mlp and prefix-mlp")
    if not config.get("grounded_heads", True):
        raise InputError(f"{where} has heads that do not see the drafted tokens; Outrider reads grounded Hydra heads")
    first = bag.shape("hydra_mlp.0.1.linear.weight")
    hidden, vocab = first[0], bag.shape("hydra_lm_head.0.1.weight")[0]
    heads = 1 + max(int(m[1]) for name in bag.names if (m := re.match(r"hydra_mlp\.(\d+)\.", name)))
    layers = sum(f"hydra_mlp.0.{2 * j + 1}.linear.weight" in bag for j in range(len(bag.names)))
    prefixed = any(name.startswith("prefix_embeding_layer.") for name in bag.names)
    if prefixed != (arch == "prefix-mlp"):
        raise InputError(f"the config of {where} says {arch}, and its weights hold something else; fetch them again")
    notes = []
    for name, seen in (("hydra_num_heads", heads), ("hydra_num_layers", layers)):
        if config.get(name) not in (None, seen):
            notes.append(f"the config says {name} {config[name]} and the weights have {seen}: the weights are used")
    layer = None
    if prefixed:
        base = facts.config if facts is not None else config
        if "num_attention_heads" not in base:
            raise InputError(
                f"the layer of {where} has its target's shape; name the target: outrider import FOLDER MODEL"
            )
        biased = "prefix_embeding_layer.layers.0.self_attn.q_proj.bias" in bag
        layer = to_dict(layer_of({**base, "qkv_bias": biased}, where))
    made = {
        "vocab": vocab, "hidden": hidden, "heads": heads, "layers": layers, "prefix": prefixed, "layer": layer,
        "scale": 1.0, "tree": None, "draft_vocab": 0,
    }  # fmt: skip
    if facts is not None:
        fits(where, facts, vocab, hidden)
    tensors = bag.all(native.table("hydra", made), _name)
    for name in ("input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight"):
        if name in bag:
            copy = bag.take(name, (vocab, hidden))
            if name.startswith("input") and facts is not None:
                same_embedding(copy, facts, where)
            kind = "the target's" if name.startswith("input") else "not used"
            notes.append(f"{name} is {kind}, so it is left out")
    bag.close()
    return Checkpoint("Hydra++" if prefixed else "Hydra", "hydra", made, tensors, notes)


def _name(native_name: str) -> str:
    """A native key in Hydra's naming."""
    if m := re.match(r"heads\.(\d+)\.blocks\.(\d+)\.(.*)", native_name):
        return f"hydra_mlp.{m[1]}.{2 * int(m[2]) + 1}.{m[3]}"
    if m := re.match(r"heads\.(\d+)\.lm_head\.(.*)", native_name):
        return f"hydra_lm_head.{m[1]}.1.{m[2]}"
    name = native_name.replace("prefix.layer.", "prefix_embeding_layer.layers.0.")
    name = name.replace("prefix.input_layernorm.", "prefix_embeding_layer.layers.0.input_layernorm.")
    return name.replace("prefix.norm.", "prefix_embeding_layer.norm.")
