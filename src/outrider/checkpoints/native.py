"""The native layout: config.json with "outrider_method", "format" and the network's config; model.safetensors.

In format 1 tensors are plain, in 2 matrices are int8 beside their scales (`nets/int8.py`).

A drafter trained by Outrider also has a mark of its target's weights ("target_weights"). The tensors of a config are
those of the network itself: `NETWORK` of the drafter's file, built without weights. All layouts are checked against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import plugins
from ..backends.torch.tensors import array
from ..core.protocols import Target
from ..nets import int8
from ..nets.network import Network
from ..params import InputError
from ..schema import to_dict
from .files import folder_of, json_of, put, weights_of
from .parts import Bag, Checkpoint, Shape

PLAIN, INT8 = 1, 2  # formats
MARK = "target_weights"


def network(method: str, where: object = "this folder") -> Network:
    """The network of a trained drafter.

    Raises:
        InputError: the drafter is unknown, or has no weights.
    """
    known = method in plugins.names("drafters")
    net = getattr(plugins.module("drafters", method), "NETWORK", None) if known else None
    if net is None:
        raise InputError(f"{where} names the drafter {method!r}, which has no weights")
    return net


def table(method: str, config: Mapping[str, Any], where: object = "this folder") -> dict[str, Shape]:
    """Keys and shapes of a trained drafter's tensors, by its network."""
    of = network(method, where)
    return shapes(of.empty(of.read(config, where)))


def shapes(net: nn.Module) -> dict[str, Shape]:
    """Keys and shapes of a network's tensors."""
    return {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}


def read(path: str | Path) -> Checkpoint:
    """Load a native folder unchecked; `check`, or loading it into the network, verifies it."""
    folder = folder_of(path)
    config = json_of(folder / "config.json")
    method, version = config.pop("outrider_method"), config.pop("format", PLAIN)
    mark = str(config.pop(MARK, None) or "")
    if version not in (PLAIN, INT8):
        raise InputError(f"{path} has format {version!r:.40}, which this version does not know; install a newer one")
    if not (folder / "model.safetensors").is_file():
        raise InputError(f"{path} is no folder of a drafter: it lacks config.json or model.safetensors")
    weights = weights_of(folder, "model.safetensors")
    tensors = {name: weights[name] for name in weights}
    if version == INT8:
        tensors = _restored(tensors, path)
    return Checkpoint("native", f"{method!s:.40}", config, tensors, mark=mark)


def _restored(tensors: Mapping[str, Tensor], where: object) -> dict[str, Tensor]:
    """Dequantise int8 matrices; other tensors pass through."""
    scales = {name for name in tensors if name.endswith(int8.SCALE)}
    quantised = {name for name in tensors if name + int8.SCALE in scales} | scales
    made = int8.restored({name: array(tensors[name]) for name in quantised}, where)
    return {name: x for name, x in tensors.items() if name not in quantised} | {
        name: torch.from_numpy(x).bfloat16() for name, x in made.items()
    }


def check(checkpoint: Checkpoint, where: object) -> None:
    """Raise InputError if a native checkpoint's tensors do not match its config."""
    exact(checkpoint.tensors, table(checkpoint.method, checkpoint.config, where), where)


def exact(tensors: Mapping[str, Tensor], table: Mapping[str, Shape], where: object) -> dict[str, Tensor]:
    """The tensors, if they are exactly those of `table`, of these shapes and finite.

    Raises:
        InputError: names the first missing, unknown, misshapen or non-finite tensors.
    """
    bag = Bag(tensors, where)
    taken = bag.all(table)
    bag.close("(?!)")
    return taken


def write(checkpoint: Checkpoint, folder: Path, in_int8: bool = False) -> None:
    """Write a native folder, which must exist. in_int8: quantise matrices to int8 (format 2)."""
    mark = {MARK: checkpoint.mark} if checkpoint.mark else {}
    tensors = _quantised(checkpoint.tensors) if in_int8 else checkpoint.tensors
    config = {"outrider_method": checkpoint.method, "format": INT8 if in_int8 else PLAIN, **mark, **checkpoint.config}
    put(folder, config, tensors)


def _quantised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of format 2: matrices that int8 can represent are quantised, others pass through."""
    made = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and int8.fits(x := tensor.detach().float().cpu().numpy()):
            made[name], made[name + int8.SCALE] = (torch.from_numpy(part) for part in int8.quantise(x))
    return made


def save(folder: str | Path, method: str, net: nn.Module, config: Any = None, target: Target | None = None) -> None:
    """Write a network as the native folder of a drafter.

    Args:
        folder: created if missing.
        method: the drafter's name.
        net: its state dict is written in its own precision.
        config: the dataclass to write; by default `net.config`.
        target: the target it was trained for, whose mark is written too.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    mark = "" if target is None else target.mark
    checkpoint = Checkpoint("native", method, to_dict(config or net.config), net.state_dict(), mark=mark)
    write(checkpoint, Path(folder))
