"""The trees that compiled drafters are asked for: what their calls are told, and where they write."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.native.abi import NULL, Pointer, address
from ..backends.native.arrays import doubles, floats, integers, seeds
from ..backends.native.workspace import Workspace, fresh
from ..core.noise import tables
from ..core.price import Price
from ..core.sampling import POOL, POOLED
from ..core.types import Budget, DraftTree, Rows

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
        self.held: Any = doubles([0])

    def of(self, price: Price | None) -> Any:
        """A C array of them."""
        if price is not None and self.price is not price:
            self.price, self.held = price, doubles(price.seconds)
        return self.held


class Wanted:
    """The trees that a call is asked for, one for every row. `told` is what the structure of the draft is told.

    Args:
        rows: what is drafted for.
        budget: its floor, reach and price cut the trees.
        shape: of every tree.
        columns: tokens that can be drafted.
        seconds: of the budget's price.
        room: the workspace, used during the call.
    """

    def __init__(self, rows: Rows, budget: Budget, shape: Shape, columns: int, seconds: Seconds, room: Workspace):
        nodes, b, price = shape.nodes, len(rows), budget.price
        with torch.inference_mode(False):
            self.found = fresh(4, b * nodes)  # tokens, parents, depths; of each row its size
            self.worth, self.sees = torch.empty(b * nodes), torch.empty(b * nodes * nodes, dtype=torch.bool)
        self.rows, self.depth, self.most = b, shape.depth, min(shape.top_k, columns)
        root, heats = rows.root.contiguous(), floats(s.temperature for s in rows.sampling)
        keys, starts = seeds(rows.seeds), integers(rows.start)
        self.kept = root, heats, keys, starts
        pool = pooled(columns, self.most)
        self.told: dict[str, Any] = {
            "roots": address(root), "depth": shape.depth, "width": shape.width, "max_nodes": nodes, "top_k": self.most,
            "scale": shape.scale, "pool": pool,
            "floor": _log(budget.floor), "reach": _log(budget.reach), "trust": price.trust if price else 1.0,
            "max_priced": len(price.seconds) if price else 0, "price_total": int(price.summed) if price else 0,
            "seconds": seconds.of(price), "temperature": heats, "start_positions": starts,
            "seeds": keys if rows.rule == "coupled" and rows.hot else NULL,
            "values": address(self.worth), "visible": address(self.sees),
            **dict(zip(("tokens", "parents", "depths", "size"), map(address, self.found), strict=True)),
            **workspace(room, b, shape, self.most, pool),
        }  # fmt: skip

    def tree(self, n: int) -> DraftTree:
        """What the code wrote, n nodes in the widest row."""
        b = self.rows
        tokens, parents, depths = (part[: b * n].view(b, n) for part in self.found[:3])
        seen, values = self.sees[: b * n * n].view(b, n, n), self.worth[: b * n].view(b, n)
        return DraftTree(tokens, parents, depths, self.found[3][:b], seen, self.depth, values)


def workspace(room: Workspace, rows: int, shape: Shape, most: int, pool: int) -> dict[str, Pointer]:
    """What the code works in while it ranks and keeps candidates, `most` below a node, of `pool` that race."""
    items, nodes, wide = rows * max(shape.depth, shape.width), rows * shape.nodes, max(shape.nodes, shape.width)
    candidates = max(shape.nodes, 1 + most * (1 + (shape.depth - 1) * shape.width))
    return {
        **room.split(
            "ranks", torch.float32, noisy=items * pool, top_values=items * (pool + most),
            all_values=nodes, sorted_values=nodes, best_values=wide,
        ),
        **room.split(
            "places", torch.long, top_columns=items * (pool + most), order=nodes, new_index=candidates, ends=rows
        ),
        "gains": address(room.of("gains", nodes, torch.float64)),
    }  # fmt: skip


def pooled(columns: int, most: int) -> int:
    """How many of the likeliest tokens race where there is noise."""
    return max(POOL, most) if columns > POOLED else columns


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
