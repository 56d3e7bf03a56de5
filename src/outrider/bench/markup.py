"""HTML for the report. What comes from a run is text until `tag` has escaped it: only `Html` passes as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .draw import Plot
from .report import Row, Triple, figure

FEW = 6  # of plots, or places, that are shown at once; more unfold


class Html(str):
    """Markup; every other string is text."""


def tag(name: str, *children: Any, **attributes: Any) -> Html:
    """An element. `class_` is the attribute class; an attribute of None is left out."""
    given = [(k.rstrip("_").replace("_", "-"), escape(str(v))) for k, v in attributes.items() if v is not None]
    marks = "".join(f' {k}="{v}"' for k, v in given)
    return Html(f"<{name}{marks}>{join(children)}</{name}>")


def join(children: Iterable[Any]) -> Html:
    return Html("".join(c if isinstance(c, Html) else escape(str(c)) for c in children))


def chip(text: str) -> Html:
    kind = f"chip {text}" if text in ("lossy", "invalid", "failed", "partial") else "chip"
    return join([" ", tag("span", text, class_=kind)])


def several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


# ------------------------------------------------------------------------------------------------ tables


def td(content: Any, key: float | None = None, class_: str | None = None) -> Html:
    """A cell of a table; `key`, or a number itself, is what its column is sorted by."""
    if isinstance(content, int | float):
        key, content = float(content), f"{content:.4g}" if isinstance(content, float) else content
    kind = " ".join(filter(None, ("number" if key is not None else "", class_)))
    return tag("td", "" if content is None else content, data_sort=key, class_=kind or None)


def spanned(row: Row, name: str, digits: int = 2, *, small: Sequence[str] = ()) -> Html:
    """A figure, its interval below it, and what else is said small; a speed-up clear of 1 is coloured."""
    found = figure(row, name)
    lines = [tag("small", line) for line in small]
    if not found:
        return td(join(lines))
    value, low, high = (f"{x:.{digits}f}" for x in found)
    side = clear(found) if name == "speedup" else None
    return td(join([tag("b", value), tag("small", f"{low}–{high}"), *lines]), found[0], side)


def clear(found: Triple) -> str | None:
    """Is a speed-up on one side of 1 with its whole interval?"""
    return "up" if found[1] > 1 else "down" if found[2] < 1 else None


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Html:
    """Sorted by a click on a column's name; the first column names the row."""
    head = [tag("th", tag("button", c, type="button"), scope="col", aria_sort="none") for c in columns]
    body = [
        tag("tr", tag("th", r[0], scope="row"), *(c if isinstance(c, Html) else td(c) for c in r[1:])) for r in rows
    ]
    inner = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=columns[0])


# ---------------------------------------------------------------------------------------------- pictures


def pictures(found: Sequence[Plot]) -> list[Html]:
    """Plots side by side where there is room."""
    each = [tag("figure", tag("figcaption", p.title), named(p)) for p in found]
    shown = [tag("div", *each[:FEW], class_="plots")] if each else []
    if each[FEW:]:
        shown.append(tag("details", tag("summary", f"{len(each) - FEW} more"), tag("div", *each[FEW:], class_="plots")))
    return shown


def named(plot: Plot) -> Html:
    """The plot's SVG (markup of our own), in the page's colours, with its title for those who cannot see it."""
    svg = re.sub(r"var\((--\w+), #\w+\)", r"var(\1)", plot.svg)
    return Html(svg.replace("<svg ", f'<svg role="img" aria-label="{escape(plot.title)}" ', 1))
