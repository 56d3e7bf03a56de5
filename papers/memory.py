"""How many bytes a state keeps: the tensors that it and its parts hold, each counted once, weights left out."""

from __future__ import annotations

from typing import Any

import torch

from outrider.core.protocols import Drafter, Target


def held(state: Any) -> int:
    """Allocated bytes of all tensors reachable from a session or a drafting, but for those of models and drafters."""
    storages: dict[int, int] = {}
    waiting, seen = [state], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or (one is not state and isinstance(one, torch.nn.Module | Drafter | Target)):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
        elif type(one).__module__.startswith(("outrider.", "transformers.")):
            waiting += getattr(one, "__dict__", {}).values()
    return sum(storages.values())
