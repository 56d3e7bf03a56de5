"""Logits as numpy arrays, or as tensors of a device, of which only the needed part is copied to the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import sampling
from ..core.types import Array, Rows


def array(x: Any) -> Array:
    """An array, or a tensor, as an array on the host; of a precision that numpy lacks, in float32."""
    if isinstance(x, np.ndarray):
        return x
    x = x.detach().cpu()
    made: Array = (x.float() if x.is_floating_point() and x.itemsize < 4 else x).numpy()
    return made


def rank(
    logits: Any, rows: Rows, depth: int | Array, k: int, scale: float = 1.0, warp: bool = False, names: Any = None
) -> tuple[Array, Array]:
    """`core.sampling.rank` of an array or a tensor; `names` too may be either. The candidates are arrays."""
    if isinstance(logits, np.ndarray):
        return sampling.rank(logits, rows, depth, k, scale, warp=warp, names=None if names is None else array(names))
    from ..backends.torch import sampling as tensors
    from ..backends.torch.tensors import TensorRows, tensor

    device = logits.device
    below = depth if isinstance(depth, int) else tensor(depth, device)
    ids = None if names is None else tensor(names, device)
    chosen, logs = tensors.rank(logits, TensorRows(rows, device), below, k, scale, warp=warp, names=ids)
    return array(chosen), array(logs.float())
