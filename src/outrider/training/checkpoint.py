"""Checkpoints of a training: module, optimiser and progress in one file, written atomically."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..params import InputError


def write(path: Path, state: dict[str, Any]) -> None:
    """Save a state; if that fails, the previous one is kept."""
    files.write(path, lambda beside: torch.save(state, beside))


def read(path: Path) -> dict[str, Any] | None:
    """Load a state; None if there is none."""
    if not path.exists():
        return None
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise InputError(f"{path} is damaged ({str(error)[:60]}); remove it to start again") from None
