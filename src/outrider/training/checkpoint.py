"""The state that a training goes on from: module, optimiser and progress in one file, whole or not there."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..params import InputError


def write(path: Path, state: dict[str, Any]) -> None:
    """Save a state; on a full disk the one before it stays."""
    files.write(path, lambda beside: torch.save(state, beside))


def read(path: Path) -> dict[str, Any] | None:
    """A state, or None where there is none."""
    if not path.exists():
        return None
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise InputError(f"{path} is damaged ({str(error)[:60]}); remove it to begin again") from None
