"""Samples -> figures. A figure is a ratio of sums over prompts; its interval a bootstrap over prompts.

Tokens per second count decoding alone: every token after the first of each row and turn, by the time after the prompts'
passes. Where a prompt was decoded several times, a ratio of two methods is taken repeat by repeat and the median of the
repeats is the figure. Bootstrap draws are kept until the last mean, so that a macro mean over tasks has an interval of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.types import Usage
from .document import Depth, Estimate, RoundTime
from .theory import Comparison
from .types import Sample

DRAWS = 1000
LOOP_SHARE = 0.25  # a text with more of its 8-grams repeated than this is called looping
QUANTILES = (10, 25, 50, 75, 90)

Array = np.ndarray


@dataclass(frozen=True)
class Figure:
    """A value with its bootstrap draws [DRAWS]."""

    value: float
    draws: Array
    chunks: int  # batches of prompts that it rests on, the fewest of several tasks

    @property
    def estimate(self) -> Estimate:
        """With an interval of 95 %, of the draws that are defined; without one where it rests on a single chunk."""
        known = self.draws[np.isfinite(self.draws)]
        ends = np.percentile(known, (2.5, 97.5)) if self.chunks > 1 and known.size else ()
        return Estimate(*(round(float(x), 5) for x in (self.value, *ends)))


def count(tokens: Sequence[Sequence[int]]) -> int:
    """Decoded tokens of a batch: by ids, the first of each row left out (it is the prompt's). For every method."""
    return sum(max(0, len(row) - 1) for row in tokens)


def weights(chunks: int) -> Array:
    """[DRAWS, chunks]: how often a draw takes each chunk. The same for everything that has as many chunks (paired)."""
    picked = np.random.default_rng(0).integers(0, chunks, (DRAWS, chunks))
    made = np.zeros((DRAWS, chunks))
    np.add.at(made, (np.arange(DRAWS)[:, None], picked), 1)
    return made


def ratio(above: Array, below: Array) -> Figure:
    """Sums of `above` by sums of `below`: [chunks] each, or [repeats, chunks] with the median over repeats."""
    above, below = np.atleast_2d(above).astype(float), np.atleast_2d(below).astype(float)

    def of(w: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (w @ above.T) / (w @ below.T)
        return np.median(found, axis=1)

    value = float(of(np.ones((1, above.shape[1])))[0])
    return Figure(value if np.isfinite(value) else 0.0, of(weights(above.shape[1])), above.shape[1])


def quotient(a: Figure, b: Figure) -> Figure:
    """a / b, draw by draw."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return Figure(a.value / b.value if b.value else 0.0, a.draws / b.draws, min(a.chunks, b.chunks))


def mean(figures: Sequence[Figure]) -> Figure:
    """The macro mean. Tasks are drawn independently: their draws are shuffled against one another."""
    mixed = [np.random.default_rng(i).permutation(f.draws) for i, f in enumerate(figures)]
    return Figure(float(np.mean([f.value for f in figures])), np.mean(mixed, axis=0), min(f.chunks for f in figures))


@dataclass(frozen=True)
class Table:
    """One cell's samples as arrays [repeats, chunks]; only chunks that every repeat has."""

    samples: list[list[Sample]]

    @classmethod
    def of(cls, samples: Sequence[Sample], chunks: Sequence[int]) -> Table:
        """The chosen chunks, in their order; a repeat that lacks one is left out unless none is whole."""
        by = {(s.repeat, s.chunk): s for s in samples}
        repeats = sorted({s.repeat for s in samples})
        whole = [r for r in repeats if all((r, c) in by for c in chunks)]
        if whole:
            return cls([[by[r, c] for c in chunks] for r in whole])
        return cls([[by[repeats[0], c] for c in chunks if (repeats[0], c) in by]] if repeats else [])

    @classmethod
    def pooled(cls, tables: Sequence[Table]) -> Table:
        """All prompts of several tasks as one table; empty where they were not repeated alike."""
        if len({len(t.samples) for t in tables}) != 1:
            return cls([])
        return cls([[s for run in runs for s in run] for runs in zip(*(t.samples for t in tables), strict=True)])

    def map(self, of: Callable[[Sample], float]) -> Array:
        return np.array([[of(s) for s in run] for run in self.samples], dtype=float)

    def rate(self) -> Figure:
        """Decoded tokens per second."""
        return ratio(self.map(tokens), self.map(seconds))

    def faster(self, others: Sequence[Sample], whole: bool = False) -> Figure | None:
        """Times as fast as another method in the same turns; None where it did not take part in all of them. `whole`:
        the prompts' passes counted too."""
        theirs = {s.pair_key: s for s in others}
        pairs = [[(s, theirs.get(s.pair_key)) for s in run] for run in self.samples]
        if not pairs or any(b is None for run in pairs for _, b in run):
            return None
        each = [quotient(*(speed([p[i] for p in run], whole) for i in (0, 1))) for run in pairs]  # type: ignore[misc]
        value, draws = np.median([e.value for e in each]), np.median([e.draws for e in each], axis=0)
        return Figure(float(value), draws, each[0].chunks)

    def usages(self) -> list[list[Usage]]:
        """[chunk][row and turn] of the first repeat; empty where the method counts no rounds."""
        first = self.samples[0] if self.samples else []
        found = [[u for t in s.turns for u in t.usages] for s in first]
        return found if all(found) else []


def tokens(sample: Sample) -> int:
    """Tokens that a sample's turns hold in all."""
    return sum(count(t.tokens) for t in sample.turns)


def seconds(sample: Sample) -> float:
    """Decode seconds, prefill excluded."""
    return sum(t.seconds - t.prefill for t in sample.turns)


def speed(samples: Sequence[Sample], whole: bool = False) -> Figure:
    """Tokens per second: of decoding, or of the whole answer."""
    if whole:
        given = [[sum(map(len, t.tokens)) for t in s.turns] for s in samples]
        return ratio(np.array([sum(g) for g in given]), np.array([sum(t.seconds for t in s.turns) for s in samples]))
    return ratio(np.array([tokens(s) for s in samples]), np.array([seconds(s) for s in samples]))


def share(
    usages: Sequence[Sequence[Usage]], above: Callable[[Usage], float], below: Callable[[Usage], float]
) -> Figure:
    """A ratio of two counts of the rounds."""
    sums = [[sum(map(of, rows)) for rows in usages] for of in (above, below)]
    return ratio(np.array(sums[0]), np.array(sums[1]))


def tau(usages: Sequence[Sequence[Usage]]) -> Figure:
    """Tokens a round, the target's own counted."""
    return share(usages, lambda u: u.new_tokens - 1, lambda u: u.rounds)


def alpha(usages: Sequence[Sequence[Usage]]) -> Figure:
    """Acceptance per position tested."""
    return share(usages, lambda u: u.accepted, lambda u: u.tested)


def depths(usages: Sequence[Sequence[Usage]]) -> list[Depth]:
    """Acceptance at each depth, given that of all before (n-alpha of a chain), and its spread over prompts."""
    found = []
    for d in range(max((len(u.tested_at) for rows in usages for u in rows), default=0)):
        hits, tests = (
            np.array([sum(at[d] for at in counts(rows) if len(at) > d) for rows in usages])
            for counts in (lambda rows: [u.accepted_at for u in rows], lambda rows: [u.tested_at for u in rows])
        )
        own = hits[tests > 0] / tests[tests > 0]
        spread = np.percentile(own, QUANTILES).round(4).tolist()
        found.append(Depth(d + 1, int(tests.sum()), int(hits.sum()), ratio(hits, tests).estimate, spread))
    return found


def round_ms(usages: Sequence[Sequence[Usage]]) -> RoundTime:
    """Where the time of a round goes. Rows of a batch share their rounds: the longest row's count."""
    longest = [max(rows, key=lambda u: u.rounds) for rows in usages]
    rounds = max(1, sum(u.rounds for u in longest))
    parts = ("draft_seconds", "verify_seconds", "overhead_seconds")
    return RoundTime(*(round(1e3 * sum(getattr(u, key) for u in longest) / rounds, 4) for key in parts))


def rounds(usages: Sequence[Sequence[Usage]]) -> dict[str, Any]:
    """The fields of a cell that its rounds tell, whatever ran them; none where no rounds are counted."""
    if not usages:
        return {}
    count, drafted, accepted, tested = (
        sum(getattr(u, key) for rows in usages for u in rows) for key in ("rounds", "drafted", "accepted", "tested")
    )
    return {
        "tau": tau(usages).estimate if count else None,
        "alpha": alpha(usages).estimate if tested else None,
        "drafted_alpha": round(accepted / drafted, 5) if drafted else None,
        "nodes": round((drafted + count) / count, 3) if count else None,
        "depths": depths(usages),
        "round_ms": round_ms(usages),
    }


def theory(usages: Sequence[Sequence[Usage]], plain_ms: float, speedup: float) -> Comparison | None:
    """What Theorem 3.8 promised for these acceptances and costs. A tree counts as a chain of its depth."""
    all_of = [u for rows in usages for u in rows]
    rounds, drafted, tested = (sum(getattr(u, k) for u in all_of) for k in ("rounds", "drafted", "tested"))
    if not drafted or not tested or not plain_ms:
        return None
    deepest = max(len(u.tested_at) for u in all_of)
    gamma, ms = max(1, min(deepest, round(drafted / rounds))), round_ms(usages)
    return Comparison(
        sum(u.accepted for u in all_of) / tested, gamma, ms.draft / gamma / plain_ms, speedup,
        tau(usages).value, ms.verify / plain_ms,
    )  # fmt: skip


def loops(tokens: Sequence[int], n: int = 8) -> float:
    """The share of a text's n-grams that occurred before in it."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def looping(sample: Sample) -> bool:
    """Do most texts of a batch repeat themselves? Such texts are trivial to guess and flatter every drafter."""
    rows = [row for t in sample.turns for row in t.tokens]
    return 2 * sum(loops(row) > LOOP_SHARE for row in rows) > len(rows)
