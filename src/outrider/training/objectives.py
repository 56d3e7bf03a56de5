"""What can be trained, by name: each method's objective and the recipe its paper gives."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..targets import HFTarget
from ..types import InputError
from .data import Batch, Document
from .features import Seen


@runtime_checkable
class Objective(Protocol):
    """A torch module whose forward is the whole loss, so that wrappers (DDP, FSDP) see one call."""

    taps: tuple[int, ...]

    def __call__(self, batch: Batch, seen: Seen, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss summed over what is learned, its weight, and parts to log."""

    def groups(self) -> list[dict[str, Any]]:
        """Parameters {"params": [...], "scale": s}; s multiplies the learning rate."""

    def save(self, folder: str | Path) -> None:
        """A drafter's folder in the native layout."""


@dataclass(frozen=True)
class Method:
    """Where an objective is built, the drafter it makes, and the paper's optimiser."""

    file: str
    drafter: str
    lr: float
    build: str = "build"
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.5
    warmup: int = 2000
    decay: float = 0.0  # weight decay


METHODS: dict[str, Method] = {
    "medusa": Method("medusa", "medusa", 1e-3, betas=(0.9, 0.999), clip=1.0, warmup=40),
    "medusa2": Method("medusa2", "medusa", 5e-4, betas=(0.9, 0.999), clip=1.0, warmup=40),
    "hydra": Method("hydra", "hydra", 1e-3, betas=(0.9, 0.999), clip=1.0, warmup=40),
    "eagle": Method("eagle", "eagle", 3e-5),
    "hass": Method("eagle", "eagle", 3e-5, build="build_hass"),
    "eagle3": Method("eagle3", "eagle3", 5e-5),
    "mamba": Method("lm", "mamba", 2e-3, build="mamba", clip=1.0, warmup=100),
    "draft-lm": Method("lm", "model", 2e-3, build="draft_lm", clip=1.0, warmup=100),
}


def method_of(name: str) -> Method:
    if name not in METHODS:
        raise InputError(f"there is no method {name!r} to train; choose one of {', '.join(METHODS)}")
    return METHODS[name]


def options_of(name: str) -> dict[str, Any]:
    """The options of a method and their defaults."""
    method = method_of(name)
    build = getattr(importlib.import_module(f".{method.file}", __package__), method.build)
    given = inspect.signature(build).parameters.values()
    return {p.name: p.default for p in given if p.default is not p.empty and p.name != "documents"}


def build(name: str, target: HFTarget, documents: Sequence[Document], options: dict[str, Any]) -> Objective:
    """The untrained objective of a method."""
    method, known = method_of(name), options_of(name)
    for option in options:
        if option not in known:
            raise InputError(f"{name} has no option {option!r}; it has {', '.join(known)}")
    function = getattr(importlib.import_module(f".{method.file}", __package__), method.build)
    extra = {"documents": documents} if "documents" in inspect.signature(function).parameters else {}
    return function(target, **extra, **options)
