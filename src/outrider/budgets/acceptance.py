"""How often drafts are accepted: by depth, recently and in earlier texts, and against what confidences promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

DECAY = 0.98  # of recent rounds, per round
SLOW = 0.999  # of earlier texts, per round
PRIOR = 16.0  # rounds that earlier texts are worth where a text begins
FIRST_SHARE = 0.7  # of depth 1, before anything is known


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
    """The share of rounds, of those that drafted to depth d or more, that accepted depth d.

    Texts differ more than the rounds of one text. So there is a recent record and a slow one; a sequence that begins is
    met with the slow one's shares. Sampled texts (T > 0) have a slow record of their own, since less is accepted.
    Shares are not products of hit rates: a tree without its unlikely nodes tests deep ones only where they are likely.
    """

    recent: list[Ratio] = field(default_factory=list)  # [depth - 1]
    earlier: list[list[Ratio]] = field(default_factory=lambda: [[], []])  # [sampled?], the same; []: none came yet
    sampled: bool = False
    promised: Ratio = field(default_factory=Ratio)  # accepted tokens over those that values promised

    def __post_init__(self) -> None:
        if len(self.earlier) != 2 or any(len(record) not in (0, len(self.recent)) for record in self.earlier):
            raise ValueError("the records have different depths")

    def begin(self, share: float, sampled: bool) -> None:
        """This share of the batch is new."""
        self.sampled, usual = sampled, self.earlier[sampled]
        if not usual:
            usual += [Ratio(PRIOR * ratio.value(), PRIOR) for ratio in self.earlier[not sampled]]
        for now, before in zip(self.recent, usual, strict=True):
            value = (1 - share) * now.value() + share * before.value()
            now.bottom += share * (PRIOR - now.bottom)
            now.top = value * now.bottom

    def learn(self, accepted: Sequence[int], rows: int, promised: float) -> None:
        """Add a round: of `rows` sequences `accepted[d]` accepted depth d + 1; values promised so many tokens."""
        usual, other = self.earlier[self.sampled], self.earlier[not self.sampled]
        for d, hits in enumerate(accepted):
            if d == len(self.recent):  # a depth never drafted is assumed to continue as the one above
                guess = PRIOR * self.shares(d + 1)[d]
                for record in (self.recent, usual, other) if other else (self.recent, usual):
                    record.append(Ratio(guess, PRIOR))
            self.recent[d].add(hits, rows, DECAY)
            usual[d].add(hits, rows, SLOW)
        if promised:
            self.promised.add(sum(accepted), promised)

    def shares(self, depth: int) -> list[float]:
        """[d]: the share of rounds that accept depth d + 1. Beyond what was drafted it falls as it did last."""
        shares = [1.0, *([ratio.value() for ratio in self.recent] or [FIRST_SHARE])]
        while len(shares) <= depth:
            above, last = shares[-2:]
            shares.append(last * min(0.9, last / max(1e-9, above)))
        return shares[1 : depth + 1]

    @property
    def trust(self) -> float:
        """Accepted tokens for each that the values of the drafted nodes promised."""
        return min(4.0, max(0.25, self.promised.value(1.0, PRIOR)))
