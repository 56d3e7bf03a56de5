"""The sections of the report that are more than plots: each takes the document and returns its parts, or none."""

from __future__ import annotations

import json
import math
from typing import Any

from . import plots
from .draw import COLOURS
from .markup import FEW, Html, chip, join, pictures, several, spanned, table, tag, td
from .report import (
    FIGURES,
    Problem,
    Row,
    counted,
    described,
    figure,
    is_plain,
    means,
    names,
    problems,
    said,
    setting,
    settings,
    short,
)  # fmt: skip
from .types import OURS

SHOWN = 200  # divergences in the page; results.json has all
REASONS = 8  # of a problem
NOTES = (
    "All methods ran in one process, on the same prompts, in turn (A B A B), after warm-ups.",
    "Tokens are counted from ids by one function for all methods; nothing after the end of a text counts.",
    "Speeds are of decoding: the prompts' passes, up to the first token, are timed apart. What a drafter does with the "
    "prompt is timed with them, where our own engine tells, so all cells also have the speed-up with prompts included.",
    "A speed-up is taken repeat by repeat over plain decoding of the same prompts; the figure is the repeats' median.",
    "Intervals are of 95 %, from a bootstrap over prompts. A mean over tasks weighs each alike.",
    "tau is the number of tokens a round, the target's own included; alpha the share accepted of the tokens tested.",
    "Prompts whose plain text repeats itself are easy for any drafter: unless asked for, they are left out (looping).",
)


def wrong(document: dict[str, Any]) -> list[Html]:
    """Cells that are no results, and those not finished, with the reasons."""
    found = problems(document)
    note = "Invalid cells are in no table, plot or mean below; their figures are kept in results.json alone."
    return [tag("p", note), tag("ul", *map(_problem, found), class_="problems")] if found else []


def _problem(p: Problem) -> Html:
    reasons = [tag("p", r) for r in p.reasons[:REASONS]]
    if p.reasons[REASONS:]:
        reasons.append(tag("p", f"and {several(len(p.reasons) - REASONS, 'more reason')}, in results.json"))
    where = tag("p", p.where, class_="soft")
    if len(p.cells) > FEW:
        where = tag("details", tag("summary", several(len(p.cells), "cell")), where)
    return tag("li", tag("strong", p.method), chip(p.state), *reasons, where)


def results(document: dict[str, Any]) -> list[Html]:
    """Methods by tasks, a table for each temperature and batch size."""
    about, made = described(document), []
    for where in settings(document):
        cells = [c for c in document["cells"] if setting(c) == where]
        tasks, mean = names(cells, "task"), {m["method"]: m for m in means(document) if setting(m) == where}
        by = {(c["method"], c["task"]): c for c in cells}
        rows = []
        for method in names(cells, "method"):
            m = mean.get(method, {})
            row = [named(about.get(method, {"method": method})), spanned(m, "speedup"), spanned(m, "tau")]
            row.append(spanned(m, "tokens_per_second", 0))
            rows.append([*row, *(result(by.get((method, t))) for t in tasks)])
        made += [tag("h3", said(where).capitalize())]
        made += [table(["method", "speed-up", "tau", "tokens/s", *tasks], rows)]
    words = (
        "The means over all tasks; then by task the speed-up over plain decoding, tau, and how many prompts have plain "
        "decoding's text. Small: intervals of 95 %; green and red: clear of 1 by the whole interval."
    )
    return [tag("p", words), *made]


def named(cell: Row) -> Html:
    """A method's name with what one should know of it."""
    kinds = ["lossy"] * (not cell.get("lossless", True)) + ["baseline"] * is_plain(cell)
    kinds += [cell["peer"]] * (cell.get("peer", OURS) not in (OURS, cell["method"]))
    return join([cell["method"], *map(chip, kinds)])


def result(cell: Row | None) -> Html:
    if cell is None:
        return td("")
    if cell["state"] in ("invalid", "failed"):
        return td(tag("s" if cell["state"] == "invalid" else "span", cell["state"]), class_=cell["state"])
    tau, compared = figure(cell, "tau"), cell.get("compared")
    told = [f"tau {tau[0]:.2f}"] if tau else []
    told += [f"{cell['same_text']}/{compared} same"] if compared else []
    told += ["partial"] * (cell["state"] == "partial")
    return spanned(cell, "speedup", small=told)


def explained(document: dict[str, Any]) -> list[Html]:
    """Of each explained cell the paragraph, and a bar from the measured to the ideal speed."""
    shown = {(*setting(c), c["task"], c["method"]) for c in counted(document)}
    found = [e for e in document.get("explain") or [] if (*setting(e), e["task"], e["method"]) in shown]
    words = (
        "The bar is the way from the ideal speed down to the measured one; a part twice as wide halves the speed twice "
        "as often. Mend the widest first."
    )
    return [tag("p", words), *map(_explanation, found)] if found else []


