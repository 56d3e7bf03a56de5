"""Hidden states in the formats of other engines, one text per file: vLLM, speculators and SpecForge.

vLLM's `ExampleHiddenStatesConnector` writes safetensors with `hidden_states` [t, layers, h] and `token_ids` [t];
speculators names them hs_N.safetensors, and its fp8 connector adds `hidden_states_scales`, one for each token.
SpecForge's `prepare_hidden_states.py` writes rows_*/data_N.ckpt(.gz) with `input_ids`, `loss_mask`, the layers that a
drafter reads, concatenated (`aux_hidden_state` [1, t, layers * h]), and the last one (`hidden_state` [1, t, h]). No
file names the layers.
"""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..params import InputError


@dataclass(frozen=True)
class States:
    """A text's tokens with their hidden states, layers in the order of the file, the last one at the end."""

    tokens: list[int]
    layers: Float[Tensor, "t l h"]


def paths(folder: Path) -> Iterator[Path]:
    """The files of a folder and its subfolders, sorted."""
    for path in sorted(folder.rglob("*")):
        if path.name.endswith((".safetensors", ".ckpt", ".ckpt.gz")):
            yield path


def tokens_of(path: Path) -> list[int]:
    """A file's tokens, without its hidden states where the format allows."""
    if path.suffix == ".safetensors":
        return _of(path, "token_ids").tolist()
    return _ckpt(path)["input_ids"].flatten().tolist()


def learned(path: Path) -> tuple[list[int], list[bool]]:
    """A file's tokens and loss mask. Raises InputError if it has none."""
    if path.suffix == ".safetensors":
        raise InputError(f"{path} has no loss mask; give the JSONL that it was made from")
    tensors = _ckpt(path)
    return tensors["input_ids"].flatten().tolist(), tensors["loss_mask"].flatten().bool().tolist()


def load(path: Path, width: int) -> States:
    """Load a file.

    Args:
        width: h, the size of a hidden state, which separates SpecForge's layers.

    Raises:
        InputError: the file is damaged, still being written, or of an unknown format.
    """
    if path.suffix == ".safetensors":
        _check_lock(path)
        tokens, layers = _of(path, "token_ids").tolist(), _of(path, "hidden_states")
        if layers.element_size() == 1:
            layers = layers.float() * _of(path, "hidden_states_scales").reshape(-1, 1, 1)
    else:
        tensors = _ckpt(path)
        tokens = tensors["input_ids"].flatten().tolist()
        parts = [tensors[name][0] for name in ("aux_hidden_state", "hidden_state") if name in tensors]
        if any(part.shape[-1] % width for part in parts):
            raise InputError(f"{path} has hidden states of another size than the target's {width}")
        layers = torch.cat([part.reshape(len(part), -1, width) for part in parts], 1)
    if layers.dim() != 3 or len(layers) != len(tokens) or layers.shape[-1] != width:
        shape = " x ".join(map(str, layers.shape))
        raise InputError(
            f"{path} has hidden states of shape {shape} for {len(tokens)} tokens, and the target's have size {width}"
        )
    if not torch.isfinite(layers).all():
        raise InputError(f"{path} has hidden states with NaN or infinities; write it again")
    return States(tokens, layers)


def _of(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} has no readable {name} ({str(error)[:80]}); write it again") from None


def _ckpt(path: Path) -> dict[str, Any]:
    """Load tensors only: pickles that would run code are refused."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                tensors = torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        assert all(isinstance(tensors[name], Tensor) for name in ("input_ids", "loss_mask", "hidden_state"))
        return tensors
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = "it holds more than tensors" if isinstance(error, pickle.UnpicklingError) else str(error)[:80]
        raise InputError(f"{path} cannot be read ({reason}); write it again") from None
    except (AssertionError, KeyError, TypeError, IndexError):
        raise InputError(f"{path} has no input_ids, loss_mask and hidden_state, as SpecForge's files have") from None


def _check_lock(path: Path) -> None:
    """Check vLLM's lock on a file's .lock, which it holds while writing; the lock file itself may remain."""
    lock = path.with_name(f"{path.name}.lock")
    if lock.exists():
        import fcntl

        fd = os.open(lock, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{path} is still being written; wait until it is complete") from None
        finally:
            os.close(fd)
