"""The name by which a stock forward takes and returns what it keeps: transformers renamed it with 5.24."""

from __future__ import annotations

import inspect
from typing import Any

CARRIERS = "cache", "past_key_values", "cache_params", "state"


def carrier(model: Any) -> str | None:
    """That name for a model; None where its forward has none of those that are known."""
    for forward in (model.forward, type(model).forward):  # a forward that somebody wrapped may not tell
        named = inspect.signature(forward).parameters
        for name in CARRIERS:
            if name in named:
                return name
    return None


def carrying(model: Any, cache: Any) -> dict[str, Any]:
    """A cache (or None) as an argument of the model's forward, which keeps what it reads there."""
    return {carrier(model) or "past_key_values": cache, "use_cache": True}


def carried(model: Any, out: Any) -> Any:
    """What such a forward kept."""
    return getattr(out, carrier(model) or "past_key_values")
