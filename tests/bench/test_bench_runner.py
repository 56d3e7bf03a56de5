"""Runs go on where they stopped, failures cost their own cell alone, and many turns are many turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from instrument import Lab

from outrider import InputError
from outrider.bench.cells import Analysis, document
from outrider.bench.runner import fitting
from outrider.bench.store import read_samples
from outrider.bench.types import Answer, Ask, Method, Prompt
from outrider.drafters import load

NONE, LOOKUP = Method("none"), Method("lookup", budget="8x4")


def lab(folder: Path, **options: Any) -> Lab:
    made = Lab(folder, **options)
    made.drafter("lookup", load("lookup"))
    return made


class Failing:
    """Fails at its n-th prompt, once."""

    def __init__(self, inner: Any, at: int):
        self.inner, self.left = inner, at

    def run(self, prompts: Sequence[Sequence[int]], ask: Ask) -> Answer:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("out of memory\nand much more")
        answer: Answer = self.inner.run(prompts, ask)
        return answer


def test_a_run_that_is_broken_off_goes_on(tmp_path: Path) -> None:
    made = lab(tmp_path, turns=(1,) * 5)
    group = made.group([NONE, LOOKUP], batch=2, repeats=2)
    steps: list[str] = []

    def stop_after_five(what: str) -> None:
        steps.append(what)
        if len(steps) == 2 + 5:
            runner.deadline = monotonic() - 1

    runner = made.runner()
    runner.open(group.methods)
    assert not runner.run(group, stop_after_five)
    early = document(Analysis(runner, keep_loops=True), [group])
    assert {c.state for c in early.cells} == {"partial"}
    assert len(runner.store.samples) == 5
    again = made.runner()
    again.open(group.methods)
    assert again.store.session == 2
    assert again.run(group)
    keys = Counter((s.method, s.chunk, s.repeat) for s in again.store.samples)
    assert len(keys) == 2 * 3 * 2
    assert {n for (method, *_), n in keys.items() if method == LOOKUP.name} == {1}
    assert list(read_samples(tmp_path)) == again.store.samples
    done = document(Analysis(again, keep_loops=True), [group])
    assert {c.state for c in done.cells} == {"done"}
    assert all(c.prompts == 5 and c.repeats == 2 for c in done.cells)
    assert made.runner().missing(group) == []


@pytest.mark.parametrize("answers", range(1, 8))
def test_a_run_that_is_broken_off_anywhere_has_its_speed_ups(tmp_path: Path, answers: int) -> None:
    """Every second batch of prompts begins with the drafters: what has no plain answer beside it is measured again."""
    made = lab(tmp_path, turns=(1,) * 4)
    group = made.group([NONE, LOOKUP])
    steps: list[str] = []

    def stop(what: str) -> None:
        steps.append(what)
        if len(steps) == 2 + answers:
            runner.deadline = monotonic() - 1

    runner = made.runner()
    runner.open(group.methods)
    runner.run(group, stop)
    cells = made.measure(group.methods)
    assert {c["state"] for c in cells.values()} == {"done"}
    assert cells[LOOKUP.name]["speedup"] is not None
    assert made.runner().missing(group) == []


def test_no_text_is_drafted_from_an_answer_to_its_own_prompt(tmp_path: Path) -> None:
    """Neither another budget's nor that of an earlier repeat, where a drafter learns from earlier answers."""
    spec = "suffix?persist=true"
    narrow, wide = (Method(spec, budget=budget) for budget in ("8x4", "16x8"))
    rounds: dict[tuple[str, int, int], int] = {}
    for folder, methods, repeats in (("alone", [NONE, wide], 1), ("both", [NONE, narrow, wide], 2)):
        made = lab(tmp_path / folder)
        made.measure(methods, repeats=repeats)
        for sample in read_samples(tmp_path / folder):
            count = sum(u.rounds for turn in sample.turns for u in turn.usages)
            assert rounds.setdefault((sample.method, 0, sample.chunk), count) == count, (folder, sample.repeat)
    assert len(rounds) == 3 * 6


def test_plain_decoding_that_fails_takes_no_figures_from_others(tmp_path: Path) -> None:
    made = lab(tmp_path, turns=(1,) * 3)
    runner, group = made.runner(), made.group([NONE, LOOKUP])
    runner.open(group.methods)
    runner.peers["none"] = Failing(runner.peers["none"], 2)
    runner.run(group)
    cells = {c.method: c for c in document(Analysis(runner), [group]).cells}
    assert (cells["none"].state, cells[LOOKUP.name].state) == ("failed", "done")
    assert cells[LOOKUP.name].tau is not None


def test_more_prompts_later(tmp_path: Path) -> None:
    """A second run with other prompts keeps what it can use, by the prompts and not by their indices."""
    made = lab(tmp_path, turns=(1,) * 6)
    full, methods = made.task, [NONE, LOOKUP]
    made.task = replace(full, prompts=full.prompts[::2])
    few = made.measure(methods)
    made.task = full
    runner = made.runner()
    assert [chunk for _, chunk, _ in runner.missing(made.group(methods))] == [1, 3, 5]
    many = made.measure(methods)
    assert few["none"]["prompts"] == 3
    assert many["none"]["prompts"] == many[LOOKUP.name]["same_text"] == 6
    assert many[LOOKUP.name]["speedup"] is not None
    assert {c["state"] for c in many.values()} == {"done"}


