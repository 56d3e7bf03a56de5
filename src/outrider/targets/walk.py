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
from ..types import DraftTree, Rows, Verdict

KNOTS, SLOPES = tables()


class Walk:
    """`walk(rows, tree, logits)`."""

    def __init__(self, code: ctypes.CDLL):
        self.call = code.follow
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
        (b, n, v), depth, laws = logits.shape, tree.deepest, rows.sampling
        tokens, parents, sizes = (part.contiguous() for part in (tree.tokens, tree.parents, tree.size))
        found = torch.empty(b, depth + 4, dtype=torch.long)
        kept: list[Any] = []  # as long as the call

        def row_by_row(kind: Any, values: Iterable[Any]) -> int:
            kept.append((kind * b)(*values))
            return ctypes.addressof(kept[-1])

        asks = WalkPart(
            rows=b, nodes=n, depth=depth, vocabulary=v, logits=logits.data_ptr(), tokens=tokens.data_ptr(),
            parents=parents.data_ptr(), sizes=sizes.data_ptr(), knots=KNOTS.data_ptr(), slopes=SLOPES.data_ptr(),
            temperature=row_by_row(real, (s.temperature for s in laws)),
            top_k=row_by_row(whole, (s.top_k for s in laws)),
            top_p=row_by_row(ctypes.c_double, (s.top_p for s in laws)),
            min_p=row_by_row(ctypes.c_double, (s.min_p for s in laws)),
            seeds=row_by_row(ctypes.c_uint64, (seed & MASK64 for seed in rows.seeds)),
            starts=row_by_row(whole, rows.start), found=found.data_ptr(), threads=min(b, torch.get_num_threads()),
        )  # fmt: skip
        if any(changes):
            asks.changes = row_by_row(whole, (len(c) if c else 0 for c in changes))
            asks.penalised = row_by_row(whole, (s.penalised for s in laws))
            for field, name in (("changed", "ids"), ("said", "said"), ("factors", "factors"), ("biases", "biases")):
                arrays = (getattr(c, name).ctypes.data if c else None for c in changes)
                setattr(asks, field, row_by_row(address, arrays))
            for name in ("repetition", "presence", "frequency"):
                setattr(asks, name, row_by_row(real, (getattr(s, f"{name}_penalty") for s in laws)))
        self.call(ctypes.byref(asks))
        host = found.tolist()
        if not all(row[0] for row in host):
            return None
        verdict = Verdict(found[:, 3:], found[:, 0], found[:, 1], [bool(row[2]) for row in host])
        verdict.__dict__["host"] = [(row[3 : 3 + row[0]], row[1]) for row in host]  # known already
        return verdict
