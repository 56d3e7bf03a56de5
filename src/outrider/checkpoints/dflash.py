"""Layouts of block drafters: DFlash (z-lab, SpecForge), JetSpec, DSpark (DeepSpec), and those of speculators.

fc, hidden_norm, norm, layers.{i}.*                  named as in our network; embedding and head are the target's
markov_head.markov_{w1,w2}.weight                    DSpark's pair head, [V, r] and [Vd, r]
confidence_head.*                                    read by nobody here, so it is left out
lm_head.weight, d2t, t2d                             speculators: a draft vocabulary

DFlash counts `target_layer_ids` as layer outputs from 0 (our tap is one more), speculators counts hidden states as we
do. In DFlash and JetSpec slot j predicts the token at a + j, in DSpark the one at a + j + 1. Whether a slot sees the
later slots is spelled in three ways; they must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ..nets.layer import LayerShape
from ..nets.network import from_dict, to_dict
from ..types import InputError
from . import native
from .parts import Bag, Found, Shape, extras, flag, layer_of, llama, number
from .safeailab import fits
from .target import Facts

OURS = ("scale",)
DSPARK = "Qwen3DSparkModel"
KINDS = ("dflash", "dspark")  # of speculators


def is_block(config: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Is it a folder of z-lab's, SpecForge's, JetSpec's or DeepSpec's?"""
    named = "dflash_config" in config or config.get("architectures") == [DSPARK]
    return named or {"fc.weight", "hidden_norm.weight"} <= names


def read(bag: Bag, config: Mapping[str, Any], facts: Facts | None) -> Found:
    """DFlash, JetSpec or DSpark.

    Raises:
        InputError: a part is missing, unknown or of another shape.
    """
    inner, dspark = dict(config.get("dflash_config") or {}), config.get("architectures") == [DSPARK]
    given = {**config, **inner}
    if not isinstance(given.get("target_layer_ids"), list):
        raise InputError(f"the config of {bag.where} does not say target_layer_ids; add them")
    taps = [int(i) + 1 for i in given["target_layer_ids"]]
    return _found(bag, config, given, taps, causal_of(config, inner), dspark, facts, "DSpark" if dspark else "DFlash")


def speculators(bag: Bag, config: Mapping[str, Any], facts: Facts | None) -> Found:
    """A `dflash` or `dspark` folder of speculators."""
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise InputError(f"the config of {bag.where} has no transformer_layer_config; fetch it again")
    dspark = config["speculators_model_type"] == "dspark"
    given = {**inner, **config}
    taps = [int(i) for i in given.get("aux_hidden_state_layer_ids") or ()]
    from_anchor = flag(config, "sample_from_anchor", bag.where, dspark)
    layout = f"speculators {'DSpark' if dspark else 'DFlash'}"
    return _found(bag, inner, given, taps, causal_of(config, {}), from_anchor, facts, layout)


def causal_of(config: Mapping[str, Any], inner: Mapping[str, Any]) -> bool | None:
    """Whether a slot sees only the slots before it; None where a config says both.

    vLLM reads `is_causal`, else `dflash_config.causal`; JetSpec writes `dflash_config.causal_head`. A config that says
    nothing is DFlash's own, which is not causal.
    """
    said = [config.get("is_causal"), inner.get("causal"), inner.get("causal_head"), config.get("causal_head")]
    known = {bool(value) for value in said if value is not None}
    return None if len(known) > 1 else known == {True}


def faults(config: Mapping[str, Any], where: object, facts: Facts) -> Iterator[str]:
    """Sentences, one for each fault in the config of an exported DFlash folder."""
    inner = config.get("dflash_config") or {}
    said = {
        "is_causal": config.get("is_causal"),
        "dflash_config.causal": inner.get("causal"),
        "dflash_config.causal_head": inner.get("causal_head"),
    }
    if len({repr(value) for value in said.values()}) > 1 or None in said.values():
        yield f"{', '.join(said)} must all be there and say the same: every engine reads another one"
    ids, mask = inner.get("target_layer_ids"), inner.get("mask_token_id")
    if not isinstance(ids, list) or not ids or len(set(ids)) < len(ids):
        yield f"target_layer_ids is {ids}, where distinct layers belong"
    elif min(ids) < 0 or max(ids) >= facts.layers:
        yield f"target_layer_ids {ids} lie outside 0 to {facts.layers - 1}, the layers of {facts.name}"
    if not isinstance(mask, int) or not 0 <= mask < facts.vocab:
        yield f"mask_token_id is {mask}, which is no token of {facts.name}"


