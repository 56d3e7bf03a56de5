"""Medusa's layouts. The number of heads is that of the keys, since published configs are wrong.

medusa_lm_head.pt               {i}.{l}.linear.{weight,bias}, {i}.{L}.weight [V, h]: heads alone
medusa_lm_head.safetensors      the same; without {i}.{L}.weight the heads share the target's LM head
a full model, Medusa-2          medusa_head.{i}.{l}.linear.*, medusa_head.{i}.{L}.weight beside the changed target
vLLM (up to 0.32)               blocks.{i}.layers.{l}.{weight,bias}, lm_heads.{i}.weight
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..params import InputError
from . import native
from .files import Weights
from .parts import Bag, Checkpoint, Shape, extras, flag, number
from .safeailab import fits
from .target import Facts

FILES = ("medusa_lm_head.pt", "medusa_lm_head.safetensors")
OURS = ("scale", "lossy", "tree", "zero_bias", "share_head")


def has_heads(names: frozenset[str]) -> bool:
    """Whether these tensors have Medusa heads beside a full model."""
    return any(name.startswith("medusa_head.") for name in names)


def is_vllm(config: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether these are heads in vLLM's layout."""
    return config.get("model_type") == "medusa" or "blocks.0.layers.0.weight" in names


def read(weights: Weights, where: object, config: Mapping[str, Any], facts: Facts | None) -> Checkpoint:
    """Load heads alone, or inside a full model."""
    names = frozenset(weights)
    inside = has_heads(names)
    prefix = "medusa_head." if inside else ""
    bag = Bag(weights, where, lambda name: name.startswith(prefix))
    first = f"{prefix}0.0.linear.weight"
    if first not in bag:
        raise InputError(f"the weights of {where} lack {first}, so these are no Medusa heads")
    hidden = bag.shape(first)[0]
    heads = 1 + max(int(m[1]) for name in bag.names if (m := re.match(rf"{re.escape(prefix)}(\d+)\.", name)))
    layers = sum(f"{prefix}0.{i}.linear.weight" in bag for i in range(len(bag.names)))
    share = f"{prefix}0.{layers}.weight" not in bag
    notes = []
    stated = config.get("medusa_num_heads")
    if stated is not None and stated != heads:
        notes.append(f"the config says {stated} heads and the weights have {heads}: the weights are used")
    if share:
        vocab = facts.vocab if facts is not None else config.get("vocab_size")
        if vocab is None:
            raise InputError(
                f"the heads of {where} share their target's LM head; name the target: outrider import FOLDER MODEL"
            )
        notes.append("the heads share the target's LM head")
    else:
        vocab = bag.shape(f"{prefix}0.{layers}.weight")[0]
    if inside:
        notes.append("Medusa-2: the heads go with the changed model in the same folder, which differs from its base")
    block = extras(config, OURS, where)
    made = _config(vocab, hidden, heads, layers, share, f"{prefix}0.{layers}.bias" in bag, block, inside)
    table = native.table("medusa", made)

    def foreign(name: str) -> str:
        name = re.sub(r"^heads\.(\d+)\.blocks\.(\d+)\.", rf"{prefix}\1.\2.", name)
        return re.sub(r"^heads\.(\d+)\.lm_head\.", rf"{prefix}\1.{layers}.", name)

    tensors = bag.all(table, foreign)
    bag.close()
    if facts is not None:
        fits(where, facts, vocab, hidden)
    return Checkpoint("Medusa-2" if inside else "Medusa", "medusa", made, tensors, notes)


def _config(
    vocab: int, hidden: int, heads: int, layers: int, share: bool, bias: bool, block: Mapping[str, Any], inside: bool
) -> dict[str, Any]:
    return {
        "vocab": vocab,
        "hidden": hidden,
        "heads": heads,
        "layers": layers,
        "share_head": share,
        "bias": bias,
        "scale": block.get("scale", 1.0),
        "draft_vocab": 0,
        "lossy": block.get("lossy", inside),
        "tree": block.get("tree"),
    }


