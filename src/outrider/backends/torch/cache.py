"""The tree cache: keys and values at explicit slots, committed by gathering.

Node i of row b is written at slot `length_b + i`. Layers of equal width share one buffer [layers, rows, capacity,
width], so that committing an accepted path, or moving a row, is a few kernels for all layers. Slots at and beyond a
row's length hold finite leftovers that masks hide.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...params import InputError

FIRST = 1024  # slots of a row at first, where its capacity is larger


class TreeLayer(CacheLayerMixin):
    """One layer as transformers sees it. The storage belongs to the `TreeCache`; these are views of it."""

    is_compileable = False  # or generate would build masks of its own
    is_sliding = False

    def __init__(self, owner: TreeCache):
        super().__init__()
        self._owner = weakref.ref(owner)  # or cache and layers would outlive their batch until a collection
        self.parts: list[Tensor] = []  # keys and values [b, h, n, d] of the first pass, until the buffers exist
        self.shapes: list[tuple[int, int]] = []  # (h, d) of keys and of values
        self.flat: list[Tensor] = []  # [b * capacity, h * d]: where slots are written
        self.wide: list[Tensor] = []  # [b, h, capacity, d]: the same memory, as attention reads it

    @property
    def owner(self) -> TreeCache:
        owner = self._owner()
        assert owner is not None, "a layer does not outlive its cache"
        return owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.parts, self.is_initialized = [key_states, value_states], True
        self.shapes = [(p.shape[1], p.shape[3]) for p in self.parts]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [b, h, n, d] at the pass's slots; what the queries may attend to, [b, h, view, d]."""
        owner = self.owner
        if owner.fresh:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        all_keys, all_values = self.wide
        if owner.span is not None:  # rows of equal length write one stretch: cheaper than an index
            all_keys.narrow(2, *owner.span).copy_(key_states)
            all_values.narrow(2, *owner.span).copy_(value_states)
            return all_keys.narrow(2, 0, owner.view), all_values.narrow(2, 0, owner.view)
        slots = owner.slots if owner.slots.device == key_states.device else owner.slots.to(key_states.device)
        keys, values = self.flat
        keys.index_copy_(0, slots, key_states.transpose(1, 2).reshape(-1, keys.shape[1]))
        values.index_copy_(0, slots, value_states.transpose(1, 2).reshape(-1, values.shape[1]))
        return all_keys.narrow(2, 0, owner.view), all_values.narrow(2, 0, owner.view)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.owner.fresh else self.owner.view), 0

    def get_seq_length(self) -> int:
        return 0  # positions and masks are always passed; an int, or generate would wait for the device

    def get_max_length(self) -> int:
        return self.owner.limit


