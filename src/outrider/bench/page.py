"""report.html: one file that needs no network, for phones and desks, light and dark.

A section is a function of the document; one without data does not appear. `data/report.html.j2` lays them out.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from . import plots
from .document import Cell, Document, Estimate, Mean, said, short, unique
from .plots import Plot
from .summary import headline, problems
from .types import OURS

SHOWN = 200  # divergences on the page; results.json has all
FIGURES = {"speedup": 2, "tokens_per_second": 0, "whole": 2, "over_stock": 2, "tau": 2, "alpha": 3, "prefill_ms": 1}


@dataclass(frozen=True)
class Td:
    """A cell of a table; `sort` is the value that its column is sorted by, for numbers."""

    text: Any = ""
    sort: float | None = None
    kind: str = ""
    small: Sequence[str] = ()
    chips: Sequence[str] = ()
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of Td, texts and numbers; the first of a row names it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    fold: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the report."""

    title: str
    words: str = ""
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    data: Any = field(default=None, repr=False)  # of a section that the template lays out itself

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower())

    def __bool__(self) -> bool:
        return bool(self.plots or self.data or any(t.rows for t in self.tables))


def page(document: Document) -> str:
    """The file's text."""
    from jinja2 import DictLoader, Environment
    from markupsafe import Markup

    folder = files(__package__) / "data"
    data = {name: (folder / name).read_text(encoding="utf-8") for name in ("report.html.j2", "report.css", "report.js")}
    environment = Environment(
        loader=DictLoader({"page": data["report.html.j2"]}), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"td": td, "image": image, "several": several}
    environment.globals |= {"style": Markup(data["report.css"]), "script": Markup(data["report.js"])}
    parts = [part for part in sections(document) if part]
    machine = ", ".join(f"{k} {short(v)}" for k, v in document.run.machine.items() if v not in ("", [], None))
    return environment.get_template("page").render(
        run=document.run, sections=parts, lines=headline(document), grid=grid(document),
        machine=f"{machine}; {document.run.started[:10]}",
    )  # fmt: skip


def sections(document: Document) -> list[Section]:
    """All sections, empty ones included."""
    return [
        Section("Problems", "Invalid cells are in no table, plot or mean below; results.json keeps their figures.",
                data=problems(document)),
        Section("Results", "The means over all tasks; then by task the speed-up over plain decoding, tau, and how many "
                "texts equal plain decoding's. Small: 95% intervals; green and red: the interval excludes 1.",
                tables=results(document)),
        Section("Mean speed-up", "Means over the tasks, with 95% intervals. Grey: plain decoding and other engines; "
                "blue: ours; orange: lossy.", plots.speedups(document)),
        Section("Acceptance by depth", "Of the nodes tested at a depth (all before them were accepted), the share "
                "accepted; all tasks together.", plots.depths(document)),
        Section("Batch size", "", plots.batches(document)),
        Section("Temperature", "", plots.temperatures(document)),
        divergences(document),
        Section("All cells", tables=[everything(document)]),
        how(document),
    ]  # fmt: skip


def grid(document: Document) -> str:
    """The sizes of the grid: 3 methods × 2 tasks × ..."""
    words = {"method": "method", "task": "task", "temperature": "temperature", "batch": "batch size"}
    return " × ".join(several(len({getattr(c, k) for c in document.cells}), w) for k, w in words.items())


def image(plot: Plot) -> str:
    """The plot as the source of an <img>."""
    return f"data:image/svg+xml;base64,{base64.b64encode(plot.svg.encode()).decode()}"


def several(count: int, what: str) -> str:
    """A count and its noun: 1 prompt, 2 prompts."""
    return f"{count} {what}{'s' * (count != 1)}"


def td(value: Any) -> Td:
    """A cell of a table from a value."""
    if isinstance(value, Td):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Td("" if value is None else value)
    return Td(f"{value:.4g}" if isinstance(value, float) else value, float(value), "number")


def figure(value: Estimate | None, digits: int = 2, side: bool = False, small: Sequence[str] = ()) -> Td:
    """A figure with its interval; with `side`, coloured if the interval excludes 1."""
    if value is None:
        return Td(small=small)
    apart = side and value.clear_of(1)
    kind = "number" + (" up" if apart and value.value > 1 else " down" if apart else "")
    interval = "n = 1, no interval" if value.low is None else "{:.{d}f}–{:.{d}f}".format(*value.ends, d=digits)
    return Td(f"{value.value:.{digits}f}", value.value, kind, [interval, *small], strong=True)


