"""A run in a few words: its problems, its headline, and both with the means on the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from .document import Cell, Document, State, counted, setting_text, unique
from .types import OURS, weights_of

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
        return "; ".join(f"{c.task} ({setting_text(c.setting)})" for c in self.cells)


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
    base = next((weights_of(c.variant) for c in about.values() if c.plain), "auto")
    fair = {n for n, c in about.items() if c.lossless and weights_of(c.variant) == base and not c.plain} - invalid
    rows = [(m.speedup, m) for m in document.means if m.method in fair and m.speedup]
    complete = [(f, m) for f, m in rows if m.tasks == len(counted_tasks(document, m.setting))]
    if not complete:
        return ["No lossless method has valid figures for every task, so there is no speed-up to claim."]
    best, mean = max(complete, key=lambda x: (x[0].low is not None, x[0].value))
    others = [f.value for f, m in rows if m.method == mean.method]
    over = f"over {mean.tasks} tasks" if mean.tasks > 1 else "on one task"
    of = f"the best of {len(fair)} lossless methods" if len(fair) > 1 else "the only lossless method"
    first = (
        f"{mean.method}, {of}, is {best.text()} times as fast as plain decoding {over} at {setting_text(mean.setting)}"
    )
    if len(others) > 1:
        first += f"; from {min(others):.2f} to {max(others):.2f} over all {len(others)} settings"
    return [f"{first}.", *slowest(document), *left_out(document)]


def counted_tasks(document: Document, setting: tuple[float, int]) -> list[str]:
    """The tasks that means of this setting include."""
    return unique(c.task for c in counted([c for c in document.cells if c.setting == setting]))


def slowest(document: Document) -> list[str]:
    """A sentence on the slowest result of a drafter, if any."""
    cells = [c for c in document.results if c.speedup and not c.plain and c.task in counted_tasks(document, c.setting)]
    ours = [(c.speedup, c) for c in cells if c.peer == OURS and c.speedup]
    if not ours:
        return []
    low, worst = min(ours, key=lambda x: x[0].value)
    where = f"{worst.method} on {worst.task} at {setting_text(worst.setting)}"
    return [f"The slowest result of a drafter: {where}, {low.text()} times as fast as plain decoding."]


def left_out(document: Document) -> list[str]:
    """A sentence on the tasks whose plain texts all repeat themselves, if any."""
    tasks = unique(c.task for c in document.cells if c.loops)
    if not tasks:
        return []
    rest = "" if unique(c.task for c in document.cells if not c.loops) else "; there are no others, so they count"
    return [f"Left out of all means, since every plain text repeats itself: {', '.join(tasks)}{rest}."]


def show(document: Document) -> None:
    """Print the means, the problems and the headline."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for setting in document.settings:
        rows = Table("method", title=Text(setting_text(setting).capitalize(), "bold"), title_justify="left")
        for name in ("speed-up", "tau", "tokens/s"):
            rows.add_column(name, justify="right")
        for m in document.means:
            if m.setting == setting:
                rate = m.tokens_per_second.text(0) if m.tokens_per_second else ""
                rows.add_row(Text(m.method), *(x.text() if x else "" for x in (m.speedup, m.tau)), rate)
        if rows.row_count:
            console.print(rows)
    for p in problems(document):
        where = p.where if len(p.cells) <= 3 else f"{len(p.cells)} cells"
        why = "; ".join(p.reasons) or "no reason was given"
        console.print(Text(f"{p.state}: {p.method}, {where}: {why}", "yellow" if p.state == "partial" else "red"))
    console.print(Text(" ".join(headline(document)), "bold"))
