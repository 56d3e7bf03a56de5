"""Layouts of block drafters: DFlash and DFlash 2 (z-lab, SpecForge), JetSpec, DSpark (DeepSpec), and speculators'.

fc, hidden_norm, norm, layers.{i}.*                  as in our network; embedding and head are the target's
markov_head.markov_{w1,w2}.weight                    DSpark's pair head, [V, r] and [Vd, r]
candidate_selector.*                                 DFlash 2's pair head: codebooks [V, r], hidden_projection [r, h]
layers.{i}.{attention,mlp}_conv.*                    DFlash 2's convolutions, as in our network
confidence_head.*                                    unused here, so it is dropped
lm_head.weight, d2t, t2d                             speculators: a draft vocabulary

DFlash's `target_layer_ids` number layer outputs from 0 (our tap is one more); speculators' number hidden states, as
ours do. In DFlash and JetSpec slot j predicts the token at a + j, in DSpark the one at a + j + 1. Three fields say
whether a slot attends to later slots; they must agree. speculators 0.9.0 has none of them: there it follows from the
layers' windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ..nets.layer import LayerShape
from ..params import InputError
from ..schema import from_dict, to_dict
from . import native
from .parts import Bag, Checkpoint, Shape, extras, flag, layer_of, llama, number
from .safeailab import fits, mapping
from .target import Facts

OURS = ("scale",)
DSPARK, DFLASH2 = "Qwen3DSparkModel", "DFlash2DraftModel"
KINDS = {"dflash": "DFlash", "dflash2": "DFlash 2", "dspark": "DSpark"}  # of speculators
SELECTOR = {
    "markov_w1.weight": "candidate_selector.predecessor_codebook",
    "markov_w2.weight": "candidate_selector.successor_codebook",
    "pair_hidden.weight": "candidate_selector.hidden_projection.weight",
}
MARKOV = {name: f"markov_head.{name}" for name in ("markov_w1.weight", "markov_w2.weight")}
TOP = 16  # default number of candidates of DFlash 2's pair head


def is_block(config: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether it is a folder of z-lab, SpecForge, JetSpec or DeepSpec."""
    named = "dflash_config" in config or config.get("architectures") == [DSPARK]
    return named or {"fc.weight", "hidden_norm.weight"} <= names


def read(bag: Bag, config: Mapping[str, Any], facts: Facts | None) -> Checkpoint:
    """DFlash, JetSpec or DSpark.

    Raises:
        InputError: a tensor is missing, unknown or of another shape.
    """
    inner, dspark = dict(config.get("dflash_config") or {}), config.get("architectures") == [DSPARK]
    given = {**config, **inner}
    if not isinstance(given.get("target_layer_ids"), list):
        raise InputError(f"the config of {bag.where} does not say target_layer_ids; add them")
    taps = [int(i) + 1 for i in given["target_layer_ids"]]
    second = any(name in bag for name in SELECTOR.values())
    layout = "DSpark" if dspark else "DFlash 2" if second else "DFlash"
    return _found(bag, config, given, taps, causal_of(config, inner), dspark, facts, layout)


def speculators(bag: Bag, config: Mapping[str, Any], facts: Facts | None) -> Checkpoint:
    """A `dflash`, `dflash2` or `dspark` folder of speculators."""
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise InputError(f"the config of {bag.where} has no transformer_layer_config; fetch it again")
    kind = config["speculators_model_type"]
    given = {**inner, **config}
    taps = [int(i) for i in given.get("aux_hidden_state_layer_ids") or ()]
    from_anchor = flag(config, "sample_from_anchor", bag.where, kind == "dspark")
    open_ = flag(config, "sliding_window_non_causal", bag.where, kind == "dflash2")
    fields_ = {"is_causal": _causal_by_windows(inner, open_), **{k: v for k, v in given.items() if v is not None}}
    return _found(bag, inner, given, taps, causal_of(fields_, {}), from_anchor, facts, f"speculators {KINDS[kind]}")


