"""Weights of trained drafters: networks from folders, filled strictly, for one target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import checkpoints, plugins
from ..backends.torch.tensors import array, dtype_of
from ..checkpoints import native
from ..core.protocols import Drafter, Target
from ..params import InputError
from ..shipped import placed as placed
from ._trained import fits as fits
from ._trained import warn_of_other_weights

Net = TypeVar("Net", bound=nn.Module)


def network(path: str | None, method: str, target: Target | None, **said: Any) -> Any:
    """The network in a folder or hub id of whatever layout, frozen, on the target's device and in its precision.

    Args:
        path: a folder, a hub id, or `demo` and `demo/NAME`, which ship with the package.
        method: the drafter's name; its file has the `NETWORK`.
        target: some layouts leave things to it (a head, the layers that are read).
        said: fields of the config that the caller knows better than the folder.

    Raises:
        InputError: the folder is damaged, holds another drafter, or belongs to another target.
    """
    if target is None:
        raise InputError(f"{method} reads its target's features, so it needs the target that it drafts for")
    if path is None:
        raise InputError(plugins.unnamed(method))
    path = placed(path, method)
    folder = checkpoints.read(path, target)
    if folder.method != method:
        raise InputError(f"{path} holds {folder.method}, not {method}; name that method")
    of = native.network(method, path)
    config = of.read({**folder.config, **said}, path)
    mine = target.mark
    if folder.mark and mine and mine != folder.mark and _sizes(config) == (target.vocab, target.hidden):
        warn_of_other_weights(str(path), mine)  # of other sizes it is refused (`fits`)
    return fill(lambda: of.module(config), folder.tensors, path, target)


def _sizes(config: Any) -> tuple[int, int]:
    """A config's vocabulary and width of features, as its target must have them."""
    return config.vocab, getattr(config, "target_hidden", None) or config.hidden


def fill(build: Callable[[], Net], tensors: Mapping[str, Tensor], where: object, target: Target | None = None) -> Net:
    """A network that holds exactly these tensors, on the target's device and in its precision; frozen.

    Whatever is missing, unexpected, of another shape or not a number is refused by name.
    """
    with torch.device("meta"):
        net = build()
    with torch.inference_mode(False):
        net.load_state_dict(native.exact(tensors, native.shapes(net), where), strict=True, assign=True)
    return placed_on(net, target)


def placed_on(net: Net, target: Target | None) -> Net:
    """The network itself, frozen, on the target's device and in its precision."""
    with torch.inference_mode(False), torch.no_grad():
        if target is not None:
            net.to(device=target.device, dtype=dtype_of(target))
    return net.requires_grad_(False).eval()


def compiled(build: Callable[..., Drafter | None], net: Any, target: Target, *options: Any) -> Drafter | None:
    """The drafter of a network in memory in compiled code, as `build(config, weights, target, *options)` makes it; None
    where the target's passes do not run in such code, or that has no such network."""
    if target.code is None:
        return None
    weights = {name: array(x) for name, x in net.state_dict().items()}
    return build(net.config, weights, target, *options)
