"""A run's samples as one document: a cell for each line of the report, macro means, and what the checks found."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import checks, methods, metrics
from .metrics import Figure, Table
from .runner import STOCK, Group, Runner
from .types import OURS, VERSION, Method, Sample, Task

Laws = dict[tuple[float, int, str], dict[str, Any]]  # (temperature, batch, method): tokens and p


@dataclass
class Judge:
    """Turns groups into cells; keeps the draws for the macro means."""

    runner: Runner
    keep_loops: bool = False
    figures: dict[tuple[Any, ...], dict[str, Figure]] = field(default_factory=dict)
    drawn: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)  # the law's u of a text
    us: dict[tuple[float, int, str], list[float]] = field(default_factory=dict)  # and of a method

    def cells(self, group: Group) -> Iterator[dict[str, Any]]:
        """A cell for every method of a group, in its order."""
        mine = group.own(self.runner.store.samples)
        by = {m.name: [s for s in mine if s.method == m.name] for m in group.methods}
        plain = next((m.name for m in group.methods if m.plain), "")
        every = range(len(group.chunks))
        looping = {s.chunk for s in by.get(plain, ()) if metrics.looping(s)}
        chunks = [c for c in every if self.keep_loops or c not in looping]
        said = "" if chunks else "every plain text repeats itself, and all are counted"
        chunks = chunks or list(every)
        for method in group.methods:
            cell, samples = identity(group, method), latest(by[method.name])
            failed = [f.reason for f in self.runner.store.failures if f.cell == tuple(cell[k] for k in KEYS)]
            table = Table.of(samples, chunks)
            if failed or not table.samples or not table.samples[0]:
                why = {"state": "failed", "reason": failed[-1]} if failed else {"reason": "not measured yet"}
                yield {**cell, **why}
                continue
            whole = len(samples) >= len(every) * group.repeats
            cell |= {"state": "done" if whole else "partial", "reason": said if whole else "not all prompts yet"}
            cell |= self.times(table, by.get(plain, []), by.get(STOCK, []), cell)
            cell |= {"looping": sum(len(group.chunks[c]) for c in looping if c not in chunks)}
            same = truth(method, group.methods)
            good = [s for s in samples if not s.faults]
            cell |= self.texts(group, method, good, latest(by.get(same.name, [])) if same else [])
            faults = {*cell["faults"], *checks.repeated(samples), *(f for s in samples for f in s.faults)}
            if faults:
                self.strike(cell, faults)
            yield cell

    def strike(self, cell: dict[str, Any], faults: set[str]) -> None:
        """Make a cell invalid; it has no part in any mean."""
        cell |= {"state": "invalid", "reason": min(faults), "faults": sorted(faults)}
        self.figures.pop(tuple(cell[k] for k in KEYS), None)

    def times(
        self, table: Table, plain: Sequence[Sample], stock: Sequence[Sample], cell: dict[str, Any]
    ) -> dict[str, Any]:
        """What depends on clocks and rounds."""
        usages, found = table.usages(), dict[str, Any]()
        figures = {"tokens_per_second": table.rate()}
        for name, base, all_of_it in (("speedup", plain, False), ("whole", plain, True), ("over_stock", stock, False)):
            faster = table.faster(base, all_of_it)
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
        rest = Table.of(latest(plain), [s.chunk for s in table.samples[0]]).usages()
        if usages and rest and "speedup" in figures:
            promised = metrics.theory(usages, metrics.round_ms(rest)["verify"], figures["speedup"].value)
            found["theory"] = promised.document() if promised else None
        self.figures[tuple(cell[k] for k in KEYS)] = figures
        first = table.samples[0]
        prefill = metrics.ratio(table.map(lambda s: 1e3 * s.turns[0].prefill), table.map(lambda s: 1.0))
        memory = [t.memory for s in first for t in s.turns if t.memory]
        return {
            "prompts": sum(len(s.prompts) for s in first), "repeats": len(table.samples),
            "new_tokens": sum(len(row) for s in first for t in s.turns for row in t.tokens),
            "prompt_tokens": round(float(np.mean([n for s in first for n in s.lengths])), 1),
            "speedup": None, "whole": None, "over_stock": None, "tau": None, "alpha": None, "drafted_alpha": None,
            "depths": [], "round_ms": None, "theory": None, "quality": None, "reliability": None,
            **{name: f.interval for name, f in figures.items()}, "prefill_ms": prefill.interval,
            "memory": {k: max(m.get(k, 0) for m in memory) for k in ("cache", "drafter")} if memory else {}, **found,
        }  # fmt: skip

    def texts(self, group: Group, method: Method, samples: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, Any]:
        """What the texts prove: equal to plain decoding's, or of the target's law."""
        first, theirs = newest(samples), newest(plain)
        found: dict[str, Any] = {"same_text": 0, "compared": 0, "divergences": [], "law": None, "faults": []}
        coupled = method.peer == OURS and method.rule == "coupled"
        if method.plain:
            found["faults"] += self.own(group, method, first)
        elif group.temperature == 0 or coupled:
            for chunk, sample in first.items():
                if chunk in theirs:
                    self.compare(group, method, sample, theirs[chunk], found)
        if group.temperature > 0 and methods.lossless(method):
            us = self.uniforms(group, method, first)
            self.us.setdefault((group.temperature, group.batch, method.name), []).extend(us)
            p = checks.law_test(us)
            found["law"] = None if p is None else {"tokens": len(us), "p": p}
        return found

    def own(self, group: Group, method: Method, first: dict[int, Sample]) -> list[str]:
        """Plain decoding itself is held against the stock model's own pass."""
        llm = self.runner.models.llm(method.variant)
        for chunk, sample in first.items():
            prompts = group.chunks[chunk]
            for turn, ids, who in self.runner.turns(group.task, prompts, sample.turns):
                seeds = self.runner.seeds(group, [prompts[i] for i in who], turn)
                for text, new, seed in zip(ids, sample.turns[turn].tokens, seeds, strict=True):
                    if new and checks.own(llm, text, new, group.temperature, seed) > checks.tie(llm):
                        return ["plain decoding wrote what the model's own pass does not choose"]
        return []

    def compare(self, group: Group, method: Method, mine: Sample, plain: Sample, found: dict[str, Any]) -> None:
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
                one = checks.divergence(llm, prompts[index].id, turn, ids[row], a, b, group.temperature, seed)
                found["divergences"].append(one.document())
                if not checks.rounding(llm, one):
                    found["faults"].append("its text is not the target's")
        found["compared"] += len(prompts)
        found["same_text"] += len(prompts) - len(parted)

    def uniforms(self, group: Group, method: Method, first: dict[int, Sample]) -> list[float]:
        """u of all tokens of a cell: see `checks.uniforms`."""
        llm, us = self.runner.models.llm(method.variant), list[float]()
        for chunk, sample in first.items():
            for turn, ids, _ in self.runner.turns(group.task, group.chunks[chunk], sample.turns):
                for prompt, new in zip(ids, sample.turns[turn].tokens, strict=True):
                    key = ("int8" in method.variant, group.temperature, tuple(prompt), tuple(new))
                    if new and key not in self.drawn:
                        dice = random.Random(repr(key))
                        self.drawn[key] = checks.uniforms(llm, prompt, new, group.temperature, dice)
                    us += self.drawn.get(key, [])
        return us

    def laws(self, cells: Sequence[dict[str, Any]]) -> Laws:
        """The test over all tasks together, which sees more; a method that fails it is invalid in all of them."""
        found = {}
        for key, us in self.us.items():
            p = checks.law_test(us)
            if p is None:
                continue
            found[key] = {"tokens": len(us), "p": p}
            for cell in cells if p < checks.REFUSED else ():
                if (cell["temperature"], cell["batch"], cell["method"]) == key and cell["state"] in ("done", "partial"):
                    self.strike(cell, {f"its tokens do not follow the target's law (p = {p:.1e})"})
        return found

    def macro(self, groups: Sequence[Group], cells: Sequence[dict[str, Any]], laws: Laws) -> list[dict[str, Any]]:
        """Means over the tasks, of methods that are measured and valid in all of them."""
        found, tasks = [], list(dict.fromkeys(g.task.name for g in groups))
        done = {tuple(c[k] for k in KEYS) for c in cells if c["state"] == "done"}
        for t, b in dict.fromkeys((g.temperature, g.batch) for g in groups):
            mine = [g for g in groups if (g.temperature, g.batch) == (t, b)]
            for name in dict.fromkeys(m.name for g in mine for m in g.methods):
                keys = [(task, t, b, name) for task in tasks]
                have = [self.figures[k] for k in keys if k in self.figures and k in done]
                if len(have) < len(tasks):
                    continue
                row: dict[str, Any] = {"temperature": t, "batch": b, "method": name, "tasks": len(tasks)}
                for figure in ("speedup", "whole", "over_stock", "tau", "tokens_per_second"):
                    each = [f[figure] for f in have if figure in f]
                    row[figure] = metrics.mean(each).interval if len(each) == len(tasks) else None
                found.append({**row, "law": laws.get((t, b, name))})
        return found


