"""The ways to decode that are compared: one file is one peer, and the file's name is how it is asked for.

A SPEC is `name`, `name:path-or-hub-id`, or either with options, as for drafters: `transformers?cache=static`,
`transformers:DRAFT-MODEL`. A file has `load(models, path, **options) -> Peer`; another package adds one of its own by
an entry point of the group `outrider.bench.peers` that names such a module. Drafters of our own are no peers to name:
`outrider.py` runs them.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Any

from ...drafters import options_of
from ...types import InputError
from ..models import Models
from ..types import OURS, Method, Peer

GROUP = "outrider.bench.peers"


def names() -> list[str]:
    """The peers that can be named."""
    here = {m.name for m in pkgutil.iter_modules(__path__)} - {OURS}
    return sorted(here | {e.name for e in entry_points(group=GROUP)})


def method(spec: str) -> Method:
    """The row of a peer's SPEC, refused if there is no such peer."""
    name = spec.partition("?")[0].partition(":")[0]
    if name not in names():
        raise InputError(f"there is no peer {name!r}; choose one of {', '.join(names())}")
    return Method(spec, peer=name)


def load(method: Method, models: Models) -> Peer:
    """The peer that runs a method."""
    if method.peer == OURS:
        from . import outrider

        return outrider.load(method, models)
    body, _, query = method.spec.partition("?")
    module: Any = module_of(method.peer)
    options = options_of(method.spec, query, module.load)
    peer: Peer = module.load(models, body.partition(":")[2] or None, **options)
    return peer


def module_of(name: str) -> Any:
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            return entry.load()
    return importlib.import_module(f".{name}", __name__)
