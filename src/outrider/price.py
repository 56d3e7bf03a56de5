"""What the nodes of a round cost, and how many of them pay."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Price:
    """What a round costs by its nodes, so that trees can be cut where it pays best."""

    seconds: tuple[float, ...]  # [n - 1]: a round whose widest row has n nodes, the root included
    trust: float = 1.0  # accepted tokens for each that the values promise
    summed: bool = False  # padding costs nothing; `seconds` are those of rounds with n drafted nodes in all, [n]

    def most(self, values: Float[Tensor, "b n"]) -> list[int]:
        """How many nodes each row keeps: those with the most tokens per second over all rows.

        values  logs of probabilities, each row's in falling order, the root's first; -inf: no node
        """
        rows, drafted = len(values), values[:, 1:]
        if self.summed:
            ordered = drafted.flatten().sort(descending=True).values[: len(self.seconds) - 1]
            best = self._best(rows, ordered.exp())
            least = float(ordered[best - 1]) if best else float("inf")
            return [1 + n for n in (drafted >= least).sum(1).tolist()]
        return [1 + self._best(rows, drafted[:, : len(self.seconds) - 1].exp().sum(0))] * rows

    def _best(self, rows: int, gains: Float[Tensor, " n"]) -> int:
        """How many of these gains are worth their time, one after the other."""
        tokens = [rows, *(rows + self.trust * g for g in gains.cumsum(0).tolist())]
        rates = [t / s for t, s in zip(tokens, self.seconds, strict=False)]
        return max(range(len(rates)), key=rates.__getitem__)

    def wider(self, rows: int, nodes: int, more: int) -> float:
        """Seconds that `more` nodes in each of so many rows cost, which have `nodes` already."""
        step, last = rows if self.summed else 1, len(self.seconds) - 1
        return self.seconds[min(last, step * (nodes - 1 + more))] - self.seconds[min(last, step * (nodes - 1))]

    @property
    def slope(self) -> float:
        """Seconds that one more node costs, over all sizes."""
        return (self.seconds[-1] - self.seconds[0]) / max(1, len(self.seconds) - 1)
