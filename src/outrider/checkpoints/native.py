"""The native layout: config.json with "outrider_method", "format": 1 and the network's config; model.safetensors.

`table` says which tensors a config asks for. Every layout is read against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..nn import LayerShape
from ..types import InputError
from .files import folder_of, json_of, put, weights_of
from .parts import Bag, Found, Shape, layer_table

FORMAT = 1


def table(method: str, config: Mapping[str, Any]) -> dict[str, Shape]:
    """Keys and shapes of a trained drafter's network."""
    return METHODS[method](config)


def _eagle(config: Mapping[str, Any]) -> dict[str, Shape]:
    layer = LayerShape.from_dict(config["layer"])
    h, inputs = layer.hidden, config.get("inputs", "feature+shifted")
    made: dict[str, Shape] = {"fc.weight": (h, 2 * h if "+" in inputs else h)}
    if config.get("bias", False):
        made["fc.bias"] = (h,)
    return made | layer_table(layer, "layers.0.")


def _eagle3(config: Mapping[str, Any]) -> dict[str, Shape]:
    layer = LayerShape.from_dict(config["layer"])
    h, wide, vocab, few = layer.hidden, config["target_hidden"], config["vocab"], config["draft_vocab"]
    made: dict[str, Shape] = {"fc.weight": (h, 3 * wide)}
    if config.get("norm_before_fc", False):
        made["input_norm.weight"] = (3 * wide,)
    if config.get("fc_norm", False):
        made |= {f"fc_norm.{i}.weight": (wide,) for i in range(3)}
    if config.get("own_embedding", False):
        made["embed_tokens.weight"] = (vocab, h)
    made |= layer_table(layer, "midlayer.")
    made |= {"midlayer.hidden_norm.weight": (h,), "midlayer.input_layernorm.weight": (h,)}
    return made | {"norm.weight": (h,), "lm_head.weight": (few, h), "d2t": (few,), "t2d": (vocab,)}


def _medusa(config: Mapping[str, Any]) -> dict[str, Shape]:
    h, vocab, made = config["hidden"], config["vocab"], dict[str, Shape]()
    for i in range(config.get("heads", 4)):
        for l in range(config.get("layers", 1)):  # noqa: E741
            made |= {f"heads.{i}.blocks.{l}.linear.weight": (h, h), f"heads.{i}.blocks.{l}.linear.bias": (h,)}
        if not config.get("share_head", False):
            made[f"heads.{i}.lm_head.weight"] = (vocab, h)
            if config.get("bias", False):
                made[f"heads.{i}.lm_head.bias"] = (vocab,)
    return made


def _hydra(config: Mapping[str, Any]) -> dict[str, Shape]:
    h, vocab, made = config["hidden"], config["vocab"], dict[str, Shape]()
    if config.get("layer") is not None:
        layer = LayerShape.from_dict(config["layer"])
        made |= {"prefix.input_layernorm.weight": (h,), "prefix.norm.weight": (h,)}
        made |= layer_table(layer, "prefix.layer.")
    for i in range(config.get("heads", 4)):
        for j in range(config.get("layers", 1)):
            at, wide = f"heads.{i}.blocks.{j}.", h * (i + 2) if j == 0 else h
            made |= {f"{at}linear.weight": (h, wide), f"{at}linear.bias": (h,)}
            if j == 0:
                made |= {f"{at}res_connection.weight": (h, wide), f"{at}res_connection.bias": (h,)}
        made |= {f"heads.{i}.lm_head.weight": (vocab, h), f"heads.{i}.lm_head.bias": (vocab,)}
    return made


METHODS = {"eagle": _eagle, "eagle3": _eagle3, "medusa": _medusa, "hydra": _hydra}


def read(path: str | Path) -> Found:
    """A native folder as it is; the network that is filled with it, or `check`, sees whether it is whole."""
    folder = folder_of(path)
    config = json_of(folder / "config.json")
    method, version = config.pop("outrider_method"), config.pop("format", FORMAT)
    if version != FORMAT:
        raise InputError(f"{path} has format {version}, which this version does not know; install a newer one")
    if not (folder / "model.safetensors").is_file():
        raise InputError(f"{path} is no folder of a drafter: it lacks config.json or model.safetensors")
    weights = weights_of(folder, "model.safetensors")
    return Found("native", str(method), config, {name: weights[name] for name in weights})


def check(found: Found, where: object) -> None:
    """Refuse a native checkpoint whose tensors are not those that its config asks for."""
    if found.method not in METHODS:
        raise InputError(f"{where} says that it holds {found.method!r}, which has no weights of its own to read")
    try:
        wanted = table(found.method, found.config)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the config of {where} is not that of {found.method} ({error}); train it again") from None
    bag = Bag(found.tensors, where)
    bag.all(wanted)
    bag.close("(?!)")


def write(found: Found, folder: Path) -> None:
    put(folder, {"outrider_method": found.method, "format": FORMAT, **found.config}, found.tensors)
