"""A run's samples as one document: a cell for each line of the report, macro means, and what the checks found."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import checks, methods, metrics
from .metrics import Figure, Table
from .runner import Group, Runner
from .types import OURS, VERSION, Method, Sample, Task


@dataclass
class Judge:
    """Turns groups into cells; keeps the draws for the macro means."""

    runner: Runner
    keep_loops: bool = False
    figures: dict[tuple[Any, ...], dict[str, Figure]] = field(default_factory=dict)
    drawn: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)  # the law's u of a text

    def cells(self, group: Group) -> Iterator[dict[str, Any]]:
        """A cell for every method of a group, in its order."""
        mine = group.own(self.runner.store.samples)
        by = {m.name: [s for s in mine if s.method == m.name] for m in group.methods}
        plain = next((m.name for m in group.methods if m.plain), "")
        stock = next((m.name for m in group.methods if m.spec == "transformers"), "")
        every = range(len(group.chunks))
        looping = {s.chunk for s in by.get(plain, ()) if metrics.looping(s)}
        chunks = [c for c in every if self.keep_loops or c not in looping] or list(every)
        base, others = (Table.of(by.get(name, []), chunks) for name in (plain, stock))
        for method in group.methods:
            cell, samples = identity(group, method), by[method.name]
            failed = [f.reason for f in self.runner.store.failures if f.cell == tuple(cell[k] for k in KEYS)]
            table = Table.of(samples, chunks)
            if failed or not table.samples or not table.samples[0]:
                why = {"state": "failed", "reason": failed[-1]} if failed else {"reason": "not measured yet"}
                yield {**cell, **why}
                continue
            whole = len({(s.chunk, s.repeat) for s in samples}) >= len(every) * group.repeats
            cell |= {"state": "done" if whole else "partial", "reason": "" if whole else "not all prompts yet"}
            cell |= {**self.times(table, base, others, cell), "looping": len(every) - len(chunks)}
            same = next((m.name for m in group.methods if m.plain and m.variant == method.variant), plain)
            cell |= self.texts(group, method, samples, by.get(same, []))
            faults = {*cell["faults"], *checks.repeated(samples), *(f for s in samples for f in s.faults)}
            if faults:
                cell |= {"state": "invalid", "reason": min(faults), "faults": sorted(faults)}
                self.figures.pop(tuple(cell[k] for k in KEYS), None)
            yield cell

    def times(self, table: Table, plain: Table, stock: Table, cell: dict[str, Any]) -> dict[str, Any]:
        """What depends on clocks and rounds."""
        usages, found = table.usages(), dict[str, Any]()
        figures = {"tokens_per_second": table.rate()}
        for name, base in (("speedup", plain), ("over_stock", stock)):
            faster = table.faster(base)
            if faster is not None:
                figures[name] = faster
        if usages:
            figures["tau"] = metrics.tau(usages)
            if any(u.tested for rows in usages for u in rows):
                figures["alpha"] = metrics.alpha(usages)
            drafted = sum(u.drafted for rows in usages for u in rows)
            found["drafted_alpha"] = (
                round(sum(u.accepted for rows in usages for u in rows) / drafted, 5) if drafted else None
            )
            found["depths"] = metrics.depths(usages)
            found["round_ms"] = metrics.round_ms(usages)
        rest = plain.usages()
        if usages and rest and "speedup" in figures:
            promised = metrics.theory(usages, metrics.round_ms(rest)["verify"], figures["speedup"].value)
            found["theory"] = promised.document() if promised else None
        self.figures[tuple(cell[k] for k in KEYS)] = figures
        first = table.samples[0] if table.samples else []
        prefill = metrics.ratio(table.map(lambda s: 1e3 * s.turns[0].prefill), table.map(lambda s: 1.0))
        memory = [t.memory for s in first for t in s.turns if t.memory]
        return {
            "prompts": sum(len(s.prompts) for s in first), "repeats": len(table.samples),
            "new_tokens": sum(len(row) for s in first for t in s.turns for row in t.tokens),
            "prompt_tokens": round(float(np.mean([n for s in first for n in s.lengths])), 1),
            "speedup": None, "over_stock": None, "tau": None, "alpha": None, "drafted_alpha": None, "depths": [],
            "round_ms": None, "theory": None, "quality": None, "reliability": None,
            **{name: f.interval for name, f in figures.items()}, "prefill_ms": prefill.interval,
            "memory": {k: max(m.get(k, 0) for m in memory) for k in ("cache", "drafter")} if memory else {}, **found,
        }  # fmt: skip

    def texts(self, group: Group, method: Method, samples: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, Any]:
        """What the texts prove: equal to plain decoding's, or of the target's law."""
        first, truth = newest(samples), newest(plain)
        found: dict[str, Any] = {"same_text": 0, "compared": 0, "divergences": [], "law": None, "faults": []}
        equal = group.temperature == 0 or (method.peer == OURS and method.rule == "coupled")
        for chunk, sample in first.items():
            if chunk in truth:
                self.compare(group, method, sample, truth[chunk], found, equal)
        if group.temperature > 0 and methods.lossless(method):
            found["law"] = law = self.law(group, method, first)
            if law and law["p"] < checks.REFUSED:
                found["faults"].append(f"its tokens do not follow the target's law (p = {law['p']:.1e})")
        return found

    def compare(
        self, group: Group, method: Method, mine: Sample, plain: Sample, found: dict[str, Any], equal: bool
    ) -> None:
        """Rows against plain decoding's; the first turn that differs tells (later ones have other prompts)."""
        if [len(t.tokens) for t in mine.turns] != [len(t.tokens) for t in plain.turns]:
            return
        llm, prompts = self.runner.models.llm(method.variant), group.chunks[mine.chunk]
        parted: set[int] = set()
        for turn, ids, who in self.runner.turns(group.task, prompts, plain.turns):
            for row, index in enumerate(who):
                a, b = mine.turns[turn].tokens[row], plain.turns[turn].tokens[row]
                if index in parted or a == b:
                    continue
                parted.add(index)
                seed = self.runner.seeds(group, [prompts[index]], turn)[0]
                if equal:
                    one = checks.divergence(llm, prompts[index].id, turn, ids[row], a, b, group.temperature, seed)
                    found["divergences"].append(one.document())
                    if not checks.rounding(llm, one):
                        found["faults"].append("its text is not the target's")
        found["compared"] += len(prompts)
        found["same_text"] += len(prompts) - len(parted)

    def law(self, group: Group, method: Method, first: dict[int, Sample]) -> dict[str, Any] | None:
        """The test of `checks.uniforms` over all tokens of a cell; None where they are too few."""
        llm, us = self.runner.models.llm(method.variant), list[float]()
        for chunk, sample in first.items():
            for turn, ids, _ in self.runner.turns(group.task, group.chunks[chunk], sample.turns):
                for prompt, new in zip(ids, sample.turns[turn].tokens, strict=False):
                    if new:
                        key = (method.variant, group.temperature, tuple(prompt), tuple(new))
                        if key not in self.drawn:
                            dice = random.Random(repr(key))
                            self.drawn[key] = checks.uniforms(llm, prompt, new, group.temperature, dice)
                        us += self.drawn[key]
        p = checks.law_test(us)
        return None if p is None else {"tokens": len(us), "p": p}

    def macro(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Means over the tasks that a method has a valid figure for in all of them."""
        found = []
        tasks = list(dict.fromkeys(g.task.name for g in groups))
        for t, b in dict.fromkeys((g.temperature, g.batch) for g in groups):
            for method in dict.fromkeys(m for g in groups for m in g.methods if methods.fits(m, t)):
                have = [f for task in tasks if (f := self.figures.get((task, t, b, method.name)))]
                if len(have) < len(tasks):
                    continue
                row: dict[str, Any] = {"temperature": t, "batch": b, "method": method.name, "tasks": len(tasks)}
                for name in ("speedup", "over_stock", "tau", "tokens_per_second"):
                    each = [f[name] for f in have if name in f]
                    row[name] = metrics.mean(each).interval if len(each) == len(tasks) else None
                found.append(row)
        return found


KEYS = ("task", "temperature", "batch", "method")


def identity(group: Group, method: Method) -> dict[str, Any]:
    return {
        "task": group.task.name, "temperature": group.temperature, "batch": group.batch, "method": method.name,
        "label": method.label, "spec": method.spec, "rule": method.rule, "budget": method.budget,
        "variant": method.variant, "peer": method.peer,
        "lossless": methods.lossless(method), "state": "partial", "reason": "", "faults": [],
    }  # fmt: skip


def newest(samples: Sequence[Sample]) -> dict[int, Sample]:
    """One sample for each chunk: the first repeat of the last session."""
    found: dict[int, Sample] = {}
    for s in sorted(samples, key=lambda s: (-s.session, s.repeat)):
        found.setdefault(s.chunk, s)
    return dict(sorted(found.items()))


def about(task: Task) -> dict[str, Any]:
    return {
        "prompts": len(task.prompts), "kind": task.kind, "note": task.note, "raw": task.raw, "cut": task.cut,
    }  # fmt: skip


def document(judge: Judge, groups: Sequence[Group], seconds: float) -> dict[str, Any]:
    """results.json."""
    cells = [cell for group in groups for cell in judge.cells(group)]
    header = {k: v for k, v in judge.runner.store.header.items() if k != "format"}
    return {
        "format": VERSION,
        "run": {**header, "seconds": round(seconds, 1)},
        "tasks": {g.task.name: about(g.task) for g in groups},
        "cells": cells,
        "macro": judge.macro(groups),
        "explain": [],
    }
