"""A run in a few words: its problems, and an honest headline."""

from __future__ import annotations

from dataclasses import dataclass

from .document import Cell, Document, State, said, unique
from .types import OURS

ORDER: tuple[State, ...] = ("invalid", "failed", "partial")


@dataclass(frozen=True)
class Problem:
    """Cells of one method that are incomplete or no result, for one reason."""

    method: str
    state: State
    reasons: tuple[str, ...]
    cells: tuple[Cell, ...]

    @property
    def where(self) -> str:
        return "; ".join(f"{c.task} ({said(c.setting)})" for c in self.cells)


def problems(document: Document) -> list[Problem]:
    """Every cell that is incomplete or no result; the worst first."""
    groups: dict[tuple[str, State, tuple[str, ...]], list[Cell]] = {}
    for c in document.cells:
        if c.state != "done":
            reasons = tuple(unique(r for r in (c.reason, *c.faults) if r))
            groups.setdefault((c.method, c.state, reasons), []).append(c)
    rows = [Problem(method, state, why, tuple(cells)) for (method, state, why), cells in groups.items()]
    return sorted(rows, key=lambda p: ORDER.index(p.state))


def headline(document: Document) -> list[str]:
    """Sentences: the fastest valid lossless method, the slowest result of a drafter, and the tasks left out.

    Tasks of which every plain text repeats itself are in neither, unless there are no others.
    """
    invalid, about = {c.method for c in document.cells if c.state == "invalid"}, document.methods
    base = next((c.target for c in about.values() if c.plain), "full")
    fair = {n for n, c in about.items() if c.lossless and c.target == base and not c.plain} - invalid
    rows = [(m.speedup, m) for m in document.means if m.method in fair and m.speedup]
    complete = [(f, m) for f, m in rows if m.tasks == len(counted(document, m.setting))]
    if not complete:
        return ["No lossless method has valid figures for every task, so there is no speed-up to claim."]
    best, mean = max(complete, key=lambda x: (x[0].low is not None, x[0].value))
    others = [f.value for f, m in rows if m.method == mean.method]
    over = f"over {mean.tasks} tasks" if mean.tasks > 1 else "on one task"
    of = f"the best of {len(fair)} lossless methods" if len(fair) > 1 else "the only lossless method"
    first = f"{mean.method}, {of}, is {best.text()} times as fast as plain decoding {over} at {said(mean.setting)}"
    if len(others) > 1:
        first += f"; from {min(others):.2f} to {max(others):.2f} over all {len(others)} settings"
    return [f"{first}.", *slowest(document), *left_out(document)]


def counted(document: Document, setting: tuple[float, int]) -> list[str]:
    """The tasks that means of this setting are over: those with a text that does not repeat itself, or all."""
    here = [c for c in document.cells if c.setting == setting]
    return unique(c.task for c in here if not c.loops) or unique(c.task for c in here)


def slowest(document: Document) -> list[str]:
    """A sentence on the slowest result of a drafter, if any."""
    cells = [c for c in document.results if c.speedup and not c.plain and c.task in counted(document, c.setting)]
    ours = [(c.speedup, c) for c in cells if c.peer == OURS and c.speedup]
    if not ours:
        return []
    low, worst = min(ours, key=lambda x: x[0].value)
    where = f"{worst.method} on {worst.task} at {said(worst.setting)}"
    return [f"The slowest result of a drafter: {where}, {low.text()} times as fast as plain decoding."]


def left_out(document: Document) -> list[str]:
    """A sentence on the tasks whose plain texts all repeat themselves, if any."""
    tasks = unique(c.task for c in document.cells if c.loops)
    if not tasks:
        return []
    rest = "" if unique(c.task for c in document.cells if not c.loops) else "; there are no others, so they count"
    return [f"Left out of all means, since every plain text repeats itself: {', '.join(tasks)}{rest}."]
