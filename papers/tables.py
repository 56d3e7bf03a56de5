"""The tables of the pages, each from the reports of one study (papers/results), or of the ablations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from outrider.bench.document import Estimate

from . import contexts as lengths
from .document import Cell, Document, Mean
from .studies import BANDITS, LINE, arm_of


def span(figure: Estimate | None, digits: int = 2) -> str:
    """A figure with its interval; alone where it has none."""
    if figure is None or figure.low is None:
        return number(figure and figure.value, digits)
    return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(*figure, d=digits)


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def same(row: Cell | Mean) -> str:
    return f"{row.same_text}/{row.compared}" if row.compared else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * left + "--:|" * (len(columns) - left)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def average(cells: Sequence[Cell], of: Callable[[Cell], float | None]) -> float | None:
    """Over the tasks that have the figure."""
    results = [value for c in cells if (value := of(c)) is not None]
    return sum(results) / len(results) if results else None


def part_of(name: str) -> Callable[[Cell], float | None]:
    """A cell's milliseconds of a part of its rounds."""
    return lambda c: getattr(c.round_ms, name) if c.round_ms else None


def judged(key: str) -> Callable[[Cell], float | None]:
    """A figure of a cell's quality."""
    return lambda c: getattr(c.quality, key) if c.quality else None


def behind(report: Document, mean: Mean) -> list[Cell]:
    """The cells behind a mean."""
    return [c for c in report.cells if (*c.setting, c.method) == (*mean.setting, mean.method)]


def methods(temperature: float) -> Callable[[Document], str]:
    """All methods over all prompts, at one temperature."""

    def made(report: Document) -> str:
        results = [m for m in report.pooled if m.temperature == temperature]
        plain = next(m for m in results if m.method == "none")
        columns = ("method", "tau", "speed-up", "acceptance by depth", "draft, ms", "verify, ms", "same text")
        rows = [
            [m.method, span(m.tau), span(m.speedup), " ".join(number(d.rate.value) for d in m.depths[:5]),
             *(number(part, 1) for part in ((m.round_ms.draft, m.round_ms.verify) if m.round_ms else (None, None))),
             same(m)]
            for m in results
        ]  # fmt: skip
        every = plain.prompts + plain.looping
        counts = f"Speeds are of the {plain.prompts} of {every} held-out prompts whose plain text does not loop."
        return f"{counts}\n\n{table(columns, rows)}"

    return made


def domains(report: Document) -> str:
    """tau and speed of every method by task, greedy; the speed alone where rounds are not told."""
    cold = [c for c in report.cells if c.temperature == 0]
    tasks = list(dict.fromkeys(c.task for c in cold))

    def cell(name: str, task: str) -> str:
        results = report.cell(task, 0.0, 1, name)
        if results is None or results.speedup is None:
            return ""
        tau = f"{results.tau.value:.2f} " if results.tau else ""
        return f"{tau}({results.speedup.value:.2f}x)"

    names = dict.fromkeys(c.method for c in cold)
    rows = [[name, *(cell(name, task) for task in tasks)] for name in names]
    return table(("method", *(task.removeprefix("demo/") for task in tasks)), rows)


def tasks(report: Document) -> str:
    """Every task at every temperature, and the mean of the tasks: speed and tau of every method."""
    names = [name for name in dict.fromkeys(c.method for c in report.cells) if name != "none"]
    rows = []
    for t in dict.fromkeys(c.temperature for c in report.cells):
        cells = [c for c in report.cells if c.temperature == t and c.batch == 1]
        means = {m.method: m for m in report.macro if m.setting == (t, 1)}
        for plain in (c for c in cells if c.method == "none"):
            row = [
                plain.task,
                f"{t:g}",
                str(plain.prompts),
                number(plain.tokens_per_second and plain.tokens_per_second.value, 0),
            ]
            for name in names:
                results = report.cell(plain.task, t, 1, name)
                row += [span(results.speedup if results else None), span(results.tau if results else None)]
            rows.append(row)
        mean = ["mean", f"{t:g}", "", ""]
        for name in names:
            mean += [span(means[name].speedup), span(means[name].tau)]
        rows.append(mean)
    heads = (f"{name}: {figure}" for name in names for figure in ("speed-up", "tau"))
    return table(("task", "T", "prompts", "plain, tokens/s", *heads), rows)


