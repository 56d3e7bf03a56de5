"""The native layout: config.json with "outrider_method", "format" and the network's config; model.safetensors.

In format 1 tensors are plain, in 2 matrices are int8 beside their scales (`nets/int8.py`).

A drafter that was trained here also names the target's weights that it was trained for, by a mark ("target_weights").

Which tensors belong to a config is asked of the network itself: `NETWORK` of the drafter's file, built without numbers.
Every layout is read against it.
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
from .parts import Bag, Found, Shape

PLAIN, INT8 = 1, 2  # formats
MARK = "target_weights"


def network(method: str, where: object = "this folder") -> Network:
    """The network of a trained drafter.

    Raises:
        InputError: there is no such drafter, or it has no weights of its own.
    """
    known = method in plugins.names("drafters")
    found = getattr(plugins.module("drafters", method), "NETWORK", None) if known else None
    if found is None:
        raise InputError(f"{where} says that it holds {method!r}, which has no weights of its own to read")
    return found


def table(method: str, config: Mapping[str, Any], where: object = "this folder") -> dict[str, Shape]:
    """Keys and shapes of a trained drafter's tensors, as its network names them."""
    of = network(method, where)
    return shapes(of.empty(of.read(config, where)))


def shapes(net: nn.Module) -> dict[str, Shape]:
    """Keys and shapes of a network's tensors."""
    return {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}


def read(path: str | Path) -> Found:
    """A native folder as it is; the network that is filled with it, or `check`, sees whether it is whole."""
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
    return Found("native", f"{method!s:.40}", config, tensors, mark=mark)


def _restored(tensors: Mapping[str, Tensor], where: object) -> dict[str, Tensor]:
    """`int8.restored` of the matrices; what is not quantised stays as it is."""
    scales = {name for name in tensors if name.endswith(int8.SCALE)}
    quantised = {name for name in tensors if name + int8.SCALE in scales} | scales
    made = int8.restored({name: array(tensors[name]) for name in quantised}, where)
    return {name: x for name, x in tensors.items() if name not in quantised} | {
        name: torch.from_numpy(x) for name, x in made.items()
    }


def check(found: Found, where: object) -> None:
    """Refuse a native checkpoint whose tensors are not those that its config asks for."""
    exact(found.tensors, table(found.method, found.config, where), where)


def exact(tensors: Mapping[str, Tensor], wanted: Mapping[str, Shape], where: object) -> dict[str, Tensor]:
    """These tensors, if they are the wanted ones: all of them and no others, of these shapes, without NaN.

    Raises:
        InputError: naming the first tensors that are missing, unknown, of another shape or not finite.
    """
    bag = Bag(tensors, where)
    found = bag.all(wanted)
    bag.close("(?!)")
    return found


def write(found: Found, folder: Path, in_int8: bool = False) -> None:
    """Write a native folder, which must exist; `in_int8`: matrices in eight bits (format 2)."""
    mark = {MARK: found.mark} if found.mark else {}
    tensors = _quantised(found.tensors) if in_int8 else found.tensors
    config = {"outrider_method": found.method, "format": INT8 if in_int8 else PLAIN, **mark, **found.config}
    put(folder, config, tensors)


def _quantised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as format 2 has them; what is no matrix that eight bits can hold stays as it is."""
    made = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and int8.fits(x := tensor.detach().float().cpu().numpy()):
            made[name], made[name + int8.SCALE] = (torch.from_numpy(part) for part in int8.quantise(x))
    return made


def save(folder: str | Path, method: str, net: nn.Module, config: Any = None, target: Target | None = None) -> None:
    """Write a network as the native folder of a drafter.

    Args:
        folder: made if it is not there.
        method: the drafter's name.
        net: its state dict is written in its own precision.
        config: the dataclass to write; by default `net.config`.
        target: what it was trained for; the mark of its weights, where it has one, is written too.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    mark = str(getattr(target, "mark", ""))
    found = Found("native", method, to_dict(config or net.config), net.state_dict(), mark=mark)
    write(found, Path(folder))
