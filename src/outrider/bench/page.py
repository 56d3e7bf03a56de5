"""report.html: one file that needs no network, for phones and desks, light and dark.

`sections.py` says what is in it; `data/report.html.j2` lays it out.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment
from markupsafe import Markup

from .document import Document, said, short
from .draw import Plot
from .sections import SECTIONS, Section, several, td
from .summary import headline, problems


def page(document: Document) -> str:
    """The whole file."""
    return (
        environment()
        .get_template("page")
        .render(run=document.run, sections=sections(document), lines=headline(document), **overview(document))
    )


def environment() -> Environment:
    """Jinja2 with this package's templates; every text of a run is escaped."""
    data = files(__package__) / "data"
    read = {name: (data / name).read_text(encoding="utf-8") for name in ("report.html.j2", "report.css", "report.js")}
    made = Environment(
        loader=DictLoader({"page": read["report.html.j2"]}), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {"td": td, "svg": svg, "several": several}
    made.globals |= {"style": Markup(read["report.css"]), "script": Markup(read["report.js"]), "said": said}
    return made


def sections(document: Document) -> list[Section]:
    """Those that have something to show."""
    return [found for title, made in SECTIONS.items() if (found := made(title, document))]


def overview(document: Document) -> dict[str, Any]:
    """What was run: the grid, the machine, a few counts."""
    cells, results = document.cells, document.results
    words = {"method": "method", "task": "task", "temperature": "temperature", "batch": "batch size"}
    wrong = sum(len(p.cells) for p in problems(document) if p.state != "partial")
    machine = ", ".join(f"{k} {short(v)}" for k, v in document.run.machine.items() if v not in ("", [], None))
    return {
        "grid": " × ".join(several(len({getattr(c, k) for c in cells}), w) for k, w in words.items()),
        "machine": f"{machine}; {document.run.started[:10]}",
        "tiles": {
            "cells": f"{len(results)} of {len(cells)}" if wrong else len(cells),
            "prompts": sum(t.prompts for t in document.tasks.values()),
            "texts compared with plain decoding": sum(c.compared for c in results),
            "of those the same": sum(c.same_text for c in results),
        },
    }


def svg(plot: Plot) -> Markup:
    """The plot's SVG (markup of our own), in the page's colours, with its title for those who cannot see it."""
    drawn = re.sub(r"var\((--\w+), #\w+\)", r"var(\1)", plot.svg)
    label = Markup('<svg role="img" aria-label="{}" ').format(plot.title)
    return Markup(drawn.replace("<svg ", label, 1))
