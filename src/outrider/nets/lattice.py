"""What compiled drafters of one pass share: the structures of a call that grows the best trees of a lattice
(`native/lattice.h`), as `drafters/_lattice.py` finds them in tensors."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..core.noise import MASK64
from ..core.sampling import POOL, POOLED
from ..native.parts import BlockPart, Room
from ..types import Budget, DraftTree, Price, Rows
from .grown import KNOTS, SLOPES, Shape

LISTS = "token", "below", "level", "chosen"  # of all nodes


@dataclass(frozen=True)
class Places:
    """How much room a call needs: rows of the batch; of a row the slots that are read, the positions that wait, the
    tree's nodes and the candidates of a slot."""

    rows: int = 1
    slots: int = 1
    waits: int = 1
    nodes: int = 1
    most: int = 1

    def both(self, other: Places) -> Places:
        """Room for either."""
        return Places(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


class Seconds:
    """The times of a price as the code reads them, kept while the price is the same."""

    def __init__(self) -> None:
        self.price: Price | None = None
        self.held: Any = (ctypes.c_double * 1)()

    def of(self, price: Price | None) -> int:
        """Their address."""
        if price is not None and self.price is not price:
            self.price, self.held = price, (ctypes.c_double * len(price.seconds))(*price.seconds)
        return ctypes.addressof(self.held)


class Wanted:
    """The trees that a call is asked for, one for every row: what the structure of the draft is told, and where the
    code writes.

    Args:
        rows: what is drafted for.
        budget: its floor and price cut the trees.
        shape: `depth` slots, `top_k` candidates of each, `nodes` at most.
        columns: tokens that can be drafted.
        seconds: of the budget's price.
    """

    def __init__(self, rows: Rows, budget: Budget, shape: Shape, columns: int, seconds: Seconds):
        nodes, depth, b, price = shape.nodes, shape.depth, len(rows), budget.price
        most = min(shape.top_k, columns)
        with torch.inference_mode(False):
            self.found, self.worth = torch.empty(b * (3 * nodes + 1), dtype=torch.long), torch.empty(b * nodes)
            self.sees = torch.empty(b * nodes * nodes, dtype=torch.bool)
        self.rows, self.nodes, self.depth, self.most = b, nodes, depth, most
        root, size = rows.root.contiguous(), self.found.data_ptr()
        heats = (ctypes.c_float * b)(*(s.temperature for s in rows.sampling))
        seeds = (ctypes.c_uint64 * b)(*(seed & MASK64 for seed in rows.seeds))
        starts, deepest = (ctypes.c_int64 * b)(*rows.start), (ctypes.c_int64 * b)()
        deepest[:] = [min(depth, remaining - 1) for remaining in rows.remaining]
        self.deepest, self.kept = ctypes.addressof(deepest), (root, heats, seeds, starts, deepest)
        self.told: dict[str, Any] = {
            "root": root.data_ptr(), "nodes": nodes, "candidates": nodes, "most": most, "scale": shape.scale,
            "pool": max(POOL, most) if columns > POOLED else columns,
            "floor": math.log(budget.floor) if budget.floor > 0 else -math.inf, "trust": price.trust if price else 1.0,
            "sizes": len(price.seconds) if price else 0, "summed": int(price.summed) if price else 0,
            "seconds": seconds.of(price),
            "temperature": ctypes.addressof(heats), "starts": ctypes.addressof(starts),
            "seeds": ctypes.addressof(seeds) if rows.rule == "coupled" and rows.hot else None,
            "size": size, "values": self.worth.data_ptr(), "sees": self.sees.data_ptr(),
            **{name: size + 8 * b * (1 + i * nodes) for i, name in enumerate(("tokens", "parents", "depths"))},
        }  # fmt: skip

    def tree(self, n: int) -> DraftTree:
        """What the code wrote, n nodes in the widest row."""
        b, found = self.rows, self.found
        tokens, parents, depths = (found[b * (1 + i * self.nodes) :][: b * n].view(b, n) for i in range(3))
        seen, values = self.sees[: b * n * n].view(b, n, n), self.worth[: b * n].view(b, n)
        return DraftTree(tokens, parents, depths, found[:b], seen, self.depth, values)


def fit(room: Room, block: BlockPart, places: Places, columns: int, names: Tensor | None) -> dict[str, Any]:
    """Room for the trees of calls up to this size: `block` is told of its own, the rest is for the draft."""
    b, slots, nodes, most = places.rows, places.slots, places.nodes, places.most
    pool = max(POOL, most) if columns > POOLED else columns
    for name, size, dtype in (
        ("columns", slots, torch.long), ("confidences", slots, torch.float32),
        ("logs", nodes, torch.float32), ("order", nodes, torch.long),
    ):  # fmt: skip
        setattr(block, name, room.of(name, b * size * most, dtype).data_ptr())
    return {
        "names": None if names is None else names.data_ptr(), "knots": KNOTS.data_ptr(), "slopes": SLOPES.data_ptr(),
        "value": room.of("value", b * nodes).data_ptr(), "raced": room.of("raced", b * slots * pool).data_ptr(),
        **room.cut("nodes", torch.long, **dict.fromkeys(LISTS, b * nodes)),
    }  # fmt: skip
