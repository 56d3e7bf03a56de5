"""Measured figures with their intervals, and checks: statements about figures, whether they hold, and what they would
have seen.

Where two methods answered the same prompts and the counts of each prompt are stored, they are compared in pairs: the
ratio of the two, with a bootstrap over prompts. Else finished figures are taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats

HOLDS, PARTLY, FAILS, NOISE, OPEN = "holds", "partly", "does not hold", "undecided", "not run"
COMPUTED = "computed"  # a closed form, or our own shapes counted: no finding
BESIDE = "beside"  # what our own rule gives, which no paper has: counts for nothing
ROUGH = 0.015  # half an interval, as a share, where a file has none: differences under 3 % decide nothing
SIGNS = 0.05  # the chance, both sides counted, up to which domains or a test decide
CLOSE = 0.1  # what is "like" another figure: a formula and its measurement, or speeds that should not differ
WIDE = 0.1  # a standard deviation of rates between prompts that matters; chance alone is refuted where it was missed
DRAWS = 2000  # of a bootstrap
POWER = (1.96 + 0.84) / 1.96  # times half an interval of 95 %: the effect that is seen with a chance of 80 %


@dataclass(frozen=True)
class Figure:
    """A value with its interval of 95 %.

    Args:
        parts: the same figure by domain.
        measured: whether the interval was measured, over prompts or over repeats.
        pairs: (tokens, rounds) of each batch of prompts in the run `run`; their quotient is the figure.
    """

    value: float
    low: float
    high: float
    parts: Mapping[str, float] = field(default_factory=dict)
    measured: bool = True
    pairs: tuple[tuple[float, float], ...] = ()
    run: str = ""

    @classmethod
    def of(cls, given: Any, parts: Mapping[str, float] | None = None, rough: float = ROUGH) -> Figure:
        """Of a bare number, or of an `Estimate`: [value, low, high], the ends None where there is no interval."""
        value, low, high = (given, None, None) if isinstance(given, int | float) else given
        if low is None or high is None:
            half = abs(value) * rough
            return cls(value, value - half, value + half, parts or {}, False)
        return cls(value, low, high, parts or {})

    @classmethod
    def share(cls, hits: int, of: int) -> Figure:
        """A proportion with Wilson's interval."""
        interval = stats.binomtest(hits, of).proportion_ci(method="wilson")
        return cls(hits / of, interval.low, interval.high)

    def __str__(self) -> str:
        digits = 0 if abs(self.value) >= 50 else 2
        value, low, high = (f"{x:.{digits}f}" for x in (self.value, self.low, self.high))
        between = " to " if self.low < 0 else "-"
        return f"{value} ({low}{between}{high})" if self.measured else value

    @property
    def short(self) -> str:
        return f"{self.value:.0f}" if abs(self.value) >= 50 else f"{self.value:.2f}"

    @property
    def half(self) -> float:
        """Half the interval."""
        return (self.high - self.low) / 2


ONE = Figure(1.0, 1.0, 1.0)


def mean(figures: Sequence[Figure]) -> Figure:
    """Of figures measured on different prompts."""
    n, value = len(figures), sum(f.value for f in figures) / len(figures)
    down, up = math.hypot(*(f.value - f.low for f in figures)) / n, math.hypot(*(f.high - f.value for f in figures)) / n
    return Figure(value, value - down, value + up, measured=all(f.measured for f in figures))


def quotient(a: Figure, b: Figure) -> Figure:
    """a / b of positive figures: in pairs where both have them, else as if they were measured independently."""
    if paired(a, b):
        x, y = np.array(a.pairs), np.array(b.pairs)
        drawn = np.random.default_rng(0).integers(0, len(x), (DRAWS, len(x)))
        ratios = np.sort(ratio_of(x[drawn]) / ratio_of(y[drawn]))
        low, high = (float(ratios[round(share * (DRAWS - 1))]) for share in (0.025, 0.975))
        return Figure(float(ratio_of(x) / ratio_of(y)), low, high)
    value = a.value / b.value
    down = math.hypot(1 - a.low / a.value, b.high / b.value - 1)
    up = math.hypot(a.high / a.value - 1, 1 - b.low / b.value)
    return Figure(value, value * (1 - down), value * (1 + up), measured=a.measured and b.measured)


def paired(a: Figure, b: Figure) -> bool:
    """Whether both are figures of the same prompts."""
    return bool(a.pairs) and a.run == b.run and len(a.pairs) == len(b.pairs)


def ratio_of(pairs: Any) -> Any:
    """Tokens over rounds, of [..., n, 2]."""
    counts = np.asarray(pairs)
    return counts[..., 0].sum(-1) / counts[..., 1].sum(-1)


def difference(a: Figure, b: Figure) -> Figure:
    """a - b; from the ratio's interval where they are paired."""
    value = a.value - b.value
    if paired(a, b):
        ratio = quotient(a, b)
        return Figure(value, b.value * (ratio.low - 1), b.value * (ratio.high - 1))
    down, up = math.hypot(a.value - a.low, b.high - b.value), math.hypot(a.high - a.value, b.value - b.low)
    return Figure(value, value - down, value + up, measured=a.measured and b.measured)


def inverse(a: Figure) -> Figure:
    return Figure(1 / a.value, 1 / a.high, 1 / a.low, measured=a.measured)


# ------------------------------------------------------------------------------------------------ checks


@dataclass(frozen=True)
class Check:
    """A statement and its outcome.

    Args:
        words: the statement.
        outcome: HOLDS, FAILS, NOISE, OPEN or COMPUTED.
        figures: what was measured, in full.
        short: the same for a line of the page.
        seen: the smallest effect that would have been seen with a chance of 80 %.
    """

    words: str
    outcome: str
    figures: str = ""
    short: str = ""
    seen: str = ""


