"""Tables of docs/results.md from reports of `outrider bench` (benchmarks/results/bench_*.json): see `demo.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Report = dict[str, Any]
Figures = Sequence[float] | None


def span(figures: Figures, digits: int = 2) -> str:
    return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(*figures, d=digits) if figures else ""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * left + "--:|" * (len(columns) - left)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def mean(cells: Sequence[Report], key: str, part: str) -> float | None:
    """Over the tasks."""
    found = [c[key][part] for c in cells if c.get(key) and c[key].get(part) is not None]
    return sum(found) / len(found) if found else None


def cells(report: Report, mean: Report) -> list[Report]:
    """The cells behind a macro mean."""
    keys = ("method", "temperature", "batch")
    return [c for c in report["cells"] if all(c[k] == mean[k] for k in keys)]


def batches(report: Report) -> str:
    """Speed over the batch size, and what fits into a gibibyte."""
    rooms: dict[tuple[str, int], int] = {}  # of the longest task
    for c in report.get("capacity", ()):
        key = (c["method"], c["batch"])
        rooms[key] = min(c["rows"], rooms.get(key, c["rows"]))
    rows = [
        [m["method"], str(m["batch"]), span(m["speedup"]), f"{m['tokens_per_second'][0]:.0f}", span(m["tau"]),
         str(rooms.get((m["method"], m["batch"]), ""))]
        for m in sorted(report["macro"], key=lambda m: m["method"])
    ]  # fmt: skip
    return table(("method", "batch", "speed-up", "tokens/s", "tau", "rows in 1 GiB"), rows)


def temperatures(report: Report) -> str:
    """tau by rule over the temperature. At 0 all lossless rules are one."""
    ts = sorted({m["temperature"] for m in report["macro"]})
    names = list(dict.fromkeys(m["method"] for m in report["macro"] if m["tau"] and m["tau"][0] > 1))
    by = {(m["method"], m["temperature"]): m for m in report["macro"]}
    rows = [
        [n, *(span(by[n, t]["tau"]) + f", {by[n, t]['speedup'][0]:.2f}x" if (n, t) in by else "" for t in ts)]
        for n in names
    ]
    return table(("tau, speed-up", *(f"T = {t:g}" for t in ts)), rows)


def sizes(report: Report) -> str:
    """One drafter with larger and larger trees."""
    rows = []
    for m in report["macro"]:
        mine = cells(report, m)
        if not m["tau"] or m["tau"][0] <= 1:
            continue
        parts = [mean(mine, "round_ms", part) for part in ("draft", "verify")]
        ece = mean(mine, "reliability", "ece")
        start = [f"{m['temperature']:g}", m["method"], span(m["tau"]), span(m["speedup"])]
        rows.append([*start, *(f"{p:.1f}" for p in parts if p), f"{ece:.3f}" if ece is not None else ""])
    return table(("T", "tree", "tau", "speed-up", "draft, ms", "verify, ms", "ECE"), rows, 2)


def variants(report: Report) -> str:
    rows = [
        [m["method"], span(m["tokens_per_second"], 0), span(m["speedup"]), span(m["over_stock"]), span(m["tau"])]
        for m in report["macro"]
    ]
    return table(("method", "tokens/s", "over plain", "over transformers", "tau"), rows)


def typical(report: Report) -> str:
    rows = []
    for m in report["macro"]:
        mine = cells(report, m)
        mine_, plain = (mean(mine, "quality", k) for k in ("log_likelihood", "plain"))
        told = [f"{x:.3f}" if x is not None else "" for x in (mine_, plain)]
        rows.append([m["method"], span(m["tau"]), span(m["speedup"]), *told])
    return table(("method", "tau", "speed-up", "log-likelihood", "plain's"), rows)


def calibration(report: Report) -> str:
    """Calibration errors and tau of drafters with s = 1 and with a fitted s."""
    tau = {(m["method"], m["temperature"]): m["tau"] for m in report.get("pooled", ())}
    error = {}
    for key in tau:
        mine = [c["reliability"] for c in report["cells"] if (c["method"], c["temperature"]) == key]
        error[key] = sum(r["ece"] * r["pairs"] for r in mine) / sum(r["pairs"] for r in mine)
    rows = []
    for name, t in error:
        if "fitted" not in name:
            label, *rest = name.split(", ")
            both = ((name, t), (", ".join([f"{label} fitted", *rest]), t))
            setting = f"T = {t:g}" + ("" if t == 0 else ", rejection" if "rejection" in rest else ", shared noise")
            rows.append([label, setting, *(f"{error[k]:.3f}" for k in both), *(span(tau[k]) for k in both)])
    return table(("drafter", "", "error, s = 1", "error, fitted", "tau, s = 1", "tau, fitted"), rows, 2)


def causes(report: Report) -> str:
    """Where the speed of the fastest method of each task goes: geometric means over the tasks."""
    rows = []
    for t in sorted({e["temperature"] for e in report["explain"]}):
        mine = [e for e in report["explain"] if e["temperature"] == t]
        names = [p["name"] for p in mine[0]["parts"]]
        factors = [
            math.exp(sum(math.log(p["factor"]) for e in mine for p in e["parts"] if p["name"] == n) / len(mine))
            for n in names
        ]
        ends = [sum(e[k] for e in mine) / len(mine) for k in ("ideal", "measured")]
        rows.append([f"{t:g}", f"{ends[0]:.0f}", *(f"{f:.2f}" for f in factors), f"{ends[1]:.0f}"])
    return table(("T", "ideal, tokens/s", *names, "measured"), rows) if rows else "Not measured."