KEYS = ("task", "temperature", "batch", "method")


def identity(group: Group, method: Method) -> dict[str, Any]:
    return {
        "task": group.task.name, "temperature": group.temperature, "batch": group.batch, "method": method.name,
        "label": method.label, "spec": method.spec, "rule": method.rule, "budget": method.budget,
        "variant": method.variant, "peer": method.peer,
        "lossless": methods.lossless(method), "state": "partial", "reason": "", "faults": [],
    }  # fmt: skip


def truth(method: Method, rows: Sequence[Method]) -> Method | None:
    """Plain decoding of the same weights, of the same variant if it is there."""
    plain = [m for m in rows if m.plain and ("int8" in m.variant) == ("int8" in method.variant)]
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


def about(task: Task) -> dict[str, Any]:
    return {
        "prompts": len(task.prompts), "kind": task.kind, "note": task.note, "raw": task.raw, "cut": task.cut,
    }  # fmt: skip


def document(judge: Judge, groups: Sequence[Group], seconds: float) -> dict[str, Any]:
    """results.json."""
    cells = [cell for group in groups for cell in judge.cells(group)]
    laws = judge.laws(cells)
    header = {k: v for k, v in judge.runner.store.header.items() if k != "format"}
    return {
        "format": VERSION,
        "run": {**header, "seconds": round(seconds, 1)},
        "tasks": {g.task.name: about(g.task) for g in groups},
        "cells": cells,
        "macro": judge.macro(groups, cells, laws),
        "explain": [],
    }
