"""What passes, drafts and the rest of a round cost on this machine, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..core.price import Price
from .budgeter import Report
from .curve import LONGEST, Curve, nearest, points_of

MOST = 96  # nodes of a batch together that a pass is priced for, and that a draft has when nothing is known


def _means() -> Curve:
    return Curve(mean=True, slope=0.5)


@dataclass
class CostModel:
    """Learned from rounds, kept for each model and machine (`memory.py`), and scaled online by one factor, `drift`.

    A pass costs by the nodes that it computes: those of all rows where padding costs nothing (`summed`), else those of
    the widest row times the rows. Drafts, and how many nodes of a depth are left when a tree has been cut, are kept by
    batch size; a size that was not measured is taken for the nearest one.
    """

    verify: Curve = field(default_factory=Curve)  # by nodes computed
    alone: Curve = field(default_factory=Curve)  # by rows, of passes without drafts
    draft: dict[int, Curve] = field(default_factory=dict)  # rows -> by requested depth
    nodes: dict[int, Curve] = field(default_factory=dict)  # rows -> nodes of a row (no seconds) by requested depth
    rest: float = 0.0
    drift: float = 1.0  # how long plain passes take, on average, of what `verify` says, which is a low quantile
    summed: bool = False
    rounds: int = 0

    def learn(self, report: Report, reading: bool = False, uncut: bool = False) -> None:
        """Add a round. `reading`: its drafter read text first; `uncut`: its tree was not cut to what pays."""
        b, depth, self.summed = report.rows, report.depth, report.total > 0
        self.rounds += 1
        computed = report.total or b * report.nodes
        self.verify.learn(computed, report.verify_seconds)
        self.rest += (report.rest_seconds - self.rest) / min(self.rounds, 50)
        if not depth:
            ratio = report.verify_seconds / max(1e-9, self.alone(b) or report.verify_seconds)
            self.alone.learn(b, report.verify_seconds)
            self.drift += 0.1 * (min(2.0, ratio) - self.drift)
            return
        draft = self.draft.setdefault(b, _means())
        if not reading or not draft.points or report.draft_seconds < 0.5 * draft(depth):
            draft.learn(depth, report.draft_seconds)
        if not uncut:
            self.nodes.setdefault(b, Curve(mean=True, slope=1.0)).learn(depth, computed / b)

    def drafts(self, rows: int) -> Curve:
        """Seconds of a draft by depth."""
        return self.draft.get(_nearest(self.draft, rows), NOTHING)

    def single(self, rows: int) -> float:
        """Seconds of a pass without drafts."""
        return self.alone(rows) if nearest(rows) in self.alone.points else self.verify(rows)

    def plain(self, rows: int) -> float:
        """Seconds of a round without drafts, as the machine is now."""
        return max(1e-9, self.drift * self.single(rows) + self.rest)

    def seconds(self, report: Report) -> float:
        """What a round as it was should have taken."""
        verify = self.verify(report.total or report.rows * report.nodes)
        return self.drafts(report.rows)(report.depth) + verify + self.rest

    def rounds_by_depth(self, rows: int, depth: int) -> list[float]:
        """[d]: seconds of a round that drafts to depth d."""
        like = _nearest(self.nodes, rows)  # as many nodes in all, where this batch size was not measured
        curve, draft = self.nodes.get(like, NOTHING), self.drafts(rows)
        depths = range(1, depth + 1)
        sizes = [rows * max(2.0, 1 + (curve(d) - 1) * like / rows) for d in depths]
        pairs = zip(self.verify.table(sizes), map(draft, depths), strict=True)
        return [self.single(rows) + self.rest, *(verify + seconds + self.rest for verify, seconds in pairs)]

    def price(self, rows: int, depth: int, nodes: int, trust: float) -> Price:
        """Seconds of a round of this depth by its nodes, for trees that are cut where it pays best."""
        fixed = self.drafts(rows)(depth) + self.rest
        sizes = (
            range(rows, rows + min(MOST, rows * (nodes - 1)) + 1)
            if self.summed
            else range(rows, rows * nodes + 1, rows)
        )
        return Price(tuple([seconds + fixed for seconds in self.verify.table(sizes)]), trust, self.summed)

    def state(self) -> dict[str, Any]:
        """As JSON."""
        tables = {name: {rows: c.points for rows, c in getattr(self, name).items()} for name in ("draft", "nodes")}
        return {"verify": self.verify.points, **tables, "rest": self.rest, "summed": self.summed}

    def restore(self, state: Any) -> None:
        """Take over a state; ValueError, KeyError, TypeError or AttributeError where it is none."""
        verify, rest = points_of(state["verify"]), float(state["rest"])
        tables = {name: {int(b): points_of(p) for b, p in state[name].items()} for name in ("draft", "nodes")}
        if not verify or not 0 <= rest < LONGEST or not isinstance(state["summed"], bool):
            raise ValueError("not a cost model")
        self.verify, self.rest, self.summed = Curve(points=verify), rest, state["summed"]
        self.draft = {b: Curve(True, 0.5, points) for b, points in tables["draft"].items()}
        self.nodes = {b: Curve(True, 1.0, points) for b, points in tables["nodes"].items()}


NOTHING = Curve()


def _nearest(tables: dict[int, Curve], rows: int) -> int:
    return min(tables, key=lambda b: abs(b - rows), default=rows)
