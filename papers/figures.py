"""Measured figures with their intervals, and checks: statements about figures, and whether they hold.

`outrider.bench.metrics` computes figures and their ratios from samples, prompt by prompt. Here there are finished
figures alone, of reports whose samples are gone, so two of them are taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HOLDS, PARTLY, FAILS, NOISE, OPEN = "holds", "partly", "does not hold", "within noise", "not measured"
ROUGH = 0.015  # taken for half an interval, as a share, where a file has none: differences under 3 % decide nothing
SIGNS = 0.05  # chance of as many domains on one side, both sides counted, up to which they decide
CLOSE = 0.1  # what is "like" another figure: a formula and its measurement, or speeds that should not differ


@dataclass(frozen=True)
class Figure:
    """`parts`: the same figure by domain. `told`: its interval was measured (95 % over prompts, or over repeats)."""

    value: float
    low: float
    high: float
    parts: Mapping[str, float] = field(default_factory=dict)
    told: bool = True
    kind: str = "domains"  # what the parts are

    @classmethod
    def of(cls, found: Any, parts: Mapping[str, float] | None = None, rough: float = ROUGH) -> Figure:
        """Of a bare number, or of an `Estimate`: [value, low, high], the ends None where there is no interval."""
        value, low, high = (found, None, None) if isinstance(found, int | float) else found
        if low is None or high is None:
            half = abs(value) * rough
            return cls(value, value - half, value + half, parts or {}, False)
        return cls(value, low, high, parts or {})

    def __str__(self) -> str:
        digits = 0 if abs(self.value) >= 50 else 2
        value, low, high = (f"{x:.{digits}f}" for x in (self.value, self.low, self.high))
        between = " to " if self.low < 0 else "-"
        return f"{value} ({low}{between}{high})" if self.told else value


ONE = Figure(1.0, 1.0, 1.0)


def mean(figures: Sequence[Figure]) -> Figure:
    """Of figures measured on different prompts."""
    n, value = len(figures), sum(f.value for f in figures) / len(figures)
    down, up = math.hypot(*(f.value - f.low for f in figures)) / n, math.hypot(*(f.high - f.value for f in figures)) / n
    return Figure(value, value - down, value + up, told=all(f.told for f in figures))


def quotient(a: Figure, b: Figure) -> Figure:
    """a / b of positive figures, as if they were measured independently: a wide interval where they were not."""
    value = a.value / b.value
    down = math.hypot(1 - a.low / a.value, b.high / b.value - 1)
    up = math.hypot(a.high / a.value - 1, 1 - b.low / b.value)
    return Figure(value, value * (1 - down), value * (1 + up), told=a.told and b.told)


def difference(a: Figure, b: Figure) -> Figure:
    value = a.value - b.value
    down, up = math.hypot(a.value - a.low, b.high - b.value), math.hypot(a.high - a.value, b.value - b.low)
    return Figure(value, value - down, value + up, told=a.told and b.told)


def inverse(a: Figure) -> Figure:
    return Figure(1 / a.value, 1 / a.high, 1 / a.low, told=a.told)


# ------------------------------------------------------------------------------------------------ checks


@dataclass(frozen=True)
class Check:
    words: str  # with its figures
    outcome: str  # HOLDS, FAILS, NOISE or OPEN


def ahead(a: Figure, b: Figure) -> tuple[str, str]:
    """Whether a > b holds, and what decided where the intervals overlap: the domains, if they agree beyond chance."""
    if a.low > b.high:
        return HOLDS, ""
    if a.high < b.low:
        return FAILS, ""
    signs = [x > b.parts[k] for k, x in a.parts.items() if k in b.parts and x != b.parts[k]]
    most = max(sum(signs), len(signs) - sum(signs))
    chance = 2 * sum(math.comb(len(signs), k) for k in range(most, len(signs) + 1)) / 2 ** len(signs)
    up = sum(signs) == most
    if chance <= SIGNS and up == (a.value > b.value):
        return (HOLDS if up else FAILS), f", {'higher' if up else 'lower'} in {most} of {len(signs)} {a.kind}"
    return NOISE, ""


def higher(words: str, a: Figure, b: Figure) -> Check:
    """The statement that a lies above b."""
    outcome, aside = ahead(a, b)
    return Check(f"{words}: {a} against {b}{aside}", outcome)


def least(words: str, a: Figure, bar: float) -> Check:
    """The statement that a is at least `bar`, a published or agreed number."""
    return Check(f"{words}: {a}", ahead(a, Figure(bar, bar, bar))[0])


def close(words: str, found: Figure, right: float) -> Check:
    """The statement that a figure is a number but for CLOSE of it."""
    off = found.value / right - 1
    outcome = HOLDS if abs(off) <= CLOSE else NOISE if found.low <= right <= found.high else FAILS
    return Check(f"{words}: {found} against {right:.2f} ({off:+.0%})", outcome)


def true(words: str, holds: bool) -> Check:
    return Check(words, HOLDS if holds else FAILS)


def open_(words: str) -> Check:
    return Check(words, OPEN)


def verdict(checks: Iterable[Check]) -> str:
    """Of a row. PARTLY: some statements hold, and others do not, cannot be told or were not measured."""
    found = {check.outcome for check in checks}
    if found <= {OPEN}:
        return OPEN
    if HOLDS in found:
        return HOLDS if found == {HOLDS} else PARTLY
    return FAILS if FAILS in found else NOISE
