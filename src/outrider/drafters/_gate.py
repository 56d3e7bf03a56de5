"""Whether the networks of a mix draft in a round, after the drafters that cost next to nothing have drafted.

How deep networks draft, and which of their nodes stay, follows from their confidences. The parts of the adaptive budget
decide whether they draft at all: their seconds by batch size (`Curve`), the tokens that they gain (`Ratio`) and the
time that they have lost (`Ledger`). If they take s seconds and the pass over their nodes p more, and a row's text
advances g tokens further than with the cheap drafts, they pay where

    sum over rows of g  >  rows * rate * (s + p)

with `Budget.rate`, the tokens per second of a row as things are. g is learned by the chance that the row's cheap draft
has the next token. Networks that do not pay are tried when the ledger is at zero. At a new batch size (its nearest
power of two) they draft until SETTLING drafts were timed: a disturbed start would keep them from being timed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..budgets.acceptance import Ratio, bin_of
from ..budgets.curve import Curve, Mean
from ..budgets.ledger import Ledger
from ..core.types import Budget

SETTLING = 4  # first drafts of a batch size; the quickest counts
BINS = 4  # of the chance that a cheap draft has the next token
FIRST = 1.0  # tokens that networks are assumed to gain a row at first
PRIOR = 4.0  # rows that this assumption is worth in each bin
DOUBT = 0.5  # standard errors that are added to g, so that an estimate from few rows is tested again


@dataclass
class Gate:
    """One for all texts of a mix."""

    seconds: Curve = field(default_factory=lambda: Curve(0.5, SETTLING))  # of the networks' drafts, by batch size
    gains: list[Ratio] = field(default_factory=lambda: [Ratio() for _ in range(BINS)])  # by chance
    added: Mean = field(default_factory=lambda: Mean(1.0, 1))  # nodes that networks add to a row's tree

    def __post_init__(self) -> None:
        self.ledger = Ledger()

    def allows(self, chances: Sequence[float], most: Sequence[int], nodes: int, budget: Budget) -> bool:
        """Do the networks draft in this round?

        Args:
            chances: [row]: the chance that its cheap draft has the next token.
            most: [row]: how many tokens a draft may gain it.
            nodes: of the widest row's cheap draft, the root included.
            budget: where it has no `rate`, they draft in every round.
        """
        rows = len(chances)
        if not budget.rate or self.seconds.settles(rows):
            return True
        seconds = self.seconds(rows) + (budget.price.wider(rows, nodes, self.added.value) if budget.price else 0.0)
        gains = sum(min(limit, self.gain(chance)) for chance, limit in zip(chances, most, strict=True))
        self.ledger.pay(rows, 1 / budget.rate)
        if gains > rows * budget.rate * seconds:
            return True
        if self.ledger.owed(rows) > 0:
            return False
        self.ledger.charge(rows, seconds)
        return True

    def gain(self, chance: float) -> float:
        """Tokens that networks gain a row whose cheap draft has the next token by this chance, plus DOUBT standard
        errors. (The variance is a geometric distribution's: each further token comes by the same chance.)"""
        own = bin_of(self.gains, chance)
        mean = own.value(FIRST, PRIOR)
        return float(mean + DOUBT * (mean * (1 + mean) / (own.bottom + 1)) ** 0.5)

    def learn(self, chances: Sequence[float], gains: Sequence[int], added: float) -> None:
        """Add a round in which networks drafted.

        Args:
            chances: [row]: as given to `allows`, of the rows that may gain.
            gains: [row]: how many tokens further its text advanced than with the cheap drafts.
            added: nodes of a row's tree that only the networks proposed, on average.
        """
        self.added.add(added)
        for chance, gain in zip(chances, gains, strict=True):
            bin_of(self.gains, chance).add(gain)
