"""Record what `simulate_budget.py` replays: texts, the drafts at all their positions, and what passes and drafts cost.

    python -m papers.record_budget record --data FOLDER       from a real model; needs a quiet machine
    python -m papers.record_budget fixed                      what fixed budgets give on a recording, worked out anew

FOLDER has the files of the tasks (`outrider.bench.tasks`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import outrider
from outrider import drafters, files
from outrider.bench import tasks
from outrider.budgets.budgeter import FixedBudget, Report
from outrider.core.protocols import Drafter, Drafting, Round
from outrider.core.tree import root_only
from outrider.core.types import Array, Budget, DraftTree, HostRow, Rows
from outrider.engine import Engine, Request, generate
from outrider.llm import LLM
from outrider.params import Sampling

from .simulate_budget import DATA, DEPTH, PARTS, RECORDED, STEPS_PER_NAT, TASKS, TEMPERATURES, Table, fixed, load, part

TEXTS, TOKENS, NODES = 12, 48, 32  # of a cell, of a text, of a tree
LEAST = float(np.log(0.01))  # of the values recorded: no budget keeps nodes below
WIDTHS = {1: (1, 2, 3, 4, 6, 8, 12, 16, 17, 20, 24, 32), 4: (1, 2, 3, 4, 6, 8, 16), 8: (1, 2, 3, 4, 6, 8)}  # by rows
REPEATS = 3  # of each measurement, with other texts
ENOUGH = 6  # measurements of a pass, for a point of its table


# -------------------------------------------------------------------------------------------------------- the drafts


@dataclass(frozen=True)
class Recorder(Drafter):
    """Drafts with several drafters at once, keeps what they propose, and proposes nothing."""

    parts: tuple[Drafter, ...] = field()
    kept: dict[int, list[HostRow]] = field(default_factory=dict)  # position of the root -> by drafter

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(sorted({tap for part in self.parts for tap in part.taps}))

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> Recording:
        return Recording(self.kept, [part.open(prompts, capacity) for part in self.parts])


@dataclass
class Recording(Drafting):
    """The state of a batch of one row. Its drafters read tokens and features of the text alone, not the tree."""

    kept: dict[int, list[HostRow]]
    parts: list[Drafting]

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        self.kept[rows.start[0]] = [part.propose(rows, budget).host[0] for part in self.parts]
        return root_only(rows.root)

    def observe(self, round: Round) -> None:
        for drafting in self.parts:
            drafting.observe(round)

    def select(self, index: Sequence[int]) -> None:
        assert list(index) == [0], "texts are recorded one at a time"

    def join(self, other: Drafting) -> None:
        raise AssertionError("texts are recorded one at a time")


def record(engine: Engine, parts: dict[str, Drafter], request: Request) -> tuple[list[int], dict[str, list[HostRow]]]:
    """A text, and what each drafter proposes after each of its tokens but the last."""
    recorder = Recorder(tuple(parts.values()))
    recording = replace(engine, drafter=recorder, budget=FixedBudget(NODES, DEPTH))
    *_, last = generate(recording, [request], 1)
    results = [trees for _, trees in sorted(recorder.kept.items())]
    return last.row.output, {name: [trees[i] for trees in results] for i, name in enumerate(parts)}


def packed(trees: Sequence[HostRow]) -> tuple[Array, ...]:
    """Trees in the form of a recording (`simulate_budget.PARTS`)."""
    rows = [part(row, [i for i, value in enumerate(row[2]) if i == 0 or value >= LEAST]) for row in trees]
    tokens, parents, values = (np.array([x for row in rows for x in row[k][1:]]) for k in range(3))
    return (
        np.array([len(ids) - 1 for ids, _, _ in rows], np.uint8),
        tokens.astype(np.uint16),
        parents.astype(np.uint8),
        np.minimum(255, np.rint(-STEPS_PER_NAT * values)).astype(np.uint8),
    )


# --------------------------------------------------------------------------------------------------------- the costs


@dataclass
class Timed(FixedBudget):
    """A fixed budget that keeps its reports."""

    reports: list[Report] = field(default_factory=list)

    def learn(self, report: Report) -> None:
        self.reports.append(report)


def measure(model: str, eagle: str, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Seconds of passes, drafts and the rest of a round. Low quantiles: other work on the machine only adds time."""
    verify: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    rest: tuple[list[float], list[float]] = [], []
    tables: dict[str, dict[int, Table]] = {}
    read = {}
    for name in RECORDED:
        llm = outrider.load(model, f"eagle:{eagle}" if name == "eagle" else name)
        draft: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        firsts = []
        for texts, depth, reports in _rounds(llm, prompts, name == "eagle"):
            b, steps = len(texts), depth if name == "eagle" else 1  # the others take one, however deep
            if depth:
                firsts.append((b, steps, reports[0].draft_seconds, sum(map(len, texts))))
            for report in reports[2:]:
                if report.rows == b and report.depth == depth:
                    verify[b][report.total].append(report.verify_seconds)
                    rest[depth > 0].append(report.rest_seconds)
                    if depth:
                        draft[b][steps].append(report.draft_seconds)
        usual = {b: {steps: _low(seconds) for steps, seconds in results.items()} for b, results in draft.items()}
        read[name] = max(0.0, _low([(s - usual[b][steps]) / tokens for b, steps, s, tokens in firsts]))
        tables[name] = {b: _rising(results) for b, results in draft.items()}
        if name != "eagle":
            tables[name] = {b: [(1, seconds), (2, seconds)] for b, ((_, seconds),) in tables[name].items()}
    often = {b: {n: times for n, times in results.items() if len(times) >= ENOUGH} for b, results in verify.items()}
    return {
        "verify": {b: _rising(results) for b, results in often.items()},
        "draft": tables, "rest": [_low(rest[0]), _low(rest[1])], "read": read,
    }  # fmt: skip


