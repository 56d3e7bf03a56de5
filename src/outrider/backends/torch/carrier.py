"""What a stock forward takes; and the name by which it takes and returns its cache, which transformers 5.24 renamed."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

CARRIERS = "cache", "past_key_values", "cache_params", "state"


def accepted(model: Any) -> frozenset[str]:
    """The names of what a model's forward takes; where it hands on whatever it is given (`**kwargs`), as a wrapper or a
    subclass may, also what those below it take."""
    own = getattr(model.forward, "__func__", model.forward)
    return _accepted((own, *(vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))))


@lru_cache(64)
def _accepted(forwards: tuple[Any, ...]) -> frozenset[str]:
    names: set[str] = set()
    for forward in forwards:
        parameters = inspect.signature(forward).parameters
        names |= parameters.keys()
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            break
    return frozenset(names)


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
