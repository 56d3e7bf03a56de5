"""Samples to cells: figures, what the texts prove, and means over tasks and over prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backends.torch.load import precision_of
from . import checks, methods, metrics
from .document import Cell, Document, LawTest, Mean, Memory, RunInfo, TaskInfo, unique
from .metrics import Figure, Table
from .runner import STOCK, Advance, Group, Runner
from .types import OURS, Method, Sample, Task, law_of

FIGURES = ("speedup", "whole", "over_stock", "tau", "tokens_per_second")  # that have means


@dataclass
class Analysis:
    """Turns groups into cells, and keeps what the means over them need."""

    runner: Runner
    keep_loops: bool = False
    figures: dict[tuple[Any, ...], dict[str, Figure]] = field(default_factory=dict)  # of valid cells, by key
    tables: dict[tuple[Any, ...], tuple[Table, dict[str, list[Sample]]]] = field(default_factory=dict)
    drawn: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)  # text -> its u; see `checks.uniforms`
    us: dict[tuple[float, int, str], list[float]] = field(default_factory=dict)  # method -> the u of all its texts

    def cells(self, group: Group) -> Iterator[Cell]:
        """A cell for every method of a group, in its order."""
        mine = group.own(self.runner.store.samples)
        by = {m.name: [s for s in mine if s.method == m.name] for m in group.methods}
        plain = next((m.name for m in group.methods if m.plain), "")
        bases = {"plain": by.get(plain, []), "stock": by.get(STOCK, [])}
        every = range(len(group.chunks))
        looping = {s.chunk for s in bases["plain"] if metrics.looping(s)}
        chunks = [c for c in every if self.keep_loops or c not in looping] or list(every)
        for method in group.methods:
            cell, samples = identity(group, method), latest(by[method.name])
            cell.loops = not self.keep_loops and len(looping) == len(every)
            failed = [f.reason for f in self.runner.store.failures if f.cell == cell.key]
            table = Table.of(samples, chunks)
            if failed:
                cell.state, cell.reason = "failed", failed[-1]
            elif not table.samples or not table.samples[0]:
                cell.reason = "not measured yet"
            else:
                if len(samples) >= len(every) * group.repeats:
                    cell.state, cell.reason = "done", ""
                cell.looping = sum(len(group.chunks[c]) for c in looping if c not in chunks)
                self.measure(cell, table, bases)
                same = plain_beside(method, group.methods)
                self.check(cell, group, method, samples, latest(by.get(same.name, [])) if same else [])
            yield cell

    def strike(self, cell: Cell, faults: set[str]) -> None:
        """Make a cell invalid; it has no part in any mean."""
        cell.state, cell.reason, cell.faults = "invalid", min(faults), sorted(faults)
        self.figures.pop(cell.key, None)

    def measure(self, cell: Cell, table: Table, bases: dict[str, list[Sample]]) -> None:
        """Timing and acceptance figures."""
        figures = rates(table, bases)
        usages, first = table.usages(), table.samples[0]
        if usages:
            figures["tau"] = metrics.tau(usages)
        fill(cell, {**metrics.rounds(usages), **{name: f.estimate for name, f in figures.items()}})
        plain = Table.of(latest(bases["plain"]), [s.chunk for s in first]).usages()
        if usages and plain and cell.speedup:
            cell.theory = metrics.theory(usages, metrics.round_ms(plain).verify, cell.speedup.value)
        cell.prompts, cell.repeats = sum(len(s.prompts) for s in first), len(table.samples)
        cell.new_tokens = sum(len(row) for s in first for t in s.turns for row in t.tokens)
        cell.prompt_tokens = round(float(np.mean([n for s in first for n in s.lengths])), 1)
        cell.prefill_ms = metrics.ratio(
            table.map(lambda s: 1e3 * s.turns[0].prefill), table.map(lambda s: 1.0)
        ).estimate
        held = [t.memory for s in first for t in s.turns if t.memory]
        if held:
            cell.memory = Memory(*(max(m.get(k, 0) for m in held) for k in ("cache", "drafter")))
        self.figures[cell.key], self.tables[cell.key] = figures, (table, bases)

    def check(
        self, cell: Cell, group: Group, method: Method, samples: Sequence[Sample], plain: Sequence[Sample]
    ) -> None:
        """What the texts prove: equal to plain decoding's, or of the target's law; faults make the cell invalid."""
        mine = newest([s for s in samples if not s.faults])
        faults = {*checks.repeated(samples), *(f for s in samples for f in s.faults)}
        if method.plain:
            faults |= self.own(group, method, mine)
        elif group.temperature == 0 or (method.peer == OURS and method.rule == "coupled"):
            theirs = newest(plain)
            for chunk, sample in mine.items():
                if chunk in theirs:
                    self.compare(cell, group, method, sample, theirs[chunk])
            if not all(d.within for d in cell.divergences):
                faults.add("its text is not the target's")
        if group.temperature > 0 and methods.lossless(method):
            us = self.uniforms(group, method, mine)
            self.us.setdefault((group.temperature, group.batch, method.name), []).extend(us)
            p = checks.law_test(us)
            cell.law = None if p is None else LawTest(len(us), p)
        if faults:
            self.strike(cell, faults)

    def own(self, group: Group, method: Method, first: dict[int, Sample]) -> set[str]:
        """Plain decoding itself is held against the stock model's own pass."""
        llm = self.runner.models.llm(method.variant)
        texts = [text for text in self.runner.texts(group, first) if text.new]
        others = sum(checks.own(llm, text.ids, text.new, group.temperature, text.seed) for text in texts)
        rare = others * checks.RARE <= sum(len(text.new) for text in texts)
        return set() if rare else {"plain decoding wrote what the model's own pass does not choose"}

    def compare(self, cell: Cell, group: Group, method: Method, mine: Sample, plain: Sample) -> None:
        """Rows against plain decoding's; the first turn that differs tells (later ones have other prompts)."""
        if [len(t.tokens) for t in mine.turns] != [len(t.tokens) for t in plain.turns]:
            return
        llm, parted = self.runner.models.llm(method.variant), set[str]()
        for text in self.runner.texts(group, {mine.chunk: plain}):
            name, wrote = text.prompt.id, mine.turns[text.turn].tokens[text.row]
            if name not in parted and wrote != text.new:
                parted.add(name)
                cell.divergences.append(
                    checks.divergence(llm, name, text.turn, text.ids, wrote, text.new, group.temperature, text.seed)
                )
        cell.compared += len(group.chunks[mine.chunk])
        cell.same_text += len(group.chunks[mine.chunk]) - len(parted)

    def uniforms(self, group: Group, method: Method, first: dict[int, Sample]) -> list[float]:
        """u of all tokens of a cell: see `checks.uniforms`."""
        llm, us = self.runner.models.llm(method.variant), list[float]()
        for text in self.runner.texts(group, first):
            key = (law_of(method.variant), group.temperature, tuple(text.ids), tuple(text.new))
            if text.new and key not in self.drawn:
                dice = random.Random(repr(key))
                self.drawn[key] = checks.uniforms(llm, text.ids, text.new, group.temperature, dice)
            us += self.drawn.get(key, [])
        return us

    def laws(self, cells: Sequence[Cell]) -> dict[tuple[float, int, str], LawTest]:
        """The test over all tasks together, which sees more; a method that fails it is invalid in all of them."""
        found = {}
        for key, us in self.us.items():
            p = checks.law_test(us)
            if p is None:
                continue
            found[key] = LawTest(len(us), p)
            for cell in cells if p < checks.REFUSED else ():
                if (*cell.setting, cell.method) == key and cell.result:
                    self.strike(cell, {f"its tokens do not follow the target's law (p = {p:.1e})"})
        return found

    def means(
        self, cells: Sequence[Cell], laws: dict[tuple[float, int, str], LawTest]
    ) -> tuple[list[Mean], list[Mean]]:
        """Means of methods that are measured and valid on all tasks: tasks weighing alike, and prompts weighing alike.

        Tasks of which every plain text repeats itself are left out, unless there are no others.
        """
        macro, pooled = [], []
        for setting in unique(c.setting for c in cells):
            here = [c for c in cells if c.setting == setting]
            calm = [c for c in here if not c.loops] or here
            tasks = unique(c.task for c in calm)
            for name in unique(c.method for c in calm):
                mine = [c for c in calm if c.method == name and c.state == "done" and c.key in self.figures]
                if len(mine) < len(tasks):
                    continue
                law = laws.get((*setting, name))
                mean = Mean(*setting, name, len(tasks), law=law)
                for figure in FIGURES:
                    each = [self.figures[c.key][figure] for c in mine if figure in self.figures[c.key]]
                    setattr(mean, figure, metrics.mean(each).estimate if len(each) == len(tasks) else None)
                macro.append(mean)
                pooled.append(self.pooled(Mean(*setting, name, len(tasks), law=law), mine))
        return macro, pooled

    def pooled(self, mean: Mean, cells: Sequence[Cell]) -> Mean:
        """A method's figures over all prompts of some cells."""
        fill(mean, {k: sum(getattr(c, k) for c in cells) for k in ("looping", "same_text", "compared")})
        table = Table.pooled([self.tables[c.key][0] for c in cells])
        if not table.samples:
            return mean
        bases = {name: [s for c in cells for s in self.tables[c.key][1][name]] for name in ("plain", "stock")}
        fill(mean, {name: f.estimate for name, f in rates(table, bases).items()})
        fill(mean, metrics.rounds(table.usages()))
        mean.prompts = sum(len(s.prompts) for s in table.samples[0])
        return mean


