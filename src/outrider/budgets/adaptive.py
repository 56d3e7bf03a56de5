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
from .acceptance import DEPTH, Acceptance
from .budgeter import Report
from .cost import PRICED, CostModel
from .ledger import FORGIVEN, Ledger

LEARN = 6  # first rounds, which measure; the first warms up, and the second has no draft
FIRST = (16, 4)  # nodes and depth of a draft when nothing is known
EXPLORE = 12  # every so many rounds another depth is drafted, or nothing, so that no estimate grows stale
LATE = 8  # rounds without drafts after which a drafter has more to read than usual
STALE = 8  # rounds for which a forecast is kept: it costs as much as a short draft
PLAIN = Budget(1, 0)


@dataclass
class AdaptiveBudget:
    """Chooses the depth that pays best on this machine, down to none. One instance serves a target and a drafter."""

    nodes: int = 32
    depth: int = DEPTH
    cost: CostModel = field(default_factory=CostModel)
    acceptance: Acceptance = field(default_factory=Acceptance)
    ledger: Ledger = field(default_factory=Ledger)
    rounds: int = 0
    idle: int = LATE  # rounds since the last draft
    trying: bool = False  # does this round draft against the forecast?
    empty: bool = False  # did the last draft keep no node?
    reading: float = 0.0  # seconds that drafts took longer where text had to be read first, recently
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # forecasts and prices

    @property
    def measuring(self) -> bool:
        """Are these the first rounds on a machine?"""
        return self.cost.rounds < LEARN - 1

    def choose(self, rows: Rows) -> Budget:
        """The budget of the next round."""
        b, drafting = len(rows), sum(left > 1 for left in rows.remaining)
        depth = min(self.depth, max(rows.remaining) - 1)
        if depth < 1:
            return PLAIN
        if new := rows.serial.count(0):
            self.idle = LATE
            self.acceptance.begin(new / b, rows.sampled)
            self.ledger.charge(b, -FORGIVEN * (new / b) ** 2 * self.cost.plain(b))
            self._kept.clear()
        if self.measuring:
            nodes = min(self.nodes, FIRST[0], max(2, PRICED // b))
            return PLAIN if self.rounds == 1 else Budget(nodes, min(depth, FIRST[1]))
        best, draft, rate = self._forecast(b, drafting)
        plain = self.cost.plain(b)
        if self.idle >= LATE and self.reading > max(rows.remaining) * max(0.0, plain - b / rate):
            best = 0
        self.trying = not best
        if self.ledger.owed(b) > (self.ledger.hold(b, plain) if best else 0.0):
            return PLAIN
        if best and self.rounds % EXPLORE == 0:
            draft = (0, best + 1, max(1, best - 1))[self.rounds // EXPLORE % 3]
        return self._cut(b, drafting, min(depth, draft), rate) if draft else PLAIN

    def _cut(self, rows: int, drafting: int, depth: int, rate: float) -> Budget:
        """A draft that is cut to what pays; `rate`: tokens per second of the batch as things are. A try after
        a draft that kept no node is cut by its floor alone, or passes over nodes would not be measured again."""
        trust, draft = self.acceptance.trust, self.cost.drafts(rows)
        if (price := self._kept.get((rows, depth))) is None:
            price = self._kept[rows, depth] = self.cost.price(rows, depth, self.nodes, trust)
        # A step of the drafter is worth it where the chance to get there makes up for its time.
        reach = min(0.5, rate * max(0.0, draft(2) - draft(1)) / drafting / trust)
        floor = min(0.25, 0.5 * rate / rows * (rows if price.summed else 1) * price.slope / trust)
        return Budget(self.nodes, depth, floor, reach, None if self.trying and self.empty else price, rate / rows)

    def _forecast(self, rows: int, drafting: int) -> tuple[int, int, float]:
        """The best depth, the best one above 0, and the best one's tokens per second of the batch."""
        if (kept := self._kept.get((rows, drafting, "forecast"))) is None:
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
        measuring, reading = self.measuring, self.idle >= LATE
        self.rounds += 1
        self.idle = 0 if report.depth else self.idle + 1
        if self.rounds > 1:
            self.cost.learn(report, reading, measuring)
        seconds = report.draft_seconds + report.verify_seconds + report.rest_seconds
        self.ledger.pay(b, seconds)
        if self.rounds % STALE == 0 or self.rounds < 100:
            self._kept.clear()
        if not report.depth:
            return
        self.empty, plain = report.computed == b, self.cost.plain(b)
        self.acceptance.learn(report.accepted, drafting, report.promised)
        if reading:
            read = max(0.0, report.draft_seconds - self.cost.drafts(b)(report.depth))
            self.reading += 0.3 * (read - self.reading)
        if not measuring:
            lost = seconds - (b + sum(report.accepted)) * plain / b
            # Reading, or other work, makes a round long: that alone does not end drafts that should pay.
            self.ledger.charge(b, lost if self.trying else min(lost, 0.5 * self.ledger.hold(b, plain)))
