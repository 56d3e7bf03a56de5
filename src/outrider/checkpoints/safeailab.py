"""SafeAILab's layouts: EAGLE-1, EAGLE-2 and HASS (the same weights), and EAGLE-3 with its variants.

EAGLE   `fc.weight [h, 2h]` over cat(embedding, feature), `fc.bias` unless the config says "bias": false (published
        configs leave it out and mean true), `layers.0.*` without an input norm, `embed_tokens.weight`, the target's.
EAGLE-3 `fc.weight [h, 3H]`, `midlayer.*` or `layers.0.*`, `norm`, `lm_head [Vd, h]` (absent: the target's), `d2t`
        offsets (absent: the full vocabulary), `t2d`, an embedding only if it is the drafter's own.
        With P-EAGLE's parts: see `peagle.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..nets.layer import LayerShape
from ..params import InputError
from ..schema import from_dict, to_dict
from . import native, peagle
from .parts import Bag, Checkpoint, extras, flag, layer_of, llama, number
from .target import Facts

OURS = ("scale", "trained", "bias")
OURS3 = ("scale", "own_embedding", "parallel")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def is_eagle(names: frozenset[str]) -> bool:
    """Whether these tensors are an EAGLE drafter's."""
    return "layers.0.self_attn.q_proj.weight" in names and not is_eagle3(names)


def is_eagle3(names: frozenset[str]) -> bool:
    """Whether these tensors are an EAGLE-3 drafter's."""
    marks = ("midlayer.", "d2t", "t2d", "layers.0.hidden_norm.", "input_norm.", "fc_norm.")
    return any(name.startswith(marks) for name in names)


def eagle(bag: Bag, config: Mapping[str, Any], facts: Facts | None) -> Checkpoint:
    """Load an EAGLE folder. Raises InputError for missing, unknown or misshapen tensors."""
    where = bag.where
    _single(config, where)
    layer, vocab = layer_of(config, where), number(config, "vocab_size", where)
    kept = {"scale": 1.0, "trained": "eagle", **extras(config, OURS, where)}
    biased = flag(config, "bias", where, True)
    made = {
        "layer": to_dict(layer),
        "vocab": vocab,
        "target_hidden": layer.hidden,
        "inputs": "feature+shifted",
        "bias": biased,
        "scale": kept["scale"],
        "draft_vocab": 0,
        "trained": kept["trained"],
    }
    if biased and "fc.bias" not in bag:
        raise InputError(
            f'the weights of {where} lack fc.bias, which its config requires ("bias" absent means true); '
            'fetch them again, or set "bias" to false if it was trained without'
        )
    tensors = bag.all(native.table("eagle", made))
    notes = _embedding(bag, vocab, layer.hidden, facts)
    if "lm_head.weight" in bag:
        bag.drop("lm_head.weight")
        notes.append("lm_head.weight in the file is left out: EAGLE uses the target's")
    bag.close()
    if biased and kept.get("bias") is False and not bool(tensors["fc.bias"].any()):
        made["bias"] = False
        del tensors["fc.bias"]
    return Checkpoint("SafeAILab EAGLE", "eagle", made, tensors, notes)


def _embedding(bag: Bag, vocab: int, hidden: int, facts: Facts | None) -> list[str]:
    """Check and drop the file's copy of the target's embedding."""
    if "embed_tokens.weight" not in bag:
        return []
    copy = bag.take("embed_tokens.weight", (vocab, hidden))
    if facts is None:
        return ["embed_tokens.weight is dropped unchecked: it should be the target's (name the target to check it)"]
    fits(bag.where, facts, vocab, hidden)
    same_embedding(copy, facts, bag.where)
    return ["embed_tokens.weight is the target's, so it is left out"]


def fits(where: object, facts: Facts, vocab: int, hidden: int) -> None:
    """Raise InputError if a drafter was trained for a target with another vocabulary or hidden size."""
    if (vocab, hidden) != (facts.vocab, facts.hidden):
        raise InputError(
            f"{where} is for a target with {vocab} tokens and hidden size {hidden}; "
            f"{facts.name} has {facts.vocab} and {facts.hidden}"
        )


