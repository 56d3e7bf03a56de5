"""The kinds of pictures that a report has, drawn by matplotlib: values in, an SVG string out.

The same values give the same string. It holds text as text, and every colour as a CSS variable with a fallback: a page
that sets --ink, --grid, --c0 ... --c7 shows it in its own colours, light or dark; an SVG file shows it too.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..budgets.calibration import Bin, ece
from .document import Estimate

INK, GRID = "#767c86", "#a4a9b1"  # text that can be read on white and on black
COLOURS = ("#2a78b8", "#d0662a", "#2f9463", "#9a5fb5", "#b8901a", "#c9486b", "#3d9fae", "#7d8590")
MARKS = "osD^vPX*"
WIDTH = 4.0  # inches: on a phone, the 10 points of the text are 12 pixels
STYLE = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 10, "text.color": INK, "axes.edgecolor": GRID,
    "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "grid.color": GRID,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.35, "axes.axisbelow": True, "legend.frameon": False,
    "lines.markersize": 5, "lines.linewidth": 1.6, "xtick.bottom": False, "ytick.left": False,
}  # fmt: skip
DASHED: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (3, 3)), "zorder": 0.9}

Style = tuple[str, str]  # colour and mark
Spread = tuple[int, float, list[float]]  # x, the rate, its quantiles over prompts: 10, 25, 50, 75, 90 %
Lines = dict[str, tuple[Style, list[tuple[float, Estimate]]]]  # name -> its style, and x with the figure there


@dataclass(frozen=True)
class Plot:
    """A picture: its title and its SVG text."""

    title: str
    svg: str


def style(i: int) -> Style:
    """The i-th colour and mark; colours come again after eight, with other marks."""
    return COLOURS[i % len(COLOURS)], MARKS[(i + i // len(COLOURS)) % len(MARKS)]


def clipped(text: str, most: int = 42) -> str:
    """The text, its middle left out beyond `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-most // 2 :]}"


def render(title: str, height: float, paint: Callable[[Figure], None]) -> Plot:
    """What `paint` draws on a figure of this height (inches)."""
    out, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.style.context(["default", {**STYLE, "svg.hashsalt": title}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's fonts draw the text, not ours
        made = Figure(figsize=(WIDTH, height), layout="constrained")
        paint(made)
        made.savefig(out, format="svg", transparent=True, metadata=nothing)
    return Plot(title, _trimmed(out.getvalue()))


def _trimmed(svg: str) -> str:
    """One <svg> element that can stand inside a page: no prolog, no style sheet, no ids but those it refers to."""
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    svg = re.sub(r"<[^>]*>", lambda m: re.sub(r"(\d\.\d\d)\d+", r"\1", m[0]), svg)  # attributes, not text
    svg = re.sub(r"\s*\n\s*", " ", svg)
    svg = svg.replace("<svg ", '<svg style="stroke-linejoin: round; font-family: system-ui, sans-serif" ', 1)
    for name, colour in {"ink": INK, "grid": GRID, **{f"c{i}": c for i, c in enumerate(COLOURS)}}.items():
        svg = svg.replace(colour, f"var(--{name}, {colour})")
    return svg


def legend(made: Figure, shown: dict[str, Style], line: bool = True) -> None:
    """Names with their looks below the axes; `line`: marks are joined in the plot."""
    marks = [
        Line2D([], [], color=colour, marker=mark, linestyle="-" if line else "") for colour, mark in shown.values()
    ]
    texts = [clipped(name) for name in shown]
    columns = max(1, 36 // max(10, *map(len, texts), 1))
    made.legend(marks, texts, loc="outside lower left", fontsize=9.5, ncols=columns, labelspacing=0.25)


def _errors(figures: Sequence[Estimate]) -> list[list[float]]:
    """Distances below and above, as matplotlib wants them."""
    return [[max(0.0, f.value - f.ends[0]) for f in figures], [max(0.0, f.ends[1] - f.value) for f in figures]]


def bars(title: str, panels: dict[str, list[tuple[str, str, Estimate]]]) -> Plot:
    """{what: (name, colour, figure)} as bars from 0, each name above its bar; a stroke at 1, plain decoding's value."""
    tall = [len(rows) + 1 for rows in panels.values()]

    def paint(made: Figure) -> None:
        every = made.subplots(len(panels), 1, squeeze=False, height_ratios=tall)[:, 0]
        for axes, (what, rows) in zip(every, panels.items(), strict=True):
            for i, (_, colour, found) in enumerate(rows):
                axes.barh(i, found.value, 0.34, color=colour, alpha=0.65)
                axes.errorbar(found.value, i, xerr=_errors([found]), color=INK, elinewidth=1.2, capsize=2.5)
                axes.vlines(1, i - 0.24, i + 0.24, color=INK, linewidth=1)
            _beside(axes, [(name, f"{found.value:.2f}") for name, _, found in rows])
            axes.set(xlabel=what, xlim=(0, 1.04 * max(1, *(max(found.value, *found.ends) for *_, found in rows))))

    return render(title, 0.1 + 0.42 * sum(tall), paint)


def _beside(axes: Axes, rows: Sequence[tuple[str, str]]) -> None:
    """Names above their bars, values in a column at the right."""
    axes.set(yticks=[], ylim=(len(rows) - 0.6, -0.8))
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=6)
    for i, (name, value) in enumerate(rows):
        axes.text(0, i - 0.21, f" {clipped(name)}", va="bottom", fontsize=9.5)
        axes.text(1.02, i, value, va="center", fontsize=9.5, transform=axes.get_yaxis_transform())


def curves(title: str, across: str, panels: dict[str, Lines], log: bool = True) -> Plot:
    """{what: lines}: panels above each other over one x axis, one legend for all."""
    shown = {name: style for lines in panels.values() for name, (style, _) in lines.items()}
    points = sorted({x for lines in panels.values() for _, curve in lines.values() for x, _ in curve})

    def paint(made: Figure) -> None:
        every = made.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (what, lines) in zip(every, panels.items(), strict=True):
            for (colour, mark), curve in lines.values():
                y = [f for _, f in curve]
                axes.errorbar(
                    [x for x, _ in curve], [f.value for f in y], _errors(y), color=colour, marker=mark, capsize=2.5
                )
            axes.set_ylabel(what)
            axes.set_ylim(0, 1.08 * max(max(f.value, *f.ends) for _, curve in lines.values() for _, f in curve) or 1)
        if log:
            every[-1].set_xscale("log", base=2)
        every[-1].set_xticks(points, [f"{x:g}" for x in points])
        every[-1].minorticks_off()
        every[-1].set_xlabel(across)
        legend(made, shown)

    return render(title, 0.6 + 1.75 * len(panels) + 0.2 * len(shown), paint)


def scatter(
    title: str, across: str, up: str, points: list[tuple[str, Style, Estimate, Estimate]], equal: bool = False
) -> Plot:
    """(name, style, x, y) with both intervals; the diagonal where x and y are to be `equal`."""
    shown = {name: style for name, style, *_ in points}

    def paint(made: Figure) -> None:
        axes = made.subplots()
        for _, (colour, mark), x, y in points:
            axes.errorbar(x.value, y.value, _errors([y]), _errors([x]), color=colour, marker=mark, elinewidth=0.9)
        if equal:
            most = 1.08 * max(v for *_, x, y in points for v in (x.value, *x.ends, y.value, *y.ends))
            axes.plot([0, most], [0, most], **DASHED)
            axes.set(xlim=(0, most), ylim=(0, most))
        axes.set(xlabel=across, ylabel=up)
        legend(made, shown, line=False)

    return render(title, 3.2 + 0.2 * len(shown), paint)


def spreads(
    title: str,
    cells: list[tuple[str, Style, list[Spread]]],
    across: str = "depth",
    up: str = "accepted of those tested",
) -> Plot:
    """(name, style, places): at every place the rate (mark) and the quantiles over prompts."""
    deepest = max(x for *_, places in cells for x, *_ in places)
    thick = min(12, 130 / deepest / len(cells))

    def paint(made: Figure) -> None:
        axes = made.subplots()
        for i, (_, (colour, mark), places) in enumerate(cells):
            aside = 0.8 * ((i + 0.5) / len(cells) - 0.5)
            axes.plot([x + aside for x, *_ in places], [rate for _, rate, _ in places], mark, c=colour, ms=4)
            if known := [(x + aside, *spread) for x, _, spread in places if spread]:
                at, low, lower, middle, upper, high = zip(*known, strict=True)
                axes.vlines(at, low, high, color=colour, linewidth=1)
                axes.vlines(at, lower, upper, color=colour, linewidth=thick, alpha=0.35)
                axes.plot(at, middle, "_", color=colour, markersize=thick)
        axes.set(xlabel=across, ylabel=up, ylim=(-0.02, 1.02), xticks=range(1, deepest + 1))
        axes.grid(axis="x", visible=False)
        legend(made, {name: style for name, style, _ in cells}, line=False)

    return render(title, 2.7 + 0.12 * len(cells), paint)


def calibration(title: str, bins: list[Bin]) -> Plot:
    """A reliability diagram; the area of a mark is the share of the nodes."""
    x, y, most = [b.confidence for b in bins], [b.acceptance for b in bins], max(b.count for b in bins)

    def paint(made: Figure) -> None:
        axes = made.subplots()
        axes.plot([0, 1], [0, 1], **DASHED)
        axes.plot(x, y, color=COLOURS[0])
        axes.scatter(x, y, [8 + 100 * b.count / most for b in bins], color=COLOURS[0], alpha=0.6)
        axes.text(0.03, 0.92, f"ECE {ece(bins):.3f}; {sum(b.count for b in bins)} nodes", transform=axes.transAxes)
        axes.set(xlabel="confidence", ylabel="accepted", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))

    return render(title, 3.0, paint)


def stacks(title: str, across: str, rows: list[tuple[str, dict[str, float]]]) -> Plot:
    """(name, {part: value}) as one stacked bar each, the name above it."""
    parts = list(dict.fromkeys(part for _, values in rows for part in values))
    colours = dict(zip(parts, (COLOURS[1], COLOURS[0], COLOURS[7]), strict=False))

    def paint(made: Figure) -> None:
        axes = made.subplots()
        for i, (_, values) in enumerate(rows):
            left = 0.0
            for part, value in values.items():
                axes.barh(i, value, 0.34, left=left, color=colours[part])
                left += value
        _beside(axes, [(name, f"{sum(values.values()):.1f}") for name, values in rows])
        axes.set(xlabel=across, xlim=(0, 1.04 * max(sum(values.values()) for _, values in rows) or 1))
        legend(made, {part: (colours[part], "s") for part in parts}, line=False)

    return render(title, 0.8 + 0.42 * len(rows), paint)
