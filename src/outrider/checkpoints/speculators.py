"""The format of `speculators`, vLLM's own library: EAGLE-3 alone, its layer named layers.0, an embedding beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..nets.layer import LayerShape
from ..nets.network import from_dict
from ..types import InputError
from . import safeailab
from .parts import Bag, Found, extras, flag, llama, number
from .target import Facts

VERSION = "0.9.0"  # of the library whose files these are
TOKENS = 5  # drafted in each round unless the server is told otherwise


def read(bag: Bag, config: Mapping[str, Any], facts: Facts | None) -> Found:
    """A folder of speculators as a drafter. Raises InputError for another type than eagle3."""
    where, kind = bag.where, config.get("speculators_model_type")
    if kind != "eagle3":
        raise InputError(f"{where} is a speculator of type {kind}; Outrider reads eagle3")
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise InputError(f"the config of {where} has no transformer_layer_config; fetch it again")
    if "norm_before_residual" not in config:
        raise InputError(
            f"the config of {where} does not say norm_before_residual, which speculators takes for false and vLLM for "
            "true; add it"
        )
    if inner.get("model_type", "llama") != "llama":
        raise InputError(f"the layer of {where} is {inner['model_type']}'s; Outrider reads llama's")
    if number(inner, "num_hidden_layers", where, 1) != 1:
        raise InputError(f"{where} has {inner['num_hidden_layers']} layers; Outrider reads EAGLE drafters of one")
    merged = {
        **inner,
        "draft_vocab_size": config.get("draft_vocab_size"),
        "target_hidden_size": config.get("target_hidden_size"),
    }
    notes: list[str] = []
    taps = safeailab._taps(config, facts, where, notes)
    flags = {name: flag(config, name, where) for name in safeailab.FLAGS}
    vocab, block = number(inner, "vocab_size", where), extras(config, safeailab.OURS3, where)
    verifier = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    if verifier:
        notes.append(f"made for {verifier}")
    for name in ("verifier_lm_head.weight", "verifier_norm.weight"):
        if name in bag:
            bag.drop(name)
    return safeailab.eagle3_of(bag, merged, vocab, flags, taps, block, facts, "speculators EAGLE-3", notes)


def folder(found: Found, facts: Facts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors as speculators has them. Raises InputError for what it cannot express."""
    config, tensors = found.config, dict(found.tensors)
    layer, taps = from_dict(LayerShape, config["layer"]), list(config["taps"])
    safeailab.check_export_taps(taps, facts)
    if layer.qkv_bias:
        raise InputError("speculators has no EAGLE-3 with biases in its attention alone; train it without")
    if config["norm_before_fc"] and config["fc_norm"]:
        raise InputError("speculators takes either norm_before_fc or fc_norm, not both")
    safeailab.full_vocabulary(tensors, config)
    if not config["own_embedding"]:
        tensors["embed_tokens.weight"] = facts.embedding()
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    made = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": config["draft_vocab"],
        **({"target_hidden_size": config["target_hidden"]} if config["target_hidden"] != layer.hidden else {}),
        **{name: config[name] for name in safeailab.FLAGS},
        "eagle_aux_hidden_state_layer_ids": taps,
        "transformer_layer_config": llama(layer, config["vocab"], facts.context),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": TOKENS,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": facts.name, "architectures": facts.architectures},
        },
        "dtype": dtype,
        "outrider": {name: config[name] for name in safeailab.OURS3},
    }
    return made, tensors
