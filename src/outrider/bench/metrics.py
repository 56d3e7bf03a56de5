"""Samples to figures: ratios of sums over prompts, with bootstrap intervals over prompts.

Tokens per second count decoding alone: every token after the first of each row and turn, over the time after prefill.
With several repeats, two methods are compared within each repeat, and the figure is the median over repeats. Bootstrap
draws are kept, so that a macro mean over tasks has its own interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.types import Usage
from .document import Depth, Estimate, RoundTime
from .types import Sample

DRAWS = 1000
LOOP_SHARE = 0.25  # a text loops if more than this share of its 8-grams are repeated

Array = np.ndarray


@dataclass(frozen=True)
class Figure:
    """A value with its bootstrap draws [DRAWS]."""

    value: float
    draws: Array
    chunks: int  # number of batches of prompts; of several tasks the fewest

    @property
    def estimate(self) -> Estimate:
        """With the 95% interval of the finite draws; without one for a single batch of prompts."""
        known = self.draws[np.isfinite(self.draws)]
        ends = np.percentile(known, (2.5, 97.5)) if self.chunks > 1 and known.size else ()
        return Estimate(*(round(float(x), 5) for x in (self.value, *ends)))


def weights(chunks: int) -> Array:
    """[DRAWS, chunks]: how often a draw has each chunk; the same for all figures over as many chunks (paired)."""
    picked = np.random.default_rng(0).integers(0, chunks, (DRAWS, chunks))
    counts = np.zeros((DRAWS, chunks))
    np.add.at(counts, (np.arange(DRAWS)[:, None], picked), 1)
    return counts


def ratio(above: Array, below: Array) -> Figure:
    """Sums of `above` by sums of `below`: [chunks] each, or [repeats, chunks] with the median over repeats."""
    above, below = np.atleast_2d(above).astype(float), np.atleast_2d(below).astype(float)

    def of(w: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.median((w @ above.T) / (w @ below.T), axis=1))

    value = float(of(np.ones((1, above.shape[1])))[0])
    return Figure(value if np.isfinite(value) else 0.0, of(weights(above.shape[1])), above.shape[1])


def quotient(a: Figure, b: Figure) -> Figure:
    """a / b, draw by draw."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return Figure(a.value / b.value if b.value else 0.0, a.draws / b.draws, min(a.chunks, b.chunks))


def mean(figures: Sequence[Figure]) -> Figure:
    """The macro mean. Tasks are independent, so their draws are shuffled against one another."""
    mixed = [np.random.default_rng(i).permutation(f.draws) for i, f in enumerate(figures)]
    return Figure(float(np.mean([f.value for f in figures])), np.mean(mixed, axis=0), min(f.chunks for f in figures))


@dataclass(frozen=True)
class Table:
    """One cell's samples, [repeats][chunks]."""

    samples: list[list[Sample]]

    @classmethod
    def of(cls, samples: Sequence[Sample], chunks: Sequence[int]) -> Table:
        """The given chunks in their order, of complete repeats; of the first repeat where none is complete."""
        by = {(s.repeat, s.chunk): s for s in samples}
        repeats = sorted({s.repeat for s in samples})
        complete = [r for r in repeats if all((r, c) in by for c in chunks)]
        if complete:
            return cls([[by[r, c] for c in chunks] for r in complete])
        return cls([[by[repeats[0], c] for c in chunks if (repeats[0], c) in by]] if repeats else [])

    def map(self, of: Callable[[Sample], float]) -> Array:
        return np.array([[of(s) for s in run] for run in self.samples], dtype=float)

    def rate(self) -> Figure:
        """Decoded tokens per second."""
        return ratio(self.map(tokens), self.map(seconds))

    def faster(self, others: Sequence[Sample], prefill: bool = False) -> Figure | None:
        """The speed-up over another method's samples of the same prompts, repeat and session, of those prompts that
        both have answered; None if there are none.

        prefill: with the prompts' passes included.
        """
        theirs = {s.pair_key: s for s in others}
        runs = [[(s, theirs[s.pair_key]) for s in run if s.pair_key in theirs] for run in self.samples]
        runs = [run for run in runs if any(tokens(s) for _, s in run)]  # texts of one token have no decoding speed
        if not runs:
            return None
        each = [quotient(speed([a for a, _ in run], prefill), speed([b for _, b in run], prefill)) for run in runs]
        value, draws = np.median([e.value for e in each]), np.median([e.draws for e in each], axis=0)
        return Figure(float(value), draws, min(e.chunks for e in each))

    def usages(self) -> list[list[Usage]]:
        """[chunk][row and turn] of the first repeat; empty if the method does not count rounds."""
        first = self.samples[0] if self.samples else []
        usages = [[u for t in s.turns for u in t.usages] for s in first]
        return usages if all(usages) else []

    def turns(self) -> list[list[Usage]]:
        """[turn of a chunk][row] of the first repeat."""
        return [list(t.usages) for s in self.samples[0] for t in s.turns]