def table_of(config: Mapping[str, Any], where: object) -> dict[str, Shape]:
    """Keys and shapes that the config of a DFlash folder asks for."""
    layer, vocab = layer_of(config, where), number(config, "vocab_size", where)
    made = {
        "layer": to_dict(layer), "layers": number(config, "num_hidden_layers", where), "vocab": vocab,
        "draft_vocab": vocab, "target_hidden": layer.hidden, "block": number(config, "block_size", where),
        "taps": list(range(1, 1 + len((config.get("dflash_config") or {}).get("target_layer_ids") or [0]))),
        "pair_head": "none", "sample_from_anchor": False, "mask_token": 0,
    }  # fmt: skip
    return native.table("block", made, where)


def _found(
    bag: Bag,
    config: Mapping[str, Any],
    given: Mapping[str, Any],
    taps: list[int],
    causal: bool | None,
    from_anchor: bool,
    facts: Facts | None,
    layout: str,
) -> Found:
    where, notes = bag.where, list[str]()
    shape = layer_of(config, where)
    for name in bag.names:
        if "_conv." in name or name.startswith(("candidate_selector.", "prefix_gru.", "embed_proj.")):
            raise InputError(f"{where} holds {name}, of DFlash 2 or Domino; Outrider reads DFlash, JetSpec and DSpark")
    vocab = number(given, "vocab_size", where)
    trimmed = "lm_head.weight" in bag and bag.shape("lm_head.weight")[0] < vocab
    markov = "markov_head.markov_w1.weight" in bag
    made = {
        "layer": to_dict(shape),
        "layers": number(config, "num_hidden_layers", where),
        "vocab": vocab,
        "draft_vocab": bag.shape("lm_head.weight")[0] if trimmed else vocab,
        "target_hidden": shape.hidden,
        "taps": taps,
        "block": number(given, "block_size", where),
        "causal": causal,
        "sample_from_anchor": from_anchor,
        "pair_head": "markov" if markov else "none",
        "pair_rank": bag.shape("markov_head.markov_w1.weight")[1] if markov else 1,
        "mask_token": _token(given, where),
        "scale": 1.0,
        **extras(config, OURS, where),
    }
    if facts is not None:
        fits(where, facts, vocab, shape.hidden)
    table = native.table("block", {**made, "causal": bool(causal)}, where)
    tensors = bag.all(table, lambda name: f"markov_head.{name}" if name.startswith("markov_") else name)
    for name in sorted(bag.left):
        if name.startswith("confidence_head.") or name in ("embed_tokens.weight", "t2d", "lm_head.weight"):
            notes.append(f"{name} is not used here, so it is left out")
            bag.drop(name)
    bag.close()
    return Found(layout, "block", made, tensors, notes)


def folder(found: Found, facts: Facts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A DFlash folder as vLLM and SGLang load it, causality spelled for each of them.

    Raises:
        InputError: the drafter has parts that DFlash has no place for.
    """
    config = found.config
    layer, taps = from_dict(LayerShape, config["layer"]), list(config["taps"])
    lacks = [
        reason
        for wrong, reason in (
            (config["pair_head"] != "none", "pair_head=none"),
            (config["sample_from_anchor"], "sample_from_anchor=false"),
            (config["mask_token"] < 0, "mask_token=ID"),
            (config["draft_vocab"] != config["vocab"], "draft_vocab=0"),
        )
        if wrong
    ]
    if lacks:
        raise InputError(f"DFlash has no place for parts of this drafter; train it with {', '.join(lacks)}")
    if min(taps) < 1 or (facts.layers and max(taps) > facts.layers):
        raise InputError(
            f"DFlash reads the outputs of layers; hidden states {taps} are not all such, so train with others"
        )
    ids = [tap - 1 for tap in taps]
    made = {
        **llama(layer, config["vocab"], facts.context),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": config["layers"],
        "layer_types": ["full_attention"] * config["layers"],
        "block_size": config["block"],
        "num_target_layers": facts.layers,
        "is_causal": config["causal"],
        "dflash_config": {
            "mask_token_id": config["mask_token"],
            "target_layer_ids": ids,
            "causal": config["causal"],
            "causal_head": config["causal"],
        },
        "dtype": str(found.tensors["fc.weight"].dtype).removeprefix("torch."),
        "outrider": {name: config[name] for name in OURS},
    }
    return made, dict(found.tensors)


def _token(config: Mapping[str, Any], where: object) -> int:
    value = config.get("mask_token_id")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"mask_token_id in the config of {where} must be a token's number, not {value!r}")
    return value
