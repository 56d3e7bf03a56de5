"""Drafting in compiled code: committed pairs of features and tokens are queued, and processed by the next draft's call.

A text for which nothing is drafted is never processed: processing every token of a full batch would cost a twentieth of
its time. The queue of a row moves with the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backends.native.abi import Library
from ..backends.native.drafts import Pairs, SlotCache
from ..backends.native.eagle import Eagle
from ..backends.native.library import library
from ..core.protocols import Drafting, Round, Target
from ..core.types import Array, Budget, DraftTree, Rows
from . import _ranks
from ._growth import Grown, Growth, Step

MOST = 2048  # pairs in the queue of a row


def code_for(target: Target, precision: str) -> Library | None:
    """The compiled library for a drafter in this precision; None where its target's passes are not compiled, or there
    is none on this machine.

    It is the target's own where that has kernels for blocks of quantised weights (on processors with AVX2 alone: where
    the target's weights have 16 bits, though all else is float32).
    """
    if target.code is None:
        return None
    if target.precision == precision and target.code.block_lanes:
        return target.code
    return library(precision, precision) if precision in ("bfloat16", "float32") else None


def last_features(round: Round, before: Array | None) -> Array:
    """The final hidden state [b, h] of each row's last committed token; that of `before` where this round committed
    none."""
    features = round.output.features[-1]
    made: Array = features[range(len(round.paths)), [path[-1] if path else 0 for path in round.paths]]
    kept = [row for row, path in enumerate(round.paths) if not path]
    if before is not None and kept:
        made[kept] = before[kept]
    return made


@dataclass
class PairDrafting(Drafting):
    """The state of a compiled drafter that reads pairs of features and tokens."""

    drafter: Any  # its taps, and `compiled`
    cache: SlotCache
    last: Array  # float32 [b, h]: after every row's last pair
    pairs: list[Pairs] = field(default_factory=list)  # the queue
    counts: list[int] = field(init=False)  # queued pairs of each row

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.cache.host)

    def observe(self, round: Round) -> None:
        """Queue the features of committed tokens, each with its token."""
        self.pairs.append(given := Pairs.of(round, self.drafter.taps))
        self.counts = [old + len(nodes) for old, nodes in zip(self.counts, given.nodes, strict=True)]
        if max(self.counts) >= MOST:
            self.read()

    def select(self, index: Sequence[int]) -> None:
        if list(index) == list(range(len(self.cache.host))):
            return
        chosen = (pairs.select(index) for pairs in self.pairs)
        self.pairs = [pairs for pairs in chosen if any(pairs.nodes)]
        self.last, self.counts = self.last[list(index)], [self.counts[i] for i in index]
        self.cache.select(index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, PairDrafting)
        rows, more = len(self.cache.host), len(other.cache.host)
        self.pairs = [*(p.beside(0, more) for p in self.pairs), *(p.beside(rows, 0) for p in other.pairs)]
        self.last, self.counts = np.concatenate([self.last, other.last]), self.counts + other.counts
        self.cache.join(other.cache)

    def read(self) -> None:
        """Process the queue."""
        if self.pairs:
            self.reader.read(self.cache, self.last, self.taken())

    @property
    def reader(self) -> Any:
        """The compiled network, which has `read`."""
        return self.drafter.compiled

    def taken(self) -> list[Pairs]:
        """The queue, which is emptied."""
        pairs, self.pairs, self.counts = self.pairs, [], [0] * len(self.counts)
        return pairs


@dataclass(frozen=True)
class CompiledEagle(Grown):
    """A trained EAGLE or EAGLE-3 in compiled code."""

    compiled: Eagle
    growth: Growth
    vocab: int  # the target's
    taps: tuple[int, ...] = ()

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> EagleDrafting:
        last = np.zeros((len(prompts), self.compiled.shape.hidden), np.float32)
        return EagleDrafting(self, self.compiled.cache(len(prompts), capacity), last)


class EagleDrafting(PairDrafting):
    """Trees of one call where it can grow them, else a call for each step (`_features.py` explains pairs and slots)."""

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        drafter = self.drafter
        if (arguments := drafter.growth.compiled(rows, budget)) is not None:
            tree: DraftTree = drafter.compiled.grow(self.cache, self.last, self.taken(), rows, *arguments)
            assert self.cache.host == list(rows.start), "one pair for every token but the first, the root included"
            return tree
        first, step = self._start(rows)
        made: DraftTree = drafter.growth.propose(rows, first, step, budget, drafter.compiled.names, drafter.vocab)[0]
        return made

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `tune-tree`."""
        first, step = self._start(rows)
        return _ranks.below(rows, first, step, truth, k, self.drafter.compiled.names)

    def _start(self, rows: Rows) -> tuple[Array, Step]:
        """The logits below the root, and the step that follows."""
        self.read()
        assert self.cache.host == list(rows.start), "one pair for every token but the first, the root included"
        compiled: Eagle = self.drafter.compiled
        vectors = self.last[:, None].copy()

        def step(fed: DraftTree, since: int) -> Array:
            nonlocal vectors
            assert fed.ancestors is not None
            above = np.take_along_axis(vectors, fed.parents[:, since:, None], 1)
            tokens = fed.tokens[:, since:]
            embedded = compiled.embeddings.rows(tokens.ravel()).reshape(*tokens.shape, -1)
            given = np.concatenate([embedded, above], -1)
            made, logits = compiled.step(self.cache, given, fed.depths[:, 1:] - 1, fed.ancestors[:, 1:, 1:])
            vectors = np.concatenate([vectors, made], 1)
            return logits

        return compiled.logits(vectors), step
