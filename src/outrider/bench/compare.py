"""`outrider bench compare A B`: two runs side by side, cell by cell; what changed beyond both intervals is marked.

Two intervals of 95 % that do not overlap are called significant. That is stricter than a test of the difference (at
about 0.6 % a cell by chance, where both are equally wide), which many cells at once ask for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .report import IDENTITY, Row, Triple, counted, figure, plainly, said, setting, short, span

MEASURES = {"speedup": "speed-up", "tau": "tau", "tokens_per_second": "tokens/s"}


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Two documents of results.json, as one for JSON.

    warnings     what the runs do not have in common, a sentence each: target, machine, versions, arguments
    rows         a cell that is a result in both: identity, and for each measure a, b, ratio (b/a) and `significant`
    only_a/_b    identities of cells that only one run has
    no_result    identities of cells in both that are invalid or failed in one, and their states
    """
    mine, theirs = ({_key(c): c for c in document["cells"]} for document in (a, b))
    results = {_key(c) for c in counted(a)} & {_key(c) for c in counted(b)}
    both = [k for k in mine if k in theirs]
    return {
        "warnings": warnings(a["run"], b["run"]),
        "rows": [_row(mine[k], theirs[k]) for k in both if k in results],
        "only_a": [_identity(c) for k, c in mine.items() if k not in theirs],
        "only_b": [_identity(c) for k, c in theirs.items() if k not in mine],
        "no_result": [
            {**_identity(mine[k]), "a": mine[k]["state"], "b": theirs[k]["state"]} for k in both if k not in results
        ],
    }


def _key(cell: Row) -> tuple[Any, ...]:
    return tuple(cell[name] for name in IDENTITY)


def _identity(cell: Row) -> Row:
    return {name: cell[name] for name in IDENTITY}


def _row(a: Row, b: Row) -> Row:
    return {**_identity(a), **{name: change(figure(a, name), figure(b, name)) for name in MEASURES}}


def change(a: Triple | None, b: Triple | None) -> Row | None:
    """From one figure to the other; None where one was not measured."""
    if a is None or b is None:
        return None
    spread = a[1] < a[2] and b[1] < b[2]  # a figure of a single batch has none, and says nothing of chance
    apart = spread and (b[1] > a[2] or b[2] < a[1])
    return {"a": list(a), "b": list(b), "ratio": b[0] / a[0] if a[0] else None, "significant": apart}


def warnings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What makes two runs hard to compare."""
    found = []
    if a["target"] != b["target"]:
        found.append(f"The targets differ, so speeds and tau are of different models: {a['target']}, {b['target']}.")
    for part, words in (("machine", "machines"), ("versions", "versions"), ("arguments", "arguments")):
        old, new = a.get(part) or {}, b.get(part) or {}
        differ = [k for k in dict.fromkeys([*old, *new]) if old.get(k) != new.get(k)]
        each = "; ".join(f"{k} {short(old.get(k))}, {short(new.get(k))}" for k in differ)
        if each:
            found.append(f"The {words} differ: {each}.")
    return found


def sentence(comparison: dict[str, Any]) -> str:
    """How many cells got faster and slower."""
    changes = [r["speedup"] for r in comparison["rows"] if r["speedup"]]
    sure = [c["ratio"] for c in changes if c["significant"]]
    up, down = sum(r > 1 for r in sure), sum(r < 1 for r in sure)
    return (
        f"Of {len(changes)} cells with a speed-up in both runs, {up} are faster in B and {down} slower "
        "(intervals of 95 % that do not overlap)."
    )


def _missing(comparison: dict[str, Any]) -> list[str]:
    """A line for each cell that was not compared."""
    where = [(f"only in {run}", comparison[f"only_{run.lower()}"]) for run in "AB"]
    lines = [f"{what}: {_named(c)}" for what, cells in where for c in cells]
    return lines + [f"no result: {_named(c)} ({c['a']} in A, {c['b']} in B)" for c in comparison["no_result"]]


def _named(cell: Row) -> str:
    return f"{cell['method']} on {cell['task']}, {said(setting(cell))}"


def show(comparison: dict[str, Any]) -> None:
    """On the terminal, without intervals; * marks a significant change."""
    console = Console()
    for warning in comparison["warnings"]:
        console.print(Text(warning, "yellow"))
    for place in dict.fromkeys((row["task"], *setting(row)) for row in comparison["rows"]):
        table = Table("method", title=f"{place[0]}, {said(place[1:])}", title_justify="left")
        for name in MEASURES.values():
            table.add_column(f"{name}: A, B (B/A)", justify="right")
        for row in comparison["rows"]:
            if (row["task"], *setting(row)) == place:
                table.add_row(Text(row["method"]), *(_brief(row[name], name) for name in MEASURES))
        console.print(table)
    for line in _missing(comparison):
        console.print(Text(line, "bright_black"))
    console.print(Text(sentence(comparison), "bold"))


def _brief(change: Row | None, name: str) -> Text:
    """A, B and their ratio on one line, without intervals."""
    if change is None:
        return Text("")
    digits = 0 if name == "tokens_per_second" else 2
    a, b = (f"{change[k][0]:.{digits}f}" for k in ("a", "b"))
    return Text(f"{a}, {b} ({_parts(change, name)[2]})", _style(change))


def _parts(change: Row | None, name: str) -> list[str]:
    """A, B and their ratio; a significant one with its mark."""
    if change is None:
        return ["", "", ""]
    a, b = (span(tuple(change[k]), 0 if name == "tokens_per_second" else 2) for k in ("a", "b"))
    ratio = "" if change["ratio"] is None else f"{change['ratio']:.2f}" + " *" * change["significant"]
    return [a, b, ratio]


def _style(change: Row | None) -> str:
    if change is None or not change["significant"] or change["ratio"] is None:
        return ""
    return "bold green" if change["ratio"] > 1 else "bold red"


def markdown(comparison: dict[str, Any]) -> str:
    """The same as a table for an issue or a README."""
    head = [
        "method",
        "task",
        "T",
        "batch",
        *(f"{n}{end}" for n in MEASURES.values() for end in (", A", ", B", ", B/A")),
    ]
    lines = [f"| {' | '.join(head)} |", "|---|---|" + "--:|" * (len(head) - 2)]
    for row in comparison["rows"]:
        cells = [part.replace(" *", " \\*") for name in MEASURES for part in _parts(row[name], name)]
        start = [plainly(row["method"]), plainly(row["task"]), f"{row['temperature']:g}", str(row["batch"])]
        lines.append(f"| {' | '.join([*start, *cells])} |")
    parts = ["\n".join(map(plainly, comparison["warnings"])), "\n".join(lines), _list(_missing(comparison))]
    return "\n\n".join([*filter(None, parts), plainly(sentence(comparison)) + r" Marked: \*."]) + "\n"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {plainly(line)}" for line in lines)
