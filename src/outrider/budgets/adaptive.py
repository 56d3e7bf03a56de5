"""How much to draft: the depth with the most tokens per second, from costs, acceptance and what drafts have lost.

A round that drafts to depth D commits E(D) = 1 + sum over d <= D of share(d) tokens in t(D) seconds. The budget takes
the D with the highest E(D) / t(D); D = 0 is plain decoding. Three parts know what that takes, and can be read alone:

    CostModel   (cost.py)         t(D): seconds of passes by nodes, of drafts by depth, and one drift factor
    Acceptance  (acceptance.py)   share(d), and what confidences are worth (`trust`)
    Ledger      (ledger.py)       the time that drafts really lost or saved: when to stop, and when to try again

A tree is cut where it pays best: of its nodes in the order of their values, over all rows, the first n stay that make
(rows + trust * sum of values) / seconds(n) highest (`Budget.price`). Values never rise along that order and each node
costs time, so no other set is better. The drafter goes deeper only while its best node is worth a step, and feeds no
node that is sure to be cut (`Budget.reach`, `Budget.floor`). These three look at the draft, which only the rule
`coupled` allows; the engine clears them under the others. Depth and nodes look at past rounds alone.

Some drafters read a text only before their first draft (or after LATE rounds without one). That time
teaches nothing of drafts; it is charged, at most half of what may be owed where drafts should pay, and all of it else.
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

EXPLORE = 12  # every so many drafted rounds another depth is taken, so that no estimate grows stale
LEARN = 6  # first rounds, which measure; one of them without a draft
FIRST = (16, 4)  # nodes and depth of a draft when nothing is known
EMPTY = 2  # drafts in a row of which no node was left; the next try is not cut, or passes would not be measured again
LATE = 8  # rounds without drafts after which a drafter has more to read than usual
STALE = 8  # rounds for which a forecast is kept: it costs as much as a short draft
DISTURBED = 2.0  # times what a round is forecast to take; what it took beyond that is not charged
PLAIN = Budget(1, 0)


@dataclass
class AdaptiveBudget:
    """Chooses the depth that pays best on this machine, down to none. One instance serves a target and a drafter."""

    nodes: int = 32
    depth: int = 8
    cost: CostModel = field(default_factory=CostModel)
    acceptance: Acceptance = field(default_factory=Acceptance)
    ledger: Ledger = field(default_factory=Ledger)
    seen: dict[int, int] = field(default_factory=dict)  # rows -> rounds
    rounds: int = 0
    idle: int = 0  # rounds since the last draft
    empty: int = 0  # drafts in a row of which no node was left
    trying: bool = False  # is this round drafted against the forecast?
    uncut: bool = False  # is its draft not cut to what pays?
    behind: bool = False  # has the drafter text to read first?
    fresh: bool = False  # all of it, in a text that is new?
    reading: float = 0.0  # seconds that reading a new text took, recently
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # forecasts

    def choose(self, rows: Rows) -> Budget:
        """The budget of the next round."""
        self.trying = self.uncut = False
        useful = max(rows.remaining) - 1
        if useful < 1 or self.nodes < 2 or self.depth < 1:
            return PLAIN
        b, drafting = len(rows), sum(left > 1 for left in rows.remaining)
        if new := rows.serial.count(0):
            self._begin(b, new / b, rows.sampled)
        self.behind = self.behind or self.idle >= LATE
        if self.seen.get(b, 0) < LEARN and max(self.seen.values(), default=0) < LEARN:
            self.uncut = True
            return PLAIN if self.seen.get(b) == 1 else Budget(self._few(b), min(self.depth, FIRST[1], useful))
        best, draft, rate = self._forecast(b, drafting)
        plain = self.cost.plain(b)
        if best and self.fresh and self.reading > useful * max(0.0, plain - b / rate):
            best = 0  # what is left of these texts does not repay their reading
        self.trying = best == 0
        if self.ledger.owed(b) > (self.ledger.hold(b, plain) if best else 0.0):
            return PLAIN
        if self.trying:
            best, self.uncut = draft, self.empty >= EMPTY
            if self.uncut:
                return Budget(self._few(b), min(best, useful))
        elif self.rounds % EXPLORE == 0:
            best = (0, min(self.depth, best + 1), max(1, best - 1))[self.rounds // EXPLORE % 3]
            if best == 0:
                return PLAIN
        return self._budget(b, drafting, best, useful, rate)

    def _budget(self, b: int, drafting: int, depth: int, useful: int, rate: float) -> Budget:
        """A draft of this depth; `rate`: tokens per second of the batch as things are."""
        trust = self.acceptance.trust
        price = self._kept.get((b, depth))
        if price is None:
            price = self._kept[b, depth] = self.cost.price(b, depth, self.nodes, trust)
        draft = self.cost.drafts(b)
        # A step of the drafter is worth it where the chance to get there makes up for its time.
        reach = min(0.5, rate * max(0.0, draft(2) - draft(1)) / drafting / trust)
        floor = min(0.25, 0.5 * rate / b * (b if price.summed else 1) * price.slope / trust)
        return Budget(self.nodes, min(depth, useful), floor=floor, reach=reach, price=price, rate=rate / b)

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

    def _begin(self, rows: int, share: float, sampled: bool) -> None:
        """This share of the batch is new."""
        self.behind, self.fresh = True, share == 1 or self.fresh
        self.acceptance.begin(share, sampled)
        self.ledger.begin(rows, share, self.cost.plain(rows))
        self._kept.clear()

    def _few(self, rows: int) -> int:
        """Nodes of a draft that is not cut to what pays."""
        return min(self.nodes, FIRST[0], max(2, MOST // rows))

    def learn(self, report: Report) -> None:
        """Add what a round cost and gave."""
        b, drafting = report.rows, report.rows if report.drafting is None else report.drafting
        if not drafting:
            return
        self.rounds += 1
        self.seen[b] = self.seen.get(b, 0) + 1
        if self.seen[b] > 1:  # the first round warms up
            self.cost.learn(report, self.behind, self.uncut)
        seconds = report.draft_seconds + report.verify_seconds + report.rest_seconds
        self.ledger.pay(b, seconds)
        self.idle = 0 if report.depth else self.idle + 1
        if self.rounds % STALE == 0 or self.rounds < 100:
            self._kept.clear()
        if report.depth:
            self._learn_draft(report, drafting, seconds)

    def _learn_draft(self, report: Report, drafting: int, seconds: float) -> None:
        b = report.rows
        self.empty = 0 if (report.total or b * report.nodes) > b else self.empty + 1
        read = max(0.0, report.draft_seconds - self.cost.drafts(b)(report.depth)) if self.behind else 0.0
        self.acceptance.learn(report.accepted, drafting, report.promised)
        if self.seen[b] > 1 and max(self.seen.values()) > LEARN:
            plain = self.cost.plain(b)
            self.reading += 0.3 * (read - self.reading) if self.fresh else 0.0
            charged = read if self.trying else min(read, 0.5 * self.ledger.hold(b, plain))
            usual = max(8 * plain, DISTURBED * self.cost.seconds(report))
            self.ledger.charge(b, min(seconds - read, usual) + charged - (b + sum(report.accepted)) * plain / b)
        self.behind = self.fresh = False
