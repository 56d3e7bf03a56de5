"""How much to draft: the depth with the most tokens per second, from costs, acceptance and what drafts have lost.

A round that drafts to depth D commits E(D) = 1 + sum over d <= D of share(d) tokens in t(D) seconds. The budget takes
the D with the highest E(D) / t(D); D = 0 is plain decoding. Three parts know what that takes, and can be read alone:

    CostModel   (cost.py)         t(D): seconds of passes by nodes, of drafts by depth
    Acceptance  (acceptance.py)   share(d), and what confidences are worth (`trust`)
    Ledger      (ledger.py)       the time that drafts really lost or saved: when to stop, and when to try again

A tree is cut where it pays best: of its nodes in the order of their values, over all rows, the first n stay that make
(rows + trust * sum of values) / seconds(n) highest (`Budget.price`). Values never rise along that order and each node
costs time, so no other set is better. The drafter goes deeper only while its best node is worth a step, and feeds no
node that is sure to be cut (`Budget.reach`, `Budget.floor`). These three look at the draft, which only the rule
`coupled` allows; the engine clears them under the others. Depth and nodes look at past rounds alone.

Some drafters read a text only before their first draft of it, or after LATE rounds without one. That time says nothing
of what a further draft costs; it is a loss, and a text whose rest would not repay it is not drafted for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ..core.types import Budget, Rows
from .acceptance import Acceptance
from .budgeter import Report
from .cost import MOST, CostModel
from .ledger import Ledger

LEARN = 6  # first rounds, which measure; the first warms up, and the second has no draft
FIRST = (16, 4)  # nodes and depth of a draft when nothing is known
EXPLORE = 12  # every so many rounds another depth is drafted, or nothing, so that no estimate grows stale
EMPTY = 2  # drafts in a row of which no node was left; the next try is not cut, or passes would not be measured again
LATE = 8  # rounds without drafts after which a drafter has more to read than usual
STALE = 8  # rounds for which a forecast is kept: it costs as much as a short draft
PLAIN = Budget(1, 0)


@dataclass
class AdaptiveBudget:
    """Chooses the depth that pays best on this machine, down to none. One instance serves a target and a drafter."""

    nodes: int = 32
    depth: int = 8
    cost: CostModel = field(default_factory=CostModel)
    acceptance: Acceptance = field(default_factory=Acceptance)
    ledger: Ledger = field(default_factory=Ledger)
    rounds: int = 0
    idle: int = 0  # rounds since the last draft; LATE where a text is new
    empty: int = 0  # drafts in a row of which no node was left
    trying: bool = False  # does this round draft against the forecast?
    uncut: bool = False  # is its draft not cut to what pays?
    reading: float = 0.0  # seconds that drafts took longer where text had to be read first, recently
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # forecasts and prices

    @property
    def measuring(self) -> bool:
        """Are these the first rounds on a machine?"""
        return self.cost.rounds < LEARN - 1

    def choose(self, rows: Rows) -> Budget:
        """The budget of the next round."""
        self.trying = self.uncut = False
        b, drafting = len(rows), sum(left > 1 for left in rows.remaining)
        depth = min(self.depth, max(rows.remaining) - 1)
        if depth < 1:
            return PLAIN
        if new := rows.serial.count(0):
            self._begin(b, new / b, rows.sampled)
        if self.measuring:
            return PLAIN if self.rounds == 1 else self._uncut(b, min(depth, FIRST[1]))
        best, draft, rate = self._forecast(b, drafting)
        plain = self.cost.plain(b)
        if self.idle >= LATE and self.reading > max(rows.remaining) * max(0.0, plain - b / rate):
            best = 0
        if self.ledger.owed(b) > (self.ledger.hold(b, plain) if best else 0.0):
            return PLAIN
        if not best:
            self.trying = True
            if self.empty >= EMPTY:
                return self._uncut(b, min(depth, draft))
        elif self.rounds % EXPLORE == 0:
            draft = (0, best + 1, max(1, best - 1))[self.rounds // EXPLORE % 3]
        return self._cut(b, drafting, min(depth, draft), rate) if draft else PLAIN

    def _begin(self, rows: int, share: float, sampled: bool) -> None:
        """This share of the batch is new."""
        self.idle = LATE
        self.acceptance.begin(share, sampled)
        self.ledger.begin(rows, share, self.cost.plain(rows))
        self._kept.clear()

    def _uncut(self, rows: int, depth: int) -> Budget:
        """A small draft that is not cut to what pays."""
        self.uncut = True
        return Budget(min(self.nodes, FIRST[0], max(2, MOST // rows)), depth)

    def _cut(self, rows: int, drafting: int, depth: int, rate: float) -> Budget:
        """A draft that is cut to what pays; `rate`: tokens per second of the batch as things are."""
        trust, draft = self.acceptance.trust, self.cost.drafts(rows)
        price = self._kept.get((rows, depth))
        if price is None:
            price = self._kept[rows, depth] = self.cost.price(rows, depth, self.nodes, trust)
        # A step of the drafter is worth it where the chance to get there makes up for its time.
        reach = min(0.5, rate * max(0.0, draft(2) - draft(1)) / drafting / trust)
        floor = min(0.25, 0.5 * rate / rows * (rows if price.summed else 1) * price.slope / trust)
        return Budget(self.nodes, depth, floor=floor, reach=reach, price=price, rate=rate / rows)

    def _forecast(self, rows: int, drafting: int) -> tuple[int, int, float]:
        """The best depth, the best one above 0, and the best one's tokens per second of the batch."""
        kept = self._kept.get((rows, drafting, "forecast"))
        if kept is None:
            shares = self.acceptance.shares(self.depth)
            tokens = accumulate((drafting * share for share in shares), initial=float(rows))
            seconds = self.cost.rounds_by_depth(rows, self.depth)
            rates = [t / max(1e-9, s) for t, s in zip(tokens, seconds, strict=True)]
            draft = max(range(1, len(rates)), key=rates.__getitem__)
            best = draft if rates[draft] > rates[0] else 0
            kept = self._kept[rows, drafting, "forecast"] = best, draft, rates[best]
        return kept

    def learn(self, report: Report) -> None:
        """Add what a round cost and gave."""
        b, drafting = report.rows, report.rows if report.drafting is None else report.drafting
        if not drafting:
            return
        self.rounds += 1
        if self.rounds > 1:
            self.cost.learn(report, self.idle >= LATE, self.uncut)
        seconds = report.draft_seconds + report.verify_seconds + report.rest_seconds
        self.ledger.pay(b, seconds)
        if self.rounds % STALE == 0 or self.rounds < 100:
            self._kept.clear()
        if report.depth:
            self._learn_draft(report, drafting, seconds)
        self.idle = 0 if report.depth else self.idle + 1

    def _learn_draft(self, report: Report, drafting: int, seconds: float) -> None:
        b, plain = report.rows, self.cost.plain(report.rows)
        self.empty = 0 if report.computed > b else self.empty + 1
        self.acceptance.learn(report.accepted, drafting, report.promised)
        if self.idle >= LATE:
            read = max(0.0, report.draft_seconds - self.cost.drafts(b)(report.depth))
            self.reading += 0.3 * (read - self.reading)
        if not self.measuring:
            lost = seconds - (b + sum(report.accepted)) * plain / b
            # Reading, or other work, makes a round long: that alone does not end drafts that should pay.
            self.ledger.charge(b, lost if self.trying else min(lost, 0.5 * self.ledger.hold(b, plain)))