def taus(report: Document) -> str:
    """tau of every method by temperature and task, and its mean over the tasks."""
    names = [name for name in dict.fromkeys(c.method for c in report.cells) if name != "none"]
    tasks = list(dict.fromkeys(c.task for c in report.cells))
    rows = []
    for t in dict.fromkeys(c.temperature for c in report.cells):
        results = {(c.method, c.task): c for c in report.cells if c.temperature == t}
        means = {m.method: m for m in report.macro if m.temperature == t}
        pooled = {m.method: m for m in report.pooled if m.temperature == t}
        rows.append(["prompts", f"{t:g}", *(str(results["none", task].prompts) for task in tasks), "", ""])
        for name in names:
            values = (number(c.tau and c.tau.value) for c in (results[name, task] for task in tasks))
            rows.append([name, f"{t:g}", *values, span(means[name].tau), same(pooled[name])])
    return table(("method", "T", *tasks, "mean", "same text"), rows)


def ablations(document: dict[str, Any]) -> str:
    def figures(run: dict[str, Any], t: str) -> list[str]:
        return [span(Estimate(*run[of][t])) if t in run.get(of, {}) else "" for of in ("tau", "ratio")]

    rows = [
        [r["name"], *figures(r, "0"), *figures(r, "1"), f"{r['held_out_loss']:.4f}"] for r in document["runs"]
    ]  # fmt: skip
    return table(("run", "tau, T = 0", "of eagle's", "tau, T = 1", "of eagle's", "held-out loss"), rows)


def engines(temperature: float) -> Callable[[dict[str, Any]], str]:
    """Engines beside each other, one text at a time, from what `benchmarks/peers.py --store` wrote."""

    def made(document: dict[str, Any]) -> str:
        at = (temperature, 1)
        (rows,) = (one["rows"] for one in document["tables"] if (one["temperature"], one["batch"]) == at)
        return table(rows[0], rows[1:])

    return made


def plain(document: dict[str, Any]) -> str:
    """Prompts and plain decoding beside llama.cpp, tokens per second, from what `benchmarks/plain.py` wrote."""

    def cell(figures: Sequence[float]) -> str:
        low, high = (f"{end:.1f}" if end < 100 else f"{end:.0f}" for end in (min(figures), max(figures)))
        middle = median(figures)
        return f"{middle:.1f} ({low}-{high})" if middle < 100 else f"{middle:.0f} ({low}-{high})"

    rows = []
    for name, run in document.items():
        engines = [run["figures"].get(engine, {}) for engine in ("ours, full", "ours, native", "llama.cpp", "memory")]
        for work in dict.fromkeys(work for works in engines for work in works):
            rows.append([name, work, *(cell(works[work]) if work in works else "" for works in engines)])
    return table(("file", "work", "full weights", "native", "llama.cpp", "the memory's limit"), rows, 2)


def ladder(temperature: float) -> Callable[[Document, Document], str]:
    """Speed and quality of Medusa's rungs, and of Medusa-2 beside them."""

    def made(*reports: Document) -> str:
        rows = list[list[str]]()
        for report in reports:
            for m in (m for m in report.pooled if m.temperature == temperature):
                mine = behind(report, m)
                likely = average(mine, judged("log_likelihood"))
                loss = average(mine, judged("held_out_loss"))
                name = "Medusa-2, plain decoding" if m.method == "none" and rows else m.method
                rows.append([name, span(m.tau), span(m.speedup), number(likely, 3), number(loss, 3), same(m)])
        return table(("", "tau", "speed-up", "log-likelihood", "held-out loss", "same text"), rows)

    return made


def engine(*reports: Document) -> str:
    """Our engine beside transformers' own generation; what is neither target nor drafter, as a share of a round."""
    rows = []
    for name, report in zip(("engine", "summaries", "untrained", "rules", "oracle"), reports, strict=True):
        for m in report.pooled:
            ms = vars(m.round_ms) if m.round_ms else {}
            share = f"{100 * ms['overhead'] / sum(ms.values()):.1f} %" if ms else ""
            rows.append([name, m.method, *(span(m.tokens_per_second, 0).split(" (")[:1]), span(m.speedup),
                         span(m.over_stock), number(m.tau and m.tau.value), share])  # fmt: skip
    columns = ("study", "method", "tokens/s", "over plain", "over transformers", "tau", "overhead")
    return table(columns, rows, 2)