def figures(row: Cell | Mean, *names: str) -> list[Td]:
    """The figures of these names."""
    return [figure(getattr(row, name), FIGURES[name], name == "speedup") for name in names]


def named(cell: Cell) -> Td:
    """A method's name with its kind."""
    kinds = ["lossy"] * (not cell.lossless) + ["baseline"] * cell.plain
    kinds += [cell.peer] * (cell.peer not in (OURS, cell.method))
    return Td(cell.method, chips=kinds)


PLACE = ("task", "T", "batch")


def place(cell: Cell) -> list[Any]:
    """Task, temperature and batch size."""
    return [cell.task, cell.temperature, cell.batch]


def results(document: Document) -> list[Table]:
    """Methods by tasks, a table for each temperature and batch size."""
    about, tables = document.methods, []
    for setting in document.settings:
        cells = [c for c in document.cells if c.setting == setting]
        tasks, means = unique(c.task for c in cells), {m.method: m for m in document.means if m.setting == setting}
        by = {(c.method, c.task): c for c in cells}
        rows = [
            [
                named(about[method]),
                *figures(means.get(method, Mean(*setting, method)), "speedup", "tau", "tokens_per_second"),
                *(result(by.get((method, t))) for t in tasks),
            ]
            for method in unique(c.method for c in cells)
        ]
        tables.append(Table(["method", "speed-up", "tau", "tokens/s", *tasks], rows, said(setting).capitalize()))
    return tables


def result(cell: Cell | None) -> Td:
    """A cell of the overview: speed-up, tau and how many texts are the same."""
    if cell is None or not cell.result:
        return Td(cell.state, kind=cell.state) if cell else Td()
    small = [f"tau {cell.tau.value:.2f}"] if cell.tau else []
    small += [f"{cell.same_text}/{cell.compared} same"] if cell.compared else []
    small += ["partial"] * (cell.state == "partial") + ["all texts loop"] * cell.loops
    return figure(cell.speedup, 2, not cell.loops, small)


def divergences(document: Document) -> Section:
    """Where texts part from plain decoding's, and by how much the target preferred its own token there."""
    pairs = [(c, d) for c in document.cells for d in c.divergences]
    columns = ["method", *PLACE, "prompt", "turn", "position", "margin", "wrote", "plain"]
    rows = [[named(c), *place(c), d.prompt, d.turn, d.position, d.margin, d.mine, d.plain] for c, d in pairs[:SHOWN]]
    more = f" {len(pairs) - SHOWN} more are in results.json." if len(pairs) > SHOWN else ""
    words = (
        f"{several(len(pairs), 'text')} of methods that should write plain decoding's: the first token that differs, "
        "and the margin by which the target prefers its own. A small margin is rounding: two orders of adding up the "
        f"same numbers. A larger one is a fault and makes the cell invalid.{more}"
    )
    return Section("Divergences", words, tables=[Table(columns, rows)])


def everything(document: Document) -> Table:
    """One row for each cell, with all figures."""
    heads = ("speed-up", "tokens/s", "prompt included", "over transformers", "tau", "alpha", "prefill, ms")
    counts = ("prompts", "repeats", "looping", "new_tokens", "prompt_tokens")
    times = ("draft", "verify", "overhead")
    rows = [
        [named(c), *place(c), *figures(c, *FIGURES), *(getattr(c.round_ms, k, None) for k in times),
         *(getattr(c, k) for k in counts)]
        for c in document.results
    ]  # fmt: skip
    columns = ["method", *PLACE, *heads, *(f"{k}, ms" for k in times), *(k.replace("_", " ") for k in counts)]
    return Table(columns, rows, fold=True)


def how(document: Document) -> Section:
    """What one needs to repeat the run."""
    run = document.run
    rows = [
        [name, t.kind, t.prompts, t.cut, " ".join([t.note, "(text to continue)" * t.raw]).strip()]
        for name, t in document.tasks.items()
    ]
    own = {name: getattr(run, name) for name in ("target", "precision", "exact", "started", "seconds")}
    facts = {k: short(v) for k, v in {**own, **run.machine, **run.versions}.items()}
    data = {"facts": facts, "arguments": json.dumps(run.arguments, indent=1, ensure_ascii=False)}
    return Section(
        "How it was measured", tables=[Table(["task", "kind", "prompts", "cut to", "note"], rows)], data=data
    )
