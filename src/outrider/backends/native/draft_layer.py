"""The decoder layer of a compiled drafter: its sizes, its rotary tables, its keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ...core.types import Array
from .arrays import addresses
from .drafts import SlotCache
from .rope import Rope


@runtime_checkable
class LayerSizes(Protocol):
    """The sizes of a decoder layer, as `nets.layer.LayerShape` has them."""

    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def rope(self) -> Mapping[str, Any]: ...
    @property
    def eps(self) -> float: ...


def sizes_of(shape: LayerSizes) -> dict[str, Any]:
    """Fields of `Model`."""
    return {
        "hidden": shape.hidden, "intermediate": shape.intermediate, "heads": shape.heads, "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "eps": shape.eps,
    }  # fmt: skip


class RotaryTables:
    """Rotary tables, extended when more positions are needed."""

    def __init__(self, shape: LayerSizes):
        self.rope, self.table = Rope.of(shape.rope, shape.head_dim), np.zeros((0, 2, shape.head_dim), np.float32)

    def upto(self, positions: int) -> Array:
        """Cosines and sines of so many positions at least."""
        if len(self.table) < positions:
            self.table = self.rope.table(max(512, 1 << (positions - 1).bit_length()))
        return self.table


def pointers_of(cache: SlotCache) -> Any:
    """The addresses of its keys and values."""
    return addresses((cache.keys.ctypes.data, cache.values.ctypes.data))
