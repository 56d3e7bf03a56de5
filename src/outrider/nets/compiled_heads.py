"""Medusa's heads in compiled code: their blocks, the head that they share and the best tree of their candidates in one
call (`native/heads.h`)."""

from __future__ import annotations

import ctypes
from threading import Lock
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from ..backends.native.arrays import addresses
from ..backends.native.blocks import for_drafts
from ..backends.native.parts import BlockPart, DraftPart, HeadsPart, MatrixPart, ModelPart, PassPart, Room
from ..backends.native.weights import STEP
from ..core.types import Budget, DraftTree, Rows
from .lattice import Places, deepest, fit
from .wanted import Seconds, Shape, Wanted


class CompiledHeads:
    """x + SiLU(W_k x + b_k) for every head k, one LM head for all. Weights are rounded to eight bits where
    `for_drafts` does so."""

    def __init__(
        self,
        code: ctypes.CDLL,
        blocks: Float[Tensor, "k h h"],
        bias: Float[Tensor, "k h"],
        head: Float[Tensor, "v h"],
        names: Int[Tensor, " v"] | None,
    ):
        self.call, self.names, self.dtype = code.draft_heads, names, head.dtype
        self.call.restype, self.call.argtypes = None, [ctypes.c_void_p] * 5
        kept: list[Any] = [bias.detach().float().flatten().clone()]

        def hold(weight: Tensor) -> MatrixPart:
            kept.append(for_drafts(weight, code))
            part: MatrixPart = kept[-1].part
            return part

        self.hidden, self.columns = head.shape[1], len(head)
        self.model = ModelPart(hidden=self.hidden, vocabulary=self.columns, head=hold(head))
        self.heads = HeadsPart(blocks=hold(blocks.flatten(0, 1).contiguous()), bias=kept[0].data_ptr())
        self.block, self.asks, self.wants = BlockPart(), PassPart(), DraftPart()
        self.kept, self.lock, self.room, self.seconds = kept, Lock(), Room(code, self.model), Seconds()
        self.places = Places(0, 0, 0, 0, 0)

    def grow(self, features: Float[Tensor, "b h"], rows: Rows, budget: Budget, shape: Shape) -> DraftTree:
        """The best tree of the first `shape.depth` heads for every row, by the budget's floor and price.

        Args:
            features: of each row's last committed token, after the target's final norm.
        """
        b, features = len(rows), features.to(self.dtype).contiguous()
        with self.lock:
            wanted = Wanted(rows, budget, shape, self.columns, self.seconds, self.room)
            places = Places(b, shape.depth, 1, shape.nodes, wanted.most)
            if places.both(self.places) != self.places:
                self._fit(places.both(self.places))
            step = self.hidden * features.element_size()
            vectors = addresses(features.data_ptr() + i * step for i in range(b))
            asks, wants, depths = self.asks, self.wants, deepest(rows, shape.depth)
            asks.rows, self.block.deepest = b, ctypes.addressof(depths)
            self.room.hire(asks, self.places.rows * self.places.slots)
            wants.candidates, wants.features = shape.nodes, ctypes.addressof(vectors)
            for name, value in wanted.told.items():
                setattr(wants, name, value)
            self.call(*map(ctypes.byref, (self.model, self.heads, self.block, asks, wants)))
            return wanted.tree(int(wants.kept))

    def _fit(self, places: Places) -> None:
        """Make structures with room for this; they are kept from call to call."""
        self.places, room, together = places, self.room, places.rows * places.slots
        self.heads.made = room.of("blocks", together * self.hidden).data_ptr()
        logits = room.of("logits", together * self.columns).data_ptr()
        self.asks = PassPart(logits=logits, **room.addresses(together, 1))
        self.wants = DraftPart(**fit(room, self.block, places, self.names))


def compiled_heads(
    code: ctypes.CDLL,
    blocks: Float[Tensor, "k h h"],
    bias: Float[Tensor, "k h"],
    head: Tensor | None,
    names: Int[Tensor, " v"] | None,
) -> CompiledHeads | None:
    """The heads in compiled code; None where the code does not know such heads.

    Args:
        code: of `nets/compiled.py: code_for`.
        blocks, bias: of every head's one residual block, [outputs, inputs] each.
        head: the rows of the LM head that all share, without a bias.
        names: token ids of its rows.
    """
    if head is None or head.dtype != blocks.dtype:
        return None
    if head.device.type != "cpu" or head.shape[1] % STEP:
        return None
    return CompiledHeads(code, blocks, bias, head.contiguous(), names)