def tokens(sample: Sample) -> int:
    """Decoded tokens of all turns: all but the first of each row, which prefill gives."""
    return sum(max(0, len(row) - 1) for t in sample.turns for row in t.tokens)


def seconds(sample: Sample) -> float:
    """Decoding time of all turns, without prefill."""
    return sum(t.seconds - t.prefill for t in sample.turns)


def speed(samples: Sequence[Sample], prefill: bool = False) -> Figure:
    """Tokens per second, of decoding or with the prompts' passes included."""
    if not prefill:
        return ratio(np.array([tokens(s) for s in samples]), np.array([seconds(s) for s in samples]))
    written = [sum(len(row) for t in s.turns for row in t.tokens) for s in samples]
    return ratio(np.array(written), np.array([sum(t.seconds for t in s.turns) for s in samples]))


def share(
    usages: Sequence[Sequence[Usage]], above: Callable[[Usage], float], below: Callable[[Usage], float]
) -> Figure:
    """The ratio of two counts over all rounds."""
    sums = [[sum(map(of, rows)) for rows in usages] for of in (above, below)]
    return ratio(np.array(sums[0]), np.array(sums[1]))


def tau(usages: Sequence[Sequence[Usage]]) -> Figure:
    """Tokens per round, the target's own included."""
    return share(usages, lambda u: u.new_tokens - 1, lambda u: u.rounds)


def alpha(usages: Sequence[Sequence[Usage]]) -> Figure:
    """Acceptance per tested position."""
    return share(usages, lambda u: u.accepted, lambda u: u.tested)


def depths(usages: Sequence[Sequence[Usage]]) -> list[Depth]:
    """Acceptance at each depth, given acceptance at all depths before (n-alpha of a chain)."""
    rows = []
    for d in range(max((len(u.tested_at) for chunk in usages for u in chunk), default=0)):
        hits, tests = (
            np.array([sum(getattr(u, key)[d] for u in chunk if len(getattr(u, key)) > d) for chunk in usages])
            for key in ("accepted_at", "tested_at")
        )
        rows.append(Depth(d + 1, int(tests.sum()), int(hits.sum()), ratio(hits, tests).estimate))
    return rows


def round_ms(turns: Sequence[Sequence[Usage]]) -> RoundTime:
    """Milliseconds per round by part. Rows of a turn share their rounds, so the longest row is taken."""
    longest = [max(rows, key=lambda u: u.rounds) for rows in turns]
    count = max(1, sum(u.rounds for u in longest))
    parts = ("draft_seconds", "verify_seconds", "overhead_seconds")
    return RoundTime(*(round(1e3 * sum(getattr(u, key) for u in longest) / count, 4) for key in parts))


def rounds(usages: Sequence[Sequence[Usage]]) -> dict[str, Any]:
    """The fields of a cell about its rounds."""
    count, drafted, tested = (
        sum(getattr(u, k) for rows in usages for u in rows) for k in ("rounds", "drafted", "tested")
    )
    return {
        "tau": tau(usages).estimate if count else None,
        "alpha": alpha(usages).estimate if tested else None,
        "nodes": round((drafted + count) / count, 3) if count else None,
        "depths": depths(usages),
    }


def loops(tokens: Sequence[int], n: int = 8) -> float:
    """The share of a text's n-grams that occur in it earlier."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def looping(sample: Sample) -> bool:
    """Whether most texts of a batch repeat themselves, which makes them trivial to draft."""
    rows = [row for t in sample.turns for row in t.tokens]
    return 2 * sum(loops(row) > LOOP_SHARE for row in rows) > len(rows)
