"""Arrays for C of values that come from a request. They are made here alone, where no value is changed silently.

cffi turns a float64 that float32 cannot hold into an infinity. Here that raises OverflowError, as an integer of more
than 64 bits does: requests are checked before (`params.Sampling`), so it is a mistake of our own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from .abi import ffi

MASK64 = (1 << 64) - 1


def integers(values: Iterable[int]) -> Any:
    """As int64."""
    return _array("int64_t[]", "q", values)


def seeds(values: Iterable[int]) -> Any:
    """As uint64, modulo 2^64: any integer is a seed."""
    return _array("uint64_t[]", "Q", (seed & MASK64 for seed in values))


def floats(values: Iterable[float]) -> Any:
    """As float32. Infinite ones stay infinite."""
    return _array("float[]", "f", values)


def doubles(values: Iterable[float]) -> Any:
    """As float64."""
    return _array("double[]", "d", values)


def addresses(values: Iterable[int | None]) -> Any:
    """As pointers, NULL for None."""
    return _array("void *[]", "Q", (value or 0 for value in values))


def _array(kind: str, code: str, values: Iterable[Any]) -> Any:
    items = list(values)
    try:
        return ffi.from_buffer(kind, bytearray(struct.pack(f"={len(items)}{code}", *items)))
    except (struct.error, OverflowError) as error:
        raise OverflowError(f"a value does not fit its C type: {error}") from error