def t5(report: Document) -> str:
    """Leviathan's table 2: what the theorem promised, and what came out."""
    rows = [
        [f"{c.temperature:g}", c.rule, str(t.gamma), f"{t.alpha:.3f}", number(c.tau and c.tau.value), f"{t.tau:.2f}",
         f"{t.c:.2f}", span(c.speedup), f"{t.promised:.2f}"]
        for c in report.cells if (t := c.theory)
    ]  # fmt: skip
    columns = ("T", "rule", "gamma", "alpha", "tau", "(1-a^(g+1))/(1-a)", "c", "speed-up", "Theorem 3.8")
    return table(columns, rows, 2)


def drafting(report: Document) -> str:
    """Milliseconds of drafting for each drafted token of a chain, by temperature."""
    results: dict[str, dict[float, float]] = {}
    for m in report.pooled:
        if "chain" in m.method or "tokenizer" in m.method:
            assert m.round_ms is not None
            assert m.nodes is not None
            results.setdefault(m.method, {})[m.temperature] = m.round_ms.draft / (m.nodes - 1)
    ts = sorted({m.temperature for m in report.pooled})
    rows = [[name, *(number(ms.get(t)) for t in ts)] for name, ms in results.items()]
    return table((f"chain of {LINE.count('1')}", *(f"ms a token, T = {t:g}" for t in ts)), rows)


def bandits(report: Document) -> str:
    """Tokens per second of every arm and of the bandit over them; regret: how much longer a token took with the bandit
    than with the best arm, chosen in hindsight."""
    rows = []
    for t in sorted({m.temperature for m in report.pooled}):
        speeds = {
            m.method: m.tokens_per_second.value for m in report.pooled if m.temperature == t and m.tokens_per_second
        }
        for name, arms in BANDITS.items():
            best = max(arms, key=lambda shape: speeds[arm_of(shape)])
            listed = ", ".join(f"{shape}: {speeds[arm_of(shape)]:.0f}" for shape in arms)
            regret = speeds[arm_of(best)] / speeds[name] - 1
            rows.append([f"{t:g}", name, listed, best, f"{speeds[name]:.0f}", f"{100 * regret:.1f} %"])
    return table(("T", "bandit", "its arms, tokens/s", "best", "tokens/s", "regret"), rows, 4)


def contexts(*reports: Document) -> str:
    """Over the length of the context; a tau that is not claimed stands in brackets."""
    rows = []
    for length, report in zip(lengths.LENGTHS, reports, strict=True):
        for c in report.cells:
            assert c.memory is not None
            assert c.prefill_ms is not None
            tau = number(c.tau and c.tau.value)
            ms = c.round_ms.draft / (c.nodes - 1) if c.round_ms and c.nodes and c.nodes > 1 else None
            rows.append([
                str(length), c.method, f"{c.prefill_ms.value / 1000:.2f}", f"{c.memory.drafter / 1024:.0f}",
                f"{c.memory.cache / 2**20:.1f}", number(ms), tau if length <= lengths.TRAINED else f"({tau})",
                number(c.tokens_per_second and c.tokens_per_second.value, 0), number(c.speedup and c.speedup.value),
            ])  # fmt: skip
    columns = ("context", "drafter", "prefill, s", "drafter's state, KiB", "target's cache, MiB", "ms a drafted token")
    return table((*columns, "tau", "tokens/s", "over plain"), rows, 2)


def batches(report: Document) -> str:
    """Speed over the batch size, and what fits into a gibibyte."""
    rooms: dict[str, int] = {}  # of the longest task, from a row alone: where a batch had lost some, too many fitted
    for c in report.capacity:
        if c.batch == 1:
            rooms[c.method] = min(c.rows, rooms.get(c.method, c.rows))
    rows = [
        [m.method, str(m.batch), span(m.speedup), number(m.tokens_per_second and m.tokens_per_second.value, 0),
         span(m.tau), str(rooms.get(m.method, ""))]
        for m in sorted(report.macro, key=lambda m: m.method)
    ]  # fmt: skip
    return table(("method", "batch", "speed-up", "tokens/s", "tau", "rows in 1 GiB"), rows)


