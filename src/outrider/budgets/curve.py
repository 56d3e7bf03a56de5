"""Means of noisy measurements, and curves of seconds by size through them."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field
from itertools import accumulate

MEMORY = 10  # measurements that a mean remembers
OUTLIER = 3.0  # times the mean that a measurement counts at most


@dataclass
class Mean:
    """A running mean: of all measurements at first, later with weight 1 / MEMORY for the last one."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Add a measurement. It counts at most OUTLIER times the mean."""
        if self.count:
            value = min(value, OUTLIER * self.value)
        self.count = min(MEMORY, self.count + 1)
        self.value += (value - self.value) / self.count


@dataclass
class Curve:
    """Seconds by size: piecewise linear and non-decreasing, through means at the sizes 1, 2, 4, 8 and so on.

    A measurement at another size is moved along the curve to the nearest of these.
    """

    slope: float = 0.02  # seconds per further unit, relative to those of size 1, where only one size was measured
    settling: int = 0  # first measurements of a size, of which the least counts: disturbances only lengthen them
    points: dict[int, Mean] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._line: tuple[list[float], list[float]] | None = None  # drawn through the points

    def learn(self, size: int, seconds: float) -> None:
        """Add a measurement."""
        knot = nearest(size)
        seconds = max(0.2 * seconds, seconds + self(knot) - self(size))
        point = self.points.setdefault(knot, Mean())
        if self.settles(knot):
            point.value, point.count = min(point.value, seconds) if point.count else seconds, point.count + 1
        else:
            point.add(seconds)
        self._line = None

    def settles(self, size: int) -> bool:
        """Are a size's first measurements still to come?"""
        point = self.points.get(nearest(size))
        return (point.count if point else 0) < self.settling

    def __call__(self, size: float) -> float:
        """Seconds of a size; 0 where nothing was measured."""
        sizes, costs = self._line or self._draw()
        i = min(bisect(sizes, size), len(sizes) - 1)
        low, high = sizes[i - 1], sizes[i]
        return costs[i - 1] + (costs[i] - costs[i - 1]) * (size - low) / (high - low)

    def _draw(self) -> tuple[list[float], list[float]]:
        """The knots and their seconds, from size 0. The last two also give the line beyond them."""
        sizes = sorted(self.points) or [1]
        costs = [*accumulate((self.points.get(size, Mean()).value for size in reversed(sizes)), min)][::-1]
        if len(sizes) > 1:
            rise = (costs[1] - costs[0]) / (sizes[1] - sizes[0])
        else:
            rise = costs[0] * self.slope / (1 + self.slope * (sizes[0] - 1))
        self._line = [0, *sizes], [max(costs[0] - rise * sizes[0], 0.2 * costs[0]), *costs]
        return self._line


def nearest(size: int) -> int:
    """The nearest power of two: 5 -> 4, 6 -> 8."""
    low = 1 << (size.bit_length() - 1)
    return low if size * size < 2 * low * low else 2 * low
