"""Samples to cells: figures, comparison of the texts, and means over tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from . import checks, methods, metrics
from .document import Cell, Document, Mean, RunInfo, TaskInfo, counted, unique
from .metrics import Figure, Table
from .runner import STOCK, Advance, Group, Runner
from .types import OURS, Method, Sample, weights_of

FIGURES = ("speedup", "speedup_with_prefill", "over_stock", "tau", "tokens_per_second")  # that have means


@dataclass
class Analysis:
    """Turns groups into cells, and keeps what the means over them need."""

    runner: Runner
    keep_loops: bool = False
    figures: dict[tuple[Any, ...], dict[str, Figure]] = field(default_factory=dict)  # of valid cells, by key
    tables: dict[tuple[Any, ...], tuple[Table, dict[str, list[Sample]]]] = field(default_factory=dict)

    def cells(self, group: Group) -> Iterator[Cell]:
        """A cell for every method of a group, in its order."""
        samples = group.own(self.runner.store.samples)
        by_method = {m.name: [s for s in samples if s.method == m.name] for m in group.methods}
        plain = next((m.name for m in group.methods if m.plain), "")
        bases = {"plain": by_method.get(plain, []), "stock": by_method.get(STOCK, [])}
        every, answered = range(len(group.chunks)), {s.pair_key for s in bases["plain"]}
        looping = {s.chunk for s in bases["plain"] if metrics.looping(s)}
        chunks = [c for c in every if self.keep_loops or c not in looping] or list(every)
        for method in group.methods:
            mine = latest(by_method[method.name])
            table = Table.of(mine, chunks)
            cell = Cell(
                group.task.name, group.temperature, group.batch, method.name, **asdict(method),
                lossless=methods.lossless(method), loops=not self.keep_loops and len(looping) == len(every),
            )  # fmt: skip
            if failure := self.lost(group, method.name):
                cell.state, cell.reason = "failed", failure
            elif not table.samples or not table.samples[0]:
                cell.state, cell.reason = "partial", "not measured yet"
            else:
                if plain and self.lost(group, plain) is None and not answered >= {s.pair_key for s in mine}:
                    cell.state, cell.reason = "partial", "plain decoding has not answered all prompts yet"
                if len(mine) < len(every) * group.repeats:
                    cell.state, cell.reason = "partial", "not all prompts yet"
                cell.looping = sum(len(group.chunks[c]) for c in looping if c not in chunks)
                self.measure(cell, table, bases)
                base = plain_of(method, group.methods)
                self.check(cell, group, method, mine, latest(by_method.get(base.name, [])) if base else [])
            yield cell

    def lost(self, group: Group, method: str) -> str | None:
        """Why a method failed in this session, if it did."""
        return self.runner.failures.get((group.task.name, group.temperature, group.batch, method))

    def strike(self, cell: Cell, faults: set[str]) -> None:
        """Make a cell invalid; no mean includes it."""
        cell.state, cell.reason, cell.faults = "invalid", min(faults), sorted(faults)
        self.figures.pop(cell.key, None)

    def measure(self, cell: Cell, table: Table, bases: dict[str, list[Sample]]) -> None:
        """Fill in figures of time and acceptance."""
        figures = rates(table, bases)
        usages, first = table.usages(), table.samples[0]
        if any(u.rounds for rows in usages for u in rows):
            figures["tau"] = metrics.tau(usages)
        fields = {**metrics.rounds(usages), "round_ms": metrics.round_ms(table.turns())} if usages else {}
        fill(cell, {**fields, **{name: f.estimate for name, f in figures.items()}})
        cell.prompts, cell.repeats = sum(len(s.prompts) for s in first), len(table.samples)
        cell.new_tokens = sum(len(row) for s in first for t in s.turns for row in t.tokens)
        cell.prompt_tokens = round(float(np.mean([n for s in first for n in s.lengths])), 1)
        ms, one = table.map(lambda s: 1e3 * s.turns[0].prefill), table.map(lambda s: 1.0)
        cell.prefill_ms = metrics.ratio(ms, one).estimate
        self.figures[cell.key], self.tables[cell.key] = figures, (table, bases)

    def check(
        self, cell: Cell, group: Group, method: Method, samples: Sequence[Sample], plain: Sequence[Sample]
    ) -> None:
        """Compare texts with plain decoding's; faults make the cell invalid."""
        mine = newest([s for s in samples if not s.faults])
        faults = {*checks.repeated(samples), *(f for s in samples for f in s.faults)}
        if method.plain:
            faults |= self.check_plain(group, method, mine)
        elif self.comparable(group, method):
            theirs = newest(plain)
            for chunk, sample in mine.items():
                if chunk in theirs:
                    self.compare(cell, group, method, sample, theirs[chunk])
            if not all(d.within for d in cell.divergences):
                faults.add("its text is not the target's")
        if faults:
            self.strike(cell, faults)

    def comparable(self, group: Group, method: Method) -> bool:
        """Must its texts be plain decoding's? Other engines have full weights: theirs are another target's beside
        integer products."""
        if method.peer != OURS:
            return group.temperature == 0 and not self.runner.models.llm().target.integers
        return group.temperature == 0 or method.rule == "coupled"

    def check_plain(self, group: Group, method: Method, samples: dict[int, Sample]) -> set[str]:
        """Check plain decoding itself against the logits of `proofs.logits`."""
        llm = self.runner.models.llm(method.variant)
        texts = [text for text in self.runner.texts(group, samples) if text.new]
        others = sum(checks.own(llm, text.ids, text.new, group.temperature, text.seed) for text in texts)
        rare = others * checks.RARE <= sum(len(text.new) for text in texts)
        return set() if rare else {"plain decoding wrote what the model's own pass does not choose"}

    def compare(self, cell: Cell, group: Group, method: Method, mine: Sample, plain: Sample) -> None:
        """Compare rows with plain decoding's, up to the first turn that differs (later ones have other prompts)."""
        if [len(t.tokens) for t in mine.turns] != [len(t.tokens) for t in plain.turns]:
            return
        llm, differing = self.runner.models.llm(method.variant), set[str]()
        for text in self.runner.texts(group, {mine.chunk: plain}):
            prompt, wrote = text.prompt.id, mine.turns[text.turn].tokens[text.row]
            if prompt not in differing and wrote != text.new:
                differing.add(prompt)
                cell.divergences.append(
                    checks.divergence(llm, prompt, text.turn, text.ids, wrote, text.new, group.temperature, text.seed)
                )
        cell.compared += len(group.chunks[mine.chunk])
        cell.same_text += len(group.chunks[mine.chunk]) - len(differing)

    def means(self, cells: Sequence[Cell]) -> list[Mean]:
        """Macro means of methods that are measured and valid on all tasks.

        Tasks of which every plain text repeats itself are left out, unless there are no others.
        """
        means = []
        for setting in unique(c.setting for c in cells):
            here = counted([c for c in cells if c.setting == setting])
            tasks = unique(c.task for c in here)
            for name in unique(c.method for c in here):
                mine = [c for c in here if c.method == name and c.state == "done" and c.key in self.figures]
                if len(mine) < len(tasks):
                    continue
                mean = Mean(*setting, name, len(tasks))
                for figure in FIGURES:
                    each = [self.figures[c.key][figure] for c in mine if figure in self.figures[c.key]]
                    setattr(mean, figure, metrics.mean(each).estimate if len(each) == len(tasks) else None)
                means.append(mean)
        return means


