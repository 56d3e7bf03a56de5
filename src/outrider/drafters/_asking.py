"""Whether the networks of a mix are worth asking in a round, where what costs hardly anything has drafted already.

How deep they draft and which of their nodes are kept is left to their confidences. What is decided here is whether they
draft at all. Asked, they take s seconds, the pass over their nodes takes p more, and a row gains g tokens: so much
deeper than any free draft its text goes, as far as depth and the text's end allow. A second brings `Budget.rate` tokens
to every row as things are. So they are asked where

    sum over rows of g  >  rows * rate * (s + p)

g is learnt from past rounds, apart for rows whose free draft is unlikely to have the next token and for those where it
is likely, with a bonus for what is known of few rounds; what was learnt of other texts counts for few. Where networks
have not been asked for a while they are asked once again, ever more rarely while that changes nothing, and in a batch
as many times more rarely as it has rows: they read first what all rows wrote since, and a text that ends before that is
never read. What a batch size costs that was not met yet is taken from those that are nearly as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..budgets.curve import Curve, measured
from ..core.types import Budget

BINS = 4  # of the chance that a free draft has the next token
DECAY = 0.98  # forgetting, for each row that a record takes in
PRIOR = 4.0  # rounds that all bins' record is worth in each, and that FIRST is worth in that
FIRST = 1.0  # tokens a row that networks are believed to gain at first
DOUBT = 0.5  # standard deviations that are added
RECENT = 0.1  # what a round weighs in the nodes that networks add
LEARN = 4  # rounds of a batch size that are asked and timed first; one more warms up
PROBE, PROBE_MAX = 16, 64  # rounds that are not asked until one is, for each row
ALIKE = 2.0  # batch sizes by less than this factor apart are learnt from each other


@dataclass
class Record:
    """Rows whose networks were asked, and the tokens that these gained; decayed."""

    asked: float = 0.0
    gained: float = 0.0

    def learn(self, gain: float) -> None:
        self.asked, self.gained = DECAY * self.asked + 1, DECAY * self.gained + gain


@dataclass
class Asking:
    """One for all texts of a mix. Until it has been told some times, networks are asked in every round."""

    seconds: Curve = field(default_factory=lambda: Curve(prior_slope=0.5, mean=True))  # by batch rows
    added: float = 1.0  # nodes that networks add to a row's tree
    rounds: dict[int, int] = field(default_factory=dict)  # batch rows -> rounds asked
    records: list[Record] = field(default_factory=lambda: [Record() for _ in range(BINS)])
    idle: int = 0  # rounds not asked since the last one
    patience: int = PROBE

    def asks(self, chances: Sequence[float], most: Sequence[int], nodes: int, budget: Budget) -> bool:
        """Are the networks asked to draft?

        Args:
            chances: [row]: how likely its free draft has the next token.
            most: [row]: how many tokens a draft may gain it.
            nodes: of the widest row's free draft, the root included.
            budget: where it has no `rate`, they are asked in every round.
        """
        rows = len(chances)
        if not budget.rate or self._met(rows) <= LEARN:
            return True
        wider = budget.price.wider(rows, nodes, self.added) if budget.price else 0.0
        gains = sum(min(limit, self.gain(c, DOUBT)) for c, limit in zip(chances, most, strict=True))
        asked = gains > rows * budget.rate * (self.seconds(rows) + wider)
        if asked:
            self.patience = PROBE
        elif self.idle >= self.patience * rows:
            self.patience, asked = min(2 * self.patience, PROBE_MAX), True
        self.idle = 0 if asked else self.idle + 1
        return asked

    def gain(self, chance: float, doubt: float = 0.0) -> float:
        """Tokens that networks gain a row, whose free draft has the next token by this chance; `doubt` standard
        deviations more, as if each further token came by the same chance."""
        mine = self.records[place(chance)]
        asked, gained = (sum(x) for x in zip(*((r.asked, r.gained) for r in self.records), strict=True))
        overall = (gained + PRIOR * FIRST) / (asked + PRIOR)
        mean = (mine.gained + PRIOR * overall) / (mine.asked + PRIOR)
        return float(mean + doubt * (mean * (1 + mean) / (mine.asked + 1)) ** 0.5)

    def begin(self, share: float) -> None:
        """This share of the rows is new."""
        self.patience = max(PROBE, round((1 - share) * self.patience))
        for record in self.records:
            kept = 1 - share * (1 - min(1.0, PRIOR / max(1e-9, record.asked)))
            record.asked, record.gained = kept * record.asked, kept * record.gained

    def time(self, rows: int, seconds: float, behind: bool = False) -> None:
        """Take in how long the networks took. `behind`: they read more than usual first."""
        self.rounds[rows] = self.rounds.get(rows, 0) + 1
        if self._met(rows) > 1:  # the first one warms up
            (self.seconds.doubt if behind else self.seconds.learn)(rows, seconds)

    def _met(self, rows: int) -> int:
        """Rounds asked of batches of about this size."""
        return sum(count for b, count in self.rounds.items() if alike(b, rows))

    def learn(self, chances: Sequence[float], gains: Sequence[int], added: float) -> None:
        """Take in what a round gave whose networks were asked.

        Args:
            chances: [row]: as they were given to `asks`, of the rows that tell something.
            gains: [row]: how many tokens deeper its text went than any free draft.
            added: nodes of a row's tree that the networks alone had, on average.
        """
        self.added += RECENT * (added - self.added)
        for chance, gain in zip(chances, gains, strict=True):
            self.records[place(chance)].learn(gain)

    def state(self) -> dict[str, Any]:
        """What other texts may be told: times, and records that count for few rounds."""
        shares = [min(1.0, PRIOR / max(1.0, record.asked)) for record in self.records]
        return {
            "seconds": self.seconds.points,
            "added": self.added,
            "records": [[s * r.asked, s * r.gained] for r, s in zip(self.records, shares, strict=True)],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state; ValueError, KeyError, TypeError or AttributeError where it is none."""
        seconds = measured(state["seconds"]) if state["seconds"] else {}
        added = float(state["added"])
        records = [Record(float(asked), float(gained)) for asked, gained in state["records"]]
        counts = [added, *(x for r in records for x in (r.asked, r.gained))]
        if len(records) != BINS or not all(0 <= x < math.inf for x in counts):
            raise ValueError("as many records as bins, of counts")
        self.seconds, self.added, self.records = Curve(0.5, True, seconds), added, records
        self.rounds = dict.fromkeys(seconds, LEARN + 1)


def alike(some: int, others: int) -> bool:
    """Are these batch sizes near enough to be learnt from each other?"""
    return max(some, others) < ALIKE * min(some, others)


def place(chance: float) -> int:
    """The bin of a chance."""
    return min(BINS - 1, int(BINS * chance))