def read_vllm(bag: Bag, config: Mapping[str, Any], facts: Facts | None) -> Checkpoint:
    """Medusa heads of vLLM's layout. Raises InputError for a truncated vocabulary or missing heads."""
    where = bag.where
    hidden, vocab = number(config, "hidden_size", where), number(config, "vocab_size", where)
    if config.get("truncated_vocab_size") not in (None, vocab) or "token_map" in bag:
        raise InputError(f"{where} has a truncated vocabulary; Outrider reads Medusa heads over the full one")
    heads = 1 + max((int(m[1]) for name in bag.names if (m := re.match(r"blocks\.(\d+)\.", name))), default=-1)
    layers = sum(f"blocks.0.layers.{i}.weight" in bag for i in range(len(bag.names)))
    if not heads or not layers:
        raise InputError(f"the weights of {where} lack blocks.0.layers.0.weight, so these are no Medusa heads of vLLM")
    stated, notes = config.get("num_heads"), []
    if stated is not None and stated != heads:
        notes.append(f"the config says {stated} heads and the weights have {heads}: the weights are used")
    block, biased = extras(config, OURS, where), flag(config, "medusa_fc_bias", where)
    shared = flag(config, "original_lm_head", where)
    made = _config(vocab, hidden, heads, layers, shared, False, block, False)
    tensors = bag.all(_vllm_table(made, biased), _vllm_name)
    if shared:
        bag.take("lm_heads.0.weight", (vocab, hidden))
        notes.append("the heads share the target's LM head")
    bag.close()
    dtype = next(iter(tensors.values())).dtype
    for name, shape in native.table("medusa", made).items():
        tensors.setdefault(name, torch.zeros(shape, dtype=dtype))
    if block.get("zero_bias"):  # vLLM's heads have no bias; these had one of zeros
        made["bias"] = True
        tensors |= {f"heads.{i}.lm_head.bias": torch.zeros(vocab, dtype=dtype) for i in range(heads)}
    if facts is not None:
        fits(where, facts, vocab, hidden)
    return Checkpoint("vLLM Medusa", "medusa", made, {k: tensors[k] for k in native.table("medusa", made)}, notes)


def _vllm_name(name: str) -> str:
    name = re.sub(r"^heads\.(\d+)\.blocks\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
    return re.sub(r"^heads\.(\d+)\.lm_head\.", r"lm_heads.\1.", name)


def folder(checkpoint: Checkpoint, facts: Facts) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """The layout of the paper's code: a pickle of heads, or safetensors for heads that share the target's LM head."""
    config, layers = checkpoint.config, checkpoint.config["layers"]
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        name = re.sub(r"^heads\.(\d+)\.blocks\.(\d+)\.", r"\1.\2.", name)
        tensors[re.sub(r"^heads\.(\d+)\.lm_head\.", rf"\1.{layers}.", name)] = tensor
    made = {
        "medusa_num_heads": config["heads"],
        "medusa_num_layers": layers,
        "base_model_name_or_path": facts.name,
        "hidden_size": config["hidden"],
        "vocab_size": config["vocab"],
        "outrider": {name: config[name] for name in ("scale", "lossy", "tree")},
    }
    return made, tensors, FILES[1] if config["share_head"] else FILES[0]


def vllm_folder(checkpoint: Checkpoint, facts: Facts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors for vLLM. Raises InputError if its heads do not support these."""
    config = checkpoint.config
    biases = {name: t for name, t in checkpoint.tensors.items() if name.endswith("linear.bias")}
    ends = [t for name, t in checkpoint.tensors.items() if name.endswith("lm_head.bias")]
    if any(bool(t.any()) for t in ends):
        raise InputError(
            "vLLM's Medusa heads have no bias in their LM head, and these need theirs; use them in Outrider"
        )
    biased = any(bool(t.any()) for t in biases.values())
    tensors = {
        _vllm_name(name): t
        for name, t in checkpoint.tensors.items()
        if (biased or name not in biases) and not name.endswith("lm_head.bias")
    }
    if config["share_head"]:
        tensors["lm_heads.0.weight"] = facts.head()
    made = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config["hidden"],
        "vocab_size": config["vocab"],
        "num_heads": config["heads"],
        "num_hidden_layers": config["layers"],
        "truncated_vocab_size": config["vocab"],
        "medusa_fc_bias": biased,
        "original_lm_head": config["share_head"],
        "dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        "outrider": {**{name: config[name] for name in ("scale", "lossy", "tree")}, "zero_bias": bool(config["bias"])},
    }
    return made, tensors


def table_of(config: Mapping[str, Any], folder: Path) -> dict[str, Shape]:
    """Keys and shapes of vLLM's Medusa by its config, for `check`."""
    hidden, vocab = number(config, "hidden_size", folder), number(config, "vocab_size", folder)
    heads, layers = number(config, "num_heads", folder), number(config, "num_hidden_layers", folder)
    shared, biased = flag(config, "original_lm_head", folder), flag(config, "medusa_fc_bias", folder)
    made = _config(vocab, hidden, heads, layers, shared, False, {}, False)
    table = {_vllm_name(name): shape for name, shape in _vllm_table(made, biased).items()}
    return {**table, "lm_heads.0.weight": (vocab, hidden)} if shared else table


def _vllm_table(made: Mapping[str, Any], biased: bool) -> dict[str, Shape]:
    """The native keys and shapes in vLLM's layout."""
    return {n: shape for n, shape in native.table("medusa", made).items() if biased or not n.endswith("linear.bias")}