def fill(row: Any, fields: dict[str, Any]) -> None:
    """Set several fields."""
    for name, value in fields.items():
        setattr(row, name, value)


def rates(table: Table, bases: dict[str, list[Sample]]) -> dict[str, Figure]:
    """Tokens per second, and the speed-ups over plain decoding and over transformers if those were measured."""
    ratios = {
        "speedup": table.faster(bases["plain"]), "speedup_with_prefill": table.faster(bases["plain"], prefill=True),
        "over_stock": table.faster(bases["stock"]),
    }  # fmt: skip
    return {"tokens_per_second": table.rate(), **{name: figure for name, figure in ratios.items() if figure}}


def plain_of(method: Method, rows: Sequence[Method]) -> Method | None:
    """Plain decoding with the same weights, of the same variant if it was measured."""
    plain = [m for m in rows if m.plain and weights_of(m.variant) == weights_of(method.variant)]
    return next((m for m in plain if m.variant == method.variant), plain[0] if plain else None)


def latest(samples: Sequence[Sample]) -> list[Sample]:
    """For each batch of prompts and repeat the sample of the last session."""
    return list({(s.repeat, s.chunk): s for s in sorted(samples, key=lambda s: s.session)}.values())


def newest(samples: Sequence[Sample]) -> dict[int, Sample]:
    """One sample for each batch of prompts: the first repeat of the last session."""
    ordered = sorted(samples, key=lambda s: (s.chunk, s.session, -s.repeat))
    return {s.chunk: s for s in ordered}


def document(analysis: Analysis, groups: Sequence[Group], advance: Advance = lambda what: None) -> Document:
    """All figures of a run. advance: called for each group."""
    cells: list[Cell] = []
    for group in groups:
        advance(f"{group.task.name}, T = {group.temperature:g}: checking the texts")
        cells += analysis.cells(group)
    header = {k: v for k, v in analysis.runner.store.header.items() if k != "format"}
    target = analysis.runner.models.llm().target
    seconds = sum(turn.seconds for sample in analysis.runner.store.samples for turn in sample.turns)
    run = RunInfo(**header, seconds=round(seconds, 1), precision=target.arithmetic, exact=target.exact)
    tasks = {t.name: TaskInfo(len(t.prompts), t.kind, t.note, t.raw, t.cut) for t in (g.task for g in groups)}
    return Document(run, tasks, cells, analysis.means(cells))
