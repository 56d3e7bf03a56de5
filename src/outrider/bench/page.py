"""report.html: one file without external resources, for phones and desks, light and dark.

A section is a function of the document; one without data does not appear. `data/report.html.j2` lays them out and has
their texts.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

from . import plots
from .document import Cell, Document, Estimate, Mean, setting_text, short, unique
from .plots import Plot
from .summary import Problem, headline, problems
from .types import OURS

SHOWN = 200  # divergences on the page; results.json has all
DIGITS = {
    "speedup": 2, "tokens_per_second": 0, "speedup_with_prefill": 2, "over_stock": 2, "tau": 2, "alpha": 3,
    "prefill_ms": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Td:
    """A cell of a table; `sort` is its value in a column of numbers."""

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
    """A part of the report; the template has its text, by `anchor`."""

    title: str
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    problems: Sequence[Problem] = ()

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower())

    def __bool__(self) -> bool:
        return bool(self.plots or self.problems or any(t.rows for t in self.tables))


def page(document: Document) -> str:
    """The file's text."""
    from jinja2 import DictLoader, Environment
    from markupsafe import Markup

    folder = files(__package__) / "data"
    template, style, script = (
        (folder / f"report.{kind}").read_text(encoding="utf-8") for kind in ("html.j2", "css", "js")
    )
    environment = Environment(
        loader=DictLoader({"page": template}), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "td": td,
        "image": image,
        "several": several,
        "short": short,
        "pretty": partial(json.dumps, indent=1),
    }
    words = {"method": "method", "task": "task", "temperature": "temperature", "batch": "batch size"}
    return environment.get_template("page").render(
        run=document.run, sections=[part for part in sections(document) if part], lines=headline(document),
        grid=[several(len({getattr(c, k) for c in document.cells}), word) for k, word in words.items()],
        shown=SHOWN, style=Markup(style), script=Markup(script),
    )  # fmt: skip


def sections(document: Document) -> list[Section]:
    """All sections, empty ones included."""
    return [
        Section("Problems", problems=problems(document)),
        Section("Results", tables=results(document)),
        Section("Mean speed-up", plots.speedups(document)),
        Section("Acceptance by depth", plots.depths(document)),
        Section("Batch size", plots.batches(document)),
        Section("Temperature", plots.temperatures(document)),
        Section("Divergences", tables=[divergences(document)]),
        Section("All cells", tables=[all_cells(document)]),
        Section("How it was measured", tables=[tasks(document)]),
    ]


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


def figure(row: Cell | Mean, name: str, small: Sequence[str] = (), coloured: bool = True) -> Td:
    """A figure with its interval; speed-ups are coloured if the interval excludes 1."""
    value: Estimate | None = getattr(row, name)
    if value is None:
        return Td(small=small)
    clear = coloured and name == "speedup" and value.clear_of(1)
    kind = "number" + (" up" if clear and value.value > 1 else " down" if clear else "")
    digits = DIGITS[name]
    interval = "n = 1, no interval" if value.low is None else "{:.{d}f}–{:.{d}f}".format(*value.ends, d=digits)
    return Td(f"{value.value:.{digits}f}", value.value, kind, [interval, *small], strong=True)


def method(cell: Cell) -> Td:
    """A method's name with its kind."""
    kinds = ["lossy"] * (not cell.lossless) + ["baseline"] * cell.plain
    return Td(cell.method, chips=kinds + [cell.peer] * (cell.peer not in (OURS, cell.method)))


PLACE = ("method", "task", "T", "batch")


def place(cell: Cell) -> list[Any]:
    """The columns of `PLACE`."""
    return [method(cell), cell.task, cell.temperature, cell.batch]


def results(document: Document) -> list[Table]:
    """Methods by tasks, a table for each temperature and batch size."""
    tables = []
    for setting in document.settings:
        cells = {(c.method, c.task): c for c in document.cells if c.setting == setting}
        tasks, means = unique(task for _, task in cells), {m.method: m for m in document.means if m.setting == setting}
        rows = []
        for name in unique(name for name, _ in cells):
            mean = means.get(name, Mean(*setting, name))
            overall = [figure(mean, measure) for measure in ("speedup", "tau", "tokens_per_second")]
            rows.append([method(document.methods[name]), *overall, *(result(cells.get((name, t))) for t in tasks)])
        columns = ["method", "speed-up", "tau", "tokens/s", *tasks]
        tables.append(Table(columns, rows, setting_text(setting).capitalize()))
    return tables


def result(cell: Cell | None) -> Td:
    """A cell of the overview: speed-up, tau and the number of equal texts."""
    if cell is None or not cell.result:
        return Td(cell.state, kind=cell.state) if cell else Td()
    small = [f"tau {cell.tau.value:.2f}"] if cell.tau else []
    small += [f"{cell.same_text}/{cell.compared} same"] if cell.compared else []
    small += ["partial"] * (cell.state == "partial") + ["all texts loop"] * cell.loops
    return figure(cell, "speedup", small, coloured=not cell.loops)


def divergences(document: Document) -> Table:
    """Where texts differ from plain decoding's, and by how much the target preferred its own token there."""
    pairs = [(c, d) for c in document.cells for d in c.divergences][:SHOWN]
    rows = [[*place(c), d.prompt, d.turn, d.position, d.margin, d.mine, d.plain] for c, d in pairs]
    return Table([*PLACE, "prompt", "turn", "position", "margin", "wrote", "plain"], rows)


def all_cells(document: Document) -> Table:
    """One row for each cell, with all figures."""
    heads = ("speed-up", "tokens/s", "prompt included", "over transformers", "tau", "alpha", "prefill, ms")
    counts = ("prompts", "repeats", "looping", "new_tokens", "prompt_tokens")
    times = ("draft", "verify", "overhead")
    rows = [
        [*place(c), *(figure(c, name) for name in DIGITS), *(getattr(c.round_ms, k, None) for k in times),
         *(getattr(c, k) for k in counts)]
        for c in document.results
    ]  # fmt: skip
    columns = [*PLACE, *heads, *(f"{k}, ms" for k in times), *(k.replace("_", " ") for k in counts)]
    return Table(columns, rows, fold=True)


def tasks(document: Document) -> Table:
    """The tasks with their notes."""
    rows = [
        [name, t.kind, t.prompts, t.cut, " ".join([t.note, "(text to continue)" * t.raw]).strip()]
        for name, t in document.tasks.items()
    ]
    return Table(["task", "kind", "prompts", "cut to", "note"], rows)
