"""The sections of report.html: each is a function of the document, and one without data does not appear.

They are made of tables, plots and words; `page.py` lays them out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from . import plots
from .document import Cell, Document, Estimate, Mean, said, short, unique
from .draw import COLOURS, Plot
from .summary import problems
from .types import OURS

SHOWN = 200  # divergences in the page; results.json has all
FIGURES = {"speedup": 2, "tokens_per_second": 0, "whole": 2, "over_stock": 2, "tau": 2, "alpha": 3, "prefill_ms": 1}
NOTES = (
    "All methods ran in one process, on the same prompts, in turn (A B A B), after warm-ups.",
    "Tokens are counted from ids by one function for all methods; nothing after the end of a text counts.",
    "Speeds are of decoding: the prompts' passes, up to the first token, are timed apart. What a drafter does with the "
    "prompt is timed with them, where our own engine tells, so all cells also have the speed-up with prompts included.",
    "A speed-up is taken repeat by repeat over plain decoding of the same prompts; the figure is the repeats' median.",
    "Intervals are of 95 %, from a bootstrap over prompts; a figure of a single prompt has none. A mean over tasks "
    "weighs each alike.",
    "tau is the number of tokens a round, the target's own included; alpha the share accepted of the tokens tested.",
    "Prompts whose plain text repeats itself are easy for any drafter: unless asked for, they are left out (looping), "
    "and a task that has no others is left out of all means.",
)
LEAST = "at the run's smallest batch size"


@dataclass(frozen=True)
class Td:
    """A cell of a table. `sort`: what its column is sorted by, where that is a number."""

    text: Any = ""
    sort: float | None = None
    kind: str = ""
    small: Sequence[str] = ()
    chips: Sequence[str] = ()
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """`rows` hold Td, texts, and numbers; the first of a row names it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    fold: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the report: a title, words, plots and tables."""

    title: str
    words: str = ""
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    kind: str = ""  # of a section that the template lays out itself
    data: Any = field(default=None, repr=False)

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower())

    def __bool__(self) -> bool:
        return bool(self.plots or self.data or any(t.rows for t in self.tables))


# ------------------------------------------------------------------------------------------------ cells


def td(value: Any) -> Td:
    """A cell of a table from what a row holds."""
    if isinstance(value, Td):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Td("" if value is None else value)
    return Td(f"{value:.4g}" if isinstance(value, float) else value, float(value), "number")


def figure(found: Estimate | None, digits: int = 2, side: bool = False, small: Iterable[str] = ()) -> Td:
    """A figure with its interval below it, and what else is said small; with `side`, coloured if clear of 1."""
    if found is None:
        return Td(small=list(small))
    apart = found.clear_of(1) if side else False
    kind = "number" + (" up" if apart and found.value > 1 else " down" if apart else "")
    interval = "n = 1, no interval" if found.low is None else "{:.{d}f}–{:.{d}f}".format(*found.ends, d=digits)
    return Td(f"{found.value:.{digits}f}", found.value, kind, [interval, *small], strong=True)


def figures(row: Cell | Mean, *names: str) -> list[Td]:
    """A row's figures of these names, as cells of a table."""
    return [figure(getattr(row, name), FIGURES[name], name == "speedup") for name in names]


def named(cell: Cell) -> Td:
    """A method's name with what one should know of it."""
    kinds = ["lossy"] * (not cell.lossless) + ["baseline"] * cell.plain
    kinds += [cell.peer] * (cell.peer not in (OURS, cell.method)) + ["invalid"] * (cell.state == "invalid")
    return Td(cell.method, chips=kinds)


def place(row: Any) -> list[Any]:
    """Where a row belongs: task, temperature, batch size."""
    return [row.task, row.temperature, row.batch]


def several(count: int, what: str) -> str:
    """A count and its noun: 1 prompt, 2 prompts."""
    return f"{count} {what}{'s' * (count != 1)}"


# --------------------------------------------------------------------------------------------- sections

PLACE = ("task", "T", "batch")


def drawn(of: Callable[[Document], list[Plot]], words: str, title: str, document: Document) -> Section:
    """A section of plots."""
    return Section(title, words, of(document))


def listed(of: Callable[[Document], list[Table]], words: str, title: str, document: Document) -> Section:
    """A section of tables."""
    return Section(title, words, tables=of(document))


def wrong(title: str, document: Document) -> Section:
    """The section of cells that failed a check."""
    words = "Invalid cells are in no table, plot or mean below; their figures are kept in results.json alone."
    return Section(title, words, kind="problems", data=problems(document))


def results(document: Document) -> list[Table]:
    """Methods by tasks, a table for each temperature and batch size."""
    about, made = document.methods, []
    for where in document.settings:
        cells = [c for c in document.cells if c.setting == where]
        tasks, means = unique(c.task for c in cells), {m.method: m for m in document.means if m.setting == where}
        by = {(c.method, c.task): c for c in cells}
        rows = [
            [
                Td(method, chips=[x for x in named(about[method]).chips if x != "invalid"]),
                *figures(means.get(method, Mean(*where, method)), "speedup", "tau", "tokens_per_second"),
                *(result(by.get((method, t))) for t in tasks),
            ]
            for method in unique(c.method for c in cells)
        ]
        made.append(Table(["method", "speed-up", "tau", "tokens/s", *tasks], rows, said(where).capitalize()))
    return made


