"""The coupled rule in compiled code: a batch's walks down its trees in one call, with `core/verify.py`'s results.

Between two passes every operation on tensors finds the processor's caches cold, so few of them matter more than fast
ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.changes import Changes
from ..core.noise import MASK64, tables
from ..native.parts import WalkPart, address, real, whole
from ..types import DraftTree, Rows, Sampling, Verdict

KNOTS, SLOPES = tables()


class Laws:
    """What the code is told of the rows' laws alone: a structure to be copied, and the arrays that it points to."""

    def __init__(self, laws: Sequence[Sampling]):
        b, self.laws = len(laws), laws
        self.kept: list[Any] = [
            (real * b)(*(s.temperature for s in laws)), (whole * b)(*(s.top_k for s in laws)),
            (ctypes.c_double * b)(*(s.top_p for s in laws)), (ctypes.c_double * b)(*(s.min_p for s in laws)),
        ]  # fmt: skip
        places = zip(("temperature", "top_k", "top_p", "min_p"), map(ctypes.addressof, self.kept), strict=True)
        self.part = WalkPart(rows=b, knots=KNOTS.data_ptr(), slopes=SLOPES.data_ptr(), **dict(places))


class Walk:
    """`walk(rows, tree, logits)`."""

    def __init__(self, code: ctypes.CDLL):
        self.call, self.laws = code.follow, Laws(())
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
        (b, n, v), depth, laws = logits.shape, tree.deepest, self.laws
        if laws.laws != rows.sampling:
            laws = self.laws = Laws(rows.sampling)
        tokens, parents, sizes = (part.contiguous() for part in (tree.tokens, tree.parents, tree.size))
        found = torch.empty(b, depth + 4, dtype=torch.long)
        kept: list[Any] = []  # as long as the call

        def row_by_row(kind: Any, values: Iterable[Any]) -> int:
            kept.append((kind * b)(*values))
            return ctypes.addressof(kept[-1])

        asks = WalkPart.from_buffer_copy(laws.part)
        asks.nodes, asks.depth, asks.vocabulary = n, depth, v
        asks.logits, asks.found = logits.data_ptr(), found.data_ptr()
        asks.tokens, asks.parents, asks.sizes = tokens.data_ptr(), parents.data_ptr(), sizes.data_ptr()
        asks.seeds = row_by_row(ctypes.c_uint64, (seed & MASK64 for seed in rows.seeds))
        asks.starts, asks.threads = row_by_row(whole, rows.start), min(b, torch.get_num_threads())
        if any(changes):
            asks.changes = row_by_row(whole, (len(c) if c else 0 for c in changes))
            asks.penalised = row_by_row(whole, (s.penalised for s in rows.sampling))
            for field, name in (("changed", "ids"), ("said", "said"), ("factors", "factors"), ("biases", "biases")):
                arrays = (getattr(c, name).ctypes.data if c else None for c in changes)
                setattr(asks, field, row_by_row(address, arrays))
            for name in ("repetition", "presence", "frequency"):
                setattr(asks, name, row_by_row(real, (getattr(s, f"{name}_penalty") for s in rows.sampling)))
        self.call(ctypes.byref(asks))
        host = found.tolist()
        if not all(row[0] for row in host):
            return None
        verdict = Verdict(found[:, 3:], found[:, 0], found[:, 1], [bool(row[2]) for row in host])
        verdict.__dict__["host"] = [(row[3 : 3 + row[0]], row[1]) for row in host]  # known already
        return verdict
