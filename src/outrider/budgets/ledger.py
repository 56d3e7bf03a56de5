"""The time that drafts have lost against plain decoding: when to stop drafting, and when to try again."""

from __future__ import annotations

from dataclasses import dataclass, field

from .curve import nearest

TRIES = 0.02  # of the time may be lost to drafts that do not pay; over the cube root of the batch size
HOLD = 8.0  # plain rounds that may be owed where drafts should pay: a single round gives less by chance
FORGIVEN = 1.0  # plain rounds that a new text takes off the debt, by its share of the batch squared


@dataclass
class Ledger:
    """What is owed, in seconds, for each batch size (sizes nearest to the same power of two share an account).

    A round with drafts adds the time that it took beyond what plain rounds would have taken for the same tokens, or
    takes off what it saved. Every round pays off TRIES of its time. Where the forecast is against drafts, one is tried
    when nothing is owed; where it is for them, they continue until HOLD rounds are owed. So drafts that do not pay cost
    TRIES of the time in the long run, HOLD rounds once, and FORGIVEN rounds a text.
    """

    debt: dict[int, float] = field(default_factory=dict)

    def owed(self, rows: int) -> float:
        return self.debt.get(nearest(rows), 0.0)

    def hold(self, rows: int, plain: float) -> float:
        """Seconds that may be owed where drafts should pay: fewer rounds of larger batches, which vary less."""
        return HOLD * plain / rows**0.5

    def pay(self, rows: int, seconds: float) -> None:
        """A round of so many seconds pays off its share."""
        self.charge(rows, -TRIES / rows ** (1 / 3) * seconds)

    def charge(self, rows: int, lost: float) -> None:
        """A round with drafts lost so many seconds, or saved them (below 0)."""
        self.debt[nearest(rows)] = max(0.0, self.owed(rows) + lost)
