"""The coupled rule in compiled code: a batch's walks down its trees in one call, with `core/verify.py`'s results.

Between two passes every operation on tensors finds the processor's caches cold, so few of them matter more than fast
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.changes import Changes
from ...core.noise import tables
from ...core.types import DraftTree, Rows, Verdict
from ...params import Sampling
from ..native.abi import CHANGE_BYTES, Library, Struct, address, ffi, struct
from ..native.arrays import addresses, doubles, floats, integers, seeds

KNOTS, SLOPES = tables()


class Laws:
    """What the code is told of the rows' sampling alone: a structure to be copied, and the arrays that it points to."""

    def __init__(self, laws: Sequence[Sampling], vocabulary: int):
        self.laws, self.vocabulary = laws, vocabulary
        self.kept: list[Any] = [
            floats(s.temperature for s in laws), integers(min(s.top_k, vocabulary) for s in laws),
            doubles(s.top_p for s in laws), doubles(s.min_p for s in laws),
        ]  # fmt: skip
        filters = dict(zip(("temperature", "top_k", "top_p", "min_p"), self.kept, strict=True))
        self.part = struct(
            "Walk", rows=len(laws), vocab=vocabulary, knots=address(KNOTS), slopes=address(SLOPES), **filters
        )


class Walk:
    """`walk(rows, tree, logits)`."""

    def __init__(self, code: Library):
        self.call, self.laws = code.walk_trees, Laws((), 0)

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
        walk = struct("Walk")
        walk[0] = laws.part[0]
        walk.nodes, walk.depth = n, depth
        walk.logits, walk.result = address(logits), address(found)
        walk.tokens, walk.parents, walk.sizes = address(tokens), address(parents), address(sizes)
        kept = seeds(rows.seeds), integers(rows.start)  # as long as the call
        walk.seeds, walk.start_positions = kept
        walk.threads = min(b, torch.get_num_threads())
        changed = _changes(walk, rows, changes) if any(changes) else None
        self.call(walk)
        del kept, changed
        host = found.tolist()
        if not all(row[0] for row in host):
            return None
        verdict = Verdict(found[:, 3:], found[:, 0], found[:, 1], [bool(row[2]) for row in host])
        verdict.__dict__["host"] = [(row[3 : 3 + row[0]], row[1]) for row in host]  # known already
        return verdict


def _changes(walk: Struct, rows: Rows, changes: Sequence[Changes | None]) -> list[Any]:
    """Write to `walk` what the rows' texts change in their logits. Returns what must live as long as the call."""
    counts = [len(c) if c else 0 for c in changes]
    walk.changes_capacity = max(counts) + walk.depth + 1
    scratch = torch.empty(len(counts) * walk.changes_capacity * CHANGE_BYTES, dtype=torch.uint8)
    walk.scratch = address(scratch)
    arrays: dict[str, Any] = {"changes": integers(counts), "penalised": integers(s.penalised for s in rows.sampling)}
    for field, name in (("changed", "ids"), ("counts", "said"), ("factors", "factors"), ("biases", "biases")):
        arrays[field] = addresses(getattr(c, name).ctypes.data if c else None for c in changes)
        setattr(walk, field, ffi.cast("void *", arrays[field]))
    for name in ("repetition", "presence", "frequency"):
        arrays[name] = floats(getattr(s, f"{name}_penalty") for s in rows.sampling)
        setattr(walk, name, arrays[name])
    walk.changes, walk.penalised = arrays["changes"], arrays["penalised"]
    return [scratch, *arrays.values()]