def _rounds(
    llm: LLM, prompts: Sequence[Sequence[int]], every: bool
) -> Iterator[tuple[list[Sequence[int]], int, list[Report]]]:
    """Texts, depth and reports of runs with fixed budgets: with all widths and depths, or none and the largest."""
    for b, widths in WIDTHS.items():
        pairs = [(n, min(DEPTH, n - 1)) for n in widths] + [(16, depth) for depth in range(1, DEPTH + 1)]
        for nodes, depth in pairs if every else ((1, 0), (16, DEPTH)):
            for i in range(REPEATS):
                texts, budget = list(prompts[i * b : i * b + b]), Timed(nodes, depth)
                llm.generate(texts, max_new_tokens=33, seed=0, batch_size=b, budget=budget, ignore_eos=True)
                yield texts, depth, budget.reports


def _low(seconds: Sequence[float]) -> float:
    return float(np.quantile(np.array(seconds), 0.1))


def _rising(results: dict[int, list[float]]) -> Table:
    """Points of which none costs more than a larger one."""
    sizes = sorted(results)
    low = list(itertools.accumulate((_low(results[n]) for n in reversed(sizes)), min))[::-1]
    return list(zip(sizes, low, strict=True))


# ------------------------------------------------------------------------------------------------------------- files


def write(model: str, eagle: str, folder: Path, out: Path) -> None:
    """Record the texts of all cells with the drafts of all drafters, and what passes and drafts cost here."""
    llm = outrider.load(model, f"eagle:{eagle}")
    parts = {name: llm.drafter if name == "eagle" else drafters.load_one(name) for name in RECORDED}
    prompts = {task: _prompts(llm, task, folder) for task in TASKS}
    sizes, texts = [], []
    trees: dict[str, list[HostRow]] = defaultdict(list)
    for task, t in itertools.product(TASKS, TEMPERATURES):
        for seed, ids in enumerate(prompts[task]):
            text, results = record(llm.engine(), parts, Request(ids, seed, TOKENS + 1, Sampling(t)))
            sizes.append(len(ids))
            texts.append(text)
            for name, rows in results.items():
                trees[name] += rows
        print(task, t, file=sys.stderr)
    about: dict[str, Any] = {"tasks": TASKS, "temperatures": TEMPERATURES, "texts": TEXTS}
    about |= {"model": model, "eagle": eagle}
    about["costs"] = measure(model, eagle, [ids for task in TASKS for ids in prompts[task][:6]])
    arrays = {f"{name}_{p}": array for name in RECORDED for p, array in zip(PARTS, packed(trees[name]), strict=True)}
    out.parent.mkdir(parents=True, exist_ok=True)
    _save(out, about, {"prompts": np.array(sizes, np.uint16), "tokens": np.array(texts, np.uint16), **arrays})
    compare(out)


def _prompts(llm: LLM, task: str, folder: Path) -> list[list[int]]:
    loaded = tasks.load(task, folder, TEXTS)
    chats = [llm.encode([{"role": "user", "content": prompt.turns[0]}]) for prompt in loaded.prompts]
    return [tasks.cut(ids, loaded.cut) if loaded.cut else ids for ids in chats]


def compare(file: Path) -> None:
    """Put what the fixed budgets give on a recording into it."""
    with np.load(file) as held:
        arrays = dict(held)
    about = json.loads(str(arrays.pop("about")))
    about["best"] = fixed(load(file))
    _save(file, about, arrays)


def _save(file: Path, about: dict[str, Any], arrays: dict[str, Array]) -> None:
    def save(beside: Path) -> None:
        with beside.open("wb") as out:  # numpy would append .npz to a name
            np.savez_compressed(out, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]

    files.write(file, save)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    makes, again = commands.add_parser("record"), commands.add_parser("fixed")
    makes.add_argument("--model", default="demo")
    makes.add_argument("--eagle", default="demo/hass")
    makes.add_argument("--data", type=Path, required=True, help="a folder with the files of the tasks")
    for command in (makes, again):
        command.add_argument("--out", type=Path, default=DATA, help="the recording")
    given = parser.parse_args()
    if given.command == "record":
        write(given.model, given.eagle, given.data, given.out)
    else:
        compare(given.out)


if __name__ == "__main__":
    main()
