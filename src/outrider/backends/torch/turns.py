"""Turns over one target: threads that share it take their steps one at a time, and no step leaves a setting behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock

import torch


@contextmanager
def turn(lock: AbstractContextManager[object], device: str) -> Iterator[None]:
    """One step of a batch, alone over its target and without gradients.

    Never held across a generator's `yield`: whoever reads the generator would wait for itself, or decode on with
    gradients off.

    Args:
        lock: the target's .
        device: the target's.
    """
    with lock, torch.no_grad(), without_cudnn(device):
        yield


def without_cudnn(device: str) -> AbstractContextManager[None]:
    """Attention by kernels other than cuDNN's, which plans anew for every length: that takes longer than a pass.

    The flag belongs to the process. So the first of several steps clears it, the last one restores it, and
    without CUDA it is left alone.
    """
    return _without_cudnn() if device.startswith("cuda") else nullcontext()


_guard = Lock()
_inside: list[bool] = []  # one entry for each step under way: the flag as the first of them read it


@contextmanager
def _without_cudnn() -> Iterator[None]:
    with _guard:
        _inside.append(_inside[0] if _inside else torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _guard:
            before = _inside.pop()
            if not _inside:
                torch.backends.cuda.enable_cudnn_sdp(before)
