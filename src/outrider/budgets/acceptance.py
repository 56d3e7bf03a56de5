"""How often drafts are accepted: by depth, recently and in earlier texts, and against what confidences promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

DECAY = 0.98  # of recent rounds, per round
SLOW = 0.999  # of earlier texts, per round
PRIOR = 16.0  # rounds that earlier texts are worth where a text begins
FIRST_SHARE = 0.5  # of depth 1, before anything is known
GUESS = 4.0  # rounds that the share extrapolated from the depths above is worth
DEPTH = 8  # of the deepest drafts


@dataclass
class Ratio:
    """A ratio of two sums that forget: both are multiplied by `keep` before something is added."""

    top: float = 0.0
    bottom: float = 0.0

    def add(self, top: float, bottom: float = 1.0, keep: float = DECAY) -> None:
        self.top, self.bottom = keep * self.top + top, keep * self.bottom + bottom

    def value(self, prior: float = 0.0, weight: float = 1e-9) -> float:
        """The ratio, with a prior value that weighs as a denominator of `weight` would."""
        return (self.top + weight * prior) / (self.bottom + weight)


def bin_of(bins: Sequence[Ratio], share: float) -> Ratio:
    """The bin of a share from 0 to 1, of bins of equal width."""
    return bins[min(len(bins) - 1, int(len(bins) * share))]


@dataclass
class Acceptance:
    """share(d): of the rounds that drafted to depth d or more, the share that accepted depth d.

    Texts differ more than the rounds of one text. So there is a recent record, `recent` [depth - 1], and slow ones,
    `earlier` [sampled?][depth - 1], whose shares are the prior of a sequence that begins. Sampled texts (T > 0) have a
    slow record of their own, since less is accepted. Shares are not products of hit rates: a tree without its unlikely
    nodes tests deep ones only where they are likely.
    """

    recent: list[Ratio] = field(default_factory=lambda: [Ratio() for _ in range(DEPTH)])
    earlier: list[list[Ratio]] = field(default_factory=lambda: [[Ratio() for _ in range(DEPTH)] for _ in range(2)])
    sampled: bool = False
    promised: Ratio = field(default_factory=Ratio)  # accepted tokens over those that values promised

    def begin(self, share: float, sampled: bool) -> None:
        """This share of the batch is new."""
        self.sampled = sampled
        for now, before in zip(self.recent, self.earlier[sampled], strict=True):
            if before.bottom:
                value = (1 - share) * now.value() + share * before.value()
                now.bottom += share * (PRIOR - now.bottom)
                now.top = value * now.bottom

    def learn(self, accepted: Sequence[int], rows: int, promised: float) -> None:
        """Add a round: of `rows` sequences `accepted[d]` accepted depth d + 1; values promised so many tokens."""
        for record, keep in ((self.recent, DECAY), (self.earlier[self.sampled], SLOW)):
            for ratio, hits in zip(record, accepted, strict=False):
                ratio.add(hits, rows, keep)
        if promised:
            self.promised.add(sum(accepted), promised)

    def shares(self, depth: int) -> list[float]:
        """[d]: the share of rounds that accept depth d + 1. The prior of a depth extrapolates the two above it, and so
        does what is deeper than is counted."""
        above, share, shares = 1.0, 1.0, list[float]()
        for d in range(depth):
            guess = share * min(0.9, share / above) if shares else FIRST_SHARE
            above, share = share, self.recent[d].value(guess, GUESS) if d < len(self.recent) else guess
            shares.append(share)
        return shares

    @property
    def trust(self) -> float:
        """Accepted tokens for each that the values of the drafted nodes promised."""
        return min(4.0, max(0.25, self.promised.value(1.0, PRIOR)))
