"""The pictures of a run: each function takes the document and returns its plots, none where it has no data for them.

Only results are drawn (`report.counted`, `report.means`). A method has one colour and one mark in all plots that show
methods. A point that stands for a method is its macro mean over the tasks, with the interval of 95 %.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from statistics import fmean
from typing import Any

from ..calibration import Bin
from . import draw
from .draw import Lines, Look, Plot
from .report import Row, Triple, counted, described, figure, is_plain, means, names, said, setting, settings
from .types import OURS

SPEED = "times as fast as plain"
NODES = 15  # positions that are drawn
Value = Callable[[Row], float]


def looks(document: dict[str, Any]) -> dict[str, Look]:
    return {name: draw.look(i) for i, name in enumerate(names(document["cells"], "method"))}


def same(document: dict[str, Any], rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """The rows of each temperature and batch size, under what is said of them."""
    held = list(rows)
    found = [(said(w).capitalize(), [r for r in held if setting(r) == w]) for w in settings(document)]
    return [(title, mine) for title, mine in found if mine]


def first(document: dict[str, Any], key: str) -> list[tuple[str, list[Row]]]:
    """The cells of each method and temperature that have `key`, at the run's smallest batch size."""
    least = min((c["batch"] for c in counted(document)), default=0)
    cells = [c for c in counted(document) if c.get(key) and c["batch"] == least]
    pairs = [(t, n) for t in sorted({c["temperature"] for c in cells}) for n in names(cells, "method")]
    found = [(f"{n}, T = {t:g}", [c for c in cells if (c["temperature"], c["method"]) == (t, n)]) for t, n in pairs]
    return [(title, mine) for title, mine in found if mine]


def kin(cell: Row, *but: str) -> str:
    """A method's name without its budget, rule or variant: what it shares with those that differ in that alone."""
    return ", ".join(p for p in cell["method"].split(", ") if p not in {cell[k] for k in but})


# ------------------------------------------------------------------------------------------------- bars


def macro(document: dict[str, Any]) -> list[Plot]:
    """Mean speed-up over the tasks, for each temperature and batch size."""
    about = described(document)
    return [
        draw.bars(title, {SPEED: bars})
        for title, rows in same(document, means(document))
        if (bars := [(n, kind(about[n]), f) for n, f in ((m["method"], figure(m, "speedup")) for m in rows) if f])
    ]


def kind(cell: Row) -> str:
    """A colour: grey for plain decoding and for others' loops, blue for ours, orange for what is lossy."""
    if is_plain(cell) or cell["peer"] != OURS:
        return draw.COLOURS[7]
    return draw.COLOURS[0 if cell["lossless"] else 1]


def chains(document: dict[str, Any]) -> list[Plot]:
    """Trees beside chains, where one drafter ran as both."""
    about, found = described(document), []
    sides: dict[tuple[str, ...], set[bool]] = {}
    for cell in about.values():
        sides.setdefault(family(cell), set()).add(is_chain(cell))
    both = {name for name, cell in about.items() if len(sides[family(cell)]) == 2}
    for title, rows in same(document, (m for m in means(document) if m["method"] in both)):
        rows = sorted(rows, key=lambda m: (family(about[m["method"]]), is_chain(about[m["method"]])))
        panels = {what: _sides(rows, key, about) for what, key in ((SPEED, "speedup"), ("tau", "tau"))}
        if all(panels.values()):
            found.append(draw.bars(title, panels))
    return found


def _sides(rows: list[Row], key: str, about: Mapping[str, Row]) -> list[tuple[str, str, Triple]]:
    kinds = [(m, is_chain(about[m["method"]]), figure(m, key)) for m in rows]
    return [(f"{'chain' if c else 'tree'}: {m['method']}", draw.COLOURS[c], f) for m, c, f in kinds if f]


def family(cell: Row) -> tuple[str, ...]:
    """What a tree and a chain of one drafter have in common."""
    base, _, options = cell["spec"].partition("?")
    kept = [o for o in options.split("&") if o and not re.match("(tree|width)=", o)]
    return ("?".join([base, *kept]), cell["rule"], cell["variant"], cell["peer"])


def is_chain(cell: Row) -> bool:
    """Does its SPEC or its budget ask for a chain?"""
    size = nodes_depth(cell["budget"])
    asked = bool(re.search(r"[?&](tree=chain|width=1)(&|$)", cell["spec"]))
    return asked or bool(re.fullmatch(r"1(,1)*", cell["budget"])) or bool(size and size[0] == size[1] + 1)


