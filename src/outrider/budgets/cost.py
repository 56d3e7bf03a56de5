"""What passes, drafts and the rest of a round cost on this machine, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.price import Price
from .budgeter import Report
from .curve import Curve, nearest

PRICED = 96  # drafted nodes of a batch together that a pass is priced for


@dataclass
class CostModel:
    """Learned from rounds, and kept for each model and machine (`memory.py`).

    A pass is timed with all of its round that is no draft. Its cost is a function of the nodes that it computes: those
    of all rows where padding costs nothing (`summed`), else those of the widest row times the rows. Drafts, and how
    many nodes of a depth are left when a tree has been cut, are kept by batch size; a batch size that was not measured
    is assumed to behave like the nearest one.
    """

    verify: Curve = field(default_factory=Curve)  # by nodes computed
    alone: Curve = field(default_factory=Curve)  # by rows, of passes without drafts
    draft: dict[int, Curve] = field(default_factory=dict)  # rows -> by requested depth
    nodes: dict[int, Curve] = field(default_factory=dict)  # rows -> nodes of a row (no seconds) by requested depth
    summed: bool = False
    rounds: int = 0

    def learn(self, report: Report, reading: bool = False, uncut: bool = False) -> None:
        """Add a round. `reading`: its drafter read text first; `uncut`: its tree was not cut to what pays."""
        b, depth, self.summed = report.rows, report.depth, report.total > 0
        self.rounds += 1
        seconds = report.verify_seconds + report.rest_seconds
        self.verify.learn(report.computed, seconds)
        if not depth:
            self.alone.learn(b, seconds)
            return
        if not reading or b not in self.draft:
            self.draft.setdefault(b, Curve(0.5)).learn(depth, report.draft_seconds)
        if not uncut:
            self.nodes.setdefault(b, Curve(1.0)).learn(depth, report.computed / b)

    def drafts(self, rows: int) -> Curve:
        """Seconds of a draft by depth."""
        return self.draft.get(_nearest(self.draft, rows), Curve())

    def plain(self, rows: int) -> float:
        """Seconds of a round without drafts."""
        single = self.alone if nearest(rows) in self.alone.points else self.verify
        return max(1e-9, single(rows))

    def rounds_by_depth(self, rows: int, depth: int) -> list[float]:
        """[d]: seconds of a round that drafts to depth d."""
        like = _nearest(self.nodes, rows)  # as many nodes in all, where this batch size was not measured
        nodes, draft = self.nodes.get(like, Curve()), self.drafts(rows)
        sizes = [rows * max(2.0, 1 + (nodes(d) - 1) * like / rows) for d in range(1, depth + 1)]
        return [self.plain(rows), *(self.verify(size) + draft(d) for d, size in enumerate(sizes, 1))]

    def price(self, rows: int, depth: int, nodes: int, trust: float) -> Price:
        """Seconds of a round of this depth by its nodes, for trees that are cut where it pays best."""
        sizes = range(rows, rows * nodes + 1, 1 if self.summed else rows)[: PRICED + 1]
        draft = self.drafts(rows)(depth)
        return Price(tuple([self.verify(size) + draft for size in sizes]), trust, self.summed)


def _nearest(tables: dict[int, Curve], rows: int) -> int:
    return min(tables, key=lambda b: abs(b - rows), default=rows)
