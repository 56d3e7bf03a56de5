"""Matrices of trained drafters kept in eight bits: half the size of bfloat16 on disk.

Of each 32 neighbours in a row, the largest magnitude over 127 (at least 1e-7) is the scale (float16), and a number is
the nearest multiple of it, -127 to 127. A folder (format 2) holds `NAME`, int8 [rows, columns], and `NAME.scale`,
float16 [rows, columns / 32]. Compiled drafters round their matrices in the same way when they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..core.types import Array
from ..params import InputError

BLOCK = 32
SCALE = ".scale"


def fits(x: Array) -> bool:
    """Is this a matrix that eight bits can hold: floating point, of rows that blocks divide, and of usual size?"""
    blocks = x.ndim == 2 and x.size > 0 and x.shape[1] % BLOCK == 0 and x.dtype.kind == "f"
    return blocks and bool(np.abs(x).max() < 127 * float(np.finfo(np.float16).max))  # false for NaN


def quantise(x: Array) -> tuple[Array, Array]:
    """A matrix [rows, columns] of float32 as int8 [rows, columns] and scales, float16 [rows, columns / 32]."""
    blocks = x.reshape(len(x), -1, BLOCK)
    scale = np.maximum(np.abs(blocks).max(-1) / 127, np.float32(1e-7)).astype(np.float16)
    values = np.clip(np.rint(blocks / scale.astype(np.float32)[..., None]), -127, 127)
    return values.astype(np.int8).reshape(x.shape), scale


def dequantise(values: Array, scale: Array) -> Array:
    """The float32 matrix of `quantise`'s two."""
    blocks = values.reshape(len(values), -1, BLOCK).astype(np.float32)
    return (blocks * scale.astype(np.float32)[..., None]).reshape(values.shape)


def restored(tensors: Mapping[str, Array], where: object) -> dict[str, Array]:
    """The tensors of a folder of format 2, each matrix in one piece again.

    Raises:
        InputError: a matrix and its scales do not belong together.
    """
    made = {name: x for name, x in tensors.items() if not name.endswith(SCALE)}
    for name, scale in tensors.items():
        if not name.endswith(SCALE):
            continue
        values = made.get(name.removesuffix(SCALE))
        if (
            values is None
            or (values.dtype, scale.dtype) != (np.int8, np.float16)
            or values.ndim != 2
            or scale.shape != (len(values), values.shape[1] / BLOCK)
        ):
            raise InputError(f"{where}: {name} has no int8 matrix of its size beside it; fetch the folder again")
        made[name.removesuffix(SCALE)] = dequantise(values, scale)
    return made
