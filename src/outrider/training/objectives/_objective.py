"""The protocol of an objective, and the common case: a drafter's network trained for a frozen target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ... import checkpoints
from ...backends.torch import vocabulary
from ...checkpoints import native
from ...core.protocols import Target
from ...drafters import _heads, _weights
from ...params import InputError
from ...schema import to_dict
from ..data import Batch
from ..features import TargetFeatures

BESIDE = {"scale", "trained"}  # fields of a config besides the network's shape


@dataclass(frozen=True)
class Optimiser:
    """AdamW settings of a method's paper: peak learning rate, betas, gradient norm, warm-up steps, weight decay."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.5
    warmup: int = 2000
    decay: float = 0.0


@runtime_checkable
class Objective(Protocol):
    """A torch module whose forward is the complete loss, so that wrappers (DDP, FSDP) see one call."""

    taps: tuple[int, ...]  # the target's hidden states that it reads, as in `Drafter.taps`
    drafter: str  # the drafter that loads what `save` writes

    def __call__(self, batch: Batch, seen: TargetFeatures, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The summed loss, its weight (usually the number of positions), and parts to log."""

    def groups(self) -> list[dict[str, Any]]:
        """Parameters {"params": [...], "scale": s}; s multiplies the learning rate."""

    def save(self, folder: str | Path) -> None:
        """Write the drafter's folder, completely or raising."""


@runtime_checkable
class Prepared(Protocol):
    """An objective that reads some of its data before the first step."""

    def prepare(self, seen: Iterable[tuple[Batch, TargetFeatures]]) -> None: ...


@runtime_checkable
class Begun(Protocol):
    """An objective that can start from a trained drafter."""

    def begin(self, folder: str) -> None:
        """Load the weights, as in `TrimmedObjective.begin`."""


def uniform(batch: Batch, step: int, salt: int, *size: int) -> Float[Tensor, "b ..."]:
    """Uniform numbers on the batch's device: a function of step and row, not of the process."""
    drawn, device = [], batch.tokens.device
    for key in batch.keys:
        seed = (0x9E3779B1 * (step + 1) + salt * key) % 2**32  # CPU generators use 32 bits of a seed
        drawn.append(torch.rand(size, generator=torch.Generator(device).manual_seed(seed), device=device))
    return torch.stack(drawn)


class NetworkObjective(nn.Module):
    """An objective that trains one drafter's network, `net`, on the target's last features.

    A subclass sets `drafter` and defines `forward`. `net.config` is the dataclass of the drafter's `NETWORK`.
    """

    taps: tuple[int, ...] = (-1,)
    drafter: str

    def __init__(self, target: Target, net: Any):
        super().__init__()
        self.target, self.net = target, net

    def groups(self) -> list[dict[str, Any]]:
        """All trainable parameters, at the base learning rate."""
        return [{"params": [p for p in self.net.parameters() if p.requires_grad], "scale": 1.0}]

    def save(self, folder: str | Path) -> None:
        """Write the native folder of the drafter."""
        native.save(folder, self.drafter, self.net, target=self.target)


class TrimmedObjective(NetworkObjective):
    """The same for a network that may have a trimmed draft vocabulary (`backends/torch/vocabulary.py`).

    `head` is the target's, restricted to the draft vocabulary. Positions whose token is outside it have no loss.
    """

    places: Tensor | None  # indices of the target's tokens in the draft vocabulary, -1: none; None: all

    def __init__(self, target: Target, net: Any):
        super().__init__(target, net)
        self._read_vocabulary()

    def _read_vocabulary(self) -> None:
        target, ids = self.target, self.net.ids()
        ids = None if ids is None or len(ids) == target.vocab else ids
        # a compiled head lets no gradient through, so its rows are multiplied here
        self.head = _heads.rows(target, torch.arange(target.vocab) if ids is None and not target.tensors else ids)
        places = None if ids is None else vocabulary.places_of(ids, target.vocab)
        self.register_buffer("places", places, persistent=False)

    def load_state_dict(self, *given: Any, **options: Any) -> Any:
        """As of any module; buffers include the draft vocabulary."""
        made = super().load_state_dict(*given, **options)
        self._read_vocabulary()
        return made

    def begin(self, folder: str) -> None:
        """Load the weights of a drafter's folder or hub id, in any layout, with its draft vocabulary and the width
        of its MLP, which `recipes/trim.py` makes smaller.

        Raises:
            InputError: it has another kind of network, or other sizes.
        """
        checkpoint = checkpoints.read(_weights.placed(folder, self.drafter), self.target)
        if checkpoint.method != self.drafter:
            raise InputError(
                f"{folder} holds a drafter {checkpoint.method!r}, and this training makes {self.drafter!r}"
            )
        theirs = to_dict(native.network(checkpoint.method).read(checkpoint.config, folder))
        config, width = self.net.config, (theirs.get("layer") or {}).get("intermediate", 0)
        if narrower := 0 < width < (to_dict(config).get("layer") or {}).get("intermediate", 0):
            config = replace(config, layer=replace(config.layer, intermediate=width))
        mine = to_dict(config)
        other = sorted(k for k in mine.keys() - BESIDE if _rounded(mine[k]) != _rounded(theirs[k]))
        if other:
            differing = ", ".join(_difference(k, theirs.get(k), mine[k]) for k in other)
            raise InputError(f"{folder} has {differing} than this training; give the same options")
        if narrower:
            self.net = type(self.net)(config)
        tensors = native.exact(checkpoint.tensors, native.shapes(self.net), folder)
        self.net.load_state_dict(tensors)
        self._read_vocabulary()

    def draftable(self, tokens: Int[Tensor, "*s"]) -> Bool[Tensor, "*s"]:
        """The target's tokens in the draft vocabulary."""
        return torch.ones_like(tokens, dtype=torch.bool) if self.places is None else self.places[tokens] >= 0


def _difference(name: str, theirs: Any, mine: Any) -> str:
    """As in `another heads (5, not 4)`."""
    return f"another {name}" + ("" if isinstance(mine, dict) else f" ({theirs}, not {mine})")


def _rounded(value: Any) -> Any:
    """Numbers as float32: a .gguf file has 1e-5 as 9.99999974e-06."""
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return float(torch.tensor(value)) if isinstance(value, float) else value


def drafted(folder: str, part: str, target: Target) -> int:
    """How many tokens a drafter's folder or hub id can draft. `part`: what `demo` or `smollm2` alone stands for."""
    checkpoint = checkpoints.read(_weights.placed(folder, part), target)
    config = to_dict(native.network(checkpoint.method).read(checkpoint.config, folder))
    return config.get("draft_vocab") or target.vocab
