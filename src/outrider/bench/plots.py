"""The pictures of a run: each function takes the document and returns its plots, none where it has no data for them.

Only results are drawn (`Document.results`, `Document.means`). A method has one colour and one mark in all plots that
show methods. A point that stands for a method is its macro mean over the tasks, with the interval of 95 %.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from statistics import fmean
from typing import TypeVar

from ..budgets.calibration import Bin
from . import draw
from .document import Cell, Document, Estimate, Mean, said, unique
from .draw import Lines, Plot, Style
from .types import OURS

SPEED = "times as fast as plain"
NODES = 15  # positions that are drawn
R = TypeVar("R", Cell, Mean)


def looks(document: Document) -> dict[str, Style]:
    """A colour and a marker for every method of a document."""
    return {name: draw.style(i) for i, name in enumerate(unique(c.method for c in document.cells))}


def by_setting(document: Document, rows: Iterable[R]) -> list[tuple[str, list[R]]]:
    """Rows grouped by (temperature, batch size), each group with its title."""
    held = list(rows)
    found = [(said(w).capitalize(), [r for r in held if r.setting == w]) for w in document.settings]
    return [(title, mine) for title, mine in found if mine]


def by_method(document: Document, has: Callable[[Cell], object]) -> list[tuple[str, list[Cell]]]:
    """The results of each temperature and method that `has` something, at the run's smallest batch size."""
    least = min((c.batch for c in document.results), default=0)
    cells = [c for c in document.results if has(c) and c.batch == least]
    pairs = sorted(unique((c.temperature, c.method) for c in cells), key=lambda p: p[0])
    return [(f"{m}, T = {t:g}", [c for c in cells if (c.temperature, c.method) == (t, m)]) for t, m in pairs]


def kin(cell: Cell, but: str) -> str:
    """A method's name without its budget, rule or variant: what it shares with those that differ in that alone."""
    return ", ".join(p for p in cell.method.split(", ") if p != getattr(cell, but))


# ------------------------------------------------------------------------------------------------- bars


def macro(document: Document) -> list[Plot]:
    """Mean speed-up over the tasks, for each temperature and batch size."""
    about = document.methods
    return [
        draw.bars(title, {SPEED: bars})
        for title, rows in by_setting(document, document.means)
        if (bars := [(m.method, kind(about[m.method]), m.speedup) for m in rows if m.speedup])
    ]


def kind(cell: Cell) -> str:
    """A colour: grey for plain decoding and for others' loops, blue for ours, orange for what is lossy."""
    if cell.plain or cell.peer != OURS:
        return draw.COLOURS[7]
    return draw.COLOURS[0 if cell.lossless else 1]


def chains(document: Document) -> list[Plot]:
    """Trees beside chains, where one drafter ran as both."""
    about, found = document.methods, []
    sides: dict[tuple[str, ...], set[bool]] = {}
    for cell in about.values():
        sides.setdefault(family(cell), set()).add(is_chain(cell))
    both = {name for name, cell in about.items() if len(sides[family(cell)]) == 2}
    for title, rows in by_setting(document, (m for m in document.means if m.method in both)):
        rows = sorted(rows, key=lambda m: (family(about[m.method]), is_chain(about[m.method])))
        panels = {what: _sides(rows, key, about) for what, key in ((SPEED, "speedup"), ("tau", "tau"))}
        if all(panels.values()):
            found.append(draw.bars(title, panels))
    return found


def _sides(rows: list[Mean], key: str, about: Mapping[str, Cell]) -> list[tuple[str, str, Estimate]]:
    kinds = [(m.method, is_chain(about[m.method]), getattr(m, key)) for m in rows]
    return [(f"{'chain' if c else 'tree'}: {name}", draw.COLOURS[c], f) for name, c, f in kinds if f]


def family(cell: Cell) -> tuple[str, ...]:
    """What a tree and a chain of one drafter have in common."""
    base, _, options = cell.spec.partition("?")
    kept = [o for o in options.split("&") if o and not re.match("(tree|width)=", o)]
    return ("?".join([base, *kept]), cell.rule, cell.variant, cell.peer)


