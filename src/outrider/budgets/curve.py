"""Seconds by size, learned from noisy measurements."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

TILE = 16  # processors multiply so many rows in the time of one: a pass over 17 nodes costs a step more than over 16
RISE, FALL = 0.1, 0.4  # of what a measurement is off by, for low quantiles: it may be disturbed, and is never too short
MEMORY = 10  # measurements that a mean remembers
OUTLIER = 3.0  # times the mean: what a measurement moves it by at most
LONGEST = 1e6  # seconds; no valid measurement is longer
FAR = 1 << 20  # larger than any size


@dataclass
class Curve:
    """Linear between knots at 1, 2, 4, 8, 16, 17, 32, 33, 64, 65 and so on, and never falling.

    Each measurement moves the knots around it. What disturbs a measurement only adds time, so a curve falls faster than
    it rises, and at once where it was twice too high: it is a low quantile. `mean=True` keeps means of the last ten or
    so instead, for what varies by itself.
    """

    mean: bool = False
    slope: float = 0.02  # seconds per further unit, in those of size 1, where only one knot is known
    points: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict, repr=False, compare=False)
    _line: tuple[list[float], list[float]] | None = field(default=None, repr=False, compare=False)

    def learn(self, size: int, seconds: float) -> None:
        """Add a measurement."""
        size = nearest(size) if self.mean else size
        low, high = knots(size)
        share = (size - low) / (high - low)
        near = {low: 1 - share, high: share}
        main = high if share >= 0.5 else low
        old = self(size)
        count = self.counts[main] = self.counts.get(main, MEMORY - 1 if main in self.points else 0) + 1
        if main not in self.points:
            self.points[main] = self._first(size, seconds, main)
        elif self.mean:
            self._move(near, min(seconds - old, OUTLIER * old) / min(MEMORY, count), 0.2 * seconds)
        else:
            rate = RISE if seconds > old else 1.0 if seconds < 0.5 * old else FALL
            self._move(near, rate * min(seconds - old, 0.5 * old), 0.2 * seconds)
        self._line = None

    def _first(self, size: int, seconds: float, knot: int) -> float:
        """What a measurement says of a new knot, along the line from the nearest smaller one; no line spans a tile's
        end."""
        below = max((known for known in self.points if known < min(size, knot - 1)), default=0)
        if below:
            start = self.points[below]
            return max(start + (seconds - start) * (knot - below) / (size - below), 0.2 * start)
        return seconds * self(knot) / self(size) if self.points else seconds

    def _move(self, near: Mapping[int, float], step: float, least: float) -> None:
        """Move the curve by `step` at the point that lies so near to its knots, and none of these below `least`."""
        known = {knot: weight for knot, weight in near.items() if knot in self.points}
        total = sum(weight * weight for weight in known.values())
        for knot, weight in known.items():
            self.points[knot] = max(min(least, self.points[knot]), self.points[knot] + step * weight / total)

    def __call__(self, size: float) -> float:
        """Seconds of a size; 0 where nothing was measured."""
        sizes, costs = self._line or self._draw()
        i = min(bisect(sizes, size), len(sizes) - 1)
        low, high = sizes[i - 1], sizes[i]
        return costs[i - 1] + (costs[i] - costs[i - 1]) * (size - low) / (high - low)

    def table(self, sizes: Sequence[float]) -> list[float]:
        """Seconds of several sizes."""
        seconds: list[float] = np.interp(sizes, *(self._line or self._draw())).tolist()
        return seconds

    def _draw(self) -> tuple[list[float], list[float]]:
        """Knots and their seconds, from size 0 to FAR."""
        sizes = sorted(self.points) or [1]
        costs = [*accumulate((self.points.get(size, 0.0) for size in reversed(sizes)), min)][::-1]
        unit = costs[0] / (1 + self.slope * (sizes[0] - 1))
        slopes = [(costs[i] - costs[i - 1]) / (sizes[i] - sizes[i - 1]) for i in range(1, len(sizes))] or [
            unit * self.slope
        ]
        first = max(costs[0] - slopes[0] * sizes[0], 0.2 * costs[0])
        self._line = [0, *sizes, FAR], [first, *costs, costs[-1] + slopes[-1] * (FAR - sizes[-1])]
        return self._line


def knots(size: int) -> tuple[int, int]:
    """The knots around a size: 5 -> 4 and 8, 20 -> 17 and 32."""
    power = 1 << (size.bit_length() - 1)
    return (power + 1 if size > power >= TILE else power), (power + 1 if size == power >= TILE else 2 * power)


def nearest(size: int) -> int:
    """The nearest power of two: 5 -> 4, 6 -> 8."""
    low = 1 << (size.bit_length() - 1)
    return low if size * size < 2 * low * low else 2 * low


def points_of(state: Mapping[Any, Any]) -> dict[int, float]:
    """A curve's points from JSON; ValueError for what no measurement gives."""
    points = {int(size): float(seconds) for size, seconds in state.items()}
    if not all(size > 0 and 0 <= seconds < LONGEST for size, seconds in points.items()):
        raise ValueError("not a measurement")
    return points
