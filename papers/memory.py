"""How many bytes a state keeps: the arrays and tensors that it and its parts hold, each once, weights left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.backends.native.target import NativeTarget
from outrider.core.protocols import Drafter, Target

MODELS = (NativeTarget, torch.nn.Module, Drafter, Target)  # the first has a stock model, which a protocol's check makes
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak() -> int:
    """Bytes that the process had in memory at most since the last call of this function; 0 where Linux does not say."""
    try:
        lines = STATUS.read_text(encoding="utf-8").splitlines()
        RESET.write_text("5", encoding="ascii")  # the peak begins anew
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def weights(target: Any) -> int:
    """Bytes of weights that a pass of a target reads."""
    if isinstance(target, NativeTarget):
        return target.forward.weights.bytes
    held = {t.data_ptr(): t.nbytes for t in (*target.model.parameters(), *target.model.buffers())}
    return sum(held.values())


def held(state: Any) -> int:
    """Allocated bytes of all arrays and tensors that a session or drafting reaches, models and drafters left out."""
    storages: dict[int, int] = {}
    waiting, seen = [state], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or (one is not state and isinstance(one, MODELS)):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, np.ndarray):
            if isinstance(one.base, np.ndarray | torch.Tensor):
                waiting.append(one.base)
            else:
                storages[one.ctypes.data] = one.nbytes
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
        elif type(one).__module__.startswith(("outrider.", "transformers.")):
            waiting += getattr(one, "__dict__", {}).values()
    return sum(storages.values())
