"""The coupled rule in compiled code: a batch's walks down its trees in one call, with `core/verify.py`'s results.

Between two passes every operation on tensors finds the processor's caches cold, so few of them matter more than fast
ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.changes import Changes
from ...core.noise import tables
from ...core.types import DraftTree, Rows, Verdict
from ...params import Sampling
from ..native.arrays import addresses, doubles, floats, integers, seeds
from ..native.parts import WalkPart

KNOTS, SLOPES = tables()
CHANGED = 24  # bytes of a token that a row's text changes: its id and four numbers


class Laws:
    """What the code is told of the rows' sampling alone: a structure to be copied, and the arrays that it points to."""

    def __init__(self, laws: Sequence[Sampling], vocabulary: int):
        self.laws, self.vocabulary = laws, vocabulary
        self.kept: list[Any] = [
            floats(s.temperature for s in laws), integers(min(s.top_k, vocabulary) for s in laws),
            doubles(s.top_p for s in laws), doubles(s.min_p for s in laws),
        ]  # fmt: skip
        places = zip(("temperature", "top_k", "top_p", "min_p"), map(ctypes.addressof, self.kept), strict=True)
        self.part = WalkPart(
            rows=len(laws), vocabulary=vocabulary, knots=KNOTS.data_ptr(), slopes=SLOPES.data_ptr(), **dict(places)
        )


class Walk:
    """`walk(rows, tree, logits)`."""

    def __init__(self, code: ctypes.CDLL):
        self.call, self.laws = code.follow, Laws((), 0)
        self.call.restype, self.call.argtypes = None, [ctypes.c_void_p]

    def __call__(
        self, rows: Rows, tree: DraftTree, logits: Tensor, changes: Sequence[Changes | None] = ()
    ) -> Verdict | None:
        """What is accepted of each row's tree.

        Args:
            rows: of the batch.
            tree: what was drafted.
            logits: [b, n, v], raw. Where `changes` has something for a row, they are written over while it is drawn.
            changes: [row]: what its text changes in them; of no row where there is none.

        Returns:
            None where logits are of another precision, or where rounding could decide what a filter (top-k, top-p,
            min-p) keeps: it is drawn in tensors then.
        """
        if logits.dtype != torch.float32 or not logits.is_contiguous():
            return None
        (b, n, v), laws = logits.shape, self.laws
        depth = min(tree.deepest, n - 1)
        if laws.laws != rows.sampling or laws.vocabulary != v:
            laws = self.laws = Laws(rows.sampling, v)
        tokens, parents, sizes = (part.contiguous() for part in (tree.tokens, tree.parents, tree.size))
        found = torch.empty(b, depth + 4, dtype=torch.long)
        kept: list[Any] = []  # as long as the call

        def keep(array: Any) -> int:
            kept.append(array)
            return ctypes.addressof(array)

        asks = WalkPart.from_buffer_copy(laws.part)
        asks.nodes, asks.depth = n, depth
        asks.logits, asks.found = logits.data_ptr(), found.data_ptr()
        asks.tokens, asks.parents, asks.sizes = tokens.data_ptr(), parents.data_ptr(), sizes.data_ptr()
        asks.seeds, asks.starts = keep(seeds(rows.seeds)), keep(integers(rows.start))
        asks.threads = min(b, torch.get_num_threads())
        if any(changes):
            counts = [len(c) if c else 0 for c in changes]
            asks.changes, asks.changeable = keep(integers(counts)), max(counts) + depth + 1
            kept.append(torch.empty(b * asks.changeable * CHANGED, dtype=torch.uint8))
            asks.scratch = kept[-1].data_ptr()
            asks.penalised = keep(integers(s.penalised for s in rows.sampling))
            for field, name in (("changed", "ids"), ("said", "said"), ("factors", "factors"), ("biases", "biases")):
                setattr(asks, field, keep(addresses(getattr(c, name).ctypes.data if c else None for c in changes)))
            for name in ("repetition", "presence", "frequency"):
                setattr(asks, name, keep(floats(getattr(s, f"{name}_penalty") for s in rows.sampling)))
        self.call(ctypes.byref(asks))
        host = found.tolist()
        if not all(row[0] for row in host):
            return None
        verdict = Verdict(found[:, 3:], found[:, 0], found[:, 1], [bool(row[2]) for row in host])
        verdict.__dict__["host"] = [(row[3 : 3 + row[0]], row[1]) for row in host]  # known already
        return verdict