def is_chain(cell: Cell) -> bool:
    """Does its SPEC or its budget ask for a chain?"""
    size = nodes_depth(cell.budget)
    asked = bool(re.search(r"[?&](tree=chain|width=1)(&|$)", cell.spec))
    return asked or bool(re.fullmatch(r"1(,1)*", cell.budget)) or bool(size and size[0] == size[1] + 1)


def nodes_depth(budget: str) -> tuple[int, int] | None:
    """Of NODESxDEPTH; None for any other budget."""
    found = re.fullmatch(r"(\d+)x(\d+)", budget)
    return (int(found[1]), int(found[2])) if found else None


def rounds(document: Document) -> list[Plot]:
    """Where the time of a round goes: the mean over the tasks."""
    found = []
    for title, cells in by_setting(document, (c for c in document.results if c.round_ms)):
        bars = []
        for method in unique(c.method for c in cells):
            each = [vars(c.round_ms) for c in cells if c.method == method]
            bars.append((method, {part: fmean(ms[part] for ms in each) for part in each[0]}))
        found.append(draw.stacks(title, "milliseconds a round", bars))
    return found


# ----------------------------------------------------------------------------------------------- curves

Point = tuple[str, float, Mapping[str, Estimate | None]]  # the line's name, x, and y by panel


def _curves(
    title: str, across: str, points: Iterable[Point], style: Mapping[str, Style] | None = None, least: int = 2,
    log: bool = True,
) -> list[Plot]:  # fmt: skip
    """A plot with a panel for each y; lines of fewer than `least` points are left out."""
    given = list(points)
    style = style or {n: draw.style(i) for i, n in enumerate(unique(name for name, *_ in given))}
    found: dict[str, Lines] = {}
    for what in unique(what for *_, values in given for what in values):
        held: dict[str, list[tuple[float, Estimate]]] = {}
        for name, x, values in given:
            if y := values[what]:
                held.setdefault(name, []).append((x, y))
        found[what] = {
            n: (style[n], sorted(curve, key=lambda p: p[0])) for n, curve in held.items() if len(curve) >= least
        }
    found = {what: lines for what, lines in found.items() if lines}
    return [draw.curves(title, across, found, log)] if found else []


def sizes(document: Document) -> list[Plot]:
    """Speed-up and tau over the size of the tree, where one drafter ran with several budgets NODESxDEPTH."""
    about = document.methods
    nodes = {n: size[0] for n, c in about.items() if (size := nodes_depth(c.budget))}

    def point(m: Mean) -> Point:
        return kin(about[m.method], "budget"), nodes[m.method], {SPEED: m.speedup, "tau": m.tau}

    groups = by_setting(document, (m for m in document.means if m.method in nodes))
    return [plot for title, rows in groups for plot in _curves(title, "nodes of the tree", map(point, rows))]


def batches(document: Document) -> list[Plot]:
    """Speed-up and tokens per second over the batch size."""
    found = []
    for t in sorted({m.temperature for m in document.means}):
        points: list[Point] = [
            (m.method, m.batch, {SPEED: m.speedup, "tokens/s": m.tokens_per_second})
            for m in document.means
            if m.temperature == t
        ]
        found += _curves(f"Temperature {t:g}", "batch size", points, looks(document))
    return found


def temperatures(document: Document) -> list[Plot]:
    """Tau over the temperature: the rules of one drafter together, and drafters with one rule together."""
    about, rows = document.methods, document.means
    least, rules, held = min((m.batch for m in rows), default=0), dict[str, set[str]](), dict[str, list[Mean]]()
    rows = [m for m in rows if m.batch == least and m.tau and not about[m.method].plain]
    for m in rows:
        rules.setdefault(kin(about[m.method], "rule"), set()).add(about[m.method].rule)
    for m in rows:
        cell = about[m.method]
        alone = len(rules[kin(cell, "rule")]) == 1
        held.setdefault(f"Rule {cell.rule}" if alone else kin(cell, "rule"), []).append(m)
    found = []
    for title, mine in held.items():
        if len({m.temperature for m in mine}) > 1:
            points: list[Point] = [(m.method, m.temperature, {"tau": m.tau}) for m in mine]
            found += _curves(title, "temperature", points, looks(document), least=1, log=False)
    return found


