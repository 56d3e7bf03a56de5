"""What a run leaves behind: results.json, results.csv, results.md for a README, and report.html; and how to read it.

    write(document, folder)     all four files of one document
    read(path)                  a results.json back, refused in one sentence where it is not one

Only the cells of `counted` are results. A failed cell has no figures; an invalid one keeps them in results.json, for
whoever looks into it, and nowhere else: no table, no plot, no mean and no headline shows them.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..types import InputError
from .types import OURS, PLAIN, VERSION

Row = dict[str, Any]  # a cell or a macro mean of the document
Triple = tuple[float, float, float]  # a figure and its interval of 95 %

IDENTITY = ("task", "temperature", "batch", "method")
TEXTS = ("spec", "rule", "budget", "variant", "peer", "lossless", "state", "reason")
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


def write(document: dict[str, Any], folder: str | Path) -> list[Path]:
    """The four files, written into the folder (made if it is not there); each appears whole or not at all."""
    from . import page  # its plots need matplotlib, which takes a second to load

    document, folder = finite(document), Path(folder)
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    files = {"results.json": text, "results.csv": table(document), "results.md": markdown(document)}
    folder.mkdir(parents=True, exist_ok=True)
    return [_place(folder / name, text) for name, text in {**files, "report.html": page.page(document)}.items()]


def _place(file: Path, text: str) -> Path:
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    return part.replace(file)


def finite(value: Any) -> Any:
    """The document with None for what JSON has no number for (nan, infinity)."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: str | Path) -> dict[str, Any]:
    """The results.json of a run, named itself or by its folder. InputError where there is none of this format."""
    file = Path(path) / "results.json" if Path(path).is_dir() else Path(path)
    again = "measure it again with `outrider bench --out DIR`"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file} does not exist: name a folder that `outrider bench --out DIR` has finished") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise InputError(f"{file} is not whole JSON: run `outrider bench` with the same --out to write it") from None
    if not isinstance(document, dict) or not {"format", "run", "cells", "macro"} <= set(document):
        raise InputError(f"{file} does not hold the results of a benchmark: name what `outrider bench --out DIR` wrote")
    found = document["format"]
    if found != VERSION:
        writer = document["run"].get("versions", {}).get("outrider", "another version")
        newer = isinstance(found, int) and found > VERSION
        todo = f"update outrider, or {again}" if newer else f"{again} into another folder"
        raise InputError(f"{file} has format {found}, by outrider {writer}, and this one reads {VERSION}: {todo}")
    return document


# -------------------------------------------------------------------------------------- what may be shown


def counted(document: dict[str, Any]) -> list[Row]:
    """The cells that are results."""
    return [c for c in document["cells"] if c["state"] in ("done", "partial")]


def means(document: dict[str, Any]) -> list[Row]:
    """The macro means that are results: no task of theirs is invalid at that temperature and batch size."""
    struck = {(setting(c), c["method"]) for c in document["cells"] if c["state"] == "invalid"}
    return [m for m in document["macro"] if (setting(m), m["method"]) not in struck]


def setting(row: Row) -> tuple[float, int]:
    return row["temperature"], row["batch"]


def settings(document: dict[str, Any]) -> list[tuple[float, int]]:
    return sorted({setting(c) for c in document["cells"]})


def said(where: tuple[float, int]) -> str:
    return f"temperature {where[0]:g}, batch size {where[1]}"


def names(rows: Iterable[Row], key: str) -> list[str]:
    """The methods or the tasks of these rows, in the run's order."""
    return list(dict.fromkeys(r[key] for r in rows))


def described(document: dict[str, Any]) -> dict[str, Row]:
    """Method -> a cell that says its spec, rule, budget, variant, peer and whether it is lossless."""
    known = [c for c in document["cells"] if "spec" in c]
    return {n: next(c for c in known if c["method"] == n) for n in names(known, "method")}


def is_plain(cell: Row) -> bool:
    return cell.get("peer") == OURS and cell.get("spec") == PLAIN


def figure(row: Row, name: str) -> Triple | None:
    """A figure with its interval; None where it was not measured."""
    found = row.get(name)
    if not found or any(x is None or not math.isfinite(x) for x in found):
        return None
    value, low, high = map(float, found)
    return value, low, high


def span(found: Triple | None, digits: int = 2) -> str:
    """1.64 (1.53–1.75); nothing for None."""
    return "{:.{d}f} ({:.{d}f}–{:.{d}f})".format(*found, d=digits) if found else ""


