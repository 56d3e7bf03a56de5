"""Weights of trained drafters: folders written and read, and networks that are filled strictly.

A native folder has `config.json` (with "outrider_method", the name of the drafter's file) and `model.safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..types import InputError, Target

Net = TypeVar("Net", bound=nn.Module)


def save(folder: str | Path, method: str, net: nn.Module, config: Mapping[str, Any]) -> None:
    """Write a native folder."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in net.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({"outrider_method": method, "format": 1, **config}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def read(path: str | None, method: str, target: Target | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The native config and tensors of a folder or hub id, whatever its layout. Some layouts leave things to the
    target (a head, the layers that are read), which is then asked."""
    from .. import checkpoints

    if path is None:
        raise InputError(f"{method} needs trained weights; name their folder, as in {method}:DIR or {method}:demo")
    path = placed(path, method)
    found = checkpoints.read(path, target)
    if found.method != method:
        raise InputError(f"{path} holds {found.method}, not {method}; ask for it by its own name")
    return dict(found.config), dict(found.tensors)


def placed(path: str, default: str) -> str:
    """`demo` and `demo/NAME` are what ships with the package; other paths are as they are."""
    if path.split("/")[0] == "demo" and not Path(path).exists():
        return shipped(path.removeprefix("demo").strip("/") or default)
    return path


def shipped(name: str) -> str:
    """The folder of a drafter that ships with the package, for the demo target."""
    folder = files("outrider") / "demo" / name
    if not (folder / "config.json").is_file():
        raise InputError(f"no drafter {name!r} for the demo target ships with this package; name a folder")
    return str(folder)


def config_of(build: Callable[[Mapping[str, Any]], Any], given: Mapping[str, Any], where: object) -> Any:
    """A config from its dict; one sentence where fields are missing, unknown or of another type."""
    try:
        return build(given)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the config of {where} is not this drafter's ({error}); train or import it again") from None


def fill(build: Callable[[], Net], tensors: Mapping[str, Tensor], where: object, target: Target | None = None) -> Net:
    """A network that holds exactly these tensors, on the target's device and in its precision; frozen.

    Whatever is missing, unexpected, of another shape or not a number is refused by name.
    """
    with torch.device("meta"):
        net = build()
    wanted = net.state_dict()
    lacking, foreign = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if lacking:
        raise InputError(f"the weights of {where} lack {', '.join(lacking[:4])}; fetch or train them again")
    if foreign:
        raise InputError(f"the weights of {where} hold {', '.join(foreign[:4])}, which this drafter has not")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            shape = list(wanted[name].shape)
            raise InputError(
                f"{name} of {where} is {list(tensor.shape)}, where its config says {shape}; fetch it again"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} of {where} has entries that are NaN or infinite; fetch or train it again")
    with torch.inference_mode(False):
        net.load_state_dict(dict(tensors), strict=True, assign=True)
        dtype, device = getattr(target, "dtype", None), getattr(target, "device", None)
        net.to(device=device, dtype=dtype)
    return net.requires_grad_(False).eval()


def fits(what: str, target: Target, vocab: int, hidden: int, taps: Sequence[int] = ()) -> None:
    """Refuse a drafter that was trained for another target."""
    if vocab != target.vocab:
        raise InputError(
            f"{what} is for a vocabulary of {vocab} tokens and the target's has {target.vocab}; use its own"
        )
    with torch.no_grad():
        wide = target.embed(torch.zeros(1, 1, dtype=torch.long, device=getattr(target, "device", None))).shape[-1]
    if hidden != wide:
        raise InputError(f"{what} is for features {hidden} wide and the target's are {wide}; use its own target")
    layers = getattr(getattr(target, "config", None), "num_hidden_layers", None)
    if layers is not None and max(taps, default=0) > layers:
        raise InputError(
            f"{what} reads hidden states {list(taps)} of a target that has 0 to {layers}; correct its taps"
        )
