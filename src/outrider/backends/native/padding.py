"""Widths of attention heads and MLPs, padded with zeros to multiples of 32, which compiled code reads at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...core.types import Array
from .abi import BLOCK_WEIGHTS
from .files import Kind, Tensor


def padded(values: Array, width: int, axis: int = 0) -> Array:
    """An array with zeros after every `width` entries of an axis, up to the next multiple of 32; 0: nowhere."""
    if width % BLOCK_WEIGHTS == 0:
        return values
    before, after = values.shape[:axis], values.shape[axis + 1 :]
    split = values.reshape(*before, values.shape[axis] // width, width, *after)
    ends = [(0, 0)] * split.ndim
    ends[axis + 1] = 0, -width % BLOCK_WEIGHTS
    wide = np.pad(split, ends)
    return wide.reshape(*before, wide.shape[axis] * wide.shape[axis + 1], *after)


def padded_width(width: int) -> int:
    """The next multiple of 32."""
    return width + -width % BLOCK_WEIGHTS


def padded_size(size: int, width: int) -> int:
    """How many entries an axis of `size` entries has after `padded`."""
    return size // width * padded_width(width) if width else size


class Padded(Tensor):
    """A matrix that is made, with its padding, each time it is read.

    Args:
        source: the tensor that it is made of.
        kind: of its elements.
        shape: with the padding.
        make: makes its bytes, uint8.
    """

    source: Tensor
    make: Callable[[], Array]

    def __init__(self, source: Tensor, kind: Kind, shape: tuple[int, ...], make: Callable[[], Array]) -> None:
        values = {"name": source.name, "kind": kind, "shape": shape, "mapped": source.mapped}
        for key, value in (values | {"source": source, "make": make}).items():
            object.__setattr__(self, key, value)

    __hash__ = object.__hash__

    @property
    def data(self) -> Array:
        """uint8 [bytes]: a new copy."""
        return self.make()

    @property
    def origin(self) -> Array:
        """See `Tensor.origin`."""
        return self.source.data

    def forget(self) -> None:
        """See `Tensor.forget`."""
        self.source.forget()