def fill(row: Cell | Mean, fields: dict[str, Any]) -> None:
    """Set several fields."""
    for name, value in fields.items():
        setattr(row, name, value)


def rates(table: Table, bases: dict[str, list[Sample]]) -> dict[str, Figure]:
    """Tokens per second, and the speed-ups over plain decoding and over transformers where they took part."""
    found = {"tokens_per_second": table.rate()}
    for name, base, whole in (("speedup", "plain", False), ("whole", "plain", True), ("over_stock", "stock", False)):
        faster = table.faster(bases[base], whole)
        if faster is not None:
            found[name] = faster
    return found


def identity(group: Group, method: Method) -> Cell:
    """A cell that has not been measured."""
    return Cell(
        group.task.name, group.temperature, group.batch, method.name, method.label, method.spec, method.rule,
        method.budget, method.variant, method.peer, methods.lossless(method), "partial", "not all prompts yet",
    )  # fmt: skip


def plain_beside(method: Method, rows: Sequence[Method]) -> Method | None:
    """Plain decoding of the same weights, of the same variant if it is there."""
    plain = [m for m in rows if m.plain and law_of(m.variant) == law_of(method.variant)]
    return next((m for m in plain if m.variant == method.variant), plain[0] if plain else None)


def latest(samples: Sequence[Sample]) -> list[Sample]:
    """Of each batch of prompts and repeat the last session's."""
    return list({(s.repeat, s.chunk): s for s in sorted(samples, key=lambda s: s.session)}.values())


