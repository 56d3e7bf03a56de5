"""Whether the networks of a mix draft in a round, after the drafters that cost next to nothing have drafted.

How deep networks draft, and which of their nodes stay, follows from their confidences. The parts of the adaptive budget
decide whether they draft at all: their seconds by batch size (`Curve`), the tokens that they gain (`Ratio`) and the
time that they have lost (`Ledger`). If they take s seconds, the pass over the tree with their nodes p more than over
the tree without, and a row's text advances g tokens further than in the latter, they pay where

    sum over rows of g  >  rows * rate * (s + p)

with `Budget.rate`, the tokens per second of a row as things are. The tree without them is known; the size of one with
them is the usual one, since their nodes displace others. g is learned by the chance that the row's cheap draft has the
next token. Networks that do not pay are tried when the ledger is at zero. At a new batch size (its nearest power of
two) they draft until SETTLING drafts were timed, for a disturbed start would keep them from being timed again, and
until the size of their trees is known.
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
class Gains:
    """What networks gain, and the trees that they take part in, by batch size (its nearest power of two)."""

    tokens: dict[int, list[Ratio]] = field(default_factory=dict)  # of a row, by its chance
    sizes: dict[int, Mean] = field(default_factory=dict)  # nodes of a row's tree

    def of(self, rows: int, chance: float) -> Ratio:
        """The tokens gained by rows whose cheap draft has the next token by this chance."""
        return bin_of(self.tokens.setdefault(nearest(rows), [Ratio() for _ in range(BINS)]), chance)


@dataclass
class Gate:
    """One for all texts of a mix. Batches with a sampled row (T > 0) have gains of their own, for less is accepted."""

    seconds: Curve = field(default_factory=lambda: Curve(0.5, SETTLING))  # of the networks' drafts, by batch size
    gains: list[Gains] = field(default_factory=lambda: [Gains(), Gains()])  # [sampled?]

    def __post_init__(self) -> None:
        self.ledger = Ledger()

    def allows(self, rows: Rows, chances: Sequence[float], size: float, budget: Budget) -> bool:
        """Do the networks draft in this round?

        Args:
            chances: [row]: the chance that its cheap draft has the next token.
            size: nodes of a row's tree without networks, the root included.
            budget: one with a `rate`; without a `price`, passes are taken to be equally long.
        """
        b = len(rows)
        seconds, usual = self.seconds(b), self.gains[rows.sampled].sizes.get(nearest(b))
        if self.seconds.settles(b) or (budget.price and usual is None):
            return True
        if budget.price and usual:
            seconds += budget.price.between(b, size, max(size, usual.value))
        gains = 0.0
        for chance, left in zip(chances, rows.remaining, strict=True):
            gains += min(budget.depth, left - 1, self.gain(rows, chance))
        self.ledger.pay(b, 1 / budget.rate)
        if gains > b * budget.rate * seconds:
            return True
        if self.ledger.owed(b) > 0:
            return False
        self.ledger.charge(b, seconds)
        return True

    def gain(self, rows: Rows, chance: float) -> float:
        """Tokens that networks gain a row of such a batch, whose cheap draft has the next token by this chance, plus
        DOUBT standard errors. (The variance is a geometric distribution's: each further token comes by the same
        chance.)"""
        own = self.gains[rows.sampled].of(len(rows), chance)
        mean = max(0.0, own.value(FIRST, PRIOR))
        return float(mean + DOUBT * (mean * (1 + mean) / (own.bottom + 1)) ** 0.5)

    def learn(self, rows: Rows, chances: Sequence[float], gains: Sequence[int], size: float | None) -> None:
        """Add a round in which networks drafted.

        Args:
            chances: as given to `allows`.
            gains: [row]: how many tokens further its text advanced than without networks; -1: a token less.
            size: nodes of a row's tree. None: it was not cut to what pays.
        """
        own = self.gains[rows.sampled]
        if size is not None:
            own.sizes.setdefault(nearest(len(rows)), Mean()).add(size)
        for chance, gain, left in zip(chances, gains, rows.remaining, strict=True):
            if left > 1:  # a text's last token is no gain
                own.of(len(rows), chance).add(gain)
