"""What rounds brought: of late, in a rest, and over texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR = 16.0  # rows that an old record is worth where other texts begin
SLOW = 0.999  # forgetting of hit rates over texts, per round
RECENT = 0.97  # forgetting of what rounds with drafts brought, per such round
USUAL = 0.995  # the same where it is to outlive a text
ENOUGH = 24.0  # rows of such rounds, decayed, before they say something
MANY = 100.0  # the same of what is usual: one or two texts say little of it


@dataclass
class Usual:
    """What outlives texts, of those that are sampled or of those that are not: the shares are not the same."""

    hits: list[float] = field(default_factory=list)  # [d]: rows that accepted depth d + 1, decayed
    asked: list[float] = field(default_factory=list)  # [d]: rows that were asked for it, decayed
    brought: dict[int, Brought] = field(default_factory=dict)  # power of two nearest to batch rows -> by drafts

    def learn(self, accepted: Sequence[int], rows: int) -> None:
        """So many rows were drafted for, and so many of them accepted each depth, of those that are known."""
        for d, hits in enumerate(accepted):
            self.asked[d] = SLOW * self.asked[d] + rows
            self.hits[d] = SLOW * self.hits[d] + hits

    def faded(self) -> Usual:
        """The shares alone, each for no more than a prior: other texts may be unlike those so far."""
        kept = [min(1.0, PRIOR / asked) for asked in self.asked]
        hits, asked = ([x * k for x, k in zip(counts, kept, strict=True)] for counts in (self.hits, self.asked))
        return Usual(hits, asked)


@dataclass
class Pause:
    """Rounds without drafts in which nothing is worked out, one after the other."""

    rows: int = 1
    usual: float = 0.0  # seconds of a plain pass, by the curve
    rounds: int = 0
    passes: float = 0.0  # seconds of all their passes; what takes more than twice the usual was disturbed
    seconds: float = 0.0

    def add(self, verify: float, seconds: float) -> None:
        self.rounds, self.seconds = self.rounds + 1, self.seconds + seconds
        self.passes += min(verify, 2 * self.usual)


@dataclass
class Brought:
    """What the last rounds with drafts brought, decayed."""

    plain: float = 0.0  # seconds in which plain rounds write as many tokens
    seconds: float = 0.0
    rows: float = 0.0  # of all these rounds together

    kept: float = RECENT
    enough: float = ENOUGH

    def learn(self, plain: float, seconds: float, rows: int) -> None:
        self.plain = self.kept * self.plain + plain
        self.seconds = self.kept * self.seconds + seconds
        self.rows = self.kept * self.rows + rows

    def forget(self, share: float) -> None:
        self.plain, self.seconds, self.rows = ((1 - share) * x for x in (self.plain, self.seconds, self.rows))

    @property
    def rate(self) -> float:
        """Tokens a second, in those of plain rounds; without end where there were too few rounds to say."""
        return self.plain / max(1e-9, self.seconds) if self.rows >= self.enough else float("inf")
