"""The automatic budget beside fixed ones in every cell of drafter x temperature x batch x task.

    python benchmarks/grid.py smollm2 --drafters lookup eagle3:smollm2/eagle3 --out build/grid-smollm2.jsonl

Each cell decodes the same texts with every fixed budget, and with those that have a chance once more: that finds the
best. It, the automatic budget, which has decoded the texts once unmeasured, and plain decoding are then measured
afresh, in turn, in the same process. The best of a dozen is also the luckiest, so what it was chosen by does not count.
A factor is the geometric mean over the turns, with its standard error. Compared are tokens per second of decoding,
prompts left out, in the rounds in which the batch is full: there are twice as many texts as rows, and a text that ends
makes room for the next. (With as many texts as rows, those that can be guessed end early, and the others go on in a
smaller batch.) One line of JSON a cell; a run that was stopped goes on where it was. `--table` shows what there is.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from time import perf_counter
from typing import Any

import outrider
from outrider.bench import tasks
from outrider.budgets.budgeter import Budgeter, Report
from outrider.core.types import Budget, Rows
from outrider.encoding import has_template
from outrider.params import InputError

ROOT = Path(__file__).resolve().parents[1]
EVAL = ROOT.parent / "shared" / "data" / "eval"
CHAINS = tuple(",".join("1" * n) for n in range(2, 9))
TREES = ("4x3", "8x4", "16x6", "32x6", "60x6")
FIXED = ("none", *CHAINS, *TREES)
AUTO = "auto"
HOPELESS = 0.7  # of the best one's speed: no larger size would be the best
NEAR = 0.85  # of the best one's speed: worth a second measurement
TURNS = 6  # of the automatic budget, the best fixed one and none
BAR = 0.97  # of the best fixed budget, and of plain decoding


@dataclass
class Full:
    """A budget, and what the rounds of a full batch gave."""

    budget: Budgeter
    rows: int
    tokens: int = 0
    seconds: float = 0.0

    def choose(self, rows: Rows) -> Budget:
        return self.budget.choose(rows)

    def learn(self, report: Report) -> None:
        began = perf_counter()
        self.budget.learn(report)
        if report.rows == self.rows:
            self.tokens += report.rows + sum(report.accepted)
            self.seconds += report.draft_seconds + report.verify_seconds + report.rest_seconds
            self.seconds += perf_counter() - began  # which no report has


def texts(model: Any, task: str, data: str, count: int) -> list[list[int]]:
    """The first turns of a task's prompts, as tokens."""
    given = tasks.load(task, data, count)
    made = []
    for prompt in given.prompts:
        chat = not given.raw and has_template(model.tokenizer)
        ids = model.encode([{"role": "user", "content": prompt.turns[0]}] if chat else prompt.turns[0])
        made.append(tasks.cut(ids, given.cut) if given.cut else ids)
    return made


def speed(model: Any, prompts: list[list[int]], budget: str, batch: int, temperature: float, tokens: int) -> float:
    """Tokens per second of decoding, in the rounds in which all rows of the batch are there."""
    counted = Full(model.engine(budget=budget).budget, batch)
    model.generate(
        prompts, max_new_tokens=tokens, temperature=temperature, seed=0, batch_size=batch, budget=counted,
        ignore_eos=True,
    )  # fmt: skip
    return counted.tokens / counted.seconds


def cell(model: Any, prompts: list[list[int]], batch: int, temperature: float, tokens: int) -> dict[str, Any]:
    """The best fixed budget, and what it, the automatic one and none did in each turn [tokens per second]."""

    def measured(budget: str) -> float:
        return speed(model, prompts, budget, batch, temperature, tokens)

    measured(AUTO)
    tried: dict[str, float] = {}
    for line in (("none",), CHAINS, TREES):
        for budget in line:
            tried[budget] = measured(budget)
            if tried[budget] < HOPELESS * max(tried.values()):
                break
    near = [budget for budget in tried if tried[budget] >= NEAR * max(tried.values())]
    again = {budget: (tried[budget] + measured(budget)) / 2 for budget in reversed(near)}
    best = max(again, key=again.__getitem__)
    turns: dict[str, list[float]] = {budget: [] for budget in dict.fromkeys((AUTO, best, "none"))}
    for turn in range(TURNS):
        for budget in random.Random(turn).sample(list(turns), len(turns)):
            turns[budget].append(round(measured(budget), 2))
    return {"best": best, "turns": turns}


