"""Files that are whole or not there: written beside their place, then moved into it."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..types import InputError


def write(path: Path, state: dict[str, Any]) -> None:
    """Save a state; on a full disk the one before it stays."""
    beside = path.with_suffix(".part")
    try:
        torch.save(state, beside)
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:
        beside.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written ({error}); the checkpoint before it is whole, make room") from None


def read(path: Path) -> dict[str, Any] | None:
    """A state, or None where there is none."""
    if not path.exists():
        return None
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise InputError(f"{path} is damaged ({str(error)[:60]}); remove it to begin again") from None


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Write a folder anew, whole or not at all."""
    beside = folder.with_name(folder.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        fill(beside)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise InputError(f"{folder} cannot be written ({error}); make room and start again") from None
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)
