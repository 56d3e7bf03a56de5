"""Training objectives: one file per method, named after it.

A file has `OPTIMISER`, the rates; `NATIVE = True` if it only needs a target's hidden states, embeddings and head, which
native passes can compute; and `build(target, **options) -> Objective`, whose defaults are the method's options. If
`build` takes `documents`, it gets the training documents. Another package adds an objective by an entry point of the
group `outrider.objectives` that names such a module.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from ... import plugins
from ...core.protocols import Target
from ...params import InputError
from ..data import Document
from ._objective import Begun, NetworkObjective, Objective, Optimiser, Prepared, drafted

__all__ = [
    "Begun",
    "NetworkObjective",
    "Objective",
    "Optimiser",
    "Prepared",
    "build",
    "drafted",
    "names",
    "native",
    "optimiser_of",
    "options_of",
]


def names() -> list[str]:
    """The trainable methods."""
    return plugins.names("objectives")


def optimiser_of(name: str) -> Optimiser:
    """The rates of a method's paper."""
    optimiser: Optimiser = plugins.module("objectives", name).OPTIMISER
    return optimiser


def native(name: str) -> bool:
    """Does a method need no more of its target than native passes compute?"""
    return bool(getattr(plugins.module("objectives", name), "NATIVE", False))


def options_of(name: str) -> dict[str, Any]:
    """The options of a method and their defaults."""
    given = inspect.signature(plugins.module("objectives", name).build).parameters.values()
    return {p.name: p.default for p in given if p.default is not p.empty and p.name != "documents"}


def build(name: str, target: Target, documents: Sequence[Document], options: dict[str, Any]) -> Objective:
    """The untrained objective of a method.

    Raises:
        InputError: unknown method or option.
    """
    known, function = options_of(name), plugins.module("objectives", name).build
    for option in options:
        if option not in known:
            raise InputError(f"{name} has no option {option!r}; it has {', '.join(known)}")
    extra = {"documents": documents} if "documents" in inspect.signature(function).parameters else {}
    objective: Objective = function(target, **extra, **options)
    return objective
