"""The format of `speculators`, vLLM's own library: EAGLE-3 and P-EAGLE, their layers named layers.0, layers.1, ..., an
embedding beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..nets.layer import LayerShape
from ..params import InputError
from ..schema import from_dict
from . import peagle, safeailab
from .parts import Bag, Checkpoint, extras, flag, llama, number
from .target import Facts

VERSION = "0.9.0"  # of the library whose files these are
ARCHITECTURES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleSpeculator"}
NAMES = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
TOKENS = 5  # default number of drafted tokens per round


def read(bag: Bag, config: Mapping[str, Any], facts: Facts | None) -> Checkpoint:
    """Load a folder of speculators. Raises InputError for types other than eagle3 and peagle."""
    where, kind = bag.where, config.get("speculators_model_type")
    if kind not in ARCHITECTURES:
        raise InputError(f"{where} is a speculator of type {kind}; Outrider reads eagle3, peagle, dflash and dspark")
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise InputError(f"the config of {where} has no transformer_layer_config; fetch it again")
    if "norm_before_residual" not in config:
        raise InputError(
            f"the config of {where} has no norm_before_residual, whose default is false in speculators and true in "
            "vLLM; add it"
        )
    if inner.get("model_type", "llama") != "llama":
        raise InputError(f"the layer of {where} is {inner['model_type']}'s; Outrider reads llama's")
    settings = config.get("speculators_config") or {}
    merged = {
        **inner,
        "draft_vocab_size": config.get("draft_vocab_size"),
        "target_hidden_size": config.get("target_hidden_size"),
        "mask_token_id": config.get("mask_token_id"),
        "speculative_tokens": (settings.get("proposal_methods") or [{}])[0].get("speculative_tokens"),
    }
    notes: list[str] = []
    taps = safeailab._taps(config, facts, where, notes)
    flags = {name: flag(config, name, where) for name in safeailab.FLAGS}
    vocab, block = number(inner, "vocab_size", where), extras(config, safeailab.OURS3, where)
    verifier = (settings.get("verifier") or {}).get("name_or_path")
    if verifier:
        notes.append(f"made for {verifier}")
    for name in ("verifier_lm_head.weight", "verifier_norm.weight"):
        if name in bag:
            bag.drop(name)
    return safeailab.eagle3_of(bag, merged, vocab, flags, taps, block, facts, f"speculators {NAMES[kind]}", notes)


def folder(checkpoint: Checkpoint, facts: Facts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors for speculators. Raises InputError for what it does not support."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    layer, taps = from_dict(LayerShape, config["layer"]), list(config["taps"])
    safeailab.check_export_taps(taps, facts)
    if layer.qkv_bias:
        raise InputError("speculators has no EAGLE-3 with biases in its attention alone; train it without")
    if config["norm_before_fc"] and config["fc_norm"]:
        raise InputError("speculators takes either norm_before_fc or fc_norm, not both")
    kind = "peagle" if config["parallel"] else "eagle3"
    if config["parallel"]:
        peagle.check_export(config, "vLLM")
    safeailab.full_vocabulary(tensors, config)
    if not config["own_embedding"]:
        tensors["embed_tokens.weight"] = facts.embedding()
    tensors = {peagle.named(name, "layers.0."): t for name, t in tensors.items()}
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    made = {
        "architectures": [ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        **({"mask_token_id": config["mask_token"]} if config["parallel"] else {}),
        "speculators_version": VERSION,
        "draft_vocab_size": config["draft_vocab"],
        **({"target_hidden_size": config["target_hidden"]} if config["target_hidden"] != layer.hidden else {}),
        **{name: config[name] for name in safeailab.FLAGS},
        "eagle_aux_hidden_state_layer_ids": taps,
        "transformer_layer_config": {
            **llama(layer, config["vocab"], facts.context),
            "num_hidden_layers": config["layers"],
        },
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config["parallel"] or TOKENS,
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