def same_embedding(copy: Tensor, facts: Facts, where: object) -> None:
    """Raise InputError if two embeddings differ by more than rounding, also to a .gguf file's few bits: a fourth of
    their norm."""
    own = facts.embedding().float()
    if float((copy.float() - own).norm()) > 0.25 * float(own.norm()):
        raise InputError(f"the embedding in {where} is not that of {facts.name}: it was trained for another model")


def _single(config: Mapping[str, Any], where: object) -> None:
    layers = number(config, "num_hidden_layers", where, 1)
    if layers != 1:
        raise InputError(f"{where} has {layers} layers; Outrider reads EAGLE drafters of one")


# --- EAGLE-3 ---------------------------------------------------------------------------------------------------------


def eagle3(bag: Bag, config: Mapping[str, Any], facts: Facts | None) -> Checkpoint:
    """Load an EAGLE-3 folder. Raises InputError for missing, unknown or misshapen tensors."""
    vocab = number(config, "vocab_size", bag.where)
    block = extras(config, OURS3, bag.where)
    eagle_config = config.get("eagle_config") or {}
    flags = {name: flag(eagle_config, name, bag.where, flag(config, name, bag.where)) for name in FLAGS}
    if not eagle_config.get("use_aux_hidden_state", True):
        raise InputError(f"{bag.where} reads one layer of its target; Outrider supports EAGLE-3 with three")
    notes: list[str] = []
    taps = _taps(config, facts, bag.where, notes)
    return eagle3_of(bag, config, vocab, flags, taps, block, facts, "SafeAILab EAGLE-3", notes)


def eagle3_of(
    bag: Bag, config: Mapping[str, Any], vocab: int, flags: Mapping[str, bool], taps: list[int],
    block: Mapping[str, Any], facts: Facts | None, layout: str, notes: list[str],
) -> Checkpoint:  # fmt: skip
    """EAGLE-3's tensors by a Llama config and flags; also for speculators."""
    where = bag.where
    layer = layer_of(config, where, inputs=2)
    h, wide = layer.hidden, number(config, "target_hidden_size", where, layer.hidden)
    few = number(config, "draft_vocab_size", where, vocab)
    if facts is not None:
        fits(where, facts, vocab, wide)
    own, parallel = "embed_tokens.weight" in bag, peagle.MASK in bag
    if not parallel:
        _single(config, where)
    if h != wide and not own:
        raise InputError(
            f"the weights of {where} lack embed_tokens.weight, which drafters with their own hidden size need"
        )
    made = {
        "layer": to_dict(layer),
        "vocab": vocab,
        "draft_vocab": few,
        "target_hidden": wide,
        "taps": taps,
        "scale": block.get("scale", 1.0),
        **flags,
        "own_embedding": own,
        **(peagle.fields(config, block, where, notes) if parallel else peagle.NONE),
    }
    shapes = native.table("eagle3", made)
    middle = "midlayer." if "midlayer.self_attn.q_proj.weight" in bag else "layers.0."
    virtual = {name for name in ("d2t", "t2d", "lm_head.weight") if name not in bag}
    if parallel:
        shapes[peagle.MASK] = bag.shape(peagle.MASK)  # 3 H elements of any shape
    tensors = bag.all({k: v for k, v in shapes.items() if k not in virtual}, lambda k: peagle.named(k, middle))
    if parallel:
        tensors[peagle.MASK] = tensors[peagle.MASK].reshape(1, 1, -1)
        peagle.shed(bag, notes)
    bag.close()
    if middle != "midlayer.":
        notes.append("layers.0.* is read as midlayer.*")
    ids = mapping(tensors, virtual, few, vocab, where, notes)
    if "lm_head.weight" in virtual:
        if facts is None:
            raise InputError(
                f"{where} has no LM head, it uses its target's; name the target: outrider import FOLDER MODEL"
            )
        if facts.hidden != h:
            raise InputError(f"{where} has no LM head, and {facts.name}'s hidden size is {facts.hidden}, not {h}")
        tensors["lm_head.weight"] = facts.head()[ids].to(tensors["fc.weight"].dtype).clone()
        notes.append("there is no lm_head: the target's is taken")
    if own and block.get("own_embedding") is False:
        made["own_embedding"] = False
        del tensors["embed_tokens.weight"]
    return Checkpoint(layout, "eagle3", made, {k: tensors[k] for k in shapes if k in tensors}, notes)