def factor(above: list[float], below: list[float]) -> tuple[float, float]:
    """The geometric mean of the turns' quotients, and its standard error."""
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    mean = math.exp(fmean(logs))
    return mean, mean * stdev(logs) / math.sqrt(len(logs))


def table(lines: list[dict[str, Any]]) -> None:
    print("| drafter | T | batch | task | plain | best fixed | automatic | of the best | of plain |")
    print("|---|--:|--:|---|--:|--:|--:|--:|--:|")
    of_best, of_plain = [], []
    for line in lines:
        turns, best = line["turns"], line["best"]
        of_best.append(factor(turns[AUTO], turns[best]))
        of_plain.append(factor(turns[AUTO], turns["none"]))
        plain, fixed, auto = (median(turns[budget]) for budget in ("none", best, AUTO))
        print(
            f"| {line['drafter']} | {line['temperature']:g} | {line['batch']} | {line['task']} | {plain:.0f} "
            f"| {fixed:.0f} ({best}) | {auto:.0f} | {of_best[-1][0]:.2f} ± {of_best[-1][1]:.2f} "
            f"| {of_plain[-1][0]:.2f} ± {of_plain[-1][1]:.2f} |"
        )
    for name, results in (("the best fixed", of_best), ("plain", of_plain)):
        means = [mean for mean, _ in results]
        lower = sum(mean + 2 * error < BAR for mean, error in results)
        print(
            f"\nof {name}: worst {min(means):.2f}, median {median(means):.2f}; {BAR} and more in "
            f"{sum(mean >= BAR for mean in means)} of {len(means)} cells; "
            f"less than that by more than two standard errors in {lower}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafters", nargs="+", default=[], help="SPECs")
    parser.add_argument("--tasks", nargs="+", default=["mt-bench", "gsm8k", "humaneval", "cnn-dm@600"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--weights", choices=["full", "native", "int8"], default="full")
    parser.add_argument("--data", default=str(EVAL), help="a folder with the papers' prompts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="measure nothing, show what the file has")
    given = parser.parse_args()
    if min(*given.batches, given.tokens - 1) < 1:
        parser.error("batches are of at least 1 text, and texts of at least 2 tokens")
    try:
        lines = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    except (OSError, ValueError) as error:
        parser.error(f"{given.out} was not written by this command ({error}); give another --out")
    if any("turns" not in line for line in lines):
        parser.error(f"{given.out} has cells without turns, as an earlier version measured them; give another --out")
    if given.table and not lines:
        parser.error(f"{given.out} has no cells yet")
    if not given.table and not given.drafters:
        parser.error("name at least one drafter")
    done = {(line["drafter"], line["temperature"], line["batch"], line["task"]) for line in lines}
    if given.table:
        table(lines)
        return
    if others := {line.get("weights", "full") for line in lines} - {given.weights}:
        parser.error(f"{given.out} has cells of {others.pop()} weights; give another --out, or those --weights")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for drafter in given.drafters:
            model = outrider.load(given.model, drafter, weights=given.weights)
            for batch in given.batches:
                for temperature in given.temperatures:
                    for task in given.tasks:
                        if (drafter, temperature, batch, task) in done:
                            continue
                        prompts = texts(model, task, given.data, max(4, 2 * batch))
                        results = cell(model, prompts, batch, temperature, given.tokens)
                        line = {
                            "drafter": drafter, "temperature": temperature, "batch": batch, "task": task,
                            "weights": given.weights, **results,
                        }  # fmt: skip
                        with given.out.open("a") as file:
                            file.write(json.dumps(line) + "\n")
                        print(json.dumps(line), file=sys.stderr, flush=True)
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
