"""The ways to decode that are compared: each file is a peer, named after it.

A SPEC is `name`, `name:path-or-hub-id`, or either with options, as for drafters: `transformers?cache=static`,
`transformers:DRAFT-MODEL`. A file has `load(models, path, **options) -> Peer`; another package adds a peer by an entry
point of the group `outrider.bench.peers` that names such a module. `outrider.py` runs our own drafters.
"""

from __future__ import annotations

from typing import Any

from ... import plugins
from ...params import InputError
from ..models import Models
from ..types import OURS, Method, Peer


def names() -> list[str]:
    """The available peers."""
    return [name for name in plugins.names("peers") if name != OURS]


def method(spec: str) -> Method:
    """The method of a peer's SPEC. Raises InputError if there is no such peer."""
    name = spec.partition("?")[0].partition(":")[0]
    if name not in names():
        raise InputError(f"there is no peer {name!r}; choose one of {', '.join(names())}")
    return Method(spec, peer=name)


def load(method: Method, models: Models) -> Peer:
    """The peer that runs a method."""
    if method.peer == OURS:
        from . import outrider

        return outrider.load(method, models)
    from ...drafters import options_of

    body, _, query = method.spec.partition("?")
    module: Any = plugins.module("peers", method.peer)
    options = options_of(method.spec, query, module.load)
    peer: Peer = module.load(models, body.partition(":")[2] or None, **options)
    return peer
