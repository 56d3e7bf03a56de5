"""The coupled rule in compiled code: a batch's walks down its trees in one call, with `core/verify.py`'s results.

Between two passes every operation on tensors finds the processor's caches cold, so few of them matter more than fast
ones.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..core.noise import MASK64, tables
from ..native.parts import WalkPart
from ..types import DraftTree, Rows, Verdict

KNOTS, SLOPES = tables()


class Walk:
    """`walk(rows, tree, logits)`."""

    def __init__(self, code: ctypes.CDLL):
        self.call = code.follow
        self.call.restype, self.call.argtypes = None, [ctypes.c_void_p]

    def __call__(self, rows: Rows, tree: DraftTree, logits: Tensor) -> Verdict | None:
        """What is accepted of each row's tree; no penalty changes its logits [b, n, v]. None: these are of another
        precision, or rounding could decide what a filter (top-k, top-p, min-p) keeps; it is drawn in tensors then."""
        if logits.dtype != torch.float32 or not logits.is_contiguous():
            return None
        (b, n, v), depth = logits.shape, tree.deepest
        tokens, parents, sizes = (part.contiguous() for part in (tree.tokens, tree.parents, tree.size))
        found = torch.empty(b, depth + 4, dtype=torch.long)
        heats = (ctypes.c_float * b)(*(s.temperature for s in rows.sampling))
        likeliest = (ctypes.c_int64 * b)(*(s.top_k for s in rows.sampling))
        nucleus, least = (
            (ctypes.c_double * b)(*(s.top_p for s in rows.sampling)),
            (ctypes.c_double * b)(*(s.min_p for s in rows.sampling)),
        )
        seeds, starts = (
            (ctypes.c_uint64 * b)(*(seed & MASK64 for seed in rows.seeds)),
            (ctypes.c_int64 * b)(*rows.start),
        )
        asks = WalkPart(
            rows=b, nodes=n, depth=depth, vocabulary=v, logits=logits.data_ptr(), tokens=tokens.data_ptr(),
            parents=parents.data_ptr(), sizes=sizes.data_ptr(), temperature=ctypes.addressof(heats),
            top_k=ctypes.addressof(likeliest), top_p=ctypes.addressof(nucleus), min_p=ctypes.addressof(least),
            seeds=ctypes.addressof(seeds), starts=ctypes.addressof(starts), knots=KNOTS.data_ptr(),
            slopes=SLOPES.data_ptr(), found=found.data_ptr(), threads=min(b, torch.get_num_threads()),
        )  # fmt: skip
        self.call(ctypes.byref(asks))
        host = found.tolist()
        if not all(row[0] for row in host):
            return None
        verdict = Verdict(found[:, 3:], found[:, 0], found[:, 1], [bool(row[2]) for row in host])
        verdict.__dict__["host"] = [(row[3 : 3 + row[0]], row[1]) for row in host]  # known already
        return verdict
