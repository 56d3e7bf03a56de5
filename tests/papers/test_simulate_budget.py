"""The simulation of budgets: what it replays is what an engine does, and its clock is the table's."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

import outrider
from outrider import drafters
from outrider.budgets.adaptive import AdaptiveBudget
from outrider.budgets.budgeter import FixedBudget
from outrider.core.tree import check
from outrider.core.types import Budget
from outrider.engine import Request, generate
from outrider.params import Sampling
from papers import record_budget as recorder
from papers import simulate_budget as simulation
from papers.simulate_budget import Cell, Clock, Costs, Text, World, drafter_of, play

COSTS = Costs(
    verify={1: [(1, 1.0), (9, 1.8)], 4: [(4, 2.0), (36, 6.0)]},
    draft={name: {1: [(1, 0.1), (8, 0.8)]} for name in simulation.RECORDED},
    rest=(0.01, 0.02),
    read=dict.fromkeys(simulation.RECORDED, 0.0),
)


def world() -> World:
    return World(COSTS, Clock(0.0, 0.0, random.Random(0)))


def text(hits: int, n: int = 12) -> Text:
    """n + 1 tokens; EAGLE drafts two children of every node, and the text's own token as far as `hits` deep."""
    tokens, trees = list(range(100, 101 + n)), []
    for i in range(n):
        names, parents, values = [-1], [0], [0.0]
        for depth in range(1, 9):
            right = tokens[i + depth] if depth <= hits and i + depth < len(tokens) else 7
            names += [right, 8]
            parents += [max(0, 2 * depth - 3)] * 2
            values += [depth * math.log(0.7), depth * math.log(0.7) - 2]
        trees.append((names, parents, values))
    return Text(5, tokens, {"eagle": trees})


@pytest.mark.parametrize("hits", [0, 2])
def test_a_fixed_budget_by_hand(hits: int) -> None:
    """Twelve tokens by chains of two: four rounds of three tokens where both are right, twelve of one where none is."""
    here, cell = world(), Cell([text(hits)])
    assert simulation.tokens_of(cell) == 12
    seconds = play(here, drafter_of("eagle", here), FixedBudget(3, 2), cell)
    if hits:  # a draft of two steps, a pass over three nodes, the rest
        assert seconds == pytest.approx(4 * (0.2 + 1.2 + 0.02))
    else:  # in the text's last two rounds one token less may be drafted each time; with one left nothing is
        assert seconds == pytest.approx(10 * (0.2 + 1.2 + 0.02) + (0.1 + 1.2 + 0.02) + 1.01)


def test_plain_decoding_by_hand() -> None:
    """Six texts, at most four at a time: twelve rounds of four, then twelve of two."""
    here, cell = world(), Cell([text(2)] * 6, 1.0, 4)
    assert simulation.tokens_of(cell) == 72
    seconds = play(here, drafter_of("eagle", here), FixedBudget(1, 0), cell)
    assert seconds == pytest.approx(12 * 2.01 + 12 * (simulation.at(simulation.of_rows(COSTS.verify, 2), 2) + 0.01))


def test_noise_disturbs_what_is_observed_and_not_the_score() -> None:
    scores = set()
    for noise in (0.0, 0.3):
        here = World(COSTS, Clock(noise, noise, random.Random(1)))
        scores.add(play(here, drafter_of("eagle", here), FixedBudget(3, 2), Cell([text(2)])))
        assert (here.clock.now == pytest.approx(next(iter(scores)))) == (noise == 0)
    assert len(scores) == 1


def test_trees_come_back() -> None:
    trees = [([1, 5, 6, 7], [0, 0, 1, 1], [0.0, -0.5, -1.0, -9.0]), ([2], [0], [0.0])]
    (tokens, parents, values), (root, _, _) = simulation.unpacked(*recorder.packed(trees))
    assert (tokens, parents, root) == ([-1, 5, 6], [0, 0, 1], [-1]), "a node that no budget keeps is left out"
    assert values == pytest.approx([0.0, -0.5, -1.0], abs=1 / simulation.STEPS_PER_NAT)


