"""A study: a grid of `outrider bench`, and what is observed once it is measured, without a clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from outrider import llm as models_of
from outrider.bench import Config, methods, metrics, results
from outrider.bench.cells import Analysis, fill, rates
from outrider.bench.document import unique
from outrider.bench.instrument import Grid
from outrider.bench.metrics import Table
from outrider.bench.models import Models
from outrider.bench.types import PLAIN, Answer, Method, Peer
from outrider.llm import LLM

from . import extras, formulas
from .distribution import REFUSED, Tests
from .document import Cell, Document, Mean, Memory, extended
from .memory import held, peak
from .quality import quality


@dataclass(frozen=True)
class Study(Config):
    """A grid of drafters by rules by budgets by variants, and what is observed besides."""

    rules: tuple[str, ...] = ("coupled",)
    budgets: tuple[str, ...] = ("auto",)
    variants: tuple[str, ...] = ("plain",)
    judge: str | None = None  # the model that texts are judged by; None: the target judges lossy ones
    observe: tuple[str, ...] = ()  # the methods whose confidences and accepted nodes are looked at; "all"
    explain: bool = True  # where the speed goes
    memory: float | None = None  # GiB

    def rows(self) -> list[Method]:
        """Plain decoding of every variant, the peers, then the grid; `@BUDGET` and the like go before the grid's."""
        grid = [
            Method(**{"rule": rule, "budget": budget, "variant": variant, **methods.parts(text)})
            for text in self.drafters
            for rule, budget, variant in product(self.rules, self.budgets, self.variants)
        ]
        plain = [Method(PLAIN, variant=variant) for variant in self.variants]
        return methods.table(unique([*plain, *grid]), self.peers)


def run(study: Study, *, models: Models | None = None, peers: Mapping[str, Peer] | None = None) -> Document:
    """Measure a study and write its report, as `outrider.bench.run`; the document has what was observed besides."""
    grid = Grid.open(study, models, peers)
    grid.runner.weigh = weigh
    grid.measure()
    collected, analysis = grid.document()
    document = Document(
        collected.run,
        collected.tasks,
        [extended(Cell, c) for c in collected.cells],
        [extended(Mean, m) for m in collected.macro],
    )
    judge = None
    if study.judge:
        place: dict[str, Any] = {"dtype": study.dtype, "device": study.device}
        judge = models_of.load(study.judge, "none", **place)
    judge_laws(document, analysis, grid)
    document.pooled = pooled(document, analysis)
    for cell in document.cells:
        fill_in(cell, analysis)
    if grid.complete:
        observe(document, grid, study, judge)
    results.write(document, study.out)
    return document


def weigh(answer: Answer, rows: int) -> dict[str, int]:
    """Bytes of the target's and the drafter's states, and what the process took at most since the answer before;
    nothing if a row ended before the others and left them."""
    if not answer.states or len(answer.states[0].lengths) < rows:
        return {}
    return {**dict(zip(("cache", "drafter"), map(held, answer.states), strict=True)), "peak": peak()}


def fill_in(cell: Cell, analysis: Analysis) -> None:
    """What Theorem 3.8 promised, and the memory."""
    if cell.key not in analysis.tables:
        return
    table, bases = analysis.tables[cell.key]
    sizes = [t.memory for s in table.samples[0] for t in s.turns if t.memory]
    if sizes:
        cell.memory = Memory(*(max(m.get(k, 0) for m in sizes) for k in ("cache", "drafter", "peak")))
    plain = Table.of(bases["plain"], [s.chunk for s in table.samples[0]])
    if table.usages() and plain.usages() and cell.speedup:
        verify = metrics.round_ms(plain.turns()).verify
        cell.theory = formulas.of_rounds(table.turns(), verify, cell.speedup.value)


def judge_laws(document: Document, analysis: Analysis, grid: Grid) -> None:
    """Test the distribution of sampled tokens; a method that fails is invalid on all tasks, and has no mean."""
    tests, by = Tests(grid.runner), {c.key: c for c in document.cells}
    for group in grid.groups:
        for method in group.methods:
            cell = by[group.task.name, group.temperature, group.batch, method.name]
            if cell.result:
                cell.distribution = tests.add(group, method)
    distributions = tests.pooled()
    for cell in document.cells:
        distribution = distributions.get((*cell.setting, cell.method))
        if distribution and distribution.p < REFUSED and cell.result:
            analysis.strike(cell, {f"its tokens do not follow the target's distribution (p = {distribution.p:.1e})"})
    document.macro = [
        replace(extended(Mean, m), distribution=distributions.get((*m.setting, m.method)))
        for m in analysis.means(document.cells)
    ]


def pooled(document: Document, analysis: Analysis) -> list[Mean]:
    """For every macro mean the method's figures over all prompts of those tasks."""
    collected = []
    for macro in document.macro:
        here = [c for c in document.cells if c.setting == macro.setting]
        calm = [c for c in here if not c.loops] or here
        cells = [c for c in calm if c.method == macro.method and c.state == "done" and c.key in analysis.figures]
        mean = Mean(*macro.setting, macro.method, macro.tasks, distribution=macro.distribution)
        collected.append(mean)
        fill(mean, {k: sum(getattr(c, k) for c in cells) for k in ("looping", "same_text", "compared")})
        tables = [analysis.tables[c.key] for c in cells]
        if len({len(t.samples) for t, _ in tables}) != 1:  # not repeated alike
            continue
        table = Table([[s for run in runs for s in run] for runs in zip(*(t.samples for t, _ in tables), strict=True)])
        bases = {name: [s for _, b in tables for s in b[name]] for name in ("plain", "stock")}
        fill(mean, {name: f.estimate for name, f in rates(table, bases).items()})
        if usages := table.usages():
            fill(mean, {**metrics.rounds(usages), "round_ms": metrics.round_ms(table.turns())})
        mean.prompts = sum(len(s.prompts) for s in table.samples[0])
    return collected


def observe(document: Document, grid: Grid, study: Study, judge: LLM | None) -> None:
    """Fill in what a study asks for, and the quality of lossy texts."""
    runner = grid.runner
    for group in grid.groups:
        cells = extras.cells_of(document, group)
        for cell in cells.values():
            if not cell.result or not cell.new_tokens:
                continue
            if not cell.lossless or judge is not None:
                cell.quality = quality(runner, group, cell.method, cell.variant, judge or runner.models.llm())
            seen = {"all", cell.label or cell.spec} & set(study.observe)
            if seen and cell.alpha and (peer := extras.ours(runner, cell.method)):
                cell.reliability, cell.positions = extras.observed(runner, group, peer)
        if study.explain and group.batch == 1 and (explained := extras.explained(runner, group, cells)):
            document.explain.append(explained)
    if study.memory is not None:
        document.capacity = extras.capacity(document, grid.groups, runner, study.memory * 2**30)
