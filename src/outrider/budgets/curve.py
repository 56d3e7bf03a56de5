"""Seconds by size, learned from noisy measurements."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field
from itertools import accumulate

MEMORY = 10  # measurements that a mean remembers
OUTLIER = 3.0  # times the mean that a measurement counts at most
FAR = 1 << 20  # larger than any size


@dataclass
class Curve:
    """Linear between means at 1, 2, 4, 8 and so on, and never falling.

    A measurement at a size between them is moved to the nearest one along the curve.
    """

    slope: float = 0.02  # seconds per further unit, in those of size 1, where only one size is known
    points: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._line: tuple[list[float], list[float]] | None = None  # drawn through the points
        if self.points.keys() != self.counts.keys() or min(self.points, default=1) < 1:
            raise ValueError("sizes are 1 or more, and each has a count")

    def learn(self, size: int, seconds: float) -> None:
        """Add a measurement."""
        knot = nearest(size)
        seconds = max(0.2 * seconds, seconds + self(knot) - self(size))
        old = self.points.get(knot, seconds)
        self.counts[knot] = min(MEMORY, self.counts.get(knot, 0) + 1)
        self.points[knot] = old + (min(seconds, OUTLIER * old) - old) / self.counts[knot]
        self._line = None

    def __call__(self, size: float) -> float:
        """Seconds of a size; 0 where nothing was measured."""
        sizes, costs = self._line or self._draw()
        i = min(bisect(sizes, size), len(sizes) - 1)
        low, high = sizes[i - 1], sizes[i]
        return costs[i - 1] + (costs[i] - costs[i - 1]) * (size - low) / (high - low)

    def _draw(self) -> tuple[list[float], list[float]]:
        """The knots and their seconds, from size 0 to FAR."""
        sizes = sorted(self.points) or [1]
        costs = [*accumulate((self.points.get(size, 0.0) for size in reversed(sizes)), min)][::-1]
        rises = [(costs[i] - costs[i - 1]) / (sizes[i] - sizes[i - 1]) for i in range(1, len(sizes))]
        rises = rises or [costs[0] * self.slope / (1 + self.slope * (sizes[0] - 1))]
        first = max(costs[0] - rises[0] * sizes[0], 0.2 * costs[0])
        self._line = [0, *sizes, FAR], [first, *costs, costs[-1] + rises[-1] * (FAR - sizes[-1])]
        return self._line


def nearest(size: int) -> int:
    """The nearest power of two: 5 -> 4, 6 -> 8."""
    low = 1 << (size.bit_length() - 1)
    return low if size * size < 2 * low * low else 2 * low