def mapping(
    tensors: dict[str, Tensor], virtual: set[str], few: int, vocab: int, where: object, notes: list[str]
) -> Tensor:
    """The draft vocabulary's token ids; d2t and t2d are created if missing, and must agree otherwise."""
    at = torch.arange(few)
    if "d2t" in virtual:
        if few != vocab:
            raise InputError(f"the weights of {where} lack d2t, but its draft vocabulary has {few} of {vocab} tokens")
        tensors["d2t"] = torch.zeros(few, dtype=torch.long)
        notes.append("there is no d2t: the draft vocabulary is the full one")
    if tensors["d2t"].is_floating_point() or tensors["d2t"].dtype == torch.bool:
        raise InputError(f"d2t of {where} has dtype {tensors['d2t'].dtype}, not an integer type; export it again")
    tensors["d2t"] = tensors["d2t"].long()
    ids, marked = at + tensors["d2t"], torch.zeros(vocab, dtype=torch.bool)
    good = int(ids.min()) >= 0 and int(ids.max()) < vocab and len(ids.unique()) == few
    marked[ids.clamp(0, vocab - 1)] = True
    given = marked if "t2d" in virtual else tensors["t2d"].bool()
    if not good or not torch.equal(given, marked):
        absolute = tensors["d2t"]
        swapped = torch.zeros(vocab, dtype=torch.bool)
        swapped[absolute.clamp(0, vocab - 1)] = True
        if len(absolute.unique()) == few and torch.equal(swapped, given):
            raise InputError(
                f"d2t of {where} holds token ids where offsets belong (id = i + d2t[i]); subtract 0, 1, 2, ... from it"
            )
        what = "and t2d disagree" if good else "does not give every draft token an id of its own (id = i + d2t[i])"
        raise InputError(f"d2t {what} in {where}; export it again")
    tensors["t2d"] = given
    return ids


def _taps(config: Mapping[str, Any], facts: Facts | None, where: object, notes: list[str]) -> list[int]:
    """The hidden states to read: vLLM's ids at the top number them, SGLang's in eagle_config are one less."""
    top = config.get("eagle_aux_hidden_state_layer_ids")
    inner = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if top and inner and [i + 1 for i in inner] != list(top):
        raise InputError(
            f"the config of {where} names layers {list(top)} at the top and {list(inner)} in eagle_config, which must "
            "be one less each; correct one of them"
        )
    if top:
        return checked_taps(top, where)
    if inner:
        notes.append(
            f"layer ids {list(inner)} of eagle_config count as SGLang's: hidden states {[i + 1 for i in inner]}"
        )
        return checked_taps([i + 1 for i in inner], where)
    if facts is None or not facts.layers:
        raise InputError(
            f"{where} does not say which layers it reads, so it is those of the paper, which depend on the target's "
            "depth; name the target: outrider import FOLDER MODEL"
        )
    taps = default_taps(facts.layers)
    notes.append(f"no layers are named: the paper's, hidden states {taps}")
    return checked_taps(taps, where)