def contexts(document: Document) -> list[Plot]:
    """Time and memory over the length of the prompt, for tasks that are named NAME@TOKENS."""
    cut = {c.key: found for c in document.results if (found := re.fullmatch(r"(.+)@(\d+)", c.task))}

    def point(c: Cell) -> Point:
        held = Estimate((c.memory.cache + c.memory.drafter) / 2**20) if c.memory else None
        seconds = Estimate(*(None if x is None else x / 1e3 for x in c.prefill_ms)) if c.prefill_ms else None  # type: ignore[arg-type]
        y = {"prefill, s": seconds, "tokens/s": c.tokens_per_second, "cache and drafter, MiB": held}
        return c.method, int(cut[c.key][2]), y

    return [
        plot
        for base in unique(found[1] for found in cut.values())
        for title, mine in by_setting(document, (c for c in document.results if c.key in cut and cut[c.key][1] == base))
        for plot in _curves(f"{base}, {title.lower()}", "tokens of the prompt", map(point, mine), looks(document))
    ]


# ------------------------------------------------------------------------------------------ acceptance


def task_looks(document: Document) -> dict[str, Style]:
    """A colour and a marker for every task of a document."""
    return {task: draw.style(i) for i, task in enumerate(unique(c.task for c in document.cells))}


def depths(document: Document) -> list[Plot]:
    """Acceptance by depth, with its spread over prompts, task by task."""
    style = task_looks(document)
    return [
        draw.spreads(
            title, [(c.task, style[c.task], [(d.depth, d.rate.value, d.spread) for d in c.depths]) for c in cells]
        )
        for title, cells in by_method(document, lambda c: c.depths)
    ]


def positions(document: Document) -> list[Plot]:
    """How often each node of the tree, in its order, was accepted, with the spread over prompts."""
    style = task_looks(document)
    return [
        draw.spreads(
            title,
            [(c.task, style[c.task], [(p.position, p.rate, p.spread) for p in c.positions[:NODES]]) for c in cells],
            "node of the tree", "accepted",
        )
        for title, cells in by_method(document, lambda c: c.positions)
    ]  # fmt: skip


def reliability(document: Document) -> list[Plot]:
    """How often drafted nodes were accepted, over the confidence they had; all tasks together."""
    return [draw.calibration(title, pooled(cells)) for title, cells in by_method(document, lambda c: _bins(c))]


def _bins(cell: Cell) -> list[Bin]:
    return cell.reliability.bins if cell.reliability else []


def pooled(cells: Iterable[Cell]) -> list[Bin]:
    """The bins of several cells' reliability diagrams, made one."""
    bins = sorted((b for c in cells for b in _bins(c)), key=lambda b: b.low)
    joined = []
    for (low, high), held in groupby(bins, key=lambda b: (b.low, b.high)):
        mine = list(held)
        n = sum(b.count for b in mine)
        mean = (sum(getattr(b, key) * b.count for b in mine) / n for key in ("confidence", "acceptance"))
        joined.append(Bin(low, high, n, *mean))
    return joined


# -------------------------------------------------------------------------------------- two figures at once


def promised(document: Document) -> list[Plot]:
    """What Theorem 3.8 promised, with the passes as long as they were, beside what was measured."""
    style, found = looks(document), []
    for title, cells in by_setting(document, (c for c in document.results if c.theory and c.speedup)):
        points = [
            (c.method, style[c.method], Estimate(c.theory.promised_at_cost), c.speedup)
            for c in cells
            if c.theory and c.speedup
        ]
        found.append(draw.scatter(title, "promised speed-up", "measured speed-up", points, equal=True))
    return found


def quality(document: Document) -> list[Plot]:
    """The likelihood of what was written, less that of plain decoding's texts, beside the speed; lossless: 0."""
    style, found = looks(document), []
    gains: dict[tuple[tuple[float, int], str], list[float]] = {}
    for c in document.results:
        if c.quality and c.quality.gain is not None:
            gains.setdefault((c.setting, c.method), []).append(c.quality.gain)
    for title, rows in by_setting(
        document, (m for m in document.means if (m.setting, m.method) in gains and m.speedup)
    ):
        points = [
            (m.method, style[m.method], m.speedup, Estimate(fmean(gains[m.setting, m.method])))
            for m in rows
            if m.speedup
        ]
        found.append(draw.scatter(title, SPEED, "log-likelihood, less plain's", points))
    return found