def _explanation(e: Row) -> Html:
    costs = {p["name"]: max(0.0, -math.log(max(p["factor"], 1e-9))) for p in e["parts"]}
    colour = {name: f"background: var(--c{i % len(COLOURS)})" for i, name in enumerate(costs)}
    bar = [
        tag("span", style=f"flex-grow: {cost:.4f}; {colour[name]}", title=name) for name, cost in costs.items() if cost
    ]
    items = [
        tag("li", tag("i", style=colour[p["name"]]), tag("b", f"{p['name']} × {p['factor']:.2f}"), f" {p['words']}")
        for p in e["parts"]
    ]
    ends = tag("p", tag("span", f"ideal {e['ideal']:.0f}"), tag("span", f"measured {e['measured']:.0f} tokens/s"))
    head = tag("h3", f"{e['method']} on {e['task']}, {said(setting(e))}")
    parts = tag("ul", *items, class_="parts")
    return tag("article", head, tag("div", *bar, class_="bar"), ends, parts, tag("p", e["words"]), class_="explained")


def theory(document: dict[str, Any]) -> list[Html]:
    """Theorem 3.8's promise beside the measurement."""
    cells = [c for c in counted(document) if c.get("theory")]
    if not cells:
        return []
    columns = [
        "method", "task", "T", "batch", "alpha", "gamma", "c", "verify", "promised", "promised at cost", "measured",
        "promised tau", "measured tau",
    ]  # fmt: skip
    keys = ("alpha", "gamma", "c", "verify", "promised_speedup", "promised_speedup_at_cost")
    rows = [
        [c["method"], c["task"], c["temperature"], c["batch"], *(c["theory"].get(k) for k in keys),
         spanned(c, "speedup"), c["theory"].get("promised_tau"), spanned(c, "tau")]
        for c in cells
    ]  # fmt: skip
    words = (
        "What Theorem 3.8 of Leviathan et al. promises for the measured alpha, gamma and c (a draft step by a pass "
        "over one token); at cost: with the passes as long as they were. It is about chains whose tokens are accepted "
        "independently; a tree counts as a chain of its depth."
    )
    fold = tag("details", tag("summary", several(len(rows), "cell")), table(columns, rows))
    return [tag("p", words), *pictures(plots.promised(document)), fold]


def variants(document: dict[str, Any]) -> list[Html]:
    """Compiled and quantised targets by drafters (EAGLE's table 4), in tokens per second."""
    about, made = described(document), []
    if len({c["variant"] for c in about.values()}) < 2:
        return []
    for title, rows in plots.same(document, means(document)):
        by = {(plots.kin(about[m["method"]], "variant"), about[m["method"]]["variant"]): m for m in rows}
        columns, every = list(dict.fromkeys(v for _, v in by)), [name for name, _ in by]
        twice = [name for name in dict.fromkeys(every) if every.count(name) > 1]
        lines = [[name, *(_rate(by.get((name, v), {})) for v in columns)] for name in twice]
        made += [tag("h3", title), table(["method", *columns], lines)] if lines else []
    words = "Tokens per second, means over the tasks; below: times as fast as plain decoding of the unchanged target."
    return [tag("p", words), *made] if made else []


def _rate(mean: Row) -> Html:
    speed = figure(mean, "speedup")
    return spanned(mean, "tokens_per_second", 0, small=[f"× {speed[0]:.2f}"] if speed else [])


def lossy(document: dict[str, Any]) -> list[Html]:
    """Quality beside speed, where texts are not the target's own."""
    cells = [c for c in counted(document) if c.get("quality")]
    if not cells:
        return []
    columns = ["method", "task", "T", "batch", "speed-up", "tau", "log-likelihood", "less plain's", "exact", "loss"]
    rows = [
        [named(c), c["task"], c["temperature"], c["batch"], spanned(c, "speedup"), spanned(c, "tau"),
         q.get("log_likelihood"), plots.worse(c), q.get("exact"), q.get("held_out_loss")]
        for c in cells
        for q in [c["quality"]]
    ]  # fmt: skip
    words = (
        "Log-likelihood: nats a token of the written texts under the unmodified target. Exact: the share of right "
        "answers. Loss: of the target that decoded, on reference answers."
    )
    return [tag("p", words), *pictures(plots.quality(document)), table(columns, rows)]


def capacity(document: dict[str, Any]) -> list[Html]:
    """How many rows of each method fit into a given memory."""
    found = document.get("capacity") or []
    shown = {(*setting(c), c["task"], c["method"]) for c in counted(document)}
    rows = [
        [c["method"], c["task"], c["temperature"], c["batch"], c["bytes_per_row"] / 2**20, c["rows"]]
        for c in found
        if (*setting(c), c["task"], c["method"]) in shown
    ]
    columns = ["method", "task", "T", "batch", "MiB a row", "rows"]
    words = (
        f"The most rows beside the target's weights in {found[0]['limit'] / 2**30:g} GiB: by what a row's part of the "
        "target's cache, the drafter's state and the logits of its tree took."
        if found
        else ""
    )
    return [tag("p", words), table(columns, rows)] if rows else []