def default_taps(layers: int) -> list[int]:
    """The default hidden states of EAGLE-3 by the number of the target's layers."""
    return [2, layers // 2, layers - 3]


def checked_taps(taps: Any, where: object) -> list[int]:
    """Three different hidden states, counted from 0. Raises InputError for anything else."""
    taps = list(taps)
    if len(taps) != 3 or len(set(taps)) < 3 or any(not isinstance(t, int) or t < 0 for t in taps):
        raise InputError(f"{where} reads hidden states {taps}; EAGLE-3 reads three different ones, counted from 0")
    return taps


# --- export ----------------------------------------------------------------------------------------------------------


def eagle_folder(checkpoint: Checkpoint, to: str, facts: Facts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors for SafeAILab's code, vLLM and SGLang: one layout, whose fc has a bias, possibly of zeros
    (a missing one is random in SGLang; vLLM has none and ignores it)."""
    config = checkpoint.config
    layer, tensors = from_dict(LayerShape, config["layer"]), dict(checkpoint.tensors)
    if config["inputs"] != "feature+shifted":
        raise InputError(
            f"no engine has EAGLE with the inputs {config['inputs']}; only feature+shifted can be exported"
        )
    if to == "vllm" and config["bias"] and bool(tensors["fc.bias"].any()):
        raise InputError("vLLM ignores the bias of EAGLE's fc, which changes this drafter; train it without")
    if to == "safeailab" and layer.head_dim * layer.heads != layer.hidden:
        raise InputError("SafeAILab's EAGLE has heads of size hidden / heads; this drafter's have another size")
    if to == "safeailab" and layer.rope.get("rope_type", "default") != "default":
        raise InputError(f"SafeAILab's code does not support RoPE of type {layer.rope['rope_type']}")
    tensors.setdefault("fc.bias", torch.zeros(layer.hidden, dtype=tensors["fc.weight"].dtype))
    tensors["embed_tokens.weight"] = facts.embedding()
    made = {
        "architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"],  # vLLM needs both, in this order
        **llama(layer, config["vocab"], facts.context),
        "qkv_bias": layer.qkv_bias,
        "dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "outrider": {name: config[name] for name in OURS},
    }
    return made, tensors  # "bias" stays out of the config: absent means true, and vLLM takes it for attention's


def eagle3_folder(checkpoint: Checkpoint, to: str, facts: Facts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors for SafeAILab's code, vLLM and SGLang. vLLM numbers hidden states, SGLang layers."""
    config = checkpoint.config
    layer, taps, tensors = from_dict(LayerShape, config["layer"]), list(config["taps"]), dict(checkpoint.tensors)
    raised = [name for name in FLAGS if config.get(name)]
    unknown = {"safeailab": raised, "sglang": [n for n in raised if n == "norm_before_residual"]}.get(to, [])
    engine = {"safeailab": "SafeAILab's code", "sglang": "SGLang", "vllm": "vLLM"}[to]
    if unknown:
        raise InputError(f"{engine} has no EAGLE-3 with {', '.join(unknown)}; export this drafter for vllm")
    if layer.qkv_bias:
        raise InputError(f"{engine} has no EAGLE-3 with biases in its attention alone; train it without")
    if config["parallel"]:
        peagle.check_export(config, engine)
    check_export_taps(taps, facts)
    if to == "safeailab" and taps != default_taps(facts.layers):
        raise InputError(f"SafeAILab's code reads hidden states {default_taps(facts.layers)}, not {taps}")
    if to == "safeailab" and layer.rope.get("rope_type", "default") != "default":
        raise InputError(f"SafeAILab's code does not support RoPE of type {layer.rope['rope_type']}")
    full_vocabulary(tensors, config)
    if facts.scaled and not config["own_embedding"]:  # engines would use the unscaled one
        tensors["embed_tokens.weight"] = facts.embedding()
    wide = to != "safeailab" or "embed_tokens.weight" in tensors  # there, it says that the file has an embedding
    made = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama(layer, config["vocab"], facts.context),
        "num_hidden_layers": config["layers"],
        **(dict.fromkeys(peagle.VLLM, config["mask_token"]) if config["parallel"] else {}),
        "draft_vocab_size": config["draft_vocab"],
        **({"target_hidden_size": config["target_hidden"]} if wide else {}),
        "num_aux_hidden_states": 3,
        **{name: config[name] for name in FLAGS},
        "eagle_aux_hidden_state_layer_ids": taps,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [t - 1 for t in taps]},
        "dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "outrider": {name: config[name] for name in OURS3},
    }
    return made, {peagle.named(name, "midlayer."): t for name, t in tensors.items()}


def check_export_taps(taps: list[int], facts: Facts) -> None:
    """Raise InputError for hidden states that engines do not support."""
    if len(set(taps)) < 3 or min(taps) < 1 or max(taps) >= facts.layers:
        raise InputError(
            f"engines read three different hidden states, 1 to {facts.layers - 1} of {facts.name}, and not {taps}"
        )


def full_vocabulary(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    """Drop d2t for a full draft vocabulary, which vLLM requires."""
    if config["draft_vocab"] == config["vocab"]:
        if bool(tensors["d2t"].any()):
            raise InputError("a draft vocabulary as large as the target's must have its order; engines read no other")
        del tensors["d2t"], tensors["t2d"]
