"""Whether the networks of a mix are worth asking in a round, where what costs hardly anything has drafted already.

Asked for d tokens, networks take s(d) seconds, the pass over their nodes takes p(d) more, and a row gains

    g(d) = sum over k <= d of added(k)     added(k): the share of rounds whose text went k deep, but no free draft

A second brings `Budget.rate` tokens to every row as things are. So the networks are asked for the d for which

    sum over rows of g(d)  -  rows * rate * (s(d) + p(d))

is highest, and not at all where none pays. `added` is learnt from past rounds, apart for rows whose free draft is
unlikely to have the next token and for those where it is likely, with a bonus for what is known of few rounds; what
was learnt of other texts counts for few. Where networks have not been asked for a while they are asked once again, ever
more rarely while that changes nothing, and in a batch as many times more rarely as it has rows: they read first what
all rows wrote since, and a text that ends before that is never read. What a batch size costs that was not met yet is
taken from one that is nearly as large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ..budgets.calibration import counted
from ..budgets.curve import Curve, measured
from ..types import Budget

BINS = 4  # of the chance that a free draft has the next token
DECAY = 0.98  # forgetting, for each row that a record takes in
PRIOR = 4.0  # rounds that all bins' record is worth in each, and that FIRST and FALL are worth in that
FIRST, FALL = 0.4, 0.6  # what is believed at first: added(0), and what each depth more keeps of it
DOUBT = 0.5  # standard deviations that are added
EXPLORE = 8  # every so many rounds that are asked go one deeper
LEARN = 4  # rounds of a batch size that are asked and timed first; one more warms up
PROBE, PROBE_MAX = 16, 64  # rounds that are not asked until one is, for each row
DEEPEST = 4096  # a record is never longer
ALIKE = 2.0  # batch sizes by less than this factor apart are learnt from each other


@dataclass
class Record:
    """[k]: rows asked for depth k + 1, and those of them whose text got there by a network alone; decayed."""

    asked: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)

    def learn(self, depth: int, free: int, accepted: int) -> None:
        for k in range(depth):
            if k == len(self.asked):
                self.asked.append(0.0)
                self.added.append(0.0)
            self.asked[k] = DECAY * self.asked[k] + 1
            self.added[k] = DECAY * self.added[k] + (free <= k < accepted)


@dataclass
class Asking:
    """One for all texts of a mix. Until it has been told some times, networks are asked in every round."""

    seconds: dict[int, Curve] = field(default_factory=dict)  # batch rows -> by the depth asked for
    rounds: dict[int, int] = field(default_factory=dict)  # batch rows -> rounds asked
    records: list[Record] = field(default_factory=lambda: [Record() for _ in range(BINS)])
    turn: int = 0  # rounds asked since it began to decide
    idle: int = 0  # rounds not asked since the last one
    patience: int = PROBE

    def depth(self, chances: Sequence[float], nodes: int, budget: Budget) -> int:
        """How deep the networks are asked to draft; 0: not at all.

        Args:
            chances: [row]: how likely its free draft has the next token.
            nodes: of the widest row's free draft, the root included.
            budget: without a `rate` it decides alone.
        """
        rows, most = len(chances), budget.depth
        asked = self._met(rows)
        if not budget.rate or asked <= LEARN:
            return most if not budget.rate or asked % 2 == 0 else min(most, 1)
        near = min(self.seconds, key=lambda b: max(b, rows) / min(b, rows))
        times = [max(1.0, rows / near) * seconds for seconds in self.seconds[near].table(range(1, most + 1))]
        gains = [sum(added) for added in zip(*(self.added(c, most, DOUBT) for c in chances), strict=True)]
        worth = [0.0]
        for d, gain in enumerate(accumulate(gains), 1):
            wider = budget.price.wider(rows, nodes, d) if budget.price else 0.0
            worth.append(gain - rows * budget.rate * (times[d - 1] + wider))
        best = max(range(most + 1), key=worth.__getitem__)
        if best:
            self.patience, self.turn = PROBE, self.turn + 1
            best = min(most, best + (self.turn % EXPLORE == 0))
        elif self.idle >= self.patience * rows:
            self.patience, best = min(2 * self.patience, PROBE_MAX), most
        self.idle = 0 if best else self.idle + 1
        return best

    def added(self, chance: float, depth: int, doubt: float = 0.0) -> list[float]:
        """[k]: the chance that networks get a row to depth k + 1, and nothing else does; `doubt` standard deviations
        more."""
        mine, found = self.records[place(chance)], []
        for k in range(depth):
            seen = [r for r in self.records if k < len(r.asked)]
            asked, added = sum(r.asked[k] for r in seen), sum(r.added[k] for r in seen)
            overall = (added + PRIOR * FIRST * FALL**k) / (asked + PRIOR)
            own = (mine.asked[k], mine.added[k]) if k < len(mine.asked) else (0.0, 0.0)
            mean = (own[1] + PRIOR * overall) / (own[0] + PRIOR)
            found.append(mean + doubt * (mean * (1 - mean) / (own[0] + 1)) ** 0.5)
        return found

    def begin(self, share: float) -> None:
        """This share of the rows is new."""
        self.patience = max(PROBE, round((1 - share) * self.patience))
        for record in self.records:
            for k, asked in enumerate(record.asked):
                kept = 1 - share * (1 - min(1.0, PRIOR / max(1e-9, asked)))
                record.asked[k], record.added[k] = kept * asked, kept * record.added[k]

    def time(self, rows: int, depth: int, seconds: float, behind: bool = False) -> None:
        """Take in how long the networks took. `behind`: they read more than usual first."""
        self.rounds[rows] = self.rounds.get(rows, 0) + 1
        if self._met(rows) > 1:  # the first one warms up
            curve = self.seconds.setdefault(rows, Curve(prior_slope=0.5, mean=True))
            (curve.doubt if behind else curve.learn)(depth, seconds)

    def _met(self, rows: int) -> int:
        """Rounds asked of batches of about this size."""
        return sum(count for b, count in self.rounds.items() if alike(b, rows))

    def learn(
        self, depths: Sequence[int], chances: Sequence[float], free: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Take in what a round gave whose networks were asked.

        Args:
            depths: [row]: asked for, and no more than its text can have taken; below 1 for a row that tells nothing.
            chances: [row]: as they were given to `depth`.
            free: [row]: how deep the text went in the free draft.
            accepted: [row]: how deep it went in what was verified.
        """
        for chance, *row in zip(chances, depths, free, accepted, strict=True):
            self.records[place(chance)].learn(*row)

    def state(self) -> dict[str, Any]:
        """What other texts may be told: times, and records that count for few rounds."""
        shares = [[min(1.0, PRIOR / max(1.0, n)) for n in record.asked] for record in self.records]
        return {
            "seconds": {str(b): curve.points for b, curve in self.seconds.items()},
            "records": [
                [[n * s for n, s in zip(part, share, strict=True)] for part in (record.asked, record.added)]
                for record, share in zip(self.records, shares, strict=True)
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state; ValueError, KeyError, TypeError or AttributeError where it is none."""
        seconds = {int(b): Curve(0.5, True, measured(points)) for b, points in state["seconds"].items()}
        records = [Record(*counted(asked, added, DEEPEST)) for asked, added in state["records"]]
        if len(records) != BINS:
            raise ValueError("as many records as bins")
        self.seconds, self.records = seconds, records
        self.rounds = dict.fromkeys(seconds, LEARN + 1)


def alike(some: int, others: int) -> bool:
    """Are these batch sizes near enough to be learnt from each other?"""
    return max(some, others) < ALIKE * min(some, others)


def place(chance: float) -> int:
    """The bin of a chance."""
    return min(BINS - 1, int(BINS * chance))