class TreeCache(Cache):
    """The layers of one batch, their buffers, and where the pass under way writes (`slots`) and reads (`view`)."""

    def __init__(self, layers: int, capacity: int, limit: int):
        self.tree_layers = [TreeLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.tree_layers))
        self.capacity, self.limit = min(capacity, FIRST), limit
        self.rows = 0
        self.buffers: list[Float[Tensor, "layers r c w"]] = []  # r >= rows: rows that left are kept for newcomers
        self.members: list[list[tuple[TreeLayer, int]]] = []  # of each buffer: its layers, keys (0) or values (1)
        self.fresh = True  # the first pass attends to its own keys alone, by the plain causal kernels
        self.view = 0
        self.slots: Int[Tensor, " bn"] = torch.zeros(0, dtype=torch.long)
        self.span: tuple[int, int] | None = None  # (first slot, how many) where all rows write the same stretch

    @property
    def bytes(self) -> int:
        """Memory of keys and values."""
        return sum(s.numel() * s.element_size() for s in self.buffers)

    def pack(self) -> None:
        """After the first pass: buffers sized by its real keys and values (latent attention has two widths)."""
        groups: dict[tuple[int, torch.dtype, torch.device], list[tuple[TreeLayer, int]]] = {}
        for layer in self.tree_layers:
            for i, part in enumerate(layer.parts):
                groups.setdefault((part.shape[1] * part.shape[3], part.dtype, part.device), []).append((layer, i))
        if not groups:
            raise InputError("this model writes no keys and values to its cache, so it cannot verify a tree")
        self.rows, _, n, _ = next(p.shape for layer in self.tree_layers for p in layer.parts)
        self.capacity = max(self.capacity, min(self.limit, n))
        self.members, buffers = list(groups.values()), []
        for (width, dtype, device), group in groups.items():
            buffer = _allocated((len(group), self.rows, self.capacity, width), dtype, device)
            for row, (layer, i) in zip(buffer, group, strict=True):
                row[:, :n] = layer.parts[i].transpose(1, 2).flatten(2)
            buffers.append(buffer)
        self.fresh = False
        self._hold(buffers, self.rows)

    def taken(self, row: int, n: int) -> list[tuple[Tensor, ...]]:
        """A copy of the first `n` slots of a row: every layer's keys and values [1, h, n, d]."""
        return [tuple(part[row : row + 1, :, :n].clone() for part in layer.wide) for layer in self.tree_layers]

    def fill(self, layers: Sequence[tuple[Tensor, ...]], n: int) -> None:
        """The first `n` slots of such a copy as the one row of this cache, as if a first pass had written them."""
        for layer, parts in zip(self.tree_layers, layers, strict=True):
            if parts:
                layer.lazy_initialization(*(part[:, :, :n] for part in parts))
        self.pack()

    def _hold(self, buffers: list[Tensor], rows: int) -> None:
        """Take these buffers, of which the first `rows` rows are in use."""
        self.buffers, self.rows = buffers, rows
        views: dict[TreeLayer, list[Tensor]] = {}
        for buffer, group in zip(buffers, self.members, strict=True):
            for part, (layer, i) in zip(buffer, group, strict=True):
                views.setdefault(layer, [part, part])[i] = part[:rows]
        for layer, pair in views.items():
            layer.flat = [p.flatten(0, 1) for p in pair]
            layer.wide = [p.unflatten(2, s).transpose(1, 2) for p, s in zip(pair, layer.shapes, strict=True)]
            layer.parts = []

    def move(self, source: Int[Tensor, " k"], destination: Int[Tensor, " k"]) -> None:
        """Copy slots (counted over the batch); all are read before any is written."""
        for buffer in self.buffers:
            flat = buffer.flatten(1, 2)
            flat.index_copy_(1, destination.to(buffer.device), flat.index_select(1, source.to(buffer.device)))

    def reserve(self, needed: int) -> None:
        """Grow to at least `needed` slots a row, by doubling, up to the limit."""
        if needed <= self.capacity:
            return
        if needed > self.limit:
            raise InputError(
                f"the cache needs {needed} slots and its limit is {self.limit}; shorten the prompt or draft fewer nodes"
            )
        self.resize(min(self.limit, max(needed, 2 * self.capacity)))

    def resize(self, capacity: int, rows: int | None = None) -> None:
        """Resize keys and values to `capacity` slots a row and `rows` rows."""
        rows = rows or (self.buffers[0].shape[1] if self.buffers else 0)
        buffers = []
        for old in self.buffers:
            new = _allocated((old.shape[0], rows, capacity, old.shape[3]), old.dtype, old.device)
            new[:, : self.rows, : self.capacity] = old[:, : self.rows]
            buffers.append(new)
        self.capacity = capacity
        if buffers:
            self._hold(buffers, self.rows)

    def select(self, index: Sequence[int], used: int) -> None:
        """Row i := old row index[i], of which `used` slots matter. Rows that only move forward move in place."""
        index = list(index)
        if index == list(range(self.rows)):
            return
        if all(old >= new for new, old in enumerate(index)):  # then a row is read before it is written
            for new, old in enumerate(index):
                if new != old:
                    for buffer in self.buffers:
                        buffer[:, new, :used] = buffer[:, old, :used]
            self._hold(self.buffers, len(index))
            return
        with torch.inference_mode(False), torch.no_grad():
            wanted = torch.tensor(index, dtype=torch.long)
            self._hold([buffer.index_select(1, wanted.to(buffer.device)) for buffer in self.buffers], len(index))

    def wipe(self, rows: Sequence[int]) -> None:
        """Overwrite these rows: a mask would not hide a NaN in them from the row that takes their place."""
        for buffer in self.buffers:
            buffer[:, list(rows)] = 0

    def join(self, other: TreeCache, used: int) -> None:
        """Append the rows of another cache of the same model, of which `used` slots matter. The newcomers' room is made
        now, while everything is copied anyway, and not in one of the rounds to come."""
        total, capacity = self.rows + other.rows, max(self.capacity, other.capacity, used)
        if total > self.buffers[0].shape[1] or capacity > self.capacity:
            self.resize(capacity, max(total, self.buffers[0].shape[1]))
        self.limit = max(self.limit, other.limit)
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine[:, self.rows : total, :used] = theirs[:, : other.rows, :used]
        self._hold(self.buffers, total)


def _allocated(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that is writable under any later mode: zeros, for leftovers of others may be NaN, which no mask hides."""
    try:
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise InputError(
            f"there is no memory for {shape[1]} texts of {shape[2]} tokens side by side; take a smaller batch or "
            f"shorter texts ({error})"
        ) from None