def short(value: Any) -> str:
    """A value of the arguments, the machine or the versions, for one line."""
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Problem:
    """Cells of one method that are not (all of) a result, for one reason."""

    method: str
    state: str  # invalid, failed, partial
    reasons: tuple[str, ...]
    cells: tuple[Row, ...]

    @property
    def where(self) -> str:
        return "; ".join(f"{c['task']} ({said(setting(c))})" for c in self.cells)


def problems(document: dict[str, Any]) -> list[Problem]:
    """The worst first."""
    found: dict[tuple[str, str, tuple[str, ...]], list[Row]] = {}
    for c in document["cells"]:
        if c["state"] != "done":
            reasons = [r for r in (c.get("reason"), *(c.get("faults") or ())) if r]
            found.setdefault((c["method"], c["state"], tuple(dict.fromkeys(reasons))), []).append(c)
    order = ("invalid", "failed", "partial")
    held = [Problem(method, state, why, tuple(cells)) for (method, state, why), cells in found.items()]
    return sorted(held, key=lambda p: order.index(p.state))


def headline(document: dict[str, Any]) -> list[str]:
    """The best valid lossless method, over all it was run on, and the worst cell of the run."""
    wrong, about = {c["method"] for c in document["cells"] if c["state"] == "invalid"}, described(document)
    base = next((c["variant"] for c in about.values() if is_plain(c)), "plain")  # int8 is another target than plain's
    own = {n for n, c in about.items() if c["lossless"] and ("int8" in c["variant"]) == ("int8" in base)}
    fair = {n for n in own - wrong if not is_plain(about[n])}
    tasks = {w: len({c["task"] for c in document["cells"] if setting(c) == w}) for w in settings(document)}
    rows = [(f, m) for m in means(document) if m["method"] in fair and (f := figure(m, "speedup"))]
    whole = [(f, m) for f, m in rows if m["tasks"] == tasks[setting(m)]]
    replayed = [(f, c) for c in counted(document) if c.get("predicted") and (f := figure(c["predicted"], "speedup"))]
    if replayed:
        best, cell = max(replayed, key=lambda x: x[0][0])
        cost = cell["predicted"]["cost"]
        return [
            f"Predicted for {cost}: {cell['method']} on {cell['task']}, {span(best)} times as fast as plain decoding."
        ]
    if not whole:
        return ["No lossless method has valid figures for every task, so there is no speed-up to claim."]
    best, mean = max(whole, key=lambda x: x[0][0])
    others = [f[0] for f, m in rows if m["method"] == mean["method"]]
    over = f"over {mean['tasks']} tasks" if mean["tasks"] > 1 else "on one task"
    of = f"the best of {len(fair)} lossless methods" if len(fair) > 1 else "the one lossless method"
    first = f"{mean['method']}, {of}, is {span(best)} times as fast as plain decoding {over} at {said(setting(mean))}"
    if len(others) > 1:
        first += f"; from {min(others):.2f} to {max(others):.2f} over all {len(others)} settings"
    cells = [(f, c) for c in counted(document) if not is_plain(c) and (f := figure(c, "speedup"))]
    low, worst = min([x for x in cells if x[1]["peer"] == OURS] or cells, key=lambda x: x[0][0])
    second = (
        f"The slowest cell of a drafter: {worst['method']} on {worst['task']} at {said(setting(worst))}, {span(low)}"
    )
    loops = [c["task"] for c in document["cells"] if c["state"] == "done" and "repeats itself" in c["reason"]]
    third = [f"Every plain text of {', '.join(dict.fromkeys(loops))} repeats itself, which flatters all drafters."]
    return [f"{first}.", f"{second}.", *(third if loops else [])]


# ------------------------------------------------------------------------------------ CSV and Markdown


def table(document: dict[str, Any]) -> str:
    """CSV, one line for each cell; the figures of a cell that is no result are left empty."""
    spread = [f"{name}{end}" for name in FIGURES for end in ("", "_low", "_high")]
    inner = [f"{name}_{part}" for name, parts in PARTS.items() for part in parts]
    out = io.StringIO()
    writer = csv.DictWriter(out, [*IDENTITY, *TEXTS, *spread, *COUNTS, *inner], restval="", lineterminator="\n")
    writer.writeheader()
    results = {id(c) for c in counted(document)}
    for cell in document["cells"]:
        writer.writerow(_flat(cell, id(cell) in results))
    return out.getvalue()


