"""`outrider bench compare A B`: two runs side by side, cell by cell; what changed beyond both intervals is marked.

Two intervals of 95 % that do not overlap are called significant. That is stricter than a test of the difference (at
about 0.6 % a cell by chance, where both are equally wide), which many cells at once ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .document import Cell, Document, Estimate, RunInfo, said, short, unique
from .results import to_json

Key = tuple[str, float, int, str]  # task, temperature, batch size, method
MEASURES = {"speedup": "speed-up", "tau": "tau", "tokens_per_second": "tokens/s"}


@dataclass(frozen=True)
class Change:
    """From one figure to the other. `significant`: their intervals lie apart."""

    a: Estimate
    b: Estimate
    ratio: float | None  # b / a
    significant: bool


@dataclass(frozen=True)
class Row:
    """A cell that is a result in both runs; None where one of them has no such figure."""

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

    warnings: list[str]  # what they do not have in common: target, machine, versions, arguments
    rows: list[Row]
    only_a: list[Key]
    only_b: list[Key]
    no_result: list[tuple[Key, str, str]]  # cells of both that are none in one, with both states


def compare(a: Document, b: Document) -> Comparison:
    """Two documents of results.json, cell by cell."""
    mine, theirs = ({c.key: c for c in document.cells} for document in (a, b))
    both = [(mine[k], theirs[k]) for k in mine if k in theirs]
    return Comparison(
        warnings(a.run, b.run),
        [Row(*x.key, *(change(getattr(x, m), getattr(y, m)) for m in MEASURES)) for x, y in both if result(x, y)],
        [k for k in mine if k not in theirs],
        [k for k in theirs if k not in mine],
        [(x.key, x.state, y.state) for x, y in both if not result(x, y)],
    )


def result(x: Cell, y: Cell) -> bool:
    """Do both cells hold a result?"""
    return x.result and y.result


def change(a: Estimate | None, b: Estimate | None) -> Change | None:
    """From one figure to the other; None where one was not measured."""
    if a is None or b is None:
        return None
    (low, high), (other_low, other_high) = a.ends, b.ends
    spread = low < high and other_low < other_high  # a figure without an interval says nothing of chance
    apart = spread and (other_low > high or other_high < low)
    return Change(a, b, b.value / a.value if a.value else None, apart)


def warnings(a: RunInfo, b: RunInfo) -> list[str]:
    """What makes two runs hard to compare."""
    found = []
    if a.target != b.target:
        found.append(f"The targets differ, so speeds and tau are of different models: {a.target}, {b.target}.")
    for part, words in (("machine", "machines"), ("versions", "versions"), ("arguments", "arguments")):
        old, new = getattr(a, part), getattr(b, part)
        differ = [k for k in unique([*old, *new]) if old.get(k) != new.get(k) and k != "out"]
        each = "; ".join(f"{k} {short(old.get(k))}, {short(new.get(k))}" for k in differ)
        if each:
            found.append(f"The {words} differ: {each}.")
    return found


def sentence(found: Comparison) -> str:
    """How many cells got faster and slower."""
    changes = [r.speedup for r in found.rows if r.speedup]
    sure = [c.ratio for c in changes if c.significant and c.ratio]
    up, down = sum(r > 1 for r in sure), sum(r < 1 for r in sure)
    return (
        f"Of {len(changes)} cells with a speed-up in both runs, {up} are faster in B and {down} slower "
        "(intervals of 95 % that do not overlap)."
    )


def missing(found: Comparison) -> list[str]:
    """A line for each cell that was not compared."""
    lines = [f"only in {run}: {_named(k)}" for run, keys in (("A", found.only_a), ("B", found.only_b)) for k in keys]
    return lines + [f"no result: {_named(k)} ({a} in A, {b} in B)" for k, a, b in found.no_result]


def _named(key: Key) -> str:
    task, temperature, batch, method = key
    return f"{method} on {task}, {said((temperature, batch))}"


def document(found: Comparison) -> dict[str, Any]:
    """For JSON, with the sentence."""
    told: dict[str, Any] = to_json(found)
    return {**told, "sentence": sentence(found)}


def show(found: Comparison) -> None:
    """On the terminal, without intervals; significant changes are coloured."""
    console = Console()
    for warning in found.warnings:
        console.print(Text(warning, "yellow"))
    for place in unique((row.task, row.temperature, row.batch) for row in found.rows):
        console.print(_table(place, [r for r in found.rows if (r.task, r.temperature, r.batch) == place]))
    for line in missing(found):
        console.print(Text(line, "bright_black"))
    console.print(Text(sentence(found), "bold"))


def _table(place: tuple[str, float, int], rows: Sequence[Row]) -> Table:
    table = Table("method", title=f"{place[0]}, {said(place[1:])}", title_justify="left")
    for name in MEASURES.values():
        table.add_column(f"{name}: A, B (B/A)", justify="right")
    for row in rows:
        brief = (_brief(getattr(row, name), 0 if name == "tokens_per_second" else 2) for name in MEASURES)
        table.add_row(Text(row.method), *brief)
    return table


def _brief(change: Change | None, digits: int) -> Text:
    """A, B and their ratio on one line; a significant one with a mark."""
    if change is None:
        return Text("")
    ratio = "" if change.ratio is None else f" ({change.ratio:.2f}{' *' * change.significant})"
    style = ("bold green" if (change.ratio or 0) > 1 else "bold red") if change.significant else ""
    return Text(f"{change.a.value:.{digits}f}, {change.b.value:.{digits}f}{ratio}", style)