def test_a_constant_is_replaced_where_it_is_used() -> None:
    from outrider.budgets import adaptive, ledger

    old = ledger.TRIES, adaptive.LATE
    simulation.changed(["budgets.ledger.TRIES=0.5", "budgets.adaptive.LATE=99"])
    try:
        books = ledger.Ledger({1: 1.0})
        books.pay(1, 1.0)
        assert (books.owed(1), adaptive.LATE) == (0.5, 99)
    finally:
        simulation.changed([f"budgets.ledger.TRIES={old[0]}", f"budgets.adaptive.LATE={old[1]}"])
    assert old == (ledger.TRIES, adaptive.LATE)
    assert set(simulation.ABLATIONS) >= {"budgets.ledger.TRIES", "budgets.adaptive.LATE"}


@pytest.mark.parametrize("name", simulation.ABLATIONS)
def test_every_ablation_names_a_constant(name: str) -> None:
    module, constant = name.rsplit(".", 1)
    old = getattr(simulation.importlib.import_module(f"outrider.{module}"), constant)
    assert old != simulation.ABLATIONS[name]


def test_the_adaptive_budget_beats_plain_decoding_on_the_recording() -> None:
    """In a single cell, where drafts are worth half of the time at least."""
    recording = simulation.load()
    here = World(recording.costs, Clock(0.05, 0.0, random.Random(0)))
    budget, cell = AdaptiveBudget(), recording.cells["mt-bench | 0 | 1"]
    for _ in range(2):
        seconds = play(here, drafter_of("eagle", here), budget, cell)
    best, plain = recording.best["eagle | mt-bench | 0 | 1"]
    assert simulation.tokens_of(cell) / seconds > max(1.5 * plain, 0.9 * best)


@pytest.mark.parametrize("name", simulation.DRAFTERS)
def test_drafts_are_trees_within_their_budget(name: str) -> None:
    """Of texts in all their lengths, the last tokens included, where less may be drafted."""
    recording = simulation.load()
    here, cell = World(recording.costs, Clock(0.0, 0.0, random.Random(0))), recording.cells["gsm8k | 1 | 4"]
    here.texts, budget = cell.texts, Budget(6, 3)
    drafting = drafter_of(name, here).open((), 0)
    for n in range(46):
        places = [simulation.Place(i, text.prompt + n, 48 - n, 1) for i, text in enumerate(cell.texts[:3])]
        view = simulation._view(places, cell)
        tree = drafting.propose(view, budget)
        check(tree)
        assert tree.tokens[:, 0].tolist() == list(view.root)
        assert tree.nodes <= 6
        assert tree.deepest <= min(3, 47 - n)


@pytest.mark.trained
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_are_those_of_the_engine(temperature: float) -> None:
    """A text is recorded, then written with a fixed budget by the engine and by the simulation."""
    llm = outrider.load("demo", "lookup", compile=False)
    prompt = llm.encode("one two three four one two three four one two three four one")
    request = Request(prompt, 3, 49, Sampling(temperature))
    output, trees = recorder.record(llm.engine(), {"lookup": drafters.load_one("lookup")}, request)
    rows = simulation.unpacked(*recorder.packed(trees["lookup"]))
    *_, last = generate(llm.engine(budget=FixedBudget(6, 5)), [request], 1)
    assert last.row.output == output
    here, counted = world(), recorder.Timed(6, 5)
    cell = Cell([Text(len(prompt), output, {"lookup": rows})], temperature)
    play(here, drafter_of("lookup", here), counted, cell)
    assert len(counted.reports) == last.row.usage.rounds
    assert sum(sum(report.accepted) for report in counted.reports) == last.row.usage.accepted


@pytest.mark.trained
def test_a_recording_is_made_read_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"TASKS": ("sample/chat",), "TEXTS": 2, "TOKENS": 12, "WIDTHS": {1: (1, 2, 4), 2: (1, 2, 4)}, "REPEATS": 1}
    for name, value in {**small, "ENOUGH": 1}.items():
        monkeypatch.setattr(recorder, name, value)
    recorder.write("demo", "demo/hass", tmp_path, tmp_path / "new" / "r.npz")
    recording = simulation.load(tmp_path / "new" / "r.npz")
    assert recording.cells.keys() == {f"sample/chat | {t} | {b}" for t in (0, 1) for b in simulation.BATCHES}
    assert len(recording.best) == len(recording.cells) * len(simulation.DRAFTERS)
    assert set(recording.costs.draft) == set(simulation.RECORDED)
    for text in recording.cells["sample/chat | 1 | 1"].texts:
        assert len(text.tokens) == 13
        assert {len(rows) for rows in text.trees.values()} == {11}
    result = simulation.run(recording, simulation.DRAFTERS, simulation.Setting(seeds=1))
    assert all(result[cell][0] > 0 for cell in recording.best)
