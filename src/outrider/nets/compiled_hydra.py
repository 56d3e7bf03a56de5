"""Hydra's heads in compiled code: the whole tree in one call, a head for each of its layers (`c/hydra.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..backends.native.abi import Library, Pointer, Struct, address, ffi, struct
from ..backends.native.arrays import addresses
from ..backends.native.blocks import for_drafts
from ..backends.native.weights import STEP
from ..backends.native.workspace import Workspace
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
        code: Library,
        heads: Sequence[HeadParts],
        embeddings: Float[Tensor, "t h"],
        names: Int[Tensor, " v"] | None,
    ):
        self.call, self.names, self.embeddings = code.draft_hydra, names, embeddings
        kept: list[Any] = []

        def hold(weight: Tensor) -> Struct:
            kept.append(for_drafts(weight, code))
            return kept[-1].struct

        def small(values: Tensor) -> Pointer:
            kept.append(values.detach().float().clone())
            return address(kept[-1])

        self.columns, self.hidden = heads[0].head.shape
        inputs = (len(heads) + 1) * self.hidden
        self.model = struct("Model", hidden=self.hidden, vocab=self.columns, input_dim=inputs)
        self.heads = ffi.new("HydraHead[]", len(heads))
        for part, own in zip(self.heads, heads, strict=True):
            part.block, part.head = hold(own.block), hold(own.head)
            part.bias, part.head_bias = small(own.bias), small(own.shift)
        self.kept, self.lock, self.workspace, self.seconds = kept, Lock(), Workspace(code, self.model), Seconds()
        self.places, self.pass_, self.draft = Places(), struct("Pass"), struct("Draft")

    def grow(self, features: Float[Tensor, "b h"], rows: Rows, budget: Budget, shape: Shape) -> DraftTree:
        """A tree for every row, of no more layers than there are heads.

        Args:
            features: of each row's last committed token, after the target's final norm or Hydra++'s layer.
        """
        b, features = len(rows), features.to(self.embeddings.dtype).contiguous()
        with self.lock:
            wanted = Wanted(rows, budget, shape, self.columns, self.seconds, self.workspace)
            fed = (shape.depth - 1) * shape.width
            places = Places(b, max(1, fed), 1 + wanted.most * (1 + fed), shape.width).both(self.places)
            if places != self.places:
                self._fit(places)
            step = self.hidden * features.element_size()
            vectors = addresses(features.data_ptr() + i * step for i in range(b))
            self.pass_.rows = b
            self.workspace.use_threads(self.pass_, self.places.rows * self.places.width)
            self.draft.features = vectors
            for name, value in wanted.told.items():
                setattr(self.draft, name, value)
            residual = address(self.workspace.buffers["blocks"])
            self.call(self.model, self.heads, residual, self.pass_, self.draft)
            return wanted.tree(self.draft.widest)

    def _fit(self, places: Places) -> None:
        """Make structures with room for this; they are kept from call to call."""
        self.places, room, b = places, self.workspace, places.rows
        together, candidates = b * places.width, b * places.candidates
        room.of("blocks", together * 2 * self.hidden)
        logits = address(room.of("logits", together * self.columns))
        self.pass_ = struct("Pass", logits=logits, **room.of_pass(together, 1))
        self.draft = struct(
            "Draft", embeddings=address(self.embeddings), embedding_rows=len(self.embeddings),
            token_ids=address(self.names), knots=address(KNOTS), slopes=address(SLOPES),
            max_candidates=places.candidates, fed_candidate=address(room.of("fed", b * places.fed, torch.long)),
            **room.split("candidates", torch.long, **dict.fromkeys(LISTS, candidates)),
            value=address(room.of("value", candidates)),
        )  # fmt: skip


def compiled_hydra(
    code: Library,
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
