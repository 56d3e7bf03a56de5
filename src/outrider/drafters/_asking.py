"""Whether the networks of a mix draft in a round, where drafters that cost hardly anything have drafted already.

How deep networks draft, and which of their nodes stay, is left to their confidences. Here the parts of the adaptive
budget decide whether they draft at all: their seconds by batch size (`Curve`), the tokens that they gain (`Ratio`) and
the time that they lost (`Ledger`). They take s seconds, the pass over their nodes p more, and a row's text goes g
tokens deeper than any free draft; a second is worth `Budget.rate` tokens to every row as things are. So they pay where

    sum over rows of g  >  rows * rate * (s + p)

g is learned by how likely a row's free draft has the next token. Networks that do not pay are tried when nothing is
owed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..budgets.acceptance import Ratio, ratios_of, state_of
from ..budgets.curve import Curve, points_of
from ..budgets.ledger import Ledger
from ..core.types import Budget

BINS = 4  # of the chance that a free draft has the next token
PRIOR = 4.0  # rows that all bins together are worth in each, and FIRST in all
FIRST = 1.0  # tokens that networks are assumed to gain a row at first
DOUBT = 0.5  # standard errors that are added to g, so that what few rows taught is tried again
RECENT = 0.1  # weight of a round in the nodes that networks add
LEARN = 5  # rounds of a batch size that ask in any case, the first of which is not timed
ALIKE = 2.0  # batch sizes by less than this factor apart share these rounds


@dataclass
class Asking:
    """One for all texts of a mix."""

    seconds: Curve = field(default_factory=lambda: Curve(mean=True, slope=0.5))  # by batch size
    gains: list[Ratio] = field(default_factory=lambda: [Ratio() for _ in range(BINS)])
    ledger: Ledger = field(default_factory=Ledger)
    added: float = 1.0  # nodes that networks add to a row's tree
    rounds: dict[int, int] = field(default_factory=dict)  # batch size -> rounds that asked
    price: float = 0.0  # tokens that asking costs this round, over all rows
    trying: bool = False

    def asks(self, chances: Sequence[float], most: Sequence[int], nodes: int, budget: Budget) -> bool:
        """Do the networks draft?

        Args:
            chances: [row]: how likely its free draft has the next token.
            most: [row]: how many tokens a draft may gain it.
            nodes: of the widest row's free draft, the root included.
            budget: where it has no `rate`, they draft in every round.
        """
        rows, self.trying = len(chances), False
        met = sum(count for b, count in self.rounds.items() if max(b, rows) < ALIKE * min(b, rows))
        if not budget.rate or met < LEARN:
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
        """Tokens that networks gain a row whose free draft has the next token by this chance, and `doubt` standard
        errors, as if each further token came by the same chance."""
        mine = self.gains[place(chance)]
        overall = Ratio(sum(r.top for r in self.gains), sum(r.bottom for r in self.gains)).value(FIRST, PRIOR)
        mean = mine.value(overall, PRIOR)
        return float(mean + doubt * (mean * (1 + mean) / (mine.bottom + 1)) ** 0.5)

    def begin(self, rows: int, share: float) -> None:
        """This share of the batch is new."""
        self.gains = [r.faded(r.bottom - share * max(0.0, r.bottom - PRIOR)) for r in self.gains]
        self.ledger.begin(rows, share, self.seconds(rows))

    def time(self, rows: int, seconds: float, reading: bool = False) -> None:
        """Add how long the networks took. `reading`: they read text first."""
        self.rounds[rows] = self.rounds.get(rows, 0) + 1
        if self.rounds[rows] > 1 and (not reading or not self.seconds.points or seconds < 0.5 * self.seconds(rows)):
            self.seconds.learn(rows, seconds)

    def learn(self, chances: Sequence[float], gains: Sequence[int], added: float) -> None:
        """Add a round that asked.

        Args:
            chances: [row]: as they were given to `asks`, of the rows that tell something.
            gains: [row]: how many tokens deeper its text went than any free draft.
            added: nodes of a row's tree that the networks alone had, on average.
        """
        self.added += RECENT * (added - self.added)
        for chance, gain in zip(chances, gains, strict=True):
            self.gains[place(chance)].add(gain)

    def state(self) -> dict[str, Any]:
        """As JSON: costs, and gains that count for few rows."""
        return {"seconds": self.seconds.points, "added": self.added, "gains": state_of(self.gains, PRIOR)}

    def restore(self, state: Any) -> None:
        """Take over a state; ValueError, KeyError, TypeError or AttributeError where it is none."""
        points, added, gains = points_of(state["seconds"]), float(state["added"]), ratios_of(state["gains"])
        if len(gains) != BINS or not 0 <= added < math.inf:
            raise ValueError("not what a mix learns")
        self.seconds, self.added, self.gains = Curve(True, 0.5, points), added, gains
        self.rounds = dict.fromkeys(points, LEARN)


def place(chance: float) -> int:
    """The bin of a chance."""
    return min(BINS - 1, int(BINS * chance))
