"""What compiled drafters of one pass share: the structures of a call that grows the best trees of a lattice
(`native/lattice.h`), as `drafters/_lattice.py` finds them in tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..backends.native.arrays import integers
from ..backends.native.parts import BlockPart, Room
from ..core.types import Rows
from .wanted import KNOTS, SLOPES

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


def deepest(rows: Rows, depth: int) -> Any:
    """How deep the tree of each row may go, as the code reads it."""
    return integers(min(depth, remaining - 1) for remaining in rows.remaining)


def fit(room: Room, block: BlockPart, places: Places, names: Tensor | None) -> dict[str, Any]:
    """Room for the trees of calls up to this size: `block` is told of its own, the rest is for the draft."""
    b, slots, nodes, most = places.rows, places.slots, places.nodes, places.most
    for name, size, dtype in (
        ("columns", slots, torch.long), ("confidences", slots, torch.float32),
        ("logs", nodes, torch.float32), ("order", nodes, torch.long),
    ):  # fmt: skip
        setattr(block, name, room.of(name, b * size * most, dtype).data_ptr())
    for name, dtype in (("next", torch.long), ("value", torch.float64)):
        setattr(block, name, room.of(f"of a lattice: {name}", b * nodes, dtype).data_ptr())
    return {
        "names": None if names is None else names.data_ptr(), "knots": KNOTS.data_ptr(), "slopes": SLOPES.data_ptr(),
        "value": room.of("value", b * nodes).data_ptr(),
        **room.cut("nodes", torch.long, **dict.fromkeys(LISTS, b * nodes)),
    }  # fmt: skip
