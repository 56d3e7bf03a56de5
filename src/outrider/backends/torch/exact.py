"""What makes the bits of a token its own: how passes are padded, cut and planned where `exact` is "bits".

Plain decoding is a pass over one node, a draft's verification one over many, a prompt's chunk one over up to 512. Each
product of such a pass must give a row the same bits whatever stands in the other rows. Kernels do so within classes of
row counts, which `probe.py` finds for this machine; `Exactness` keeps every pass inside its class. Attention has to sum
in the same order too: `aligned.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from .aligned import Plan, Queries
from .session import Pass, index

BLOCK = 32  # start(p) is a multiple of it; a tree no deeper than this has all of its heads in committed text
WINDOW = 2 * BLOCK  # positions of a tail
PERIOD = 512  # keys that torch's attention for CPUs reads at a time: every multiple of it may be a head's length
LENGTHS = tuple(range(BLOCK, PERIOD + 1, BLOCK))


@dataclass(frozen=True)
class Exactness:
    """What the kernels of this machine need, so that a row's bits are its own (found by `probe.py`)."""

    rows: int = 1  # tokens a pass has at least
    step: int = 1  # and of which it has a multiple: elementwise kernels treat the end of a tensor differently
    queries: int = 1  # rows an attention product has at least
    lengths: tuple[int, ...] = LENGTHS  # that a head may have, beyond multiples of PERIOD
    blocks: dict[str, int] = field(default_factory=dict)  # most rows of a product at a time, by kind of layer
    multiple: bool = False  # an attention product has a multiple of `queries` rows

    def numbers(self) -> list[int]:
        """All of them."""
        return [self.rows, self.step, self.queries, *self.lengths, *self.blocks.values()]

    def padded(self, given: Pass) -> Pass:
        """The pass with as many nodes as it needs; the added ones are roots that nobody reads."""
        b, n = given.spots.shape
        read = n - given.since
        wanted = max(read, -(-self.rows // b))
        while wanted * b % self.step:
            wanted += 1
        more = wanted - read
        if not more:
            return given if given.asked is None else replace(given, asked=self._asked(given))
        pad = torch.nn.functional.pad
        ancestors = given.ancestors
        if ancestors is not None:
            ancestors = pad(ancestors, (0, more, 0, more))
            ancestors[:, n:, 0] = True
        after = given.spots[:, :1].expand(b, more)
        if given.chunk:
            after = given.spots[:, -1:] + 1 + index(more, given.spots.device)
        return replace(
            given,
            tokens=None if given.tokens is None else pad(given.tokens, (0, more)),
            embeds=None if given.embeds is None else pad(given.embeds, (0, 0, 0, more)),
            spots=torch.cat([given.spots, after], 1),
            ancestors=ancestors,
            bound=given.bound + (more if given.chunk else 0),
            asked=self._asked(given),
            added=more,
        )

    def _asked(self, given: Pass) -> Tensor | None:
        """The places whose logits are wanted, so many that the head's product has its rows too."""
        if given.asked is None:
            return None
        b, n = given.spots.shape[0], len(given.asked)
        wanted = max(n, -(-self.rows // b))
        while wanted * b % self.step:
            wanted += 1
        return torch.cat([given.asked, given.asked[-1:].expand(wanted - n)])

    def extent(self, given: Pass) -> int:
        """Slots that the head of a pass reads."""
        whole, rest = divmod(start(given.bound), PERIOD)
        return whole * PERIOD + (next(n for n in self.lengths if n >= rest) if rest else 0)


def start(position: int) -> int:
    """Where the tail of a node at this position begins."""
    return max(0, position - BLOCK) // BLOCK * BLOCK


def starts(positions: Int[Tensor, "*s"]) -> Int[Tensor, "*s"]:
    """The same for many."""
    return (positions - BLOCK).clamp(min=0) // BLOCK * BLOCK


def plan(given: Pass, capacity: int, dtype: torch.dtype, exactness: Exactness, window: int | None = None) -> Plan:
    """Slots and masks of one pass; `capacity`: slots from one row of the cache to the next."""
    device, b = given.spots.device, given.spots.shape[0]
    lone = given.n - given.added == 1 and not given.chunk
    places, extent = given.places[:, :1] if lone else given.places, exactness.extent(given)
    first = starts(places)
    rows = (index(b, device) * capacity)[:, None, None]
    lead, order, back = 0, None, None
    if given.chunk:
        lead = given.prefix % BLOCK
        blocks = index(-(-(given.bound + 1) // BLOCK), device)[given.prefix // BLOCK :, None]
        where = ((blocks - 1).clamp(min=0) * BLOCK + index(WINDOW, device)).expand(b, -1, -1)  # [b, k, window]
        tail = (where.clamp(max=given.bound) + rows).flatten(0, 1)
        queries = (blocks * BLOCK + index(BLOCK, device)).expand(b, -1, -1)
        seen = _near(where[:, :, None], queries[..., None], window).flatten(0, 1)
    else:
        where = first[..., None] + index(WINDOW, device)
        seen = _near(where, places[..., None], window).flatten(0, 1)
        if not lone:
            order, back, last = _shared(given, first, exactness.queries)
            tail, seen, order = (_along(given, where) + rows).flatten(0, 1)[last], seen[order], order.flatten()
        elif given.level and start(given.prefix) + WINDOW <= capacity:
            tail, seen = places.new_empty(1).expand(start(given.prefix)), seen[:, None]
        else:
            tail, seen = (where.minimum(given.lengths[:, None, None]) + rows).flatten(0, 1), seen[:, None]
    made = Plan(tail, _additive(seen, dtype)[:, None], places.new_empty(1).expand(extent), order=order, back=back)
    made.lead, made.lone, made.queries = lead, lone, Queries(exactness.queries, exactness.multiple)
    if extent:
        least = start(given.least)
        cut = window is not None and given.bound >= window
        count = index(extent, device)
        if cut or least < extent or not given.chunk:  # of trees always, so that one recording does for all
            visible = (count < first[..., None]) & _near(count, places[..., None], window)
            made.hides = _additive(visible, dtype)[:, None]
        ragged = not given.level and not given.chunk  # where some rows have a head and others none for long
        if cut or least == 0 or ragged:
            made.empty = _additive(
                starts(places) > (0 if window is None else (places - window + 1).clamp(min=0)), torch.float
            )
            made.empty = made.empty[..., None, None]
        deep = not given.chunk and given.bound - given.prefix > BLOCK
        made.rare = deep or (made.empty is not None and not ragged)
        if deep:
            made.far = (_along(given, count.expand(*places.shape, -1)) + rows).flatten(0, 1)
    return made


def _shared(given: Pass, first: Int[Tensor, "b m"], least: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which nodes share a tail: those on the way to one leaf whose tails begin at one place. What one of them does not
    see is hidden from it, and the kernel has fewer and larger products.

    Returns:
        order [k, share]: the nodes of each tail, counted over the batch, its last one repeated up to a multiple of
            `least`, so that the kernel has its rows whatever the number of heads.
        back [bm]: where each node stands in it.
        last [k]: the deepest node of each tail, on whose path all the others lie.
    """
    (b, m), device = first.shape, first.device
    assert given.ancestors is not None
    own = given.ancestors[:, given.since :, given.since :].expand(b, -1, -1)
    real = own.diagonal(dim1=1, dim2=2)  # added nodes see the root alone: they stand beside the first one
    leaf = (own.sum(1) == 1) & real
    way = (own & leaf[..., None]).int().argmax(1)  # of each node: the first leaf below it
    way = torch.where(real, way, way[:, :1])
    same = (way[..., None] == way[:, None]) & (first[..., None] == first[:, None])
    rank, deepest = same.tril(-1).sum(2), torch.where(same, given.places[:, None] * 2 + real[:, None], -1).argmax(2)
    lone = rank == 0  # the first of each
    place = (lone.flatten().cumsum(0) - 1).view(b, m).gather(1, same.int().argmax(2)).flatten()
    rows = (index(b, device) * m)[:, None]
    last = (deepest + rows)[lone]
    share = (int(rank.max()) // least + 1) * least
    order = last[:, None].repeat(1, share)
    order[place, rank.flatten()] = index(b * m, device)
    return order, place * share + rank.flatten(), last


def _near(keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _along(given: Pass, where: Int[Tensor, "b m w"]) -> Int[Tensor, "b m w"]:
    """The slots, in its row, of these positions on each node's own path; beyond the node, those of any ancestor."""
    lengths = given.lengths[:, None, None]
    assert given.ancestors is not None
    b, n = given.spots.shape
    own = given.ancestors[:, given.since :].expand(b, -1, -1)
    depths = given.spots - given.lengths[:, None]
    table = torch.zeros(b, own.shape[1], given.bound - given.prefix + 1, dtype=torch.long, device=where.device)
    table.scatter_add_(2, depths[:, None].expand_as(own), own * index(n, where.device))
    depth = where - lengths
    node = table.gather(2, depth.clamp(min=0).minimum(depths[:, given.since :, None]))
    return torch.where(depth < 0, where, node + lengths)


@contextmanager
def in_blocks(layers: Sequence[tuple[Any, int]], rows: int) -> Iterator[None]:
    """While a pass of so many rows runs: layers whose kernel changes at some size read fewer rows at a time."""
    bound = [module for module, most in layers if rows > most]
    for module, most in layers:
        if rows > most:
            module.forward = _blocked(module.forward, most)
    try:
        yield
    finally:
        for module in bound:
            del module.forward


def _blocked(forward: Callable[..., Any], most: int) -> Callable[..., Any]:
    def blocks(x: Tensor, *more: Tensor) -> Any:
        flat = x.flatten(end_dim=-2)
        count = -(-int(flat.shape[0]) // most)
        if count == 1:
            return forward(x, *more)
        parts = [forward(*part) for part in zip(*(t.chunk(count) for t in (flat, *more)), strict=True)]
        if isinstance(parts[0], tuple):  # a mixture's router
            return tuple(torch.cat(several) for several in zip(*parts, strict=True))
        return torch.cat(parts).unflatten(0, x.shape[:-1])

    return blocks