def _causal_by_windows(layer: Mapping[str, Any], open_: bool) -> bool | None:
    """Causality in speculators: layers with a window are causal unless `open_`, others are not; None if they differ."""
    windows = {not open_ and kind == "sliding_attention" for kind in layer.get("layer_types") or ("full_attention",)}
    return windows.pop() if len(windows) == 1 else None


def causal_of(config: Mapping[str, Any], inner: Mapping[str, Any]) -> bool | None:
    """Whether a slot attends to earlier slots only; None if the config contradicts itself.

    vLLM reads `is_causal`, else `dflash_config.causal`; JetSpec writes `dflash_config.causal_head`. A config without
    these is DFlash's, which is not causal; layers with a window are then causal in vLLM, unless
    `sliding_window_non_causal`.
    """
    fields_ = [config.get("is_causal"), inner.get("causal"), inner.get("causal_head"), config.get("causal_head")]
    known = {bool(value) for value in fields_ if value is not None}
    windows = "sliding_attention" in (config.get("layer_types") or ())
    if not known and windows and not config.get("sliding_window_non_causal"):
        return None
    return None if len(known) > 1 else known == {True}


def faults(config: Mapping[str, Any], where: object, facts: Facts) -> Iterator[str]:
    """One sentence per error in the config of an exported DFlash folder."""
    inner = config.get("dflash_config") or {}
    fields_ = {
        "is_causal": config.get("is_causal"),
        "dflash_config.causal": inner.get("causal"),
        "dflash_config.causal_head": inner.get("causal_head"),
    }
    if len({repr(value) for value in fields_.values()}) > 1 or None in fields_.values():
        yield f"{', '.join(fields_)} must all be present and agree, since engines read different ones"
    ids, mask = inner.get("target_layer_ids"), inner.get("mask_token_id")
    if not isinstance(ids, list) or not ids or len(set(ids)) < len(ids):
        yield f"target_layer_ids is {ids}, where distinct layers belong"
    elif min(ids) < 0 or max(ids) >= facts.layers:
        yield f"target_layer_ids {ids} lie outside 0 to {facts.layers - 1}, the layers of {facts.name}"
    if not isinstance(mask, int) or not 0 <= mask < facts.vocab:
        yield f"mask_token_id is {mask}, which is no token of {facts.name}"


def table_of(config: Mapping[str, Any], where: object) -> dict[str, Shape]:
    """Keys and shapes by the config of a DFlash folder."""
    layer, vocab, inner = (
        layer_of(config, where),
        number(config, "vocab_size", where),
        config.get("dflash_config") or {},
    )
    second = "selector_rank" in inner
    made = {
        "layer": to_dict(layer), "layers": number(config, "num_hidden_layers", where), "vocab": vocab,
        "draft_vocab": vocab, "target_hidden": layer.hidden, "block": number(config, "block_size", where),
        "taps": list(range(1, 1 + len(inner.get("target_layer_ids") or [0]))),
        "pair_head": "selector" if second else "none", "pair_rank": inner.get("selector_rank", 1),
        "conv": inner.get("conv_kernel_size", 0), "conv_group": inner.get("conv_group_size", 1),
        "sample_from_anchor": False, "mask_token": 0,
    }  # fmt: skip
    return {SELECTOR.get(name, name): shape for name, shape in native.table("block", made, where).items()}


