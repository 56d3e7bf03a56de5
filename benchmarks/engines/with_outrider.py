"""Outrider. Methods: plain; drafts (by the SPEC `drafter`)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from job import Decode, Texts, Write, serve

import outrider
from outrider.budgets.budgeter import Budgeter, Report
from outrider.core.types import Budget, Rows


@dataclass
class Timed:
    """A budget, and the rounds of a full batch that it chose for."""

    budget: Budgeter
    rows: int
    before: float = 0.0  # when the round before ended
    tokens: int = 0
    seconds: float = 0.0

    def choose(self, rows: Rows) -> Budget:
        return self.budget.choose(rows)

    def learn(self, report: Report) -> None:
        now = time.perf_counter()
        if report.rows == self.rows and self.before:
            self.tokens += report.rows + sum(report.accepted)
            self.seconds += now - self.before
        self.before = now if report.rows == self.rows else 0.0
        self.budget.learn(report)


def start(job: dict[str, Any]) -> tuple[str, Write, Decode]:
    llm = outrider.load(
        job["model"], "none" if job["method"] == "plain" else job["drafter"], weights=job.get("weights", "auto")
    )

    def one(prompt: list[int], temperature: float, goes_on: bool) -> list[int]:
        if llm.prefixes is not None and not goes_on:
            llm.prefixes.clear()
        return llm.generate([prompt], max_new_tokens=job["tokens"], temperature=temperature, seed=1)[0].tokens

    def write(prompts: Texts, temperature: float, batch: int, goes_on: bool) -> Texts:
        if batch == 1:
            return [one(prompt, temperature, goes_on) for prompt in prompts]
        results = llm.generate(prompts, max_new_tokens=job["tokens"], temperature=temperature, batch_size=batch, seed=1)
        return [output.tokens for output in results]

    def decode(prompts: Texts) -> tuple[int, float]:
        timed = Timed(llm.engine().budget, len(prompts))
        llm.generate(prompts, max_new_tokens=job["tokens"], batch_size=len(prompts), ignore_eos=True, budget=timed)
        return timed.tokens, timed.seconds

    return f"{outrider.__version__}, {llm.target.arithmetic}, {llm.target.exact}", write, decode


serve(start)
