"""The keys and values of a trained drafter's layers: those of committed text, and those of trials after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from ..backends.torch.padding import additive
from .layer import LayerShape, Store


def behind(keys: Float[Tensor, "b s heads d"], values: Float[Tensor, "b s heads d"]) -> Store:
    """New keys and values go to the last slots of these, layer by layer, and see all of them."""
    layer = iter(range(keys.shape[2]))

    def store(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        heads, m, at = k.shape[1], k.shape[2], next(layer)
        here = [x.narrow(2, at * heads, heads) for x in (keys, values)]
        for kept, new in zip(here, (k, v), strict=True):
            kept[:, kept.shape[1] - m :].copy_(new.transpose(1, 2))
        return here[0].transpose(1, 2), here[1].transpose(1, 2)

    return store


class KVCache:
    """Keys and values, the layers' heads side by side: those of committed pairs, then scratch slots for trials.
    Row b has `host[b]` committed slots, 0 .. host[b] - 1. Slots beyond hold finite leftovers that masks hide."""

    def __init__(self, shape: LayerShape, rows: int, capacity: int, like: Tensor, layers: int = 1):
        size = (rows, max(capacity, 1), layers * shape.kv_heads, shape.head_dim)
        with torch.inference_mode(False):
            self.keys, self.values = (torch.zeros(size, dtype=like.dtype, device=like.device) for _ in range(2))
        self._set([0] * rows)

    def _set(self, host: list[int]) -> None:
        self.host, self.longest = host, max(host, default=0)
        self.level = min(host, default=0) == self.longest  # have all rows as many slots?
        self.lengths = torch.tensor(host, dtype=torch.long, device=self.keys.device)

    def reserve(self, slots: int) -> None:
        """Make room for so many slots a row, by doubling."""
        have = self.keys.shape[1]
        if slots > have:
            more = max(slots, 2 * have) - have
            with torch.inference_mode(False), torch.no_grad():
                self.keys, self.values = (functional.pad(x, (0, 0, 0, 0, 0, more)) for x in (self.keys, self.values))

    def views(self, m: int, first: int = 0) -> tuple[Float[Tensor, "b s heads d"], Float[Tensor, "b s heads d"]]:
        """Keys and values up to slots first .. first + m - 1 after the text, which come last. For level rows."""
        assert self.level, "only level rows have their next slots side by side"
        view = self.longest + first + m
        self.reserve(view)
        return self.keys[:, :view], self.values[:, :view]

    def place(self, m: int, first: int = 0) -> Store:
        """Where every layer's next m keys and values go: slots first .. first + m - 1 after each row's text. They see
        the slots before them, those of `mask`."""
        if self.level:
            return behind(*self.views(m, first))
        self.reserve(self.longest + first + m)
        view, layer = self.longest + first + m, iter(range(self.keys.shape[2]))

        def store(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            heads, m, at = k.shape[1], k.shape[2], next(layer)
            keys, values = (x.narrow(2, at * heads, heads) for x in (self.keys, self.values))
            for kept, new in ((keys, k), (values, v)):
                b, capacity = kept.shape[:2]
                slots = self.lengths[:, None] + torch.arange(first, first + m, device=kept.device)
                slots = slots + capacity * torch.arange(b, device=kept.device)[:, None]
                kept.flatten(0, 1).index_copy_(0, slots.flatten(), new.transpose(1, 2).flatten(0, 1))
            return keys[:, :view].transpose(1, 2), values[:, :view].transpose(1, 2)

        return store

    def mask(self, own: Bool[Tensor, "#b m n"], dtype: torch.dtype, groups: int = 1) -> Float[Tensor, "#b 1 gm view"]:
        """Who sees whom: `own[b, i, j]`, query i sees scratch slot j; and everyone sees the row's text. Repeated for
        the heads of a group, see `attend`."""
        if groups > 1 and own.shape[1] > 1:
            own = own[:, None].expand(own.shape[0], groups, *own.shape[1:]).flatten(1, 2)
        if self.level:
            return functional.pad(additive(own, dtype), (self.longest, 0))[:, None]
        b, (m, n) = len(self.host), own.shape[1:]
        count = torch.arange(self.longest + n, device=own.device)
        text = (count < self.lengths[:, None, None]).expand(b, m, -1)
        here = (self.lengths[:, None] + count[:n])[:, None].expand(b, m, n)
        return additive(text.scatter(2, here, own.expand(b, m, n)), dtype)[:, None]

    def advance(self, counts: Sequence[int]) -> None:
        """The next counts[b] slots are text from now on."""
        self._set([h + c for h, c in zip(self.host, counts, strict=True)])

    def select(self, index: Sequence[int]) -> None:
        """Row i := old row index[i]; repeats fork."""
        if list(index) == list(range(len(self.host))):
            return
        wanted = torch.tensor(list(index), dtype=torch.long, device=self.keys.device)
        with torch.inference_mode(False), torch.no_grad():
            self.keys, self.values = self.keys.index_select(0, wanted), self.values.index_select(0, wanted)
        self._set([self.host[i] for i in index])

    def join(self, other: KVCache) -> None:
        """Append another's rows."""
        most = max(self.keys.shape[1], other.keys.shape[1])
        self.reserve(most)
        other.reserve(most)
        short = min(self.keys.shape[1], other.keys.shape[1])  # each doubles on its own: cut to what both have
        assert short >= max(self.longest, other.longest)
        with torch.inference_mode(False), torch.no_grad():
            self.keys = torch.cat([self.keys[:, :short], other.keys[:, :short]])
            self.values = torch.cat([self.values[:, :short], other.values[:, :short]])
        self._set(self.host + other.host)
