"""A drafter's queue: the features of committed tokens that it has not processed yet, each with its token.

A text for which nothing is drafted is never processed: processing every token of a full batch would cost a twentieth of
its time. The queue moves with its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..backends.torch.padding import padded
from . import _compiled

Pending = tuple[Tensor, Tensor, list[int]]  # features [b, m, f] and tokens [b, m] of a round, and how many of each row


@dataclass
class Waiting:
    """Pairs in order of their rounds."""

    counts: list[int]  # of each row
    pending: list[Pending] = field(default_factory=list)

    @property
    def late(self) -> bool:
        """Is the queue of a row full?"""
        return max(self.counts, default=0) >= _compiled.MOST

    def put(self, given: Pending) -> None:
        """Add what a round committed."""
        self.pending.append(given)
        self.counts = [old + new for old, new in zip(self.counts, given[2], strict=True)]

    def merged(self) -> Pending | None:
        """The queue, which is emptied; None where it is empty."""
        pending, self.pending, self.counts = self.pending, [], [0] * len(self.counts)
        return merged(pending) if pending else None

    def select(self, index: Sequence[int], device: torch.device) -> None:
        """Row i := old row index[i]."""
        self.counts = [self.counts[i] for i in index]
        if self.pending:
            wanted = torch.tensor(list(index), device=device)
            self.pending = [(f[wanted], t[wanted], [counts[i] for i in index]) for f, t, counts in self.pending]

    def join(self, other: Waiting) -> None:
        """Append other rows; both queues are empty."""
        assert not self.pending
        assert not other.pending
        self.counts = self.counts + other.counts


def merged(pending: Sequence[Pending]) -> tuple[Float[Tensor, "b m f"], Int[Tensor, "b m"], list[int]]:
    """The pairs of several rounds as one, without gaps."""
    if len(pending) == 1:
        return pending[0]
    features, tokens = torch.cat([p[0] for p in pending], 1), torch.cat([p[1] for p in pending], 1)
    index: list[list[int]] = [[] for _ in pending[0][2]]
    first = 0
    for f, _, counts in pending:
        for row, count in zip(index, counts, strict=True):
            row.extend(range(first, first + count))
        first += f.shape[1]
    counts = [len(row) for row in index]
    where = padded(index, tokens.device)
    return features.gather(1, where[..., None].expand(*where.shape, features.shape[2])), tokens.gather(1, where), counts
