"""The cost of a round by its nodes, and how many nodes to keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Price:
    """Seconds of a round by its nodes; trees are cut to the size with the most tokens per second."""

    seconds: tuple[float, ...]  # [n - 1]: a round whose widest row has n nodes, the root included
    trust: float = 1.0  # accepted tokens for each that the values promise
    summed: bool = False  # padding costs nothing; `seconds` are those of rounds with n drafted nodes in all, [n]

    def most(self, values: Sequence[Sequence[float]]) -> list[int]:
        """How many nodes each row keeps: those with the most tokens per second over all rows.

        values  logs of probabilities, each row's in falling order, the root's first; -inf: no node
        """
        rows = len(values)
        if self.summed:
            drafted = sorted((x for row in values for x in row[1:]), reverse=True)
            best = self._best(rows, [math.exp(x) for x in drafted])
            least = drafted[best - 1] if best else math.inf
            return [1 + sum(x >= least for x in row[1:]) for row in values]
        places = range(1, max(map(len, values)))
        best = self._best(rows, [math.fsum(math.exp(row[i]) for row in values if i < len(row)) for i in places])
        return [min(1 + best, len(row)) for row in values]

    def _best(self, rows: int, gains: Sequence[float]) -> int:
        """How many of these gains are worth their time, one after the other."""
        tokens, best, count = float(rows), rows / self.seconds[0], 0
        for i, (gain, seconds) in enumerate(zip(gains, self.seconds[1:], strict=False), 1):
            tokens += self.trust * gain
            if tokens / seconds > best:
                best, count = tokens / seconds, i
        return count

    def between(self, rows: int, few: float, many: float) -> float:
        """Seconds by which a pass over `many` nodes in each of so many rows is longer than over `few`."""
        step, last = rows if self.summed else 1, len(self.seconds) - 1
        low, high = (self.seconds[min(last, round(step * (nodes - 1)))] for nodes in (few, many))
        return high - low

    @property
    def slope(self) -> float:
        """Seconds that one more node costs, over all sizes."""
        return (self.seconds[-1] - self.seconds[0]) / max(1, len(self.seconds) - 1)
