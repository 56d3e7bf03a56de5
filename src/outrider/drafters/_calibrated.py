"""Drafters whose confidences are calibrated while they are used (`budgets/calibration.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..budgets.calibration import Fit, families
from ..core.protocols import Drafter, Drafting, Round
from ..core.types import Budget, DraftTree, Rows


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
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.inner.taps

    @property
    def reopens(self) -> bool:  # type: ignore[override]
        return self.inner.reopens

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> CalibratedDrafting:
        return CalibratedDrafting(self.inner.open(prompts, capacity), self.fit)


@dataclass
class CalibratedDrafting(Drafting):
    """A drafting whose confidences are fitted while it is used, under the rule `coupled` alone."""

    inner: Any
    fit: Fit
    mine: DraftTree | None = None  # this round's: what the target wrote tells of it, whoever's tree was verified

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
        return tree

    def select(self, index: Sequence[int]) -> None:
        self.inner.select(index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, CalibratedDrafting)
        self.inner.join(other.inner)


def calibrated(drafter: Drafter) -> Drafter:
    """The drafter with a fit that starts at its own s; itself if it has none."""
    return drafter if drafter.scale is None else Calibrated(drafter, Fit(drafter.scale))
