"""A budget that changes every round: drafting stops, resumes, shrinks and grows."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.budgets.budgeter import Report
from outrider.core.types import Budget, Rows


@dataclass
class Restless:
    """Its budgets in turn, over and over; with a single one, always that."""

    budgets: tuple[Budget, ...]
    turn: int = 0

    def choose(self, rows: Rows) -> Budget:
        self.turn += 1
        return self.budgets[self.turn % len(self.budgets)]

    def learn(self, report: Report) -> None:
        pass
