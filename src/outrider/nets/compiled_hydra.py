"""Hydra's heads in compiled code: the whole tree in one call, a head for each of its layers (`native/hydra.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..backends.native.arrays import addresses
from ..backends.native.blocks import for_drafts
from ..backends.native.parts import DraftPart, HydraPart, MatrixPart, ModelPart, PassPart, Room
from ..backends.native.weights import STEP
from ..core.types import Budget, DraftTree, Rows
from .grown import LISTS, Places
from .wanted import KNOTS, SLOPES, Seconds, Shape, Wanted


@dataclass(frozen=True)
class HeadParts:
    """A head's first block, the map that is kept above the one behind SiLU, and its LM head."""

    block: Float[Tensor, "h2 reads"]
    bias: Float[Tensor, " h2"]
    head: Float[Tensor, "v h"]
    shift: Float[Tensor, " v"]


class CompiledHydra:
    """Every head: R x + SiLU(W x + b) of the feature and a path's embeddings, and logits of that. Weights are rounded
    to eight bits where `for_drafts` does so."""

    def __init__(
        self,
        code: ctypes.CDLL,
        heads: Sequence[HeadParts],
        embeddings: Float[Tensor, "t h"],
        names: Int[Tensor, " v"] | None,
    ):
        self.call, self.names, self.embeddings = code.draft_hydra, names, embeddings
        self.call.restype, self.call.argtypes = None, [ctypes.c_void_p] * 5
        kept: list[Any] = []

        def hold(weight: Tensor) -> MatrixPart:
            kept.append(for_drafts(weight, code))
            part: MatrixPart = kept[-1].part
            return part

        def small(numbers: Tensor) -> int:
            kept.append(numbers.detach().float().clone())
            return int(kept[-1].data_ptr())

        self.columns, self.hidden = heads[0].head.shape
        self.model = ModelPart(hidden=self.hidden, vocabulary=self.columns, joined=(len(heads) + 1) * self.hidden)
        self.heads = (HydraPart * len(heads))()
        for part, own in zip(self.heads, heads, strict=True):
            part.block, part.head = hold(own.block), hold(own.head)
            part.bias, part.shift = small(own.bias), small(own.shift)
        self.kept, self.lock, self.room, self.seconds = kept, Lock(), Room(code, self.model), Seconds()
        self.places, self.asks, self.wants = Places(), PassPart(), DraftPart()

    def grow(self, features: Float[Tensor, "b h"], rows: Rows, budget: Budget, shape: Shape) -> DraftTree:
        """A tree for every row, of no more layers than there are heads.

        Args:
            features: of each row's last committed token, after the target's final norm or Hydra++'s layer.
        """
        b, features = len(rows), features.to(self.embeddings.dtype).contiguous()
        with self.lock:
            wanted = Wanted(rows, budget, shape, self.columns, self.seconds, self.room)
            fed = (shape.depth - 1) * shape.width
            places = Places(b, max(1, fed), 1 + wanted.most * (1 + fed), shape.width).both(self.places)
            if places != self.places:
                self._fit(places)
            step = self.hidden * features.element_size()
            vectors = addresses(features.data_ptr() + i * step for i in range(b))
            self.asks.rows = b
            self.room.hire(self.asks, self.places.rows * self.places.width)
            self.wants.features = ctypes.addressof(vectors)
            for name, value in wanted.told.items():
                setattr(self.wants, name, value)
            made = self.room.held["blocks"].data_ptr()
            self.call(ctypes.byref(self.model), self.heads, made, ctypes.byref(self.asks), ctypes.byref(self.wants))
            return wanted.tree(int(self.wants.kept))

    def _fit(self, places: Places) -> None:
        """Make structures with room for this; they are kept from call to call."""
        self.places, room, b = places, self.room, places.rows
        together, candidates = b * places.width, b * places.candidates
        room.of("blocks", together * 2 * self.hidden)
        logits = room.of("logits", together * self.columns).data_ptr()
        self.asks = PassPart(logits=logits, **room.addresses(together, 1))
        self.wants = DraftPart(
            embeddings=self.embeddings.data_ptr(), entries=len(self.embeddings),
            names=None if self.names is None else self.names.data_ptr(),
            knots=KNOTS.data_ptr(), slopes=SLOPES.data_ptr(), candidates=places.candidates,
            place=room.of("place", b * places.fed, torch.long).data_ptr(),
            **room.cut("candidates", torch.long, **dict.fromkeys(LISTS, candidates)),
            value=room.of("value", candidates).data_ptr(),
        )  # fmt: skip


def compiled_hydra(
    code: ctypes.CDLL,
    heads: Sequence[HeadParts],
    embeddings: Float[Tensor, "t h"] | None,
    names: Int[Tensor, " v"] | None,
) -> CompiledHydra | None:
    """The heads in compiled code; None where the code does not know such heads.

    Args:
        code: of `nets/compiled.py: code_for`.
        embeddings: of the target's tokens, in the heads' precision.
        names: token ids of the heads' rows.
    """
    weight = heads[0].head
    if embeddings is None or embeddings.dtype != weight.dtype:
        return None
    if weight.device.type != "cpu" or weight.shape[1] % STEP:
        return None
    parts = [replace(own, block=own.block.contiguous(), head=own.head.contiguous()) for own in heads]
    return CompiledHydra(code, parts, embeddings, names)