def nodes_depth(budget: str) -> tuple[int, int] | None:
    """Of NODESxDEPTH; None for any other budget."""
    found = re.fullmatch(r"(\d+)x(\d+)", budget)
    return (int(found[1]), int(found[2])) if found else None


def rounds(document: dict[str, Any]) -> list[Plot]:
    """Where the time of a round goes: the mean over the tasks."""
    found = []
    for title, cells in same(document, (c for c in counted(document) if c.get("round_ms"))):
        bars = []
        for method in names(cells, "method"):
            each = [c["round_ms"] for c in cells if c["method"] == method]
            bars.append((method, {part: fmean(ms[part] for ms in each) for part in each[0]}))
        found.append(draw.stacks(title, "milliseconds a round", bars))
    return found


# ----------------------------------------------------------------------------------------------- curves


def _curves(
    title: str, across: str, panels: dict[str, str], rows: list[Row], name: Callable[[Row], str], x: Value,
    style: Mapping[str, Look] | None = None, least: int = 2, log: bool = True,
) -> list[Plot]:  # fmt: skip
    """A plot with a panel for each {key: what}; lines of fewer than `least` points are left out."""
    style = style or {n: draw.look(i) for i, n in enumerate(dict.fromkeys(map(name, rows)))}
    found: dict[str, Lines] = {}
    for key, what in panels.items():
        held: dict[str, list[tuple[float, Triple]]] = {}
        for row in rows:
            if f := figure(row, key):
                held.setdefault(name(row), []).append((float(x(row)), f))
        found[what] = {n: (style[n], sorted(curve)) for n, curve in held.items() if len(curve) >= least}
    found = {what: lines for what, lines in found.items() if lines}
    return [draw.curves(title, across, found, log)] if found else []


def sizes(document: dict[str, Any]) -> list[Plot]:
    """Speed-up and tau over the size of the tree, where one drafter ran with several budgets NODESxDEPTH."""
    about = described(document)
    nodes = {n: size[0] for n, c in about.items() if (size := nodes_depth(c["budget"]))}
    return [
        plot
        for title, rows in same(document, (m for m in means(document) if m["method"] in nodes))
        for plot in _curves(
            title, "nodes of the tree", {"speedup": SPEED, "tau": "tau"}, rows,
            lambda m: kin(about[m["method"]], "budget"), lambda m: nodes[m["method"]],
        )
    ]  # fmt: skip


def batches(document: dict[str, Any]) -> list[Plot]:
    """Speed-up and tokens per second over the batch size."""
    panels = {"speedup": SPEED, "tokens_per_second": "tokens/s"}
    return [
        plot
        for t in sorted({m["temperature"] for m in means(document)})
        for plot in _curves(
            f"Temperature {t:g}", "batch size", panels, [m for m in means(document) if m["temperature"] == t],
            lambda m: m["method"], lambda m: m["batch"], looks(document),
        )
    ]  # fmt: skip


def temperatures(document: dict[str, Any]) -> list[Plot]:
    """Tau over the temperature: the rules of one drafter together, and drafters with one rule together."""
    about, rows = described(document), means(document)
    least, rules, held = min((m["batch"] for m in rows), default=0), dict[str, set[str]](), dict[str, list[Row]]()
    rows = [m for m in rows if m["batch"] == least and figure(m, "tau") and not is_plain(about[m["method"]])]
    for m in rows:
        cell = about[m["method"]]
        rules.setdefault(kin(cell, "rule"), set()).add(cell["rule"])
    for m in rows:
        cell = about[m["method"]]
        alone = len(rules[kin(cell, "rule")]) == 1
        held.setdefault(f"Rule {cell['rule']}" if alone else kin(cell, "rule"), []).append(m)
    return [
        plot
        for title, mine in held.items()
        if len({m["temperature"] for m in mine}) > 1
        for plot in _curves(
            title, "temperature", {"tau": "tau"}, mine, lambda m: m["method"], lambda m: m["temperature"],
            looks(document), least=1, log=False,
        )
    ]  # fmt: skip


