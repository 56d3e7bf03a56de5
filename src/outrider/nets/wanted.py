"""The trees that compiled drafters are asked for: what their calls are told, and where they write."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch

from ..core.noise import MASK64, tables
from ..core.sampling import POOL, POOLED
from ..types import Budget, DraftTree, Price, Rows

KNOTS, SLOPES = tables()


@dataclass(frozen=True)
class Shape:
    """Of a tree: `depth` layers, the `width` best nodes of each are fed, at most `nodes` are kept, the root included;
    `top_k` candidates below a node, confidences softmax(r / scale)."""

    depth: int
    width: int
    nodes: int
    top_k: int
    scale: float


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
    """The trees that a call is asked for, one for every row. `told` is what the structure of the draft is told.

    Args:
        rows: what is drafted for.
        budget: its floor, reach and price cut the trees.
        shape: of every tree.
        columns: tokens that can be drafted.
        seconds: of the budget's price.
    """

    def __init__(self, rows: Rows, budget: Budget, shape: Shape, columns: int, seconds: Seconds):
        nodes, b, price = shape.nodes, len(rows), budget.price
        with torch.inference_mode(False):
            self.found, self.worth = torch.empty(b * (3 * nodes + 1), dtype=torch.long), torch.empty(b * nodes)
            self.sees = torch.empty(b * nodes * nodes, dtype=torch.bool)
        self.rows, self.nodes, self.depth, self.most = b, nodes, shape.depth, min(shape.top_k, columns)
        root, size = rows.root.contiguous(), self.found.data_ptr()
        heats = (ctypes.c_float * b)(*(s.temperature for s in rows.sampling))
        seeds = (ctypes.c_uint64 * b)(*(seed & MASK64 for seed in rows.seeds))
        starts = (ctypes.c_int64 * b)(*rows.start)
        self.kept = root, heats, seeds, starts
        self.told: dict[str, Any] = {
            "root": root.data_ptr(), "depth": shape.depth, "width": shape.width, "nodes": nodes, "most": self.most,
            "scale": shape.scale, "pool": pooled(columns, self.most),
            "floor": _log(budget.floor), "reach": _log(budget.reach), "trust": price.trust if price else 1.0,
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


def pooled(columns: int, most: int) -> int:
    """How many of the likeliest tokens race where there is noise."""
    return max(POOL, most) if columns > POOLED else columns


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