def result(cell: Cell | None) -> Td:
    """A cell of the overview: speed-up, tau and how many texts are the same."""
    if cell is None or not cell.result:
        return Td(cell.state, kind=cell.state) if cell else Td()
    told = [f"tau {cell.tau.value:.2f}"] if cell.tau else []
    told += [f"{cell.same_text}/{cell.compared} same"] if cell.compared else []
    told += ["partial"] * (cell.state == "partial") + ["all texts loop"] * cell.loops
    return figure(cell.speedup, 2, not cell.loops, told)


def explained(title: str, document: Document) -> Section:
    """Of each explained cell the paragraph, and a bar from the measured to the ideal speed."""
    shown, found = {c.key for c in document.results}, []
    for e in document.explain:
        if (e.task, e.temperature, e.batch, e.method) in shown:
            costs = [max(0.0, -math.log(max(p.factor, 1e-9))) for p in e.parts]
            found.append((e, [(p, costs[i], i % len(COLOURS)) for i, p in enumerate(e.parts)]))
    words = (
        "The bar is the way from the ideal speed down to the measured one; a part twice as wide halves the speed twice "
        "as often. Mend the widest first."
    )
    return Section(title, words, kind="explained", data=found)


def theory(title: str, document: Document) -> Section:
    """Theorem 3.8's promise beside the measurement."""
    columns = ["method", *PLACE, "alpha", "gamma", "c", "verify", "promised", "promised at cost", "measured"]
    rows = [
        [c.method, *place(c), t.alpha, t.gamma, t.c, t.verify, t.promised, t.promised_at_cost, *figures(c, "speedup"),
         t.tau, *figures(c, "tau")]
        for c in document.results
        if (t := c.theory)
    ]  # fmt: skip
    words = (
        "What Theorem 3.8 of Leviathan et al. promises for the measured alpha, gamma and c (a draft step by a pass "
        "over one token); at cost: with the passes as long as they were. It is about chains whose tokens are accepted "
        "independently; a tree counts as a chain of its depth."
    )
    tables = [Table([*columns, "promised tau", "measured tau"], rows, fold=True)]
    return Section(title, words, plots.promised(document), tables)


def variants(document: Document) -> list[Table]:
    """Recorded and quantised targets by drafters (EAGLE's table 4), in tokens per second."""
    about, made = document.methods, []
    if len({c.variant for c in about.values()}) < 2:
        return []
    for title, rows in plots.by_setting(document, document.means):
        by = {(plots.kin(about[m.method], "variant"), about[m.method].variant): m for m in rows}
        columns, every = unique(v for _, v in by), [name for name, _ in by]
        twice = [name for name in unique(every) if every.count(name) > 1]
        lines = [[name, *(_rate(by.get((name, v))) for v in columns)] for name in twice]
        made += [Table(["method", *columns], lines, title)] if lines else []
    return made


def _rate(mean: Mean | None) -> Td:
    speed = [f"× {mean.speedup.value:.2f}"] if mean and mean.speedup else []
    return figure(mean.tokens_per_second if mean else None, 0, small=speed)


def lossy(title: str, document: Document) -> Section:
    """Quality beside speed, where texts are not the target's own."""
    columns = ["method", *PLACE, "speed-up", "tau", "log-likelihood", "less plain's", "exact", "loss"]
    rows = [
        [named(c), *place(c), *figures(c, "speedup", "tau"), q.log_likelihood, q.gain, q.exact, q.held_out_loss]
        for c in document.results
        if (q := c.quality)
    ]
    words = (
        "Log-likelihood: nats a token of the written texts under the unmodified target. Exact: the share of right "
        "answers. Loss: of the target that decoded, on reference answers."
    )
    return Section(title, words, plots.quality(document), [Table(columns, rows)])


def capacity(title: str, document: Document) -> Section:
    """How many rows of each method fit into a given memory."""
    shown = {c.key for c in document.results}
    rows = [
        [c.method, *place(c), c.bytes_per_row / 2**20, c.rows]
        for c in document.capacity
        if (c.task, c.temperature, c.batch, c.method) in shown
    ]
    limit = f"{document.capacity[0].limit / 2**30:g}" if document.capacity else ""
    words = (
        f"The most rows beside the target's weights in {limit} GiB: by what a row's part of the target's cache, the "
        "drafter's state and the logits of its tree took."
    )
    return Section(title, words, tables=[Table(["method", *PLACE, "MiB a row", "rows"], rows)])


def predicted(document: Document) -> list[Table]:
    """Replays of recorded answers: acceptance is real, speed is what a cost model says."""
    columns = ["method", "task", "cost model", "tau", "predicted speed-up", "if drafts took no time"]
    rows = [
        [named(c), c.task, p.cost, figure(c.tau), figure(p.speedup, side=True), figure(p.without_drafting)]
        for c in document.results
        if (p := c.predicted)
    ]
    return [Table(columns, rows)]


