"""docs/reproduction.md, and verdicts.csv beside each paper's claims: what is stored, judged. No figure is typed."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import rows
from .departures import CAUSES, DEPARTURES, WHY
from .document import Document
from .figures import BESIDE, COMPUTED, FAILS, HOLDS, NOISE, OPEN, PARTLY, Check, verdict
from .rows import HERE, MODELS, PAPERS, ROWS, Evidence

PAGE = rows.ROOT / "docs" / "reproduction.md"
VERDICTS = (HOLDS, PARTLY, NOISE, FAILS, OPEN, COMPUTED)
COLUMNS = ("row", "model", "statement", "outcome", "figures", "would have seen", "files")
FREE = "none"  # the model of rows that need none
BIGGEST = 15_000  # bytes of the page
UNSIGNED = "i"  # the letter of results without a processor's name
SHOWN = 2  # figures of a row on the page

HEAD = """# The papers' findings, and ours

Written by `python -m papers page` from `papers/results` and `papers/PAPER/claims.csv`. Each row is divided into
statements; all of them, with files and, where figures have an interval, the effect that would have been seen with a
chance of 80 %, stand in `papers/PAPER/verdicts.csv`. `python -m papers run ROW` makes a row's runs.

The papers measured targets of billions of parameters on GPUs. Here they are SmolLM2-135M-Instruct on the papers'
prompts and the demo target of ten million parameters, on two CPU cores, so the question is whether an order or a
direction comes out here too. Statements about T = 1 are judged under the papers' rule, `rejection`. Where our own,
`coupled`, alone was run, as in most trainings at T = 1, its statements say so and count for nothing, except that its
texts must be plain decoding's (L-alg, Ma-alg1). Two methods that answered the same prompts
are compared in pairs (a bootstrap over prompts); else their intervals of 95 % must lie apart, or the domains agree
beyond chance (5 %). A figure without an interval is taken to be known to 1.5 %.

**holds**, **does not hold**: all statements that were run; **partly**: some; *undecided*: the intervals overlap; *not
run*: no measurement. *computed*: a closed form or our own shapes counted, which is no finding. Behind the counts of
statements are figures of the first that decide (a/b: one method's and the other's), and what our own rule gives.
Letters are departures from the papers, digits say why statements were not run ([below](#departures)).
"""


READING = """Of SmolLM2. Figures are of the stored runs; the causes are our reading of them, which no run of its own has
tested."""


def judged(evidence: Evidence) -> dict[str, dict[str, tuple[list[Check], list[str]]]]:
    """(checks, files that were read) of every row, by model."""
    rows.load()
    results: dict[str, dict[str, tuple[list[Check], list[str]]]] = {}
    for row in evidence.claims:
        for model in ROWS[row].models or (FREE,):
            measured = rows.measured(row, "" if model == FREE else model, evidence)
            checks = ROWS[row].checks(measured)
            results.setdefault(row, {})[model] = (checks, measured.files)
    return results


Judged = Mapping[str, Mapping[str, tuple[Sequence[Check], Sequence[str]]]]


def cell(row: str, model: str, checks: Sequence[Check], unsigned: bool = False) -> str:
    """A row's verdict on a model in one line. `unsigned`: a file that it reads does not name its processor."""
    outcome = verdict(checks)
    if outcome == COMPUTED:
        return outcome
    lacks = any(c.outcome == OPEN for c in checks)
    notes = "".join(x for x in ROWS[row].notes.get(model, "") if lacks or not x.isdigit())
    notes = "".join(sorted(notes + UNSIGNED * (unsigned and outcome != OPEN), key=str.isdigit))
    if outcome == OPEN:
        return f"not run; {notes}"
    runs = [c for c in checks if c.outcome not in (COMPUTED, BESIDE)]
    if not runs or COMPUTED in {c.outcome for c in checks}:
        return f"computed, {sum(c.outcome == FAILS for c in checks)} of {len(checks)} differ"
    counts = Counter(c.outcome for c in runs)
    words = {HOLDS: "hold", FAILS: "fail", NOISE: "undecided", OPEN: "not run"}
    tally = (
        ", ".join(f"{counts[o]} {word}" for o, word in words.items() if counts[o])
        if len(counts) > 1
        else f"{len(runs)}"
    )
    first = [c.short for c in runs if c.short and c.outcome in (HOLDS, FAILS)] or [c.short for c in runs if c.short]
    shown = f"**{outcome}**" if outcome in (HOLDS, PARTLY, FAILS) else outcome
    ours = [f"`coupled` {c.short}" for c in checks if c.outcome == BESIDE and c.short][:1]
    figures = f": {', '.join((*first[:SHOWN], *ours))}" if first or ours else ""
    return f"{shown} ({tally}){figures}{f'; {notes}' if notes else ''}"


def unsigned(report: Any) -> bool:
    """Whether a report does not name the processor of its run."""
    return not isinstance(report, Document) or "flags" not in report.run.machine


def page(results: Judged, evidence: Evidence) -> str:
    parts = [HEAD.strip(), summary(results)]
    for paper, title in PAPERS.items():
        lines = [f"## {title}", "", "| row | finding | published | SmolLM2 | demo |", "|---|---|---|---|---|"]
        for row, claim in evidence.claims.items():
            if claim["paper"] != paper:
                continue
            cells = []
            for model in (FREE, FREE) if FREE in results[row] else MODELS:
                checks, files = results[row].get(model, ((), ()))
                old = any(unsigned(evidence.results[file]) for file in files)
                cells.append(cell(row, model, checks, old) if checks else "")
            line = " | ".join((row, claim["finding"], evidence.published_text(row), *cells))
            lines.append(f"| {line} |")
        parts.append("\n".join(lines))
    causes = "\n".join(f"- **{names}**: {words}." for names, words in CAUSES)
    parts.append(f"## Why rows fail\n\n{READING}\n\n{causes}")
    used = sorted({note for row in ROWS.values() for notes in row.notes.values() for note in notes} | {UNSIGNED})
    for title, words in (("Departures", DEPARTURES), ("Not run", WHY)):
        parts.append(f"## {title}\n\n" + "\n".join(f"- **{x}**: {words[x]}." for x in used if x in words))
    return "\n\n".join(parts) + "\n"


def summary(results: Judged) -> str:
    """How many rows have which verdict, by model."""
    lines = ["| model | " + " | ".join(VERDICTS) + " |", "|---|" + "--:|" * len(VERDICTS)]
    for model in (*MODELS, FREE):
        counts = Counter(verdict(by[model][0]) for by in results.values() if model in by)
        lines.append(
            f"| {'no model' if model == FREE else model} | " + " | ".join(str(counts[v]) for v in VERDICTS) + " |"
        )
    return "\n".join(lines)


def table(paper: str, results: Judged, evidence: Evidence) -> str:
    """A paper's verdicts.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row, by in results.items():
        if evidence.claims[row]["paper"] != paper:
            continue
        for model, (checks, files) in by.items():
            for c in checks:
                writer.writerow((row, model, c.words, c.outcome, c.figures, c.seen, " ".join(files)))
    return text.getvalue()


def made(evidence: Evidence) -> dict[Path, str]:
    """All files that are written, by path."""
    results = judged(evidence)
    return {PAGE: page(results, evidence), **{HERE / p / "verdicts.csv": table(p, results, evidence) for p in PAPERS}}
