"""Calibration: do drafted nodes get accepted as often as their confidences say, and the scale that makes it so.

A node's confidence is conditional on its parent's acceptance: softmax(r / s) among the candidates of its parent, with
r = log q + T * G under `coupled` and log q elsewhere (`sampling.rank`). A round tests it only where the parent was
accepted. A `Family` is such a test: the drafted children of one accepted node, and which of them the target chose.

    Fit      the scale s of a drafter's confidences
    Rates    for confidences that are counts: how often those of about this size came true

The fit. For c = softmax(r / s) and the target's choice y, the log-likelihood log c_y has the slope, along log s,

    g = sum over the drafted children i of (c_i - [i = y]) w_i,    w_i = log c_i - t

if t is the mean log-confidence of the candidates that were not drafted. A tree does not carry t. But g has the mean 0
at the true s whatever t is, and for every t below the least log c_i its mean falls with log s (the weights rise with
the confidences, so the mean's slope is minus a covariance of two quantities that rise together): it always leads
towards the true s. A candidate that was not drafted is below the least of those that were, and below what they leave
over; t is taken a factor e below both. Each family moves s by a step of Newton's method,

    log s <- log s + g / I,    I <- 0.998 I + sum of c_i w_i^2 - (sum of c_i w_i)^2

I being the information of all families so far, those long ago counting for less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..budgets.acceptance import Ratio, bin_of
from ..core.protocols import Drafter, Drafting, Round, Target
from ..core.types import Budget, DraftTree, Rows

KEEP = 0.998  # of the information, per family: what the fit remembers is worth 500 of them
PRIOR = 16.0  # information that the first s is worth
STEP = 0.25  # the most that one family moves log s
BOUNDS = (0.05, 20.0)  # of s
BACK = 0.2  # of the way back, in log s, after a draft of which no node was kept
BINS = 20  # of confidences
LEAST = 1e-4  # what drafted children leave over at least: no confidence is certainty


@dataclass(frozen=True)
class Family:
    """The drafted children of a node that was accepted (the root always is)."""

    logs: tuple[float, ...]  # their confidences' logarithms
    hit: int  # which of them the target chose; -1: none

    @property
    def pairs(self) -> list[tuple[float, bool]]:
        """(confidence, accepted?) of every child."""
        return [(math.exp(x), i == self.hit) for i, x in enumerate(self.logs)]


def families(tree: DraftTree, chosen: Sequence[Sequence[int]]) -> list[Family]:
    """The families of a tree along the tokens that a round added, in all rows, whether or not this tree was verified;
    none if it carries no confidences."""
    if tree.values is None or tree.nodes < 2:
        return []
    return [family for row, added in zip(tree.host, chosen, strict=True) for family in _along(*row, added)]


def _along(tokens: list[int], parents: list[int], values: list[float], chosen: Sequence[int]) -> list[Family]:
    """The families on the way that the target's tokens take through one row's tree."""
    tests, node = [], 0
    for token in chosen:
        children = [i for i in range(1, len(tokens)) if parents[i] == node and values[i] > -math.inf]
        if not children:
            break
        hit = next((k for k, i in enumerate(children) if tokens[i] == token), -1)
        tests.append(Family(tuple(min(0.0, values[i] - values[node]) for i in children), hit))
        if hit < 0:
            break
        node = children[hit]
    return tests


def score(family: Family) -> tuple[float, float]:
    """Slope of the log-likelihood along log s, and its variance (the information), of one family; see above."""
    shares = [math.exp(x) for x in family.logs]
    rest = max(LEAST, 1 - math.fsum(shares))
    below = min(min(family.logs), math.log(rest)) - 1
    weights = [x - below for x in family.logs]
    mean = math.fsum(c * w for c, w in zip(shares, weights, strict=True))
    slope = mean - (weights[family.hit] if family.hit >= 0 else 0.0)
    return slope, math.fsum(c * w * w for c, w in zip(shares, weights, strict=True)) - mean * mean


@dataclass
class Fit:
    """s of one drafter, fitted as families come in."""

    scale: float = 1.0
    information: float = PRIOR

    def learn(self, family: Family) -> None:
        slope, information = score(family)
        self.information = max(PRIOR, KEEP * self.information + max(0.0, information))
        step = max(-STEP, min(STEP, slope / self.information))
        self.scale = min(max(self.scale * math.exp(step), BOUNDS[0]), BOUNDS[1])

    def relax(self, own: float) -> None:
        """A step towards the drafter's own s, after a draft of which no node was kept: it has no family to learn from,
        so an s that leaves every node below the budget's floor would stay for ever."""
        self.scale *= (own / self.scale) ** BACK


@dataclass
class Rates:
    """How often children were right, by their confidence. It begins as half of that: a count is no probability."""

    bins: list[Ratio] = field(default_factory=lambda: [Ratio() for _ in range(BINS)])

    def learn(self, family: Family) -> None:
        for confidence, hit in family.pairs:
            bin_of(self.bins, confidence).add(hit, keep=KEEP)

    def of(self, confidence: float) -> float:
        return bin_of(self.bins, confidence).value(confidence / 2, 2.0)


@dataclass(frozen=True)
class Calibrated(Drafter):
    """A drafter whose confidences are scaled by what its past rounds taught, in all generations that share it.
    Every drafter that ranks is one, unless its SPEC names a scale, as in `?scale=1`.

    Only past rounds move s. Under `coupled` the text does not depend on it; under the other rules, where a dynamic tree
    and with it the text would depend on the requests before and beside it, drafts keep the drafter's own s.
    """

    inner: Drafter
    fit: Fit = field(default_factory=Fit)

    @property
    def uncalibrated(self) -> Drafter:
        return self.inner

    @property
    def learners(self) -> list[Any]:
        return [self.fit, *self.inner.learners]

    @property
    def models(self) -> Sequence[Target]:
        return self.inner.models

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.inner.taps

    @property
    def remembers(self) -> bool:
        return self.inner.remembers

    def forget(self) -> None:
        self.inner.forget()

    @property
    def reopens(self) -> bool:  # type: ignore[override]
        return self.inner.reopens

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> CalibratedDrafting:
        return CalibratedDrafting(self.inner.open(prompts, capacity), self.fit, self.inner.scale or 1.0)


@dataclass
class CalibratedDrafting(Drafting):
    """A drafting whose confidences are fitted while it is used, under the rule `coupled` alone."""

    inner: Any
    fit: Fit
    scale: float  # the drafter's own s
    mine: DraftTree | None = None  # this round's; it is scored by the tokens added, whichever tree was verified

    def expect(self, row: int, tokens: Sequence[int]) -> None:
        self.inner.expect(row, tokens)

    def observe(self, round: Round) -> None:
        if self.mine is not None and round.rows.rule == "coupled":
            for family in families(self.mine, round.tokens):
                self.fit.learn(family)
        self.mine = None
        self.inner.observe(round)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        # Under the other rules a text may depend on s, and hence would on the requests before and beside it.
        own = replace(budget, scale=self.fit.scale) if rows.rule == "coupled" else budget
        self.mine = tree = self.inner.propose(rows, own)
        if tree.nodes < 2 and min(budget.nodes - 1, budget.depth, max(rows.remaining) - 1) > 0:
            self.fit.relax(self.scale)
        return tree

    def select(self, index: Sequence[int]) -> None:
        self.inner.select(index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, CalibratedDrafting)
        self.inner.join(other.inner)


def calibrated(drafter: Drafter) -> Drafter:
    """The drafter with a fit that starts at its own s; itself if it has none."""
    return drafter if drafter.scale is None else Calibrated(drafter, Fit(drafter.scale))