def divergences(title: str, document: Document) -> Section:
    """Where texts part from plain decoding's, and by how much the target preferred its own token there."""
    found = [(c, d) for c in document.cells for d in c.divergences]
    columns = ["method", *PLACE, "prompt", "turn", "position", "margin", "wrote", "plain"]
    rows = [[named(c), *place(c), d.prompt, d.turn, d.position, d.margin, d.mine, d.plain] for c, d in found[:SHOWN]]
    more = f" {len(found) - SHOWN} more are in results.json." if len(found) > SHOWN else ""
    words = (
        f"{several(len(found), 'text')} of methods that should write plain decoding's own: the first token that is "
        "another, and the margin by which the target prefers its own. A small margin is rounding: two orders of adding "
        f"up the same numbers. A larger one is a fault and makes the cell invalid.{more}"
    )
    return Section(title, words, tables=[Table(columns, rows)])


def everything(document: Document) -> list[Table]:
    """The long table."""
    heads = ("speed-up", "tokens/s", "prompt included", "over transformers", "tau", "alpha", "prefill, ms")
    columns = ["method", *PLACE, *heads, "drafted alpha", "prompts", "repeats", "looping", "new tokens"]
    columns += ["prompt tokens", "cache, MiB", "drafter, MiB", "law: p"]
    rows = [
        [named(c), *place(c), *figures(c, *FIGURES), c.drafted_alpha, c.prompts, c.repeats, c.looping, c.new_tokens,
         c.prompt_tokens, *([m.cache / 2**20, m.drafter / 2**20] if (m := c.memory) else [None, None]),
         c.law.p if c.law else None]
        for c in document.results
    ]  # fmt: skip
    return [Table(columns, rows, fold=True)]


def how(title: str, document: Document) -> Section:
    """What one needs to repeat it."""
    run = document.run
    rows = [
        [name, t.kind, t.prompts, t.cut, " ".join([t.note, "(text to go on from)" * t.raw]).strip()]
        for name, t in document.tasks.items()
    ]
    own = {name: getattr(run, name) for name in ("target", "precision", "exact", "started", "seconds")}
    facts = {**own, **run.machine, **run.versions}
    data = (NOTES, {k: short(v) for k, v in facts.items()}, json.dumps(run.arguments, indent=1, ensure_ascii=False))
    return Section(title, tables=[Table(["task", "kind", "prompts", "cut to", "note"], rows)], kind="how", data=data)


Made = Callable[[str, Document], Section]
SECTIONS: dict[str, Made] = {
    "Problems": wrong,
    "Results": partial(listed, results, (
        "The means over all tasks; then by task the speed-up over plain decoding, tau, and how many prompts have plain "
        "decoding's text. Small: intervals of 95 %; green and red: clear of 1 by the whole interval."
    )),
    "Mean speed-up": partial(drawn, plots.macro, (
        "Means over the tasks, with intervals of 95 %; the stroke at 1 is plain decoding. Grey: plain decoding itself "
        "and others' loops; blue: ours; orange: lossy."
    )),
    "Where the speed goes": explained,
    "Time of a round": partial(drawn, plots.rounds, "Draft, verification and all the rest, in means over the tasks."),
    "Acceptance by depth": partial(drawn, plots.depths, (
        "Of the nodes tested at a depth (all before them were accepted), the share accepted: the mean as a mark; the "
        f"spread over prompts from 10 to 90 % as a line, from 25 to 75 % as a bar, its median as a stroke; {LEAST}."
    )),
    "Acceptance by position": partial(drawn, plots.positions, (
        "The share of all rounds in which a node of the tree was accepted, nodes in the drafter's order: the mean as a "
        f"mark, the spread over prompts as above; {LEAST}."
    )),
    "Reliability of confidence": partial(drawn, plots.reliability, (
        "How often drafted nodes were accepted, over the confidence that the drafter had; on the dashed line the "
        f"confidence is right. All tasks together, {LEAST}."
    )),
    "Tree size": partial(drawn, plots.sizes, "The same drafter with larger and larger trees."),
    "Tree against chain": partial(drawn, plots.chains, "The same drafter, drafting several branches or one."),
    "Batch size": partial(drawn, plots.batches, "The more rows share a pass, the less the machine is idle."),
    "Temperature": partial(drawn, plots.temperatures, f"Tokens a round over the temperature, by rule; {LEAST}."),
    "Context length": partial(drawn, plots.contexts, "The same prompts, cut to different lengths."),
    "Promised and measured": theory,
    "Variants of the target": partial(listed, variants, (
        "Tokens per second, means over the tasks; below: times as fast as plain decoding of the unchanged target."
    )),
    "Room in memory": capacity,
    "Lossy methods": lossy,
    "Predicted for a recorded model": partial(listed, predicted, (
        "The texts are recorded ones of the real model; the speed-ups are computed, not measured."
    )),
    "Divergences": divergences,
    "All cells": partial(listed, everything, ""),
    "How it was measured": how,
}  # fmt: skip
