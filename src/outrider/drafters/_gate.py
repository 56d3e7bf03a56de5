"""Whether the networks of a mix draft in a round, after the drafters that cost next to nothing have drafted.

How deep networks draft, and which of their nodes stay, follows from their confidences. The parts of the adaptive budget
decide whether they draft at all: their seconds by batch size (`Curve`), the tokens that they gain (`Ratio`) and the
time that they have lost (`Ledger`). If they take s seconds, the pass over the tree with their nodes p more than over
the tree without, and a row's text advances g tokens further than in the latter, they pay where

    sum over rows of g  >  rows * rate * (s + p)

with `Budget.rate`, the tokens per second of a row as things are. The tree without them is known, the size of one with
them is the usual one, since their nodes displace others. g is learned by the chance that the row's cheap draft has the
next token. Networks that do not pay are tried when the ledger is at zero. At a new batch size (its nearest
power of two) they draft until SETTLING drafts were timed: a disturbed start would keep them from being timed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..budgets.acceptance import Ratio, bin_of
from ..budgets.curve import Curve, Mean, nearest
from ..budgets.ledger import Ledger
from ..core.types import Budget, Rows

SETTLING = 4  # first drafts of a batch size; the quickest counts
BINS = 4  # of the chance that a cheap draft has the next token
FIRST = 1.0  # tokens that networks are assumed to gain a row at first
PRIOR = 4.0  # rows that this assumption is worth in each bin
DOUBT = 0.5  # standard errors that are added to g, so that an estimate from few rows is tested again


@dataclass
class Gate:
    """One for all texts of a mix. What networks gain is kept by batch size, whose trees differ."""

    seconds: Curve = field(default_factory=lambda: Curve(0.5, SETTLING))  # of the networks' drafts, by batch size
    sizes: dict[int, Mean] = field(default_factory=dict)  # batch size -> nodes of a row's tree, where networks drafted
    gains: dict[int, list[Ratio]] = field(default_factory=dict)  # batch size -> by chance

    def __post_init__(self) -> None:
        self.ledger = Ledger()

    def allows(self, rows: Rows, chances: Sequence[float], size: float, budget: Budget) -> bool:
        """Do the networks draft in this round?

        Args:
            chances: [row]: the chance that its cheap draft has the next token.
            size: nodes of a row's tree without networks, the root included.
            budget: where it has no `rate`, they draft in every round.
        """
        b, seconds, gains = len(rows), self.seconds(len(rows)), 0.0
        if not budget.rate or self.seconds.settles(b):
            return True
        if budget.price:
            if (wider := self.sizes.get(nearest(b))) is None:
                return True
            seconds += budget.price.between(b, size, max(size, wider.value))
        for chance, left in zip(chances, rows.remaining, strict=True):
            gains += min(budget.depth, left - 1, self.gain(b, chance))
        self.ledger.pay(b, 1 / budget.rate)
        if gains > b * budget.rate * seconds:
            return True
        if self.ledger.owed(b) > 0:
            return False
        self.ledger.charge(b, seconds)
        return True

    def gain(self, rows: int, chance: float) -> float:
        """Tokens that networks gain a row, in a batch of so many, whose cheap draft has the next token by this chance,
        plus DOUBT standard errors. (The variance is a geometric distribution's: each further token comes by the same
        chance.)"""
        own = bin_of(self._by_chance(rows), chance)
        mean = own.value(FIRST, PRIOR)
        return float(mean + DOUBT * (mean * (1 + mean) / (own.bottom + 1)) ** 0.5)

    def learn(self, rows: Rows, chances: Sequence[float], gains: Sequence[int], size: float) -> None:
        """Add a round in which networks drafted.

        Args:
            chances: as given to `allows`.
            gains: [row]: how many tokens further its text advanced than without networks.
            size: nodes of a row's tree.
        """
        self.sizes.setdefault(nearest(len(rows)), Mean()).add(size)
        bins = self._by_chance(len(rows))
        for chance, gain, left in zip(chances, gains, rows.remaining, strict=True):
            if left > 1:  # a text's last token is no gain
                bin_of(bins, chance).add(gain)

    def _by_chance(self, rows: int) -> list[Ratio]:
        """The gains of a batch size."""
        return self.gains.setdefault(nearest(rows), [Ratio() for _ in range(BINS)])
