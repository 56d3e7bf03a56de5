"""What compiled drafters of one pass share: the structures of a call that grows the best trees of a lattice
(`native/lattice.h`), as `drafters/_lattice.py` finds them in tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..backends.native.abi import Pointer, Struct, address
from ..backends.native.arrays import integers
from ..backends.native.workspace import Workspace
from ..core.types import Rows
from .wanted import KNOTS, SLOPES

LISTS = "token", "parent", "level", "chosen"  # of all nodes


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


def deepest(rows: Rows, depth: int) -> Any:
    """How deep the tree of each row may go, as the code reads it."""
    return integers(min(depth, remaining - 1) for remaining in rows.remaining)


def fit(room: Workspace, block: Struct, places: Places, names: Tensor | None) -> dict[str, Pointer]:
    """Room for the trees of calls up to this size: `block` is told of its own, the rest is for the draft."""
    b, slots, nodes, most = places.rows, places.slots, places.nodes, places.most
    for name, size, dtype in (
        ("columns", slots, torch.long), ("confidences", slots, torch.float32),
        ("logs", nodes, torch.float32), ("order", nodes, torch.long),
    ):  # fmt: skip
        setattr(block, name, address(room.of(name, b * size * most, dtype)))
    for name, dtype in (("next", torch.long), ("value", torch.float64)):
        setattr(block, name, address(room.of(f"of a lattice: {name}", b * nodes, dtype)))
    return {
        "token_ids": address(names), "knots": address(KNOTS), "slopes": address(SLOPES),
        "value": address(room.of("value", b * nodes)),
        **room.split("nodes", torch.long, **dict.fromkeys(LISTS, b * nodes)),
    }  # fmt: skip
