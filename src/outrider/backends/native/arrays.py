"""Arrays for C of numbers that come from a request: made here alone, where nothing wraps or overflows.

ctypes cuts a Python integer to its lowest 64 bits and turns a large float into an infinite one without a word. Here
either raises OverflowError: what a caller may ask for is checked before (`params.Sampling`), so that is our own fault.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from typing import Any

MASK64 = (1 << 64) - 1


def integers(values: Iterable[int]) -> Any:
    """As int64."""
    return _array(ctypes.c_int64, "q", values)


def seeds(values: Iterable[int]) -> Any:
    """As uint64, modulo 2^64: any integer is a seed."""
    return _array(ctypes.c_uint64, "Q", (seed & MASK64 for seed in values))


def floats(values: Iterable[float]) -> Any:
    """As float32. Infinite ones stay infinite."""
    return _array(ctypes.c_float, "f", values)


def doubles(values: Iterable[float]) -> Any:
    """As float64."""
    return _array(ctypes.c_double, "d", values)


def addresses(values: Iterable[int | None]) -> Any:
    """As pointers, NULL for None."""
    return _array(ctypes.c_void_p, "Q", (value or 0 for value in values))


def _array(kind: Any, code: str, values: Iterable[Any]) -> Any:
    given = list(values)
    try:
        return (kind * len(given)).from_buffer_copy(struct.pack(f"={len(given)}{code}", *given))
    except (struct.error, OverflowError) as error:
        raise OverflowError(f"a number does not fit its array for C: {error}") from error
