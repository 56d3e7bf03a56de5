"""The coupled rule in compiled code: the walks of a batch down its trees in one call, with the results of
`core/verify.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.changes import Changes
from ...core.noise import SLOPES, VALUES
from ...core.types import Array, Question, Rows, Verdict
from ...machine import threads
from ...params import Sampling
from .abi import CHANGE_BYTES, Library, Struct, address, ffi, struct
from .arrays import addresses, doubles, floats, integers, seeds


class Filters:
    """What follows from the rows' sampling alone: a structure to be copied, and the arrays that it points to."""

    def __init__(self, samplings: Sequence[Sampling], vocab: int):
        self.samplings, self.vocab = samplings, vocab
        fields: dict[str, Any] = {
            "temperature": floats(s.temperature for s in samplings),
            "top_k": integers(min(s.top_k, vocab) for s in samplings),
            "top_p": doubles(s.top_p for s in samplings),
            "min_p": doubles(s.min_p for s in samplings),
        }
        self.kept = fields
        self.walk = struct(
            "Walk", rows=len(samplings), vocab=vocab, knots=address(VALUES), slopes=address(SLOPES), **fields
        )


class Walk:
    """`walk(question)`: what is accepted of each row's tree under the coupled rule; where T = 0 under every lossless
    one, since all accept the target's likeliest tokens there."""

    def __init__(self, code: Library):
        self.call, self.filters = code.walk_trees, Filters((), 0)

    def __call__(self, question: Question) -> Verdict | None:
        """The verdict; logits of rows whose texts change some are overwritten.

        Returns:
            None where the reference must decide: another rule at T > 0, a caller's own processing, logits in another
            precision, or where rounding could decide what a filter (top-k, top-p, min-p) keeps.
        """
        rows, tree, logits, filters = question.rows, question.tree, question.logits, self.filters
        lossy = rows.rule == "typical"
        if (rows.rule != "coupled" and (rows.sampled or lossy)) or any(text.process for text in question.texts):
            return None
        if logits.dtype != np.float32 or not logits.flags.c_contiguous:
            return None
        b, n, v = logits.shape
        depth = min(tree.deepest, n - 1)
        if filters.samplings != rows.sampling or filters.vocab != v:
            filters = self.filters = Filters(rows.sampling, v)
        tokens, parents, sizes = (np.ascontiguousarray(part) for part in (tree.tokens, tree.parents, tree.size))
        result = np.empty((b, depth + 4), np.int64)
        walk = struct("Walk")
        walk[0] = filters.walk[0]
        walk.nodes, walk.depth = n, depth
        walk.logits, walk.result = address(logits), address(result)
        walk.tokens, walk.parents, walk.sizes = address(tokens), address(parents), address(sizes)
        kept = seeds(rows.seeds), integers(rows.start)  # as long as the call
        walk.seeds, walk.start_positions = kept
        walk.threads = min(b, threads())
        changes = [text.changes for text in question.texts]
        changed = _changes(walk, rows, changes) if any(changes) else None
        self.call(walk)
        del kept, changed
        results = result.tolist()
        if not all(row[0] for row in results):
            return None
        return Verdict(
            [row[3 : 3 + row[0]] for row in results], [row[1] for row in results], [bool(row[2]) for row in results]
        )


def _changes(walk: Struct, rows: Rows, changes: Sequence[Changes | None]) -> list[Any]:
    """Write to `walk` what the rows' texts change in their logits. Returns what must live as long as the call."""
    counts = [len(c) if c else 0 for c in changes]
    walk.changes_capacity = max(counts) + walk.depth + 1
    scratch: Array = np.empty(len(counts) * walk.changes_capacity * CHANGE_BYTES, np.uint8)
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
