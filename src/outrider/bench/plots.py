"""The plots of a run, by matplotlib: functions from the document to plots, none where there is no data.

Only results are drawn (`Document.results`, `Document.means`). A method has the same colour in all plots.
"""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .document import Cell, Document, Estimate, Mean, setting_text, unique
from .types import OURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2a78b8", "#d0662a", "#2f9463", "#9a5fb5", "#b8901a", "#c9486b", "#3d9fae", "#7d8590")
INK, GRID = "#767c86", "#a4a9b1"  # readable on white and on black
WIDTH = 5.0  # inches
STYLE = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 10, "text.color": INK, "axes.edgecolor": GRID,
    "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "grid.color": GRID,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.35, "axes.axisbelow": True, "legend.frameon": False,
    "legend.fontsize": 9, "lines.markersize": 5, "lines.linewidth": 1.6, "font.family": "sans-serif",
}  # fmt: skip
SPEED = "speed-up over plain decoding"
AXES = {"temperature": "temperature", "batch": "batch size"}  # of a mean, with their labels

Line = Sequence[tuple[float, Estimate]]  # x, and the figure there


@dataclass(frozen=True)
class Plot:
    """A title and the text of an SVG file, which is deterministic."""

    title: str
    svg: str


def draw(title: str, height: float, paint: Callable[[Figure], None]) -> Plot:
    """Let `paint` draw on a figure of this height (inches)."""
    import matplotlib.style
    from matplotlib.figure import Figure

    out = io.StringIO()
    with matplotlib.style.context(["default", {**STYLE, "svg.hashsalt": title}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's fonts draw the text
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        paint(figure)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Plot(title, out.getvalue())


def errors(figures: Sequence[Estimate]) -> list[list[float]]:
    """The distances to both ends of the intervals."""
    return [[max(0.0, f.value - f.ends[0]) for f in figures], [max(0.0, f.ends[1] - f.value) for f in figures]]


def clipped(text: str, most: int = 40) -> str:
    """The text without its middle, if it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-most // 2 :]}"


def bars(title: str, xlabel: str, rows: Sequence[tuple[str, str, Estimate]]) -> Plot:
    """(name, colour, figure) as horizontal bars from 0; the dashed line is 1, plain decoding."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        values = [f for *_, f in rows]
        axes.barh(
            range(len(rows)), [f.value for f in values], 0.6, color=[c for _, c, _ in rows], alpha=0.7,
            xerr=errors(values), error_kw={"ecolor": INK, "elinewidth": 1.2, "capsize": 2.5},
        )  # fmt: skip
        for i, f in enumerate(values):
            axes.text(max(f.ends[1], f.value), i, f"  {f.value:.2f}", va="center", fontsize=9)
        axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (3, 3)))
        axes.set_xlabel(xlabel)
        axes.set_xlim(0, 1.12 * max(1, *(f.ends[1] for f in values)))
        axes.set_yticks(range(len(rows)), [clipped(name) for name, *_ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)

    return draw(title, 0.8 + 0.3 * len(rows), paint)


def curves(
    title: str, xlabel: str, panels: Mapping[str, Mapping[str, Line]], colours: Mapping[str, str], log: bool = False
) -> Plot:
    """{y label: {name: line}} as panels above each other over one x axis, with one legend."""
    shown = unique(name for lines in panels.values() for name in lines)
    points = sorted({x for lines in panels.values() for line in lines.values() for x, _ in line})

    def paint(figure: Figure) -> None:
        every = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        handles: dict[str, Any] = {}
        for axes, (ylabel, lines) in zip(every, panels.items(), strict=True):
            for name, line in lines.items():
                y = [f for _, f in line]
                style: dict[str, Any] = {"color": colours[name], "marker": "o", "capsize": 2.5}
                handles[name] = axes.errorbar([x for x, _ in line], [f.value for f in y], errors(y), **style)
            axes.set_ylabel(ylabel)
            axes.set_ylim(bottom=0)
        if log:
            every[-1].set_xscale("log", base=2)
            every[-1].minorticks_off()
        every[-1].set_xticks(points, [f"{x:g}" for x in points])
        every[-1].set_xlabel(xlabel)
        figure.legend([handles[n] for n in shown], [clipped(n) for n in shown], loc="outside lower left")

    return draw(title, 0.7 + 1.8 * len(panels) + 0.22 * len(shown), paint)


def colours(document: Document) -> dict[str, str]:
    """A colour for every method."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(document.methods)}


def kind_colour(cell: Cell) -> str:
    """Grey for plain decoding and other engines, blue for our methods, orange for lossy ones."""
    if cell.plain or cell.peer != OURS:
        return COLOURS[7]
    return COLOURS[0 if cell.lossless else 1]


def speedups(document: Document) -> list[Plot]:
    """Mean speed-up over the tasks, for each setting."""
    about, plots = document.methods, []
    for setting in document.settings:
        means = [m for m in document.means if m.setting == setting]
        rows = [(m.method, kind_colour(about[m.method]), m.speedup) for m in means if m.speedup]
        plots += [bars(setting_text(setting).capitalize(), SPEED, rows)] if rows else []
    return plots


def depths(document: Document) -> list[Plot]:
    """Acceptance by depth of every method, all tasks together, at the smallest batch size."""
    least, plots = min((c.batch for c in document.results), default=0), []
    for t in sorted({c.temperature for c in document.results}):
        accepted, tested = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        for c in document.results:
            for d in c.depths if (c.temperature, c.batch) == (t, least) else ():
                accepted[c.method, d.depth] += d.accepted
                tested[c.method, d.depth] += d.tested
        lines: dict[str, list[tuple[float, Estimate]]] = {}
        for (method, depth), count in sorted(tested.items(), key=lambda item: item[0][1]):
            lines.setdefault(method, []).append((depth, Estimate(accepted[method, depth] / count)))
        if lines:
            panels = {"accepted of those tested": lines}
            plots.append(curves(f"Temperature {t:g}", "depth", panels, colours(document)))
    return plots


def over(document: Document, axis: str, fixed: str, panels: Mapping[str, str], means: Sequence[Mean]) -> list[Plot]:
    """Means over one of `AXES`, a plot for each value of the other; a panel for each {label: figure}.

    A line needs two points.
    """
    plots = []
    for value in sorted({getattr(m, fixed) for m in means}):
        drawn: dict[str, Mapping[str, Line]] = {}
        for label, figure in panels.items():
            lines: dict[str, list[tuple[float, Estimate]]] = {}
            for m in means:
                if getattr(m, fixed) == value and (y := getattr(m, figure)):
                    lines.setdefault(m.method, []).append((getattr(m, axis), y))
            if long := {name: sorted(line) for name, line in lines.items() if len(line) > 1}:
                drawn[label] = long
        if drawn:
            plots.append(curves(f"{AXES[fixed].capitalize()} {value:g}", AXES[axis], drawn, colours(document)))
    return plots


def batches(document: Document) -> list[Plot]:
    """Speed-up and tokens per second over the batch size."""
    panels = {SPEED: "speedup", "tokens/s": "tokens_per_second"}
    return over(document, "batch", "temperature", panels, document.means)


def temperatures(document: Document) -> list[Plot]:
    """tau and speed-up over the temperature."""
    drafted = [m for m in document.means if not document.methods[m.method].plain]
    return over(document, "temperature", "batch", {"tau": "tau", SPEED: "speedup"}, drafted)