def test_a_failure_is_its_cells_alone_and_is_tried_again(tmp_path: Path) -> None:
    made = lab(tmp_path, turns=(1,) * 4)
    group = made.group([NONE, LOOKUP, Method("x", peer="x")])
    runner = made.runner()
    runner.open([NONE, LOOKUP])
    runner.peers["x"] = Failing(runner.peers["none"], at=3)
    assert runner.run(group)
    cells = {c.method: c for c in document(Analysis(runner, keep_loops=True), [group]).cells}
    assert cells["x"].state == "failed"
    assert cells["x"].reason == "RuntimeError: out of memory"
    assert cells["none"].state == cells[LOOKUP.name].state == "done"
    again = made.runner()
    again.open([NONE, LOOKUP])
    again.peers["x"] = again.peers["none"]
    asked: list[str] = []
    assert again.run(group, asked.append)
    assert not any(LOOKUP.name in what for what in asked), "what was measured is not measured again"
    cells = {c.method: c for c in document(Analysis(again, keep_loops=True), [group]).cells}
    assert {c.state for c in cells.values()} == {"done"}
    assert cells["x"].same_text == 4
    speeds = [c.speedup for c in cells.values()]
    assert None not in speeds, "each is compared with plain decoding of its own session, prompt by prompt"


def test_a_peer_that_cannot_be_loaded_fails_alone(tmp_path: Path) -> None:
    made = lab(tmp_path, turns=(1,) * 2)
    group = made.group([NONE, Method("transformers", peer="transformers")])  # a table is no transformers model
    runner = made.runner()
    runner.open(group.methods)
    assert runner.run(group)
    cells = document(Analysis(runner, keep_loops=True), [group]).cells
    assert [c.state for c in cells] == ["done", "failed"]


@pytest.mark.parametrize("batch", [1, 3])
def test_many_turns(tmp_path: Path, batch: int) -> None:
    """Each turn's prompt holds the questions and answers before, in batches of unequal numbers of turns too."""
    made = lab(tmp_path, turns=(2, 1, 3), tokens=6)
    seen: list[list[list[int]]] = []
    runner = made.runner()
    runner.open([NONE])
    ours = runner.peers["none"]

    class Noted:
        def run(self, prompts: Any, ask: Ask) -> Answer:
            seen.append([list(p) for p in prompts])
            return ours.run(prompts, ask)

    runner.peers["none"] = Noted()
    group = made.group([NONE], batch=batch)
    assert runner.run(group)
    samples = runner.store.samples
    assert [len(s.turns) for s in samples] == ([3] if batch == 3 else [2, 1, 3])
    assert [len(t.tokens) for t in samples[-1].turns] == ([3, 2, 1] if batch == 3 else [1, 1, 1])
    letters = made.models.llm().tokenizer
    third = made.task.prompts[2]
    row = -1 if batch == 3 else 0
    answers = [samples[-1].turns[t].tokens[row] for t in (0, 1)]
    full = "\n\n".join(
        [third.turns[0], letters.decode(answers[0]), third.turns[1], letters.decode(answers[1]), third.turns[2]]
    )
    assert seen[-1][-1] == letters(full)["input_ids"]
    cells = document(Analysis(runner, keep_loops=True), [group]).cells
    assert cells[0].state == "done", cells[0].reason
    assert cells[0].new_tokens == 6 * 6


def test_a_text_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    texts = []
    for batch in (1, 2, 4):
        made = lab(tmp_path / str(batch), turns=(1,) * 4)
        made.measure([NONE, LOOKUP], 1.0, batch)
        texts.append([row for s in read_samples(made.folder) if s.method == "none" for row in s.turns[0].tokens])
    assert texts[0] == texts[1] == texts[2]


def test_prompts_that_do_not_fit_are_left_out_and_reported(tmp_path: Path) -> None:
    made = lab(tmp_path, tokens=10)
    long = Prompt("long", ("a" * 2000,))
    runner = made.runner()
    task = fitting(replace(made.task, prompts=(*made.task.prompts, long)), runner)
    assert len(task.prompts) == 6
    assert task.note == "1 of 7 prompts are longer than the model's context and were left out"
    with pytest.raises(InputError, match="fits into the model's context of 1024 tokens"):
        fitting(replace(made.task, prompts=(long,)), runner)
    assert len(fitting(replace(made.task, prompts=(long,), cut=100), runner).prompts) == 1


def test_loops_are_left_out_where_plain_text_repeats_itself(tmp_path: Path) -> None:
    """A table at T = 0 runs in circles: without `keep_loops` nothing of such a task would be left, so all is kept."""
    made = lab(tmp_path, turns=(1,) * 3, tokens=60)
    runner = made.runner()
    group = made.group([NONE, LOOKUP])
    runner.open(group.methods)
    assert runner.run(group)
    cells = document(Analysis(runner), [group]).cells
    assert cells[1].prompts == 3
    hot = made.group([NONE, LOOKUP], temperature=1.0)
    assert runner.run(hot)
    assert document(Analysis(runner), [hot]).cells[1].looping == 0
