"""When the networks of a mix draft: by hand, on a simulated machine, and with texts that must not notice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import heads
import oracle
import pytest
from play import rows_of

from outrider import drafters
from outrider.budgets.budgeter import FixedBudget
from outrider.budgets.ledger import TRIES
from outrider.core.price import Price
from outrider.core.types import Budget, Rows
from outrider.drafters import _mix, eagle
from outrider.drafters._gate import Gate
from outrider.drafters._growth import Growth

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [2, 7, 2, 7, 2], [1, 3, 5]]
BUDGET = Budget(16, 4, price=Price(tuple(0.02 + 0.001 * n for n in range(1, 17))), rate=50.0)


def experienced(gains: dict[float, float], seconds: float = 0.004, rounds: int = 400, size: float = 3.0) -> Gate:
    """A gate after rounds of one row whose free draft had the chance c: networks took so long, trees had so many nodes
    with them, and they gained gains[c] tokens on average, at most two in a round."""
    gate, dice = Gate(), random.Random(1)
    for _ in range(rounds):
        for chance, gain in gains.items():
            gate.seconds.learn(1, seconds)
            gate.learn(rows_of(1), [chance], [sum(dice.random() < gain / 2 for _ in range(2))], size)
    return gate


def drafts(gate: Gate, chances: Sequence[float], size: float, budget: Budget, left: int = 5) -> bool:
    return gate.allows(rows_of(len(chances), left), chances, size, budget)


def pays(gate: Gate, chances: Sequence[float], size: float, budget: Budget, left: int = 5) -> bool:
    """Does it draft for another reason than that a try is due?"""
    gate.ledger.charge(len(chances), 1e9)
    yes = drafts(gate, chances, size, budget, left)
    gate.ledger.debt.clear()
    return yes


def test_by_hand() -> None:
    """4 ms and two nodes of 1 ms each are worth 0.3 tokens at 50 a second."""
    gate = experienced({0.0: 0.6, 0.9: 0.05})
    assert gate.gain(rows_of(1), 0.0) == pytest.approx(0.6, abs=0.15)
    assert pays(gate, [0.0], 1, BUDGET)
    assert not pays(gate, [0.9], 4, BUDGET)
    assert not pays(gate, [0.0], 1, replace(BUDGET, rate=1000.0))
    assert pays(Gate(), [0.9], 4, BUDGET), "networks that were never timed"


def test_nodes_that_make_the_pass_longer_are_counted() -> None:
    few, many = experienced({0.0: 0.5}, size=2.0), experienced({0.0: 0.5}, size=10.0)
    assert pays(few, [0.0], 1, BUDGET), "0.25 tokens"
    assert not pays(many, [0.0], 1, BUDGET), "0.65 tokens"
    assert pays(many, [0.0], 1, replace(BUDGET, price=None))
    assert pays(many, [0.0], 9, BUDGET), "of ten nodes the free draft had nine"
    idle = experienced({0.9: 0.0}, size=2.0)
    assert not pays(idle, [0.9], 16, BUDGET), "no pass is shorter for what networks draft"
    unknown = experienced({0.0: 0.0})
    unknown.gains[0].sizes.clear()
    assert pays(unknown, [0.0], 1, BUDGET), "until the size of their trees is known"


def test_no_more_than_a_text_may_gain_is_counted() -> None:
    """6 ms are worth 1.2 tokens at 200 a second: less than what was gained, more than a text that ends can gain."""
    gate = experienced({0.0: 1.5})
    assert pays(gate, [0.0], 1, replace(BUDGET, rate=200.0))
    assert not pays(gate, [0.0], 1, replace(BUDGET, rate=200.0), left=2)


def test_sampled_batches_have_gains_of_their_own() -> None:
    gate = experienced({0.0: 1.0})
    for _ in range(100):
        gate.learn(rows_of(1, temperature=1.0), [0.0], [-1], 3.0)
    assert gate.gain(rows_of(1), 0.0) > 0.8
    assert 0 <= gate.gain(rows_of(1, temperature=1.0), 0.0) < 0.1


def test_what_no_price_has_cut_is_of_no_usual_size() -> None:
    gate = experienced({0.0: 1.0})
    gate.learn(rows_of(1), [0.0], [4], None)
    assert gate.gains[0].sizes[1].value == 3.0
    assert not gate.gains[1].sizes


def test_rows_that_need_it_pay_for_the_others() -> None:
    gate = experienced({0.0: 0.6, 0.9: 0.02})
    for size in (2, 4):
        for i in range(400):
            gate.seconds.learn(size, 0.004)
            gate.learn(rows_of(size), [0.0] + [0.9] * (size - 1), [i % 5 < 3] + [0] * (size - 1), 3.0)
    assert pays(gate, [0.0, 0.9], 1, BUDGET)
    assert not pays(gate, [0.0, 0.9, 0.9, 0.9], 1, BUDGET)


def test_networks_that_do_not_pay_are_tried_as_rarely_as_tries_may_cost() -> None:
    """A try takes 4 ms and two nodes of 1 ms; a round is worth 20 ms, of which TRIES are paid off."""
    gate = experienced({0.9: 0.0})
    drafted = [i for i in range(600) if drafts(gate, [0.9], 1, BUDGET)]
    assert drafted[0] == 0
    assert [b - a for a, b in pairwise(drafted)] == pytest.approx([0.006 / (0.02 * TRIES)] * (len(drafted) - 1), abs=1)
    assert len(drafted) > 30
    for _ in range(100):
        gate.learn(rows_of(1), [0.9], [2], 3.0)
    assert drafts(gate, [0.9], 1, BUDGET)


@pytest.mark.parametrize("times", [2.0, 30.0])
def test_a_disturbed_start_does_not_keep_networks_from_drafting(times: float) -> None:
    """Of the first drafts all but one take longer than they do later, so long that they would not pay."""
    gate = Gate()
    paying, slow = replace(BUDGET, rate=120.0), iter([times, times, 1.0, times])
    drafted = 0
    for _ in range(60):
        if drafts(gate, [0.0], 1, paying):
            gate.seconds.learn(1, 0.004 * next(slow, 1.0))
            gate.learn(rows_of(1), [0.0], [1], 3.0)
            drafted += 1
    assert drafted == 60


def plainly(target: Any, tokens: int, temperature: float) -> list[list[int]]:
    rows = heads.run(target, drafters.load("none"), PROMPTS[:1], tokens, temperature, FixedBudget(1, 0))
    return [row.output for row in rows]


@dataclass
class Priced(FixedBudget):
    """Names a rate, so that mixes decide; a node costs so many rounds without drafts."""

    rate: float = 1e6
    node: float = 1e-9

    def choose(self, rows: Rows) -> Budget:
        price = Price(tuple(1 + self.node * n for n in range(self.nodes)))
        return replace(super().choose(rows), price=price, rate=self.rate)


class EveryThird(Gate):
    """Drafts in every third round, and remembers what it observed."""

    every = 3

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.seen = 0, list[int]()

    def allows(self, rows: Rows, chances: Sequence[float], size: float, budget: Budget) -> bool:
        self.turn += 1
        return self.turn % self.every == 0

    def learn(self, rows: Rows, chances: Sequence[float], gains: Sequence[int], size: float | None) -> None:
        super().learn(rows, chances, gains, size)
        self.seen += gains


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_networks_that_rested_know_the_written_text(temperature: float) -> None:
    target, net = oracle.of_eagle()
    parts = [eagle.drafter(net, target, Growth(width=3, top_k=3, scale=0.01)), drafters.load_one("lookup")]
    gate = EveryThird()
    mixed = replace(_mix.of(parts), gate=gate)
    rows = heads.run(target, mixed, PROMPTS[:1], 61, temperature, Priced(14, 4))
    assert [row.output for row in rows] == plainly(target, 61, temperature)
    assert sum(gate.seen) > 20
    assert set(gate.seen) <= {0, 1, 2, 3, 4}
    assert gate.seen.count(4) > 3, "the oracle is right to its full depth, and lookup is not always"


@pytest.mark.parametrize("node", [1e-9, 0.6])
def test_gains_count_from_the_tree_that_would_have_been_verified(node: float) -> None:
    """Where a node costs 0.6 rounds, half-believed copies would not have been verified, so that the four tokens of the
    network are its gain; where it costs nothing, copies that were right would have brought some of them."""
    target, net = oracle.of_eagle()
    parts = [eagle.drafter(net, target, Growth(width=3, top_k=3, scale=0.01)), drafters.load_one("lookup")]
    gate = EveryThird()
    gate.every = 1
    heads.run(target, replace(_mix.of(parts), gate=gate), PROMPTS[:1], 41, 0.0, Priced(14, 4, node=node))
    assert gate.seen[0] == 4
    assert (set(gate.seen[1:-1]) == {4}) == (node == 0.6)


def test_the_size_of_a_tree_is_its_widest_rows_or_the_mean_where_padding_costs_nothing() -> None:
    rows = [([1, 2, 3], [0, 0, 1], [0.0, -1.0, -2.0]), ([4], [0], [0.0])]
    assert _mix._size(rows, BUDGET) == 3
    assert _mix._size(rows, replace(BUDGET, price=Price((1.0, 2.0), summed=True))) == 2


@pytest.mark.parametrize(("rate", "price"), [(0.0, True), (1e6, True), (1e6, False)])
def test_what_a_gate_learns_of_a_round_depends_on_its_budget(rate: float, price: bool) -> None:
    """Nothing without a rate; no usual size without a price."""
    target, net = oracle.of_eagle()
    parts: list[Any] = [eagle.drafter(net, target, Growth(width=3, top_k=3, scale=0.01)), drafters.load_one("lookup")]
    mixed, budget = _mix.of(parts), Priced(14, 4, rate=rate)
    if not price:
        budget.choose = lambda rows: replace(Priced.choose(budget, rows), price=None)  # type: ignore[method-assign]
    heads.run(target, mixed, PROMPTS[:1], 41, 1.0, budget)
    greedy, sampled = mixed.gate.gains
    assert not greedy.tokens
    assert bool(sampled.tokens) == (rate > 0)
    assert bool(sampled.sizes) == (rate > 0 and price)


@pytest.mark.parametrize(("tokens", "timed"), [(4, False), (30, True)])
def test_a_draft_that_reads_text_first_is_not_timed(tokens: int, timed: bool) -> None:
    """In four tokens the networks draft once at most, and read the prompt first."""
    target, net = oracle.of_eagle()
    parts: list[Any] = [eagle.drafter(net, target, Growth(width=3, top_k=3, scale=0.01)), drafters.load_one("lookup")]
    mixed = _mix.of(parts)
    heads.run(target, mixed, PROMPTS[2:], tokens, 1.0, FixedBudget(14, 4))
    assert bool(mixed.gate.seconds.points) == timed


class Counted(Gate):
    """Counts the rounds in which networks drafted."""

    drafted = 0

    def allows(self, rows: Rows, chances: Sequence[float], size: float, budget: Budget) -> bool:
        yes = super().allows(rows, chances, size, budget)
        self.drafted += yes
        return yes


def test_a_mix_stops_using_a_useless_drafter() -> None:
    target, net = oracle.of_eagle()
    parts: list[Any] = [eagle.drafter(net, target, Growth(width=3, top_k=3, scale=0.01)), drafters.load_one("lookup")]
    gate = Counted()
    mixed = replace(_mix.of(parts), gate=gate)
    row = heads.run(target, mixed, PROMPTS[:1], 90, 1.0, Priced(14, 4))[0]
    assert [row.output] == plainly(target, 90, 1.0)
    assert 1 <= gate.drafted < 8, "at a million tokens a second no network is worth its time"
