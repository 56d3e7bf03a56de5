"""The tree cache: keys and values at explicit slots, committed by gathering.

Every layer is stored as [b * capacity, heads * width] and written in place at `slot = length_b + node`. Layers of equal
width share one slab [layers, b * capacity, width], so that committing an accepted path is two kernels for the whole
model. Rows have their own length; slots at and beyond it hold what nobody will read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..types import InputError


class TreeLayer(CacheLayerMixin):
    """One layer as transformers sees it. Its storage belongs to the `TreeCache`."""

    is_compileable = False  # or generate would build masks of its own
    is_sliding = False

    def __init__(self, owner: TreeCache):
        super().__init__()
        self.owner = owner
        self.heads = (0, 0)
        self.widths = (0, 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Sized by the first real keys and values: latent attention stores different widths.
        rows = key_states.shape[0] * self.owner.capacity
        self.heads = key_states.shape[1], value_states.shape[1]
        self.widths = key_states.shape[3], value_states.shape[3]
        self.keys = key_states.new_zeros(rows, self.heads[0] * self.widths[0])
        self.values = value_states.new_zeros(rows, self.heads[1] * self.widths[1])
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self.owner
        b, _, n, _ = key_states.shape
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(0, owner.slots, key_states.transpose(1, 2).reshape(b * n, -1))
        self.values.index_copy_(0, owner.slots, value_states.transpose(1, 2).reshape(b * n, -1))
        if owner.fresh:
            return key_states, value_states
        keys = self.keys.view(b, owner.capacity, self.heads[0], self.widths[0])[:, : owner.view]
        values = self.values.view(b, owner.capacity, self.heads[1], self.widths[1])[:, : owner.view]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.owner.fresh else self.owner.view), 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.owner.capacity


class TreeCache(Cache):
    """The layers of one batch, their slabs, and where the pass under way writes (`slots`) and reads (`view`)."""

    def __init__(self, layers: int, capacity: int, limit: int):
        super().__init__(layers=[TreeLayer(self) for _ in range(layers)])
        self.capacity, self.limit = capacity, limit
        self.slabs: list[Tensor] | None = None
        self.view = 0
        self.fresh = False  # a prompt's first chunk attends to its own keys alone, by the plain causal kernels
        self.slots: Tensor = torch.zeros(0, dtype=torch.long)

    @property
    def bytes(self) -> int:
        """Memory held by keys and values."""
        return sum(s.numel() * s.element_size() for s in self.slabs or ())

    def pack(self) -> None:
        """Gather the layers' storage into slabs, one for each width: after the first pass."""
        if self.slabs is not None:
            return
        groups: dict[tuple[int, torch.dtype, torch.device], list[tuple[TreeLayer, str]]] = {}
        for layer in self.layers:
            for name in ("keys", "values"):
                t = getattr(layer, name)
                if t is None:
                    raise InputError("a layer of this model keeps no keys and values; it cannot be a tree's target")
                groups.setdefault((t.shape[1], t.dtype, t.device), []).append((layer, name))
        self.members = list(groups.values())
        self._set([torch.stack([getattr(layer, name) for layer, name in group]) for group in self.members])

    def _set(self, slabs: list[Tensor]) -> None:
        self.slabs = slabs
        for slab, group in zip(slabs, self.members, strict=True):
            for part, (layer, name) in zip(slab, group, strict=True):
                setattr(layer, name, part)

    def move(self, source: Int[Tensor, " k"], destination: Int[Tensor, " k"]) -> None:
        """Copy slots (counted over the whole batch); all are read before any is written."""
        assert self.slabs is not None
        for slab in self.slabs:
            slab.index_copy_(1, destination.to(slab.device), slab.index_select(1, source.to(slab.device)))

    def reserve(self, needed: int) -> None:
        """Make room for `needed` slots a row, by doubling, up to the limit."""
        if needed <= self.capacity:
            return
        if needed > self.limit:
            raise InputError(
                f"the cache needs {needed} slots and its limit is {self.limit}; shorten the prompt or draft fewer nodes"
            )
        self.resize(min(self.limit, max(needed, 2 * self.capacity)))

    def resize(self, capacity: int) -> None:
        """Give every row `capacity` slots."""
        assert self.slabs is not None
        try:
            grown = [
                torch.nn.functional.pad(self._rows(slab), (0, 0, 0, capacity - self.capacity)).flatten(1, 2)
                for slab in self.slabs
            ]
        except RuntimeError as error:
            raise InputError(f"there is no memory for a cache of {capacity} slots a row ({error})") from None
        self.capacity = capacity
        self._set(grown)

    def _rows(self, slab: Float[Tensor, "layers s w"]) -> Float[Tensor, "layers b c w"]:
        return slab.view(slab.shape[0], -1, self.capacity, slab.shape[2])

    def select(self, index: Sequence[int]) -> None:
        """Row i := old row index[i]."""
        assert self.slabs is not None
        rows = torch.tensor(list(index), dtype=torch.long)
        self._set([self._rows(slab).index_select(1, rows.to(slab.device)).flatten(1, 2) for slab in self.slabs])

    def join(self, other: TreeCache) -> None:
        """Append the rows of another cache of the same model."""
        for cache in (self, other):
            cache.pack()
            if cache.capacity < max(self.capacity, other.capacity):
                cache.resize(max(self.capacity, other.capacity))
        assert self.slabs is not None
        assert other.slabs is not None
        self._set([torch.cat([a, b], 1) for a, b in zip(self.slabs, other.slabs, strict=True)])
