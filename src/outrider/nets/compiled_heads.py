"""Medusa's heads in compiled code: their blocks, the head that they share and the best tree of their candidates in one
call (`native/heads.h`)."""

from __future__ import annotations

from threading import Lock
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from ..backends.native.abi import Library, Struct, address, struct
from ..backends.native.arrays import addresses
from ..backends.native.blocks import for_drafts
from ..backends.native.weights import STEP
from ..backends.native.workspace import Workspace
from ..core.types import Budget, DraftTree, Rows
from .lattice import Places, deepest, fit
from .wanted import Seconds, Shape, Wanted


class CompiledHeads:
    """x + SiLU(W_k x + b_k) for every head k, one LM head for all. Weights are rounded to eight bits where
    `for_drafts` does so."""

    def __init__(
        self,
        code: Library,
        blocks: Float[Tensor, "k h h"],
        bias: Float[Tensor, "k h"],
        head: Float[Tensor, "v h"],
        names: Int[Tensor, " v"] | None,
    ):
        self.call, self.names, self.dtype = code.draft_medusa, names, head.dtype
        kept: list[Any] = [bias.detach().float().flatten().clone()]

        def hold(weight: Tensor) -> Struct:
            kept.append(for_drafts(weight, code))
            return kept[-1].struct

        self.hidden, self.columns = head.shape[1], len(head)
        self.model = struct("Model", hidden=self.hidden, vocab=self.columns, head=hold(head))
        self.heads = struct("MedusaHeads", blocks=hold(blocks.flatten(0, 1).contiguous()), bias=address(kept[0]))
        self.lattice, self.pass_, self.draft = struct("Lattice"), struct("Pass"), struct("Draft")
        self.kept, self.lock, self.workspace, self.seconds = kept, Lock(), Workspace(code, self.model), Seconds()
        self.places = Places(0, 0, 0, 0, 0)

    def grow(self, features: Float[Tensor, "b h"], rows: Rows, budget: Budget, shape: Shape) -> DraftTree:
        """The best tree of the first `shape.depth` heads for every row, by the budget's floor and price.

        Args:
            features: of each row's last committed token, after the target's final norm.
        """
        b, features = len(rows), features.to(self.dtype).contiguous()
        with self.lock:
            wanted = Wanted(rows, budget, shape, self.columns, self.seconds, self.workspace)
            places = Places(b, shape.depth, 1, shape.nodes, wanted.most)
            if places.both(self.places) != self.places:
                self._fit(places.both(self.places))
            step = self.hidden * features.element_size()
            vectors = addresses(features.data_ptr() + i * step for i in range(b))
            pass_, draft, depths = self.pass_, self.draft, deepest(rows, shape.depth)
            pass_.rows, self.lattice.max_depths = b, depths
            self.workspace.use_threads(pass_, self.places.rows * self.places.slots)
            draft.max_candidates, draft.features = shape.nodes, vectors
            for name, value in wanted.told.items():
                setattr(draft, name, value)
            self.call(self.model, self.heads, self.lattice, pass_, draft)
            return wanted.tree(draft.widest)

    def _fit(self, places: Places) -> None:
        """Make structures with room for this; they are kept from call to call."""
        self.places, room, together = places, self.workspace, places.rows * places.slots
        self.heads.output = address(room.of("blocks", together * self.hidden))
        logits = address(room.of("logits", together * self.columns))
        self.pass_ = struct("Pass", logits=logits, **room.of_pass(together, 1))
        self.draft = struct("Draft", **fit(room, self.lattice, places, self.names))


def compiled_heads(
    code: Library,
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
