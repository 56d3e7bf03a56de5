"""How often drafts are accepted: by depth, recently and in earlier texts, and against what confidences promised."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

DECAY = 0.98  # of recent rounds, per round
SLOW = 0.999  # of earlier texts, per round
PRIOR = 16.0  # sequences that earlier texts are worth where a text begins


@dataclass
class Ratio:
    """A ratio of two sums that forget: both are multiplied by `keep` before something is added."""

    top: float = 0.0
    bottom: float = 0.0

    def add(self, top: float, bottom: float = 1.0, keep: float = DECAY) -> None:
        self.top, self.bottom = keep * self.top + top, keep * self.bottom + bottom

    def faded(self, most: float) -> Ratio:
        """The same ratio with a denominator of at most this."""
        keep = min(1.0, most / max(1e-9, self.bottom))
        return Ratio(keep * self.top, keep * self.bottom)

    def value(self, prior: float = 0.0, weight: float = 1e-9) -> float:
        """The ratio, with a prior value that weighs as a denominator of `weight` would."""
        return (self.top + weight * prior) / (self.bottom + weight)


def state_of(ratios: Iterable[Ratio], most: float = PRIOR) -> list[list[float]]:
    """As JSON, no more than a prior: other texts may differ."""
    return [[r.top, r.bottom] for r in (ratio.faded(most) for ratio in ratios)]


def ratios_of(state: Iterable[Sequence[Any]], largest: float = 1e9) -> list[Ratio]:
    """From JSON; ValueError where a ratio is negative or above `largest`."""
    made = [Ratio(float(top), float(bottom)) for top, bottom in state]
    if not all(0 <= r.top <= largest * r.bottom + 1e-9 and math.isfinite(r.top + r.bottom) for r in made):
        raise ValueError("not a ratio")
    return made


@dataclass
class Bins:
    """Ratios by a chance from 0 to 1, in bins of equal width."""

    bins: list[Ratio]

    def __getitem__(self, chance: float) -> Ratio:
        return self.bins[min(len(self.bins) - 1, int(len(self.bins) * chance))]

    def state(self) -> list[list[float]]:
        """As JSON, no more than a prior."""
        return state_of(self.bins)

    def restore(self, state: Any, largest: float = 1.0) -> None:
        """Take over a state; ValueError, KeyError or TypeError where it is none."""
        bins = ratios_of(state, largest)
        if len(bins) != len(self.bins):
            raise ValueError("another number of bins")
        self.bins = bins


@dataclass
class Acceptance:
    """The share of rounds, of those that drafted to depth d or more, that accepted depth d.

    Texts differ more than the rounds of one text. So there is a recent record and a slow one; a sequence that begins is
    met with the slow one's shares. Sampled texts (T > 0) have a slow record of their own, since less is accepted.
    Shares are not products of hit rates: a tree without its unlikely nodes tests deep ones only where they are likely.
    """

    recent: list[Ratio] = field(default_factory=list)  # [depth - 1]
    earlier: dict[bool, list[Ratio]] = field(default_factory=lambda: {False: []})  # sampled? -> the same
    sampled: bool = False
    promised: Ratio = field(default_factory=Ratio)  # accepted tokens of those that values promised

    def begin(self, share: float, sampled: bool) -> None:
        """This share of the batch is new."""
        if sampled not in self.earlier:
            self.earlier[sampled] = [ratio.faded(PRIOR) for ratio in self.earlier[not sampled]]
        self.sampled = sampled
        for now, earlier in zip(self.recent, self.earlier[sampled], strict=True):
            value = (1 - share) * now.value() + share * earlier.value()
            now.bottom += share * (min(PRIOR, earlier.bottom) - now.bottom)
            now.top = value * now.bottom

    def learn(self, accepted: Sequence[int], rows: int, promised: float) -> None:
        """Add a round: of `rows` sequences `accepted[d]` accepted depth d + 1; values promised so many tokens."""
        for d, hits in enumerate(accepted):
            if d == len(self.recent):  # a depth never drafted is assumed to continue as the one above
                guess = self.shares(d + 1)[d]
                for record in (self.recent, *self.earlier.values()):
                    record.append(Ratio(PRIOR * guess, PRIOR))
            self.recent[d].add(hits, rows, DECAY)
            self.earlier[self.sampled][d].add(hits, rows, SLOW)
        if promised:
            self.promised.add(sum(accepted), promised)

    def shares(self, depth: int) -> list[float]:
        """[d]: the share of rounds that accept depth d + 1. Beyond what was drafted it falls as it did last."""
        shares = [ratio.value() for ratio in self.recent[:depth]]
        last, above = shares[-1] if shares else FIRST_SHARE, shares[-2] if len(shares) > 1 else 1.0
        fall = min(0.9, last / above) if above > 0 else 0.0
        while len(shares) < depth:
            last = last * fall if shares else last
            shares.append(last)
        return shares

    @property
    def trust(self) -> float:
        """Accepted tokens for each that the values of the drafted nodes promised."""
        return min(4.0, max(0.25, self.promised.value(1.0, PRIOR)))

    def state(self) -> dict[str, Any]:
        """The earlier record, as JSON."""
        return {name: state_of(self.earlier[kind]) for name, kind in KINDS.items() if kind in self.earlier}

    def restore(self, state: Any) -> None:
        """Take over a state; ValueError, KeyError, TypeError or AttributeError where it is none."""
        earlier = {KINDS[name]: ratios_of(ratios, 1.0) for name, ratios in state.items()}
        if len({len(ratios) for ratios in earlier.values()}) != 1 or any(
            ratio.bottom <= 0 for ratios in earlier.values() for ratio in ratios
        ):
            raise ValueError("not shares by depth")
        self.earlier, self.sampled = earlier, next(iter(earlier))
        self.recent = [Ratio(ratio.top, ratio.bottom) for ratio in earlier[self.sampled]]


FIRST_SHARE = 0.7  # of depth 1, before anything is known
KINDS = {"greedy": False, "sampled": True}