def _flat(cell: Row, result: bool) -> Row:
    flat = {k: cell[k] for k in (*IDENTITY, *TEXTS) if k in cell}
    if not result:
        return flat
    flat |= {k: cell.get(k) for k in COUNTS}
    for name in FIGURES:
        flat |= dict(zip((name, f"{name}_low", f"{name}_high"), figure(cell, name) or ("", "", ""), strict=True))
    return flat | {f"{k}_{p}": (cell.get(k) or {}).get(p) for k, parts in PARTS.items() for p in parts}


def markdown(document: dict[str, Any]) -> str:
    """A table for a README: methods by macro mean and tasks, for each temperature and batch size."""
    parts = [plainly(" ".join(headline(document)))]
    for where in settings(document):
        cells = [c for c in document["cells"] if setting(c) == where]
        tasks = names(cells, "task")
        head = ["method", "speed-up", "tau", "tokens/s", *map(plainly, tasks)]
        lines = [f"### {said(where).capitalize()}", "", f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 1)]
        mean = {m["method"]: m for m in means(document) if setting(m) == where}
        for method in names(cells, "method"):
            mine = {c["task"]: c for c in cells if c["method"] == method}
            m = mean.get(method, {})
            row = [plainly(method), span(figure(m, "speedup")), span(figure(m, "tau"))]
            row += [span(figure(m, "tokens_per_second"), 0), *(_speed(mine.get(t)) for t in tasks)]
            lines.append(f"| {' | '.join(row)} |")
        parts.append("\n".join(lines))
    wrong = [f"- {_struck(p)}: {plainly('; '.join(p.reasons) or 'no reason was given')}" for p in problems(document)]
    parts += ["\n".join(wrong)] if wrong else []
    run = document["run"]
    about = {**run.get("machine", {}), **run.get("versions", {})}
    made = ", ".join(f"{k} {short(v)}" for k, v in about.items())
    parts.append(plainly(f"Target {run['target']}, {run.get('started', '')[:10]}. {made}."))
    parts.append("Means over tasks, with intervals of 95 %; tau counts the target's own token; speeds without prefill.")
    return "\n\n".join(parts) + "\n"


def _speed(cell: Row | None) -> str:
    if cell is None:
        return ""
    if cell["state"] in ("failed", "invalid"):
        return f"~~{cell['state']}~~"
    found = figure(cell, "speedup")
    return f"{found[0]:.2f}" + " (partial)" * (cell["state"] == "partial") if found else ""


def _struck(problem: Problem) -> str:
    text = plainly(f"{problem.method}, {problem.where}")
    return f"{text} ({problem.state})" if problem.state == "partial" else f"~~{text}~~ ({problem.state})"


def plainly(text: str) -> str:
    """Markdown that shows this text as it stands, in one line."""
    return re.sub(r"([\\`*_~|<\[\]])", r"\\\1", " ".join(text.split()))


def show(document: dict[str, Any]) -> None:
    """On the terminal: the macro means, what went wrong, and the headline."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for where in settings(document):
        title = Text(said(where).capitalize(), "bold")
        rows = Table("method", title=title, title_justify="left")
        for name in ("speed-up", "tau", "tokens/s"):
            rows.add_column(name, justify="right")
        for m in means(document):
            if setting(m) == where:
                figures = ((n, 0 if n == "tokens_per_second" else 2) for n in ("speedup", "tau", "tokens_per_second"))
                rows.add_row(Text(m["method"]), *(span(figure(m, n), d) for n, d in figures))
        if rows.row_count:
            console.print(rows)
    replays = Table(
        "method", "task", "tau", "predicted speed-up", "without drafting", title="Replays", title_justify="left"
    )
    for c in counted(document):
        if p := c.get("predicted"):
            told = [span(figure(c, "tau")), span(figure(p, "speedup")), span(figure(p, "without_drafting"))]
            replays.add_row(Text(c["method"]), Text(c["task"]), *told)
    if replays.row_count:
        console.print(replays)
    for p in problems(document):
        why = "; ".join(p.reasons) or "no reason was given"
        console.print(Text(f"{p.state}: {p.method}, {p.where}: {why}", "yellow" if p.state == "partial" else "red"))
    console.print(Text(" ".join(headline(document)), "bold"))
