"""What sizes cost, learnt from noisy measurements."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

TILE = 16  # rows that some processors multiply in the time of one: a pass over 17 nodes costs a step more than over 16
LONGEST = 1e6  # seconds: no measurement is longer


@dataclass
class Curve:
    """Seconds by size, learnt from noisy measurements: a running low quantile per size, lines between.

    What disturbs a measurement (a cold cache, another process) only ever adds time, so estimates fall faster than they
    rise, and at once where the old one was more than twice as long (a first pass that is being recorded). Sizes share
    the nearest power of two, or most would be seen once and never again; what a size says of that power goes by the
    curve so far. From TILE on, those above a power share the size behind it. A size seen to cost more than a larger one
    was disturbed, or is not what it was: what is asked for less often is known less well.
    """

    prior_slope: float = 0.02  # of what size 1 costs, per unit, where only one size was seen
    mean: bool = False  # for what differs from round to round by itself: the mean of the last ten or so instead
    points: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict, repr=False, compare=False)  # measurements since it began
    _line: tuple[list[int], list[float], list[float]] | None = field(default=None, repr=False, compare=False)

    def learn(self, size: int, seconds: float) -> None:
        power = nearest(size) if self.mean else shared(size)
        if size != power and not self.mean:  # a pass over 6 nodes is no pass over 8: what it says of that one
            seconds = self._carried(size, seconds, power)
        size, old, self._line = power, self.points.get(power), None
        if old is None or (seconds < 0.5 * old and not self.mean):
            self.points[size], self.counts[size] = seconds, 1
            return
        if self.mean:
            self.counts[size] = count = self.counts.get(size, 9) + 1
            self.points[size] = old + (min(seconds, 4 * old) - old) / min(10, count)
            return
        step = min(0.5 * old, seconds - old)
        self.points[size] = old + (0.1 if step > 0 else 0.4) * step

    def _carried(self, size: int, seconds: float, to: int) -> float:
        """What a measurement says of another size: by the curve, or where that is not known there, along the line from
        the nearest smaller size that is. From 16 on there is no line to 17, where a step may be."""
        if to in self.points and len(self.points) > 1:
            return seconds * self(to) / max(1e-9, self(size))
        below = max((known for known in self.points if known < min(size, to) and shared(known + 1) != to), default=0)
        if not below:
            return seconds
        start = self.points[below]
        return max(start + (seconds - start) * (to - below) / (size - below), 0.2 * start)

    def doubt(self, size: int, seconds: float) -> None:
        """Of a measurement with other work in it only this is taken: that an estimate is more than twice too long."""
        if not self.points or seconds < 0.5 * self(size):
            self.learn(size, seconds)

    def __call__(self, size: int) -> float:
        known, costs, steps = self._line or self._draw()
        i = min(max(bisect_left(known, size), 1), len(steps)) - 1
        return max(costs[i] + steps[i] * (size - known[i]), 0.2 * costs[0])

    def table(self, sizes: Sequence[int]) -> list[float]:
        """Seconds of several sizes, which rise; so do they."""
        known, costs, steps = self._line or self._draw()
        found, i, last = [], 0, len(steps) - 1
        for size in sizes:
            while i < last and size > known[i + 1]:
                i += 1
            found.append(costs[i] + steps[i] * (size - known[i]))
        least = 0.2 * costs[0]
        return found if not found or found[0] >= least else [max(least, x) for x in found]

    def _draw(self) -> tuple[list[int], list[float], list[float]]:
        """Two sizes at least and what they cost, in rising order, and the slopes from one to the next."""
        known = sorted(self.points)
        if len(known) < 2:
            first = known[0] if known else 1
            unit = self.points.get(first, 0.0) / (1 + self.prior_slope * (first - 1))
            self._line = [1, 2], [unit, unit * (1 + self.prior_slope)], [unit * self.prior_slope]
            return self._line
        costs = [*accumulate((self.points[size] for size in reversed(known)), min)][::-1]  # no more than a larger one
        steps = [(costs[i] - costs[i - 1]) / (known[i] - known[i - 1]) for i in range(1, len(known))]
        self._line = known, costs, steps
        return self._line

    def slope(self, size: int) -> float:
        """Seconds per unit around `size`."""
        return max(0.0, self(2 * size) - self(size)) / size if size else 0.0


def nearest(size: int) -> int:
    """The nearest power of two: 5 -> 4, 6 -> 8."""
    low = 1 << (size.bit_length() - 1)
    return low if 2 * size * size < 4 * low * low else 2 * low


def shared(size: int) -> int:
    """The size under which a pass's time is kept: 12 -> 16, 17 -> 17, 20 -> 17, 30 -> 32."""
    power = nearest(size)
    return power + 1 if size > power >= TILE else power


def of_batch(curves: Mapping[int, Curve], rows: int, nodes: int) -> Curve:
    """Seconds of a pass by the nodes of its widest row, up to so many: measured, or else as in other batches (batch
    rows -> their curve) of as many nodes in all."""
    own, total = curves.get(rows, Curve()), Curve()
    for b, curve in curves.items():
        for size, seconds in curve.points.items() if b != rows else ():
            total.points[b * size] = min(seconds, total.points.get(b * size, seconds))
    if not total.points:
        return own
    first = min(own.points, default=0)
    ratio = own.points[first] / max(1e-9, total(rows * first)) if first else 1.0
    sizes = [1 << i for i in range(nodes.bit_length())]
    return Curve(points={n: own.points.get(n, ratio * total(rows * n)) for n in (*sizes, *own.points)})


def measured(given: Mapping[Any, Any]) -> dict[int, float]:
    """A curve's points as JSON has them; ValueError for what no measurement gives."""
    made = {int(size): float(seconds) for size, seconds in given.items()}
    if not made or not all(size > 0 and 0 <= seconds < LONGEST for size, seconds in made.items()):
        raise ValueError("no measurement")
    return made