def ahead(a: Figure, b: Figure) -> tuple[str, str]:
    """Whether a > b, and what decided where the intervals overlap: the domains, if they agree beyond chance."""
    if a.low > b.high:
        return HOLDS, ""
    if a.high < b.low:
        return FAILS, ""
    signs = [x > b.parts[k] for k, x in a.parts.items() if k in b.parts and x != b.parts[k]]
    if not signs:
        return NOISE, ""
    most = max(sum(signs), len(signs) - sum(signs))
    chance = min(1.0, 2 * float(stats.binom.sf(most - 1, len(signs), 0.5)))
    up = sum(signs) == most
    if chance <= SIGNS and up == (a.value > b.value):
        return (HOLDS if up else FAILS), f", {'higher' if up else 'lower'} in {most} of {len(signs)} domains"
    return NOISE, ""


def higher(words: str, a: Figure, b: Figure) -> Check:
    """The statement that a lies above b."""
    if paired(a, b):
        ratio = quotient(a, b)
        outcome, figures = ahead(ratio, ONE)[0], f"{a.short} against {b.short}, ratio {ratio}"
        return Check(words, outcome, figures, f"{a.short}/{b.short}", f"{POWER * ratio.half:.0%}")
    outcome, aside = ahead(a, b)
    seen = POWER * math.hypot(a.half, b.half) / abs(b.value) if b.value else 0.0
    return Check(words, outcome, f"{a} against {b}{aside}", f"{a.short}/{b.short}", f"{seen:.0%}")


def least(words: str, a: Figure, bar: float) -> Check:
    """The statement that a is at least `bar`, a published or agreed number."""
    outcome = ahead(a, Figure(bar, bar, bar))[0]
    return Check(words, outcome, f"{a} against {bar:g}", a.short, f"{POWER * a.half:.2f}")


def close(words: str, a: Figure, right: float) -> Check:
    """The statement that a figure is a number but for CLOSE of it: all of its interval, or none for a refutation."""
    low, high = a.low / right - 1, a.high / right - 1
    outcome = HOLDS if max(-low, high) <= CLOSE else FAILS if low > CLOSE or high < -CLOSE else NOISE
    figures = f"{a} against {right:.2f} ({a.value / right - 1:+.0%})"
    return Check(words, outcome, figures, f"{a.short}/{right:.2f}", f"{POWER * a.half / right:.0%}")


def dispersed(words: str, groups: Sequence[Sequence[tuple[int, int]]]) -> Check:
    """The statement that rates differ between prompts by more than a common rate makes them: (hits, trials) of each
    prompt of each task, which has a rate of its own. Pearson's statistic over its degrees of freedom is 1 if they do
    not; it is refuted where a spread of WIDE would have been seen."""
    x, free, rows = 0.0, 0, list[tuple[int, int]]()
    for group in groups:
        mine = [(h, n) for h, n in group if n]
        p = sum(h for h, _ in mine) / max(1, sum(n for _, n in mine))
        if len(mine) > 1 and 0 < p < 1:
            x += sum((h - n * p) ** 2 / (n * p * (1 - p)) for h, n in mine)
            free, rows = free + len(mine) - 1, rows + mine
    if free < 9:
        return open_(f"{words}: too few prompts")
    rate = sum(h for h, _ in rows) / sum(n for _, n in rows)
    p = float(stats.chi2.sf(x, free))
    trials = sum(n for _, n in rows) / len(rows)
    # With correlation rho the statistic's mean is 1 + (trials - 1) rho; 80 % of such draws pass the threshold.
    ratio = float(stats.chi2.isf(SIGNS, free) / stats.chi2.ppf(0.2, free))
    spread = math.sqrt(rate * (1 - rate) * (ratio - 1) / max(1.0, trials - 1))
    outcome = HOLDS if p <= SIGNS else FAILS if spread <= WIDE else NOISE
    deviation = math.sqrt(rate * (1 - rate) * max(0.0, x / free - 1) / max(1.0, trials - 1))
    figures = f"X2/df {x / free:.2f} (p {p:.1g}), {len(rows)} prompts of {trials:.0f} rounds, rate {rate:.2f}"
    figures += f", standard deviation {deviation:.2f}"
    return Check(words, outcome, figures, f"X²/df {x / free:.1f}", f"a standard deviation of {spread:.2f}")


def true(words: str, holds: bool, figures: str = "", short: str = "", seen: str = "") -> Check:
    return Check(words, HOLDS if holds else FAILS, figures, short, seen)


def computed(words: str, right: bool, figures: str = "") -> Check:
    """A tautology, once our code is right: it is no finding that holds."""
    return Check(words, COMPUTED if right else FAILS, figures)


def beside(words: str, *figures: Figure) -> Check:
    """What `coupled` gives, beside the papers' rule."""
    short = "/".join(f.short for f in figures)
    return Check(f"{words}, under `coupled`", BESIDE, " against ".join(map(str, figures)), short)


def open_(words: str) -> Check:
    return Check(words, OPEN)


def verdict(checks: Iterable[Check]) -> str:
    """Of a row. PARTLY: some statements hold, and others do not, are undecided or were not run."""
    outcomes = {check.outcome for check in checks} - {BESIDE}
    if COMPUTED in outcomes:
        return COMPUTED if outcomes == {COMPUTED} else PARTLY
    if outcomes <= {OPEN}:
        return OPEN
    if HOLDS in outcomes:
        return HOLDS if outcomes == {HOLDS} else PARTLY
    return FAILS if FAILS in outcomes else NOISE