def newest(samples: Sequence[Sample]) -> dict[int, Sample]:
    """One sample for each chunk: the first repeat of the last session."""
    found: dict[int, Sample] = {}
    for s in sorted(samples, key=lambda s: (-s.session, s.repeat)):
        found.setdefault(s.chunk, s)
    return dict(sorted(found.items()))


def document(
    analysis: Analysis, groups: Sequence[Group], seconds: float, advance: Advance = lambda what: None
) -> Document:
    """All figures of a run; `seconds` is what this session took. `advance` is told of each group: at T > 0 the model
    reads all texts once more, to test that they follow its law."""
    cells: list[Cell] = []
    for group in groups:
        advance(f"{group.task.name}, T = {group.temperature:g}: looking at the texts")
        cells += analysis.cells(group)
    macro, pooled = analysis.means(cells, analysis.laws(cells))
    header = {k: v for k, v in analysis.runner.store.header.items() if k != "format"}
    target = analysis.runner.models.llm().target
    exact = getattr(target, "exact", "rounding")
    return Document(
        RunInfo(**header, seconds=round(seconds, 1), precision=precision_of(target), exact=exact),
        {g.task.name: about(g.task) for g in groups}, cells, macro, pooled,
    )  # fmt: skip


def about(task: Task) -> TaskInfo:
    """What a document says of a task: its prompts, kind, note and how they were cut."""
    return TaskInfo(len(task.prompts), task.kind, task.note, task.raw, task.cut)
