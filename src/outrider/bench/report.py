"""What a run leaves behind: results.json, results.csv, results.md for a README, and report.html."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..files import write as write_file
from . import page
from .document import Cell, Document, Estimate, said, short, unique
from .results import to_json
from .results import write as write_json
from .summary import Problem, headline, problems

IDENTITY = ("task", "temperature", "batch", "method")
TEXTS = ("spec", "rule", "budget", "variant", "peer", "lossless", "state", "reason", "loops")
FIGURES = ("speedup", "tokens_per_second", "whole", "over_stock", "tau", "alpha", "prefill_ms")
COUNTS = ("prompts", "repeats", "new_tokens", "looping", "same_text", "compared", "drafted_alpha", "prompt_tokens")
PARTS = {
    "round_ms": ("draft", "verify", "overhead"),
    "memory": ("cache", "drafter"),
    "law": ("tokens", "p"),
    "theory": ("alpha", "gamma", "c", "verify", "promised_speedup", "promised_speedup_at_cost", "promised_tau"),
    "quality": ("log_likelihood", "plain", "exact", "held_out_loss"),
    "reliability": ("ece", "pairs"),
}


def write(document: Document, folder: str | Path) -> list[Path]:
    """The four files, written into the folder (made if it is not there); each appears whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(document, folder / "results.json")
    files = {"results.csv": table(document), "results.md": markdown(document), "report.html": page.page(document)}
    return [folder / "results.json", *(write_file(folder / name, text) for name, text in files.items())]


def text(found: Estimate | None, digits: int = 2) -> str:
    """1.64 (1.53–1.75); nothing for None."""
    return found.text(digits) if found else ""


def table(document: Document) -> str:
    """CSV, one line for each cell; the figures of a cell that is no result are left empty."""
    spread = [f"{name}{end}" for name in FIGURES for end in ("", "_low", "_high")]
    inner = [f"{name}_{part}" for name, parts in PARTS.items() for part in parts]
    out = io.StringIO()
    writer = csv.DictWriter(out, [*IDENTITY, *TEXTS, *spread, *COUNTS, *inner], restval="", lineterminator="\n")
    writer.writeheader()
    for cell in document.cells:
        writer.writerow(_flat(cell))
    return out.getvalue()


def _flat(cell: Cell) -> dict[str, Any]:
    told = to_json(cell)
    flat = {k: told[k] for k in (*IDENTITY, *TEXTS)}
    if not cell.result:
        return flat
    flat |= {k: told[k] for k in COUNTS}
    for name in FIGURES:
        flat |= dict(zip((name, f"{name}_low", f"{name}_high"), told[name] or ("", "", ""), strict=True))
    return flat | {f"{k}_{p}": (told[k] or {}).get(p) for k, parts in PARTS.items() for p in parts}


def markdown(document: Document) -> str:
    """A table for a README: methods by macro mean and tasks, for each temperature and batch size."""
    parts = [plainly(" ".join(headline(document)))]
    for where in document.settings:
        cells = [c for c in document.cells if c.setting == where]
        tasks = unique(c.task for c in cells)
        head = ["method", "speed-up", "tau", "tokens/s", *map(plainly, tasks)]
        lines = [f"### {said(where).capitalize()}", "", f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 1)]
        means = {m.method: m for m in document.means if m.setting == where}
        for method in unique(c.method for c in cells):
            mine, mean = {c.task: c for c in cells if c.method == method}, means.get(method)
            figures = (mean.speedup, mean.tau, mean.tokens_per_second) if mean else (None,) * 3
            row = [plainly(method), *(text(f, d) for f, d in zip(figures, (2, 2, 0), strict=True))]
            lines.append(f"| {' | '.join([*row, *(_speed(mine.get(t)) for t in tasks)])} |")
        parts.append("\n".join(lines))
    wrong = [f"- {_struck(p)}: {plainly('; '.join(p.reasons) or 'no reason was given')}" for p in problems(document)]
    parts += ["\n".join(wrong)] if wrong else []
    run = document.run
    made = ", ".join(f"{k} {short(v)}" for k, v in {**run.machine, **run.versions}.items())
    parts.append(plainly(f"Target {run.target}, {run.started[:10]}. {made}."))
    parts.append("Means over tasks, with intervals of 95 %; tau counts the target's own token; speeds without prefill.")
    return "\n\n".join(parts) + "\n"


def _speed(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if not cell.result:
        return f"~~{cell.state}~~"
    notes = ["partial"] * (cell.state == "partial") + ["loops"] * cell.loops
    return f"{cell.speedup.value:.2f}" + f" ({', '.join(notes)})" * bool(notes) if cell.speedup else ""


def _struck(problem: Problem) -> str:
    words = plainly(f"{problem.method}, {problem.where}")
    return f"{words} ({problem.state})" if problem.state == "partial" else f"~~{words}~~ ({problem.state})"


def plainly(text: str) -> str:
    """Markdown that shows this text as it stands, in one line."""
    return re.sub(r"([\\`*_~|<\[\]])", r"\\\1", " ".join(text.split()))


def show(document: Document) -> None:
    """On the terminal: the means, what went wrong, and the headline."""
    console = Console()
    for where in document.settings:
        rows = Table("method", title=Text(said(where).capitalize(), "bold"), title_justify="left")
        for name in ("speed-up", "tau", "tokens/s"):
            rows.add_column(name, justify="right")
        for m in document.means:
            if m.setting == where:
                rows.add_row(Text(m.method), text(m.speedup), text(m.tau), text(m.tokens_per_second, 0))
        if rows.row_count:
            console.print(rows)
    replays = Table("method", "task", "tau", "predicted speed-up", "if drafts took no time", title="Replays")
    for c in document.results:
        if p := c.predicted:
            replays.add_row(Text(c.method), Text(c.task), text(c.tau), text(p.speedup), text(p.without_drafting))
    if replays.row_count:
        console.print(replays)
    for problem in problems(document):
        _problem(console, problem)
    console.print(Text(" ".join(headline(document)), "bold"))


def _problem(console: Console, p: Problem) -> None:
    where = p.where if len(p.cells) <= 3 else f"{len(p.cells)} cells"
    why = "; ".join(p.reasons) or "no reason was given"
    console.print(Text(f"{p.state}: {p.method}, {where}: {why}", "yellow" if p.state == "partial" else "red"))
