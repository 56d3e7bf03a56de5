"""What a run leaves behind, results.json and report.html, and its summary on the terminal."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

from ..files import write as write_file
from . import page, results
from .document import Document, Estimate, said
from .summary import headline, problems

logger = logging.getLogger(__name__)


def write(document: Document, folder: str | Path) -> list[Path]:
    """Write both files into the folder (created if need be); each appears complete or not at all. Without matplotlib,
    which draws the page's plots, there are the results alone."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    results.write(document, folder / "results.json")
    if find_spec("matplotlib") is None:
        logger.warning("no report.html: its plots need matplotlib: pip install 'outrider[bench]'")
        return [folder / "results.json"]
    return [folder / "results.json", write_file(folder / "report.html", page.page(document))]


def text(figure: Estimate | None, digits: int = 2) -> str:
    """1.64 (1.53–1.75); "" for None."""
    return figure.text(digits) if figure else ""


def show(document: Document) -> None:
    """Print the means, the problems and the headline."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for setting in document.settings:
        rows = Table("method", title=Text(said(setting).capitalize(), "bold"), title_justify="left")
        for name in ("speed-up", "tau", "tokens/s"):
            rows.add_column(name, justify="right")
        for m in document.means:
            if m.setting == setting:
                rows.add_row(Text(m.method), text(m.speedup), text(m.tau), text(m.tokens_per_second, 0))
        if rows.row_count:
            console.print(rows)
    for p in problems(document):
        where = p.where if len(p.cells) <= 3 else f"{len(p.cells)} cells"
        why = "; ".join(p.reasons) or "no reason was given"
        console.print(Text(f"{p.state}: {p.method}, {where}: {why}", "yellow" if p.state == "partial" else "red"))
    console.print(Text(" ".join(headline(document)), "bold"))
