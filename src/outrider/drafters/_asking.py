"""Whether the networks of a mix draft in a round, after the drafters that cost next to nothing have drafted.

How deep networks draft, and which of their nodes stay, follows from their confidences. The parts of the adaptive budget
decide whether they draft at all: their seconds by batch size (`Curve`), the tokens that they gain (`Bins`) and the time
that they have lost (`Ledger`). If they take s seconds and the pass over their nodes p more, and a row's text advances g
tokens further than with the cheap drafts, they pay where

    sum over rows of g  >  rows * rate * (s + p)

with `Budget.rate`, the tokens per second of a row as things are. g is learned by the chance that the row's cheap draft
has the next token. Networks that do not pay are tried when the ledger is at zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..budgets.acceptance import Bins, Ratio
from ..budgets.curve import Curve, points_of
from ..budgets.ledger import Ledger
from ..core.types import Budget

BINS = 4  # of the chance that a cheap draft has the next token
PRIOR = 4.0  # rows that the mean of all bins is worth in each, and FIRST in all
FIRST = 1.0  # tokens that networks are assumed to gain a row at first
DOUBT = 0.5  # standard errors that are added to g, so that an estimate from few rows is tested again
RECENT = 0.1  # weight of a round in the number of nodes that networks add


def _gains() -> Bins:
    return Bins([Ratio() for _ in range(BINS)])


@dataclass
class Asking:
    """One for all texts of a mix."""

    seconds: Curve = field(default_factory=lambda: Curve(mean=True, slope=0.5))  # by batch size; 0: not measured
    gains: Bins = field(default_factory=_gains)
    ledger: Ledger = field(default_factory=Ledger)
    added: float = 1.0  # nodes that networks add to a row's tree
    trying: bool = False

    def asks(self, chances: Sequence[float], most: Sequence[int], nodes: int, budget: Budget) -> bool:
        """Do the networks draft in this round?

        Args:
            chances: [row]: the chance that its cheap draft has the next token.
            most: [row]: how many tokens a draft may gain it.
            nodes: of the widest row's cheap draft, the root included.
            budget: where it has no `rate`, they draft in every round.
        """
        rows, self.trying = len(chances), False
        if not budget.rate or not self.seconds.points:
            return True
        wider = budget.price.wider(rows, nodes, self.added) if budget.price else 0.0
        seconds = self.seconds(rows) + wider
        gains = sum(min(limit, self.gain(c, DOUBT)) for c, limit in zip(chances, most, strict=True))
        self.ledger.pay(rows, 1 / budget.rate)
        if gains > rows * budget.rate * seconds:
            return True
        self.trying = self.ledger.owed(rows) <= 0
        if self.trying:
            self.ledger.charge(rows, seconds)
        return self.trying

    def gain(self, chance: float, doubt: float = 0.0) -> float:
        """Tokens that networks gain a row whose cheap draft has the next token by this chance, plus `doubt` standard
        errors. (The variance is a geometric distribution's: each further token comes by the same chance.)"""
        mine, bins = self.gains[chance], self.gains.bins
        overall = Ratio(sum(r.top for r in bins), sum(r.bottom for r in bins)).value(FIRST, PRIOR)
        mean = mine.value(overall, PRIOR)
        return float(mean + doubt * (mean * (1 + mean) / (mine.bottom + 1)) ** 0.5)

    def begin(self, rows: int, share: float) -> None:
        """This share of the batch is new."""
        self.gains = Bins([r.faded(r.bottom - share * max(0.0, r.bottom - PRIOR)) for r in self.gains.bins])
        self.ledger.begin(rows, share, self.seconds(rows))

    def time(self, rows: int, seconds: float, reading: bool = False) -> None:
        """Add the seconds of the networks' draft. `reading`: they read text first, which is not part of it."""
        if not reading or seconds < 0.5 * self.seconds(rows):
            self.seconds.learn(rows, seconds)

    def learn(self, chances: Sequence[float], gains: Sequence[int], added: float) -> None:
        """Add a round in which networks drafted.

        Args:
            chances: [row]: as given to `asks`, of the rows that may gain.
            gains: [row]: how many tokens further its text advanced than with the cheap drafts.
            added: nodes of a row's tree that only the networks proposed, on average.
        """
        self.added += RECENT * (added - self.added)
        for chance, gain in zip(chances, gains, strict=True):
            self.gains[chance].add(gain)

    def state(self) -> dict[str, Any]:
        """As JSON: costs, and gains that count for few rows."""
        return {"seconds": self.seconds.points, "added": self.added, "gains": self.gains.state()}

    def restore(self, state: Any) -> None:
        """Take over a state; ValueError, KeyError, TypeError or AttributeError where it is none."""
        points, added, gains = points_of(state["seconds"]), float(state["added"]), _gains()
        gains.restore(state["gains"], 1e9)
        if not 0 <= added < math.inf:
            raise ValueError("not a number of nodes")
        self.seconds, self.added, self.gains = Curve(True, 0.5, points), added, gains