def _found(
    bag: Bag,
    config: Mapping[str, Any],
    given: Mapping[str, Any],
    taps: list[int],
    causal: bool | None,
    from_anchor: bool,
    facts: Facts | None,
    layout: str,
) -> Checkpoint:
    where, notes = bag.where, list[str]()
    shape = layer_of(config, where)
    for name in bag.names:
        if name.startswith(("prefix_gru.", "embed_proj.")):
            raise InputError(f"{where} holds {name}, of Domino; Outrider reads DFlash, DFlash 2, JetSpec and DSpark")
    vocab = number(given, "vocab_size", where)
    trimmed = "lm_head.weight" in bag and bag.shape("lm_head.weight")[0] < vocab
    heads = {"markov": MARKOV, "selector": SELECTOR, "none": {}}
    pair = next(kind for kind, names in heads.items() if not names or names["markov_w1.weight"] in bag)
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
        "pair_head": pair,
        "pair_rank": bag.shape(heads[pair]["markov_w1.weight"])[1] if heads[pair] else 1,
        "pair_top": number(given, "selector_top_k", where, TOP) if pair == "selector" else 0,
        **_conv(bag, shape.hidden),
        "mask_token": _token(given, where),
        "scale": 1.0,
        **extras(config, OURS, where),
    }
    if facts is not None:
        fits(where, facts, vocab, shape.hidden)
    table = native.table("block", {**made, "causal": bool(causal)}, where)
    tensors = bag.all(table, lambda name: heads[pair].get(name, name))
    if trimmed:
        both = {"d2t": tensors["d2t"], **({"t2d": bag.take("t2d", (vocab,))} if "t2d" in bag else {})}
        mapping(both, {"t2d"} - both.keys(), made["draft_vocab"], vocab, where, notes)
        tensors["d2t"] = both["d2t"]
    if "sliding_attention" in (given.get("layer_types") or ()):
        notes.append(f"its layers read {given.get('sliding_window')} positions, and here all: longer texts differ")
    for name in sorted(bag.left):
        if name.startswith("confidence_head.") or name in ("embed_tokens.weight", "t2d", "lm_head.weight"):
            notes.append(f"{name} is not used here, so it is left out")
            bag.drop(name)
    bag.close()
    return Checkpoint(layout, "block", made, tensors, notes)


def _conv(bag: Bag, hidden: int) -> dict[str, int]:
    """The sizes of DFlash 2's convolutions, if any."""
    first = "layers.0.attention_conv."
    if f"{first}base_kernel" not in bag:
        return {}
    taps, rows = bag.shape(f"{first}base_kernel")[1], bag.shape(f"{first}kernel_projection.weight")[0]
    return {"conv": taps, "conv_group": hidden * 2 * taps // max(rows, 1)}


def folder(checkpoint: Checkpoint, facts: Facts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A DFlash or DFlash 2 folder for vLLM and SGLang, with causality in the fields of both.

    Raises:
        InputError: the drafter has parts that DFlash does not support.
    """
    config = checkpoint.config
    layer, taps, second = from_dict(LayerShape, config["layer"]), list(config["taps"]), _second(config)
    lacks = [
        reason
        for wrong, reason in (
            (
                config["pair_head"] == "markov" or (config["pair_head"] != "none") != bool(config["conv"]),
                "pair_head=none (or selector with conv=2)",
            ),
            (config["sample_from_anchor"], "sample_from_anchor=false"),
            (config["mask_token"] < 0, "mask_token=ID"),
            (config["draft_vocab"] != config["vocab"], "draft_vocab=0"),
            (config.get("seeded", False), "seeded=false"),
        )
        if wrong
    ]
    if lacks:
        raise InputError(f"DFlash does not support parts of this drafter; train it with {', '.join(lacks)}")
    if min(taps) < 1 or (facts.layers and max(taps) > facts.layers):
        raise InputError(
            f"DFlash reads the outputs of layers; hidden states {taps} are not all such, so train with others"
        )
    ids = [tap - 1 for tap in taps]
    made = {
        **llama(layer, config["vocab"], facts.context),
        "architectures": [DFLASH2 if second else "DFlashDraftModel"],
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
            **second,
        },
        "dtype": str(checkpoint.tensors["fc.weight"].dtype).removeprefix("torch."),
        "outrider": {name: config[name] for name in OURS},
    }
    return made, {SELECTOR.get(name, name): tensor for name, tensor in checkpoint.tensors.items()}


def _second(config: Mapping[str, Any]) -> dict[str, int]:
    """The fields of DFlash 2 beyond DFlash."""
    if config["pair_head"] != "selector":
        return {}
    return {
        "block_size": config["block"], "conv_kernel_size": config["conv"], "conv_group_size": config["conv_group"],
        "selector_rank": config["pair_rank"], "selector_top_k": config["pair_top"] or min(TOP, config["vocab"]),
    }  # fmt: skip


def _token(config: Mapping[str, Any], where: object) -> int:
    value = config.get("mask_token_id")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"mask_token_id in the config of {where} must be a token's number, not {value!r}")
    return value
