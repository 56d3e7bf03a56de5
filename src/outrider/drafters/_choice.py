"""Several drafters of which the budget chooses one each round (`Budget.part`), as a bandit over (drafter, shape) does.

All of them read what is committed, whoever proposed it; only the chosen one drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.protocols import Drafter, Drafting, Round
from ..core.types import Budget, DraftTree, Rows
from ..params import InputError


@dataclass(frozen=True)
class ChoiceDrafter(Drafter):
    """Several drafters, of which the budget names one for every round."""

    parts: tuple[Drafter, ...] = field()

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(sorted({tap for part in self.parts for tap in part.taps}))

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> ChoiceDrafting:
        return ChoiceDrafting([part.open(prompts, capacity) for part in self.parts])


@dataclass
class ChoiceDrafting(Drafting):
    """The state of each drafter; all observe every round."""

    parts: list[Drafting]

    def expect(self, row: int, tokens: Sequence[int]) -> None:
        for part in self.parts:
            part.expect(row, tokens)

    def observe(self, round: Round) -> None:
        for part in self.parts:
            part.observe(round)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        if budget.part >= len(self.parts):
            raise InputError(f"there is no drafter {budget.part + 1} to choose; there are {len(self.parts)}")
        return self.parts[budget.part].propose(rows, budget)

    def select(self, index: Sequence[int]) -> None:
        for part in self.parts:
            part.select(index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, ChoiceDrafting)
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.join(theirs)
