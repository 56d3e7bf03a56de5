"""The weights of a model file's tensors, whatever kind they are stored in: by `c/formats/gguf.h`, or without a compiler
by gguf-py's reader, whose weights these are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...machine import threads
from ..native.abi import Library, address

CHUNK = 1 << 24  # numbers that are made at a time without compiled code


def numbers(
    code: Library | None, kind: int, rows: np.ndarray, width: int, order: np.ndarray | None, dtype: torch.dtype
) -> Tensor:
    """A tensor's numbers.

    Args:
        code: the compiled pass, of any precision; None where there is none.
        kind: GGUF's number of the tensor's kind.
        rows: uint8 [o, bytes of a row], as the file holds them.
        width: numbers in a row.
        order: int64 [o], the row of `rows` that each row of the result is; None: the same.
        dtype: of the result.

    Returns:
        [o, width]: the float32 that gguf-py's reader makes, rounded to `dtype`.
    """
    halves = dtype == torch.bfloat16
    if code is None:
        return _numbers(kind, rows, order, dtype)
    result = torch.empty(len(rows), width, dtype=torch.bfloat16 if halves else torch.float32)
    blocks = np.ascontiguousarray(rows)
    place = None if order is None else np.ascontiguousarray(order, np.int64)
    done = code.dequantise(kind, address(blocks), len(rows), width, address(place), address(result), halves, threads())
    assert done == len(rows), "the caller has looked whether this kind is supported"
    return result if result.dtype == dtype else result.to(dtype)


def _numbers(kind: int, rows: np.ndarray, order: np.ndarray | None, dtype: torch.dtype) -> Tensor:
    from gguf import GGMLQuantizationType, quants

    some = max(1, CHUNK // max(1, rows.shape[1]))
    made: list[Any] = []
    for i in range(0, len(rows), some):
        part = rows[i : i + some] if order is None else rows[order[i : i + some]]
        made.append(torch.tensor(quants.dequantize(part, GGMLQuantizationType(kind))).to(dtype))
    return torch.cat(made)