def predicted(document: dict[str, Any]) -> list[Html]:
    """Replays of recorded answers: acceptance is real, speed is what a cost model says."""
    cells = [c for c in counted(document) if c.get("predicted")]
    columns = ["method", "task", "cost model", "tau", "predicted speed-up", "without drafting"]
    rows = [
        [c["method"], c["task"], c["predicted"]["cost"], spanned(c, "tau"),
         spanned(c["predicted"], "speedup"), spanned(c["predicted"], "without_drafting")]
        for c in cells
    ]  # fmt: skip
    words = "The texts are recorded ones of the real model; the speed-ups are computed, not measured."
    return [tag("p", words), table(columns, rows)] if cells else []


def divergences(document: dict[str, Any]) -> list[Html]:
    """Where texts part from plain decoding's, and by how much the target preferred its own token there."""
    found = [(c, d) for c in document["cells"] for d in c.get("divergences") or []]
    columns = ["method", "task", "T", "batch", "prompt", "turn", "position", "margin", "wrote", "plain"]
    keys = ("prompt", "turn", "position", "margin", "mine", "plain")
    rows = [
        [join([c["method"], *[chip("invalid")] * (c["state"] == "invalid")]), c["task"], c["temperature"], c["batch"],
         *(d.get(k) for k in keys)]
        for c, d in found[:SHOWN]
    ]  # fmt: skip
    words = (
        f"{several(len(found), 'text')} of methods that should write plain decoding's own: the first token that is "
        "another, and the margin by which the target prefers its own. A small margin is rounding: two orders of adding "
        "up the same numbers. A larger one is a fault and makes the cell invalid."
    )
    more = [tag("p", f"{len(found) - SHOWN} more are in results.json.")] if len(found) > SHOWN else []
    return [tag("p", words), table(columns, rows), *more] if found else []


def everything(document: dict[str, Any]) -> list[Html]:
    """The long table."""
    digits = {"speedup": 2, "tokens_per_second": 0, "whole": 2, "over_stock": 2, "tau": 2, "alpha": 3, "prefill_ms": 1}
    columns = [
        "method",
        "task",
        "T",
        "batch",
        *("speed-up", "tokens/s", "prompt included", "over transformers", "tau", "alpha"),
    ]
    columns += ["prefill, ms", "drafted alpha", "prompts", "repeats", "looping", "new tokens", "prompt tokens"]
    columns += ["cache, MiB", "drafter, MiB", "law: p"]
    keys = ("drafted_alpha", "prompts", "repeats", "looping", "new_tokens", "prompt_tokens")
    rows = [
        [named(c), c["task"], c["temperature"], c["batch"], *(spanned(c, name, digits[name]) for name in FIGURES),
         *(c.get(k) for k in keys), *(_mib(c, k) for k in ("cache", "drafter")), (c.get("law") or {}).get("p")]
        for c in counted(document)
    ]  # fmt: skip
    return [tag("details", tag("summary", several(len(rows), "cell")), table(columns, rows))] if rows else []


def _mib(cell: Row, key: str) -> float | None:
    held = (cell.get("memory") or {}).get(key)
    return None if held is None else held / 2**20


def how(document: dict[str, Any]) -> list[Html]:
    """What one needs to repeat it."""
    run, tasks = document["run"], document["tasks"]
    rows = [
        [name, t["kind"], t["prompts"], t["cut"], " ".join([t["note"], "(text to go on from)" * t["raw"]]).strip()]
        for name, t in tasks.items()
    ]
    about = {"target": run["target"], "started": run.get("started", ""), "seconds": run.get("seconds", "")}
    about |= {**run.get("machine", {}), **run.get("versions", {})}
    facts = [tag("div", tag("dt", k), tag("dd", short(v))) for k, v in about.items()]
    return [
        tag("ul", *(tag("li", note) for note in NOTES)), tag("h3", "Tasks"),
        table(["task", "kind", "prompts", "cut to", "note"], rows), tag("h3", "Machine and versions"),
        tag("dl", *facts, class_="facts"), tag("h3", "Arguments"),
        tag("pre", json.dumps(run.get("arguments", {}), indent=1, ensure_ascii=False), tabindex=0),
    ]  # fmt: skip


def machine(run: dict[str, Any]) -> str:
    """In one line."""
    about = ", ".join(f"{k} {short(v)}" for k, v in run.get("machine", {}).items() if v not in ("", [], None))
    return f"{about}; {run.get('started', '')[:10]}"
