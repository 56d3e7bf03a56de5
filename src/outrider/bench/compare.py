"""`outrider bench compare A B`: two runs side by side, cell by cell.

A change is significant if the two 95% intervals do not overlap. That is stricter than a test of the difference (about
0.6% false alarms for intervals of equal width), as the many cells of a run require.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .document import Document, Estimate, RunInfo, setting_text, short, unique

if TYPE_CHECKING:
    from rich.text import Text

Key = tuple[str, float, int, str]  # task, temperature, batch size, method
MEASURES = {"speedup": ("speed-up", 2), "tau": ("tau", 2), "tokens_per_second": ("tokens/s", 0)}  # title, digits


@dataclass(frozen=True)
class Change:
    """A figure in both runs."""

    a: Estimate
    b: Estimate
    ratio: float | None  # b / a
    significant: bool

    @classmethod
    def of(cls, a: Estimate | None, b: Estimate | None) -> Change | None:
        """None if one of them was not measured."""
        if a is None or b is None:
            return None
        known = a.ends[0] < a.ends[1] and b.ends[0] < b.ends[1]
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
    no_result: list[tuple[Key, str, str]]  # cells of both runs that are no result in one, with both states
    sentence: str  # how many cells became faster and slower


def compare(a: Document, b: Document) -> Comparison:
    """Two documents of results.json, cell by cell."""
    in_a, in_b = ({c.key: c for c in document.cells} for document in (a, b))
    pairs = [(cell, in_b[key]) for key, cell in in_a.items() if key in in_b]
    rows = [
        Row(*x.key, *(Change.of(getattr(x, name), getattr(y, name)) for name in MEASURES))
        for x, y in pairs
        if x.result and y.result
    ]
    return Comparison(
        warnings(a.run, b.run), rows, [k for k in in_a if k not in in_b], [k for k in in_b if k not in in_a],
        [(x.key, x.state, y.state) for x, y in pairs if not (x.result and y.result)], summary(rows),
    )  # fmt: skip


def summary(rows: list[Row]) -> str:
    """How many cells became faster and slower."""
    changes = [r.speedup for r in rows if r.speedup]
    ratios = [c.ratio for c in changes if c.significant and c.ratio]
    return (
        f"Of {len(changes)} cells with a speed-up in both runs, {sum(r > 1 for r in ratios)} are faster in B and "
        f"{sum(r < 1 for r in ratios)} slower (95% intervals that do not overlap)."
    )


def warnings(a: RunInfo, b: RunInfo) -> list[str]:
    """Differences that make two runs hard to compare."""
    lines = []
    if a.target != b.target:
        lines.append(f"The targets differ, so speeds and tau are of different models: {a.target}, {b.target}.")
    for part, title in (("machine", "machines"), ("versions", "versions"), ("arguments", "arguments")):
        old, new = getattr(a, part), getattr(b, part)
        names = [k for k in unique([*old, *new]) if old.get(k) != new.get(k) and k != "out"]
        each = "; ".join(f"{k} {short(old.get(k))}, {short(new.get(k))}" for k in names)
        lines += [f"The {title} differ: {each}."] if each else []
    return lines


def show(comparison: Comparison) -> None:
    """Print without intervals; significant changes are coloured."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for warning in comparison.warnings:
        console.print(Text(warning, "yellow"))
    for task, *setting in unique((r.task, r.temperature, r.batch) for r in comparison.rows):
        table = Table("method", title=f"{task}, {setting_text(setting)}", title_justify="left")
        for title, _ in MEASURES.values():
            table.add_column(f"{title}: A, B (B/A)", justify="right")
        for r in comparison.rows:
            if [r.task, r.temperature, r.batch] == [task, *setting]:
                table.add_row(Text(r.method), *(brief(getattr(r, k), digits) for k, (_, digits) in MEASURES.items()))
        console.print(table)
    alone = {"A": comparison.only_a, "B": comparison.only_b}
    lines = [f"only in {run}: {key_text(key)}" for run, keys in alone.items() for key in keys]
    lines += [f"no result: {key_text(k)} ({a} in A, {b} in B)" for k, a, b in comparison.no_result]
    console.print(Text("\n".join(lines), "bright_black"), Text(comparison.sentence, "bold"), sep="\n" if lines else "")


def key_text(key: Key) -> str:
    """A cell's key in words."""
    return f"{key[3]} on {key[0]}, {setting_text(key[1:3])}"


def brief(change: Change | None, digits: int) -> Text:
    """A, B and their ratio on one line; significant changes have a mark."""
    from rich.text import Text

    if change is None:
        return Text("")
    ratio = "" if change.ratio is None else f" ({change.ratio:.2f}{' *' * change.significant})"
    style = ("bold green" if (change.ratio or 0) > 1 else "bold red") if change.significant else ""
    return Text(f"{change.a.value:.{digits}f}, {change.b.value:.{digits}f}{ratio}", style)
