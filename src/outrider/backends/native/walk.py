"""The coupled rule in compiled code: a batch's walks down its trees in one call, with `core/verify.py`'s results.

Between two passes every operation on arrays finds the processor's caches cold, so few of them matter more than fast
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.changes import Changes
from ...core.noise import SLOPES, VALUES
from ...core.types import Array, Question, Verdict
from ...params import Sampling
from .abi import CHANGE_BYTES, Library, Struct, address, ffi, struct
from .arrays import addresses, doubles, floats, integers, seeds
from .threads import threads


class Filters:
    """What the code reads of the rows' sampling alone: a structure to be copied, and the arrays that it points to."""

    def __init__(self, sampling: Sequence[Sampling], vocab: int):
        self.sampling, self.vocab = sampling, vocab
        self.kept: list[Any] = [
            floats(s.temperature for s in sampling), integers(min(s.top_k, vocab) for s in sampling),
            doubles(s.top_p for s in sampling), doubles(s.min_p for s in sampling),
        ]  # fmt: skip
        filters = dict(zip(("temperature", "top_k", "top_p", "min_p"), self.kept, strict=True))
        self.part = struct(
            "Walk", rows=len(sampling), vocab=vocab, knots=address(VALUES), slopes=address(SLOPES), **filters
        )


class Walk:
    """`walk(question)` applies the coupled rule."""

    def __init__(self, code: Library):
        self.call, self.filters = code.walk_trees, Filters((), 0)

    def __call__(self, question: Question) -> Verdict | None:
        """What is accepted of each row's tree. Logits are written over where a row's text changes them.

        Returns:
            None for another rule, where a caller's function changes logits, where these are not dense float32 arrays,
            or where rounding could decide what a filter (top-k, top-p, min-p) keeps: the reference judges then.
        """
        rows, tree, logits, filters = question.rows, question.tree, question.logits, self.filters
        if rows.rule != "coupled" or any(text.process is not None for text in question.texts):
            return None
        if not isinstance(logits, np.ndarray) or logits.dtype != np.float32 or not logits.flags.c_contiguous:
            return None
        b, n, v = logits.shape
        depth = min(tree.deepest, n - 1)
        if filters.sampling != rows.sampling or filters.vocab != v:
            filters = self.filters = Filters(rows.sampling, v)
        given = [np.ascontiguousarray(part) for part in (tree.tokens, tree.parents, tree.size)]
        result = np.empty((b, depth + 4), np.int64)
        walk = struct("Walk")
        walk[0] = filters.part[0]
        walk.nodes, walk.depth = n, depth
        walk.logits, walk.result = address(logits), address(result)
        walk.tokens, walk.parents, walk.sizes = map(address, given)
        kept = seeds(rows.seeds), integers(rows.start)  # as long as the call
        walk.seeds, walk.start_positions = kept
        walk.threads = min(b, threads())
        changes = [text.changes for text in question.texts]
        changed = _changes(walk, rows.sampling, changes) if any(changes) else None
        self.call(walk)
        del given, kept, changed
        found: list[list[int]] = result.tolist()
        if not all(row[0] for row in found):
            return None
        paths = [row[3 : 3 + row[0]] for row in found]
        return Verdict(paths, [row[1] for row in found], [bool(row[2]) for row in found])


def _changes(walk: Struct, sampling: Sequence[Sampling], changes: Sequence[Changes | None]) -> list[Any]:
    """Write to `walk` what the rows' texts change in their logits. Returns what must live as long as the call."""
    counts = [len(c) if c else 0 for c in changes]
    walk.changes_capacity = max(counts) + walk.depth + 1
    scratch: Array = np.empty(len(counts) * walk.changes_capacity * CHANGE_BYTES, np.uint8)
    walk.scratch = address(scratch)
    arrays: dict[str, Any] = {"changes": integers(counts), "penalised": integers(s.penalised for s in sampling)}
    for field, name in (("changed", "ids"), ("counts", "said"), ("factors", "factors"), ("biases", "biases")):
        arrays[field] = addresses(getattr(c, name).ctypes.data if c else None for c in changes)
        setattr(walk, field, ffi.cast("void *", arrays[field]))
    for name in ("repetition", "presence", "frequency"):
        arrays[name] = floats(getattr(s, f"{name}_penalty") for s in sampling)
        setattr(walk, name, arrays[name])
    walk.changes, walk.penalised = arrays["changes"], arrays["penalised"]
    return [scratch, *arrays.values()]
