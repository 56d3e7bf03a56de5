"""Whether the networks of a mix draft in a round, after the drafters that cost next to nothing have drafted.

How deep networks draft, and which of their nodes stay, follows from their confidences. The parts of the adaptive budget
decide whether they draft at all: their seconds by batch size (`Curve`), the tokens that they gain (`Ratio`) and the
time that they have lost (`Ledger`). If they take s seconds and the pass over their nodes p more, and a row's text
advances g tokens further than with the cheap drafts, they pay where

    sum over rows of g  >  rows * rate * (s + p)

with `Budget.rate`, the tokens per second of a row as things are. g is learned by the chance that the row's cheap draft
has the next token. Networks that do not pay are tried when the ledger is at zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..budgets.acceptance import Ratio, bin_of
from ..budgets.curve import Curve
from ..budgets.ledger import Ledger
from ..core.types import Budget

BINS = 4  # of the chance that a cheap draft has the next token
PRIOR = 4.0  # rows that the mean of all bins is worth in each, and FIRST in all
FIRST = 1.0  # tokens that networks are assumed to gain a row at first
DOUBT = 0.5  # standard errors that are added to g, so that an estimate from few rows is tested again
RECENT = 0.1  # weight of a round in the number of nodes that networks add


@dataclass
class Gate:
    """One for all texts of a mix."""

    seconds: Curve = field(default_factory=lambda: Curve(0.5))  # of the networks' drafts, by batch size
    gains: list[Ratio] = field(default_factory=lambda: [Ratio() for _ in range(BINS)])  # by chance
    added: float = 1.0  # nodes that networks add to a row's tree

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        if len(self.gains) != BINS:
            raise ValueError(f"there are {BINS} bins")

    def allows(self, chances: Sequence[float], most: Sequence[int], nodes: int, budget: Budget) -> bool:
        """Do the networks draft in this round?

        Args:
            chances: [row]: the chance that its cheap draft has the next token.
            most: [row]: how many tokens a draft may gain it.
            nodes: of the widest row's cheap draft, the root included.
            budget: where it has no `rate`, they draft in every round.
        """
        rows = len(chances)
        if not budget.rate or not self.seconds.points:
            return True
        seconds = self.seconds(rows) + (budget.price.wider(rows, nodes, self.added) if budget.price else 0.0)
        gains = sum(min(limit, self.gain(c, DOUBT)) for c, limit in zip(chances, most, strict=True))
        self.ledger.pay(rows, 1 / budget.rate)
        if gains > rows * budget.rate * seconds:
            return True
        if self.ledger.owed(rows) > 0:
            return False
        self.ledger.charge(rows, seconds)
        return True

    def gain(self, chance: float, doubt: float = 0.0) -> float:
        """Tokens that networks gain a row whose cheap draft has the next token by this chance, plus `doubt` standard
        errors. (The variance is a geometric distribution's: each further token comes by the same chance.)"""
        own = bin_of(self.gains, chance)
        overall = Ratio(sum(r.top for r in self.gains), sum(r.bottom for r in self.gains)).value(FIRST, PRIOR)
        mean = own.value(overall, PRIOR)
        return float(mean + doubt * (mean * (1 + mean) / (own.bottom + 1)) ** 0.5)

    def begin(self, rows: int, share: float) -> None:
        """This share of the batch is new: of what is known of gains, it keeps what PRIOR rows are worth."""
        for ratio in self.gains:
            ratio.add(0.0, 0.0, keep=1 - share * max(0.0, 1 - PRIOR / max(PRIOR, ratio.bottom)))
        self.ledger.begin(rows, share, self.seconds(rows))

    def time(self, rows: int, seconds: float, reading: bool = False) -> None:
        """Add the seconds of the networks' draft. `reading`: they read text first, which is not part of it."""
        if not reading or seconds < 0.5 * self.seconds(rows):
            self.seconds.learn(rows, seconds)

    def learn(self, chances: Sequence[float], gains: Sequence[int], added: float) -> None:
        """Add a round in which networks drafted.

        Args:
            chances: [row]: as given to `allows`, of the rows that may gain.
            gains: [row]: how many tokens further its text advanced than with the cheap drafts.
            added: nodes of a row's tree that only the networks proposed, on average.
        """
        self.added += RECENT * (added - self.added)
        for chance, gain in zip(chances, gains, strict=True):
            bin_of(self.gains, chance).add(gain)