def contexts(document: dict[str, Any]) -> list[Plot]:
    """Time and memory over the length of the prompt, for tasks that are named NAME@TOKENS."""
    panels = {"prefill_s": "prefill, s", "tokens_per_second": "tokens/s", "mib": "cache and drafter, MiB"}
    rows = []
    for cell in counted(document):
        if named := re.fullmatch(r"(.+)@(\d+)", cell["task"]):
            mib, prefill = sum((cell.get("memory") or {}).values()) / 2**20, figure(cell, "prefill_ms")
            seconds = [v / 1e3 for v in prefill] if prefill else None
            rows.append({**cell, "of": named[1], "at": int(named[2]), "mib": [mib] * 3, "prefill_s": seconds})
    return [
        plot
        for base in names(rows, "of")
        for title, mine in same(document, (r for r in rows if r["of"] == base))
        for plot in _curves(
            f"{base}, {title.lower()}", "tokens of the prompt", panels, mine, lambda c: c["method"],
            lambda c: c["at"], looks(document),
        )
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------ acceptance


def depths(document: dict[str, Any]) -> list[Plot]:
    """Acceptance by depth, with its spread over prompts, task by task."""
    style = {task: draw.look(i) for i, task in enumerate(names(document["cells"], "task"))}
    return [
        draw.spreads(title, [(c["task"], style[c["task"]], c["depths"]) for c in cells])
        for title, cells in first(document, "depths")
    ]


def positions(document: dict[str, Any]) -> list[Plot]:
    """How often each node of the tree, in its order, was accepted, with the spread over prompts."""
    style = {task: draw.look(i) for i, task in enumerate(names(document["cells"], "task"))}

    def rows(cell: Row) -> list[Row]:
        return [{**p, "depth": p["position"], "rate": [p["rate"]]} for p in cell["positions"][:NODES]]

    return [
        draw.spreads(title, [(c["task"], style[c["task"]], rows(c)) for c in cells], "node of the tree", "accepted")
        for title, cells in first(document, "positions")
    ]


def reliability(document: dict[str, Any]) -> list[Plot]:
    """How often drafted nodes were accepted, over the confidence they had; all tasks together."""
    return [draw.calibration(title, pooled(cells)) for title, cells in first(document, "reliability")]


def pooled(cells: Iterable[Row]) -> list[Bin]:
    """The bins of several cells' reliability diagrams, made one."""
    bins = sorted((Bin(**b) for c in cells for b in c["reliability"]["bins"]), key=lambda b: b.low)
    joined = []
    for (low, high), held in groupby(bins, key=lambda b: (b.low, b.high)):
        mine = list(held)
        n = sum(b.count for b in mine)
        mean = (sum(getattr(b, key) * b.count for b in mine) / n for key in ("confidence", "acceptance"))
        joined.append(Bin(low, high, n, *mean))
    return joined


# -------------------------------------------------------------------------------------- two figures at once


def promised(document: dict[str, Any]) -> list[Plot]:
    """What Theorem 3.8 promised, with the passes as long as they were, beside what was measured."""
    style, found = looks(document), []
    for title, cells in same(document, (c for c in counted(document) if c.get("theory"))):
        points = []
        for c in cells:
            x, y = c["theory"].get("promised_speedup_at_cost"), figure(c, "speedup")
            if x is not None and y:
                points.append((c["method"], style[c["method"]], (x, x, x), y))
        if points:
            found.append(draw.scatter(title, "promised speed-up", "measured speed-up", points, equal=True))
    return found


def quality(document: dict[str, Any]) -> list[Plot]:
    """The likelihood of what was written, less that of plain decoding's texts, beside the speed; lossless: 0."""
    style, found = looks(document), []
    judged = {(setting(c), c["method"]) for c in counted(document) if worse(c) is not None}
    for title, rows in same(document, (m for m in means(document) if (setting(m), m["method"]) in judged)):
        points = []
        for m in rows:
            cells = [c for c in counted(document) if (setting(c), c["method"]) == (setting(m), m["method"])]
            y, x = fmean(w for c in cells if (w := worse(c)) is not None), figure(m, "speedup")
            if x:
                points.append((m["method"], style[m["method"]], x, (y, y, y)))
        if points:
            found.append(draw.scatter(title, SPEED, "log-likelihood, less plain's", points))
    return found


def worse(cell: Row) -> float | None:
    """By how many nats a token its texts are likelier to the target than plain decoding's; below 0: less likely."""
    q = cell.get("quality") or {}
    if q.get("log_likelihood") is None or q.get("plain") is None:
        return None
    return float(q["log_likelihood"] - q["plain"])
