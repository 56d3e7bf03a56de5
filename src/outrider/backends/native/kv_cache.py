"""The KV cache of a batch, in the layout that passes read: keys and values at explicit slots, committed by gathering.

Node i of row b is written at slot `lengths[b] + i`. All layers share one array, so that committing an accepted path, or
moving a row, is one operation for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.types import Array
from ...params import InputError
from .abi import ffi
from .arrays import addresses
from .pages import fresh

FIRST = 1024  # slots of a row at first, where its capacity is larger


class KVCache:
    """Keys and values [2 * layers, rows, capacity, width] of rows that come and go.

    Args:
        layers: of the model.
        width: numbers of a key (or value) of all heads.
        dtype: of these numbers; bfloat16 as the uint16 of its bits.
        capacity: tokens of a row that are expected, those of a tree included.
        limit: the most slots a row may have.
    """

    def __init__(self, layers: int, width: int, dtype: Any, capacity: int, limit: int):
        self.layers, self.width, self.dtype = layers, width, dtype
        self.capacity, self.limit, self.rows = min(capacity, FIRST), limit, 0
        self.slots: Array = self._array(0, 0)  # more rows than `rows` may be kept for newcomers
        self.pointers: Any = ffi.NULL  # of every layer's keys and values, for `Pass`

    def begin(self, rows: int) -> None:
        """Allocate slots for the rows of a new batch."""
        self.rows = rows
        self._hold(self._array(rows, self.capacity))

    def reserve(self, needed: int) -> None:
        """Grow to at least `needed` slots a row, by doubling, up to the limit."""
        if needed <= self.capacity:
            return
        if needed > self.limit:
            raise InputError(
                f"the cache needs {needed} slots and its limit is {self.limit}; shorten the prompt or draft fewer nodes"
            )
        self._resize(min(self.limit, max(needed, 2 * self.capacity)), self.slots.shape[1])

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy slots, counted over the batch; all are read before any is written."""
        flat = self.slots.reshape(2 * self.layers, -1, self.width)
        flat[:, list(destination)] = flat[:, list(source)]

    def select(self, index: Sequence[int], used: int) -> None:
        """Row i becomes old row index[i], of which `used` slots matter. Rows that only move forward move in place."""
        if all(old >= new for new, old in enumerate(index)):  # then a row is read before it is written
            for new, old in enumerate(index):
                if new != old:
                    self.slots[:, new, :used] = self.slots[:, old, :used]
        else:
            moved = self._array(len(index), self.capacity)
            moved[:, :, :used] = self.slots[:, list(index), :used]
            self._hold(moved)
        self.rows = len(index)

    def join(self, other: KVCache, used: int) -> None:
        """Append the rows of another cache of the same model, of which `used` slots matter. Their slots are allocated
        now, while everything is copied anyway, and not in a later round."""
        total, capacity = self.rows + other.rows, max(self.capacity, other.capacity, used)
        allocated = self.slots.shape[1]
        if total > allocated or capacity > self.capacity:
            self._resize(capacity, max(total, allocated))
        self.limit = max(self.limit, other.limit)
        self.slots[:, self.rows : total, :used] = other.slots[:, : other.rows, :used]
        self.rows = total

    def wipe(self, rows: Sequence[int]) -> None:
        """Overwrite what these rows hold with zeros."""
        self.slots[:, list(rows)] = 0

    def taken(self, row: int, n: int) -> list[tuple[Array, Array]]:
        """A copy of the first `n` slots of a row: every layer's keys and values [n, width]."""
        pairs = self.slots[:, row, :n].copy().reshape(self.layers, 2, n, self.width)
        return [(keys, values) for keys, values in pairs]

    def fill(self, layers: Sequence[tuple[Any, ...]], n: int) -> None:
        """The first `n` slots of such a copy, as the one row of this cache."""
        self.capacity = max(self.capacity, n)
        self.begin(1)
        for i, parts in enumerate(layers):
            for j, part in enumerate(parts):
                self.slots[2 * i + j, 0, :n] = part[:n]

    def _resize(self, capacity: int, rows: int) -> None:
        """Set the capacity of a row, and the number of rows that fit."""
        grown = self._array(rows, capacity, large=capacity > max(self.capacity, FIRST))
        grown[:, : self.rows, : self.capacity] = self.slots[:, : self.rows]
        self.capacity = capacity
        self._hold(grown)

    def _hold(self, slots: Array) -> None:
        self.slots, first = slots, slots.__array_interface__["data"][0]
        step = slots.strides[0]
        self.pointers = addresses(first + i * step for i in range(2 * self.layers))

    def _array(self, rows: int, capacity: int, large: bool = False) -> Array:
        """Memory in ordinary pages, or in large ones for long texts, which are strided through in many passes: a large
        page is filled with zeros when it is first written, and every newcomer of a batch of short texts would wait."""
        try:
            return fresh((2 * self.layers, rows, capacity, self.width), self.dtype, large)
        except (MemoryError, OSError) as error:
            raise InputError(
                f"there is no memory for {rows} texts of {capacity} tokens side by side; take a smaller batch or "
                f"shorter texts ({error})"
            ) from None