def blocks(report: Document) -> str:
    """tau and speed by method and size over temperature and batch."""
    by = {(m.method, m.temperature, m.batch): m for m in drafted(report)}
    settings = sorted({(t, b) for _, t, b in by})
    rows = []
    for name in dict.fromkeys(name for name, *_ in by):
        cells = [by.get((name, *setting)) for setting in settings]
        rows.append([name, *(f"{number(c.tau and c.tau.value)}, {number(c.speedup and c.speedup.value)}x" if c else ""
                             for c in cells)])  # fmt: skip
    return table(("tau, speed-up", *(f"T = {t:g}, {b} text{'s' * (b > 1)}" for t, b in settings)), rows)


def drafted(report: Document) -> list[Mean]:
    """The means of methods that draft."""
    return [m for m in report.macro if m.tau and m.tau.value > 1]


def temperatures(report: Document) -> str:
    """tau by rule over the temperature. At 0 all lossless rules are one."""
    ts = sorted({m.temperature for m in report.macro})
    by = {(m.method, m.temperature): f"{span(m.tau)}, {number(m.speedup and m.speedup.value)}x" for m in report.macro}
    rows = [[n, *(by.get((n, t), "") for t in ts)] for n in dict.fromkeys(m.method for m in drafted(report))]
    return table(("tau, speed-up", *(f"T = {t:g}" for t in ts)), rows)


def sizes(report: Document) -> str:
    """One drafter with larger and larger trees."""
    rows = []
    for m in drafted(report):
        mine = behind(report, m)
        parts = [average(mine, part_of(part)) for part in ("draft", "verify")]
        ece = average(mine, lambda c: c.reliability.ece if c.reliability else None)
        start = [f"{m.temperature:g}", m.method, span(m.tau), span(m.speedup)]
        rows.append([*start, *(number(p, 1) for p in parts), number(ece, 3)])
    return table(("T", "tree", "tau", "speed-up", "draft, ms", "verify, ms", "ECE"), rows, 2)


def variants(report: Document) -> str:
    rows = [
        [m.method, span(m.tokens_per_second, 0), span(m.speedup), span(m.over_stock), span(m.tau)] for m in report.macro
    ]
    return table(("method", "tokens/s", "over plain", "over transformers", "tau"), rows)


def typical(report: Document) -> str:
    rows = []
    for m in report.macro:
        mine = behind(report, m)
        told = [average(mine, judged(key)) for key in ("log_likelihood", "plain")]
        rows.append([m.method, span(m.tau), span(m.speedup), *(number(x, 3) for x in told)])
    return table(("method", "tau", "speed-up", "log-likelihood", "plain's"), rows)


def calibration(report: Document) -> str:
    """Calibration errors and tau of drafters with s = 1 and with a fitted s."""
    tau = {(m.method, m.temperature): m.tau for m in report.pooled}
    error = {}
    for key in tau:
        mine = [c.reliability for c in report.cells if (c.method, c.temperature) == key and c.reliability]
        if mine:
            error[key] = sum(r.ece * r.pairs for r in mine) / sum(r.pairs for r in mine)
    rows = []
    for name, t in error:
        if "fitted" not in name:
            label, *rest = name.split(", ")
            both = ((name, t), (", ".join([f"{label} fitted", *rest]), t))
            setting = f"T = {t:g}" + ("" if t == 0 else ", rejection" if "rejection" in rest else ", shared noise")
            rows.append([label, setting, *(f"{error[k]:.3f}" for k in both), *(span(tau[k]) for k in both)])
    return table(("drafter", "", "error, s = 1", "error, fitted", "tau, s = 1", "tau, fitted"), rows, 2)


def causes(report: Document) -> str:
    """Where the speed of the fastest method of each task goes: geometric means over the tasks."""
    rows, names = [], list[str]()
    for t in sorted({e.temperature for e in report.explain}):
        mine = [e for e in report.explain if e.temperature == t]
        names = [p.name for p in mine[0].parts]
        factors = [
            math.exp(sum(math.log(p.factor) for e in mine for p in e.parts if p.name == n) / len(mine)) for n in names
        ]
        ideal, measured = (sum(getattr(e, k) for e in mine) / len(mine) for k in ("ideal", "measured"))
        rows.append([f"{t:g}", f"{ideal:.0f}", *(f"{f:.2f}" for f in factors), f"{measured:.0f}"])
    return table(("T", "ideal, tokens/s", *names, "measured"), rows)
