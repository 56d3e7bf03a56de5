"""What a stock forward takes; and the name by which it takes and returns its cache, which transformers 5.24 renamed."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

CARRIERS = "cache", "past_key_values", "cache_params", "state"


def accepted(model: Any) -> frozenset[str]:
    """The names of what a model's forward takes; where it hands on whatever it is given (`**kwargs`), as a wrapper or a
    subclass may, also what those below it take."""
    kind: Any = type(model)
    if "forward" not in vars(model):
        return _accepted(kind)
    names, hands_on = _names(model.forward)  # patched; not kept, since it may hold the model
    return names | _accepted(kind) if hands_on else names


@lru_cache(64)
def _accepted(kind: Any) -> frozenset[str]:
    made: frozenset[str] = frozenset()
    for forward in (vars(one)["forward"] for one in kind.__mro__ if "forward" in vars(one)):
        names, hands_on = _names(forward)
        made |= names
        if not hands_on:
            break
    return made


def _names(forward: Any) -> tuple[frozenset[str], bool]:
    """The names of what it takes, and whether it hands on what else it is given."""
    parameters = inspect.signature(forward).parameters
    return frozenset(parameters), any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def carrier(model: Any) -> str | None:
    """The name of the cache for a model; None where its forward has none of those that are known."""
    names = accepted(model)
    return next((name for name in CARRIERS if name in names), None)


def carrying(model: Any, cache: Any) -> dict[str, Any]:
    """A cache (or None) as an argument of the model's forward, which keeps what it reads there."""
    return {carrier(model) or "past_key_values": cache, "use_cache": True}


def carried(model: Any, out: Any) -> Any:
    """What such a forward kept."""
    return getattr(out, carrier(model) or "past_key_values")
