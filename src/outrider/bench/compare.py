"""`outrider bench compare A B`: two runs side by side, cell by cell.

A change is called significant if the two 95% intervals do not overlap. That is stricter than a test of the difference
(about 0.6% false alarms for intervals of equal width), which many cells at once call for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .document import Cell, Document, Estimate, RunInfo, said, short, unique
from .results import to_json

if TYPE_CHECKING:
    from rich.text import Text

Key = tuple[str, float, int, str]  # task, temperature, batch size, method
MEASURES = {"speedup": "speed-up", "tau": "tau", "tokens_per_second": "tokens/s"}


@dataclass(frozen=True)
class Change:
    """From one figure to the other."""

    a: Estimate
    b: Estimate
    ratio: float | None  # b / a
    significant: bool

    @classmethod
    def of(cls, a: Estimate | None, b: Estimate | None) -> Change | None:
        """None if one of them was not measured."""
        if a is None or b is None:
            return None
        known = a.low is not None and b.low is not None and a.ends[0] < a.ends[1] and b.ends[0] < b.ends[1]
        apart = known and (b.ends[0] > a.ends[1] or b.ends[1] < a.ends[0])
        return cls(a, b, b.value / a.value if a.value else None, apart)


@dataclass(frozen=True)
class Row:
    """A cell that is a result in both runs."""

    task: str
    temperature: float
    batch: int
    method: str
    speedup: Change | None
    tau: Change | None
    tokens_per_second: Change | None


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    warnings: list[str]  # differences of target, machine, versions and arguments
    rows: list[Row]
    only_a: list[Key]
    only_b: list[Key]
    no_result: list[tuple[Key, str, str]]  # cells of both that are no result in one, with both states

    @property
    def sentence(self) -> str:
        """How many cells became faster and slower."""
        changes = [r.speedup for r in self.rows if r.speedup]
        sure = [c.ratio for c in changes if c.significant and c.ratio]
        up, down = sum(r > 1 for r in sure), sum(r < 1 for r in sure)
        return (
            f"Of {len(changes)} cells with a speed-up in both runs, {up} are faster in B and {down} slower "
            "(95% intervals that do not overlap)."
        )


def compare(a: Document, b: Document) -> Comparison:
    """Two documents of results.json, cell by cell."""
    mine, theirs = ({c.key: c for c in document.cells} for document in (a, b))
    both = [(mine[k], theirs[k]) for k in mine if k in theirs]

    def results(x: Cell, y: Cell) -> bool:
        return x.result and y.result

    return Comparison(
        warnings(a.run, b.run),
        [Row(*x.key, *(Change.of(getattr(x, m), getattr(y, m)) for m in MEASURES)) for x, y in both if results(x, y)],
        [k for k in mine if k not in theirs],
        [k for k in theirs if k not in mine],
        [(x.key, x.state, y.state) for x, y in both if not results(x, y)],
    )


def warnings(a: RunInfo, b: RunInfo) -> list[str]:
    """What makes two runs hard to compare."""
    lines = []
    if a.target != b.target:
        lines.append(f"The targets differ, so speeds and tau are of different models: {a.target}, {b.target}.")
    for part, words in (("machine", "machines"), ("versions", "versions"), ("arguments", "arguments")):
        old, new = getattr(a, part), getattr(b, part)
        differ = [k for k in unique([*old, *new]) if old.get(k) != new.get(k) and k != "out"]
        each = "; ".join(f"{k} {short(old.get(k))}, {short(new.get(k))}" for k in differ)
        lines += [f"The {words} differ: {each}."] if each else []
    return lines


def document(comparison: Comparison) -> dict[str, Any]:
    """For JSON, with the sentence."""
    return {**to_json(comparison), "sentence": comparison.sentence}


def show(comparison: Comparison) -> None:
    """On the terminal, without intervals; significant changes are coloured."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for warning in comparison.warnings:
        console.print(Text(warning, "yellow"))
    for place in unique((row.task, row.temperature, row.batch) for row in comparison.rows):
        table = Table("method", title=f"{place[0]}, {said(place[1:])}", title_justify="left")
        for name in MEASURES.values():
            table.add_column(f"{name}: A, B (B/A)", justify="right")
        for row in comparison.rows:
            if (row.task, row.temperature, row.batch) == place:
                digits = (2, 2, 0)
                table.add_row(
                    Text(row.method), *(brief(getattr(row, m), d) for m, d in zip(MEASURES, digits, strict=True))
                )
        console.print(table)
    lines = [
        f"only in {run}: {named(k)}" for run, keys in (("A", comparison.only_a), ("B", comparison.only_b)) for k in keys
    ]
    lines += [f"no result: {named(k)} ({a} in A, {b} in B)" for k, a, b in comparison.no_result]
    for line in lines:
        console.print(Text(line, "bright_black"))
    console.print(Text(comparison.sentence, "bold"))


def named(key: Key) -> str:
    """A cell's key in words."""
    return f"{key[3]} on {key[0]}, {said(key[1:3])}"


def brief(change: Change | None, digits: int) -> Text:
    """A, B and their ratio on one line; a significant one with a mark."""
    from rich.text import Text

    if change is None:
        return Text("")
    ratio = "" if change.ratio is None else f" ({change.ratio:.2f}{' *' * change.significant})"
    style = ("bold green" if (change.ratio or 0) > 1 else "bold red") if change.significant else ""
    return Text(f"{change.a.value:.{digits}f}, {change.b.value:.{digits}f}{ratio}", style)
