"""Several drafters in one round: their trees are cut by one measure, over all rows."""

from __future__ import annotations

import itertools
import math
import signal
import threading
import time
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from small import tree_of

from outrider import drafters
from outrider.budgets.adaptive import AdaptiveBudget
from outrider.budgets.budgeter import FixedBudget
from outrider.core.noise import GumbelNoise
from outrider.core.price import Price
from outrider.core.protocols import Drafter
from outrider.core.tree import check, from_lists
from outrider.core.types import Budget, DraftTree, Rows
from outrider.engine import Engine, generate
from outrider.engine.request import Request
from outrider.params import InputError
from outrider.serve.fleet import Choice, Fleet, FleetDrafter, shared, side_by_side
from outrider.serve.start import elsewhere, start
from outrider.testing import TableTarget


def rate(price: Price, kept: int, values: list[list[float]], others: float, width: int) -> float:
    """Tokens per second of a round in which these rows keep `kept` nodes each, by its definition."""
    gain = sum(sum(row[1:kept]) for row in values)
    return (len(values) + others + price.trust * gain) / price.seconds[max(kept, width) - 1]


@pytest.mark.parametrize("seed", range(20))
def test_a_part_keeps_what_pays_for_the_whole_batch(seed: int) -> None:
    dice = np.random.default_rng(seed)
    seconds = tuple((1 + dice.random(8).cumsum()).tolist())
    price = Price(seconds, 0.8)
    values = [[1.0, *sorted(dice.random(7).tolist(), reverse=True)] for _ in range(3)]
    logs = np.log(values).tolist()
    for others, width in itertools.product([0.0, 2.5, 40.0], [1, 4, 8]):
        mine = shared(price, 3, others, width)
        assert mine is not None
        kept = mine.most(logs)[0]
        best = max(rate(price, m, values, others, width) for m in range(1, 9))
        assert rate(price, kept, values, others, width) == pytest.approx(best, rel=1e-5)
    assert shared(None, 3, 1.0, 1) is None


def test_trees_side_by_side_keep_their_values() -> None:
    """Rows 0 and 2 have trees of one drafter, row 3 of another, row 1 none."""
    first = from_lists([([9, 5, 6], [0, 0, 1], [0.0, -0.5, -1.0]), ([8, 7], [0, 0], [0.0, -0.2])])
    second = tree_of([[4, 3]], [[0, 0]])
    made = side_by_side([9, 2, 8, 4], [([0, 2], first), ([3], second)])
    check(made)
    assert made.tokens.tolist() == [[9, 5, 6], [2, 0, 0], [8, 7, 0], [4, 3, 0]]
    assert made.size.tolist() == [3, 1, 2, 2]
    none = -math.inf
    assert made.values is not None
    wanted = [[0.0, -0.5, -1.0], [0.0, none, none], [0.0, -0.2, none], [0.0, 0.0, none]]
    assert np.array_equal(made.values, np.array(wanted, np.float32))


@pytest.mark.parametrize(("name", "learns"), [("", False), ("lookup", True), ("broken", False)])
def test_the_budget_learns_from_rows_that_draft_alone(name: str, learns: bool) -> None:
    target, budget = TableTarget(12, order=1, seed=5), AdaptiveBudget()
    fleet = Fleet({"lookup": drafters.load("lookup")}, failed={"broken": "RuntimeError: broken"})
    engine = Engine(target, FleetDrafter(fleet, Choice(name)), budget, GumbelNoise(12))
    pieces = list(generate(engine, [Request([1, 2, 1, 2, 1], 1, 30), Request([3, 1, 3], 2, 30)]))
    assert sum(len(piece.tokens) for piece in pieces) == 60
    assert (budget.rounds > 0) == learns


class Broken:
    """Prompt lookup whose trees have a token too many."""

    taps = ()

    def open(self, prompts: Any, capacity: int) -> Any:
        inner = drafters.load("lookup").open(prompts, capacity)
        propose = inner.propose
        inner.propose = lambda rows, budget: (tree := propose(rows, budget)) and replace(tree, tokens=tree.tokens + 99)
        return inner


def test_a_broken_tree_is_its_drafters_alone() -> None:
    """Its drafter is disabled and its row goes on; the row beside it keeps its own drafter."""
    target = TableTarget(12, order=1, seed=5)
    fleet = Fleet({"lookup": drafters.load("lookup"), "broken": cast(Drafter, Broken())})
    texts: dict[str, list[int]] = {}
    for name in ("lookup", "broken", ""):
        engine = Engine(target, FleetDrafter(fleet, Choice(name)), FixedBudget(8, 4), GumbelNoise(12))
        pieces = list(generate(engine, [Request([1, 2, 1, 2, 1], 1, 30)]))
        texts[name] = [token for piece in pieces for token in piece.tokens]
    assert texts["lookup"] == texts["broken"] == texts[""]
    assert list(fleet.failed) == ["broken"]
    assert "broken tree" in fleet.failed["broken"]


@pytest.mark.parametrize(("nodes", "wanted"), [(1 << 30, (4, (1, 1, 1))), (4, (4, (1, 1, 1))), (3, (3, None))])
def test_a_request_drafts_no_more_than_it_asks_for(nodes: int, wanted: tuple[int, tuple[int, ...] | None]) -> None:
    """Also where the server's budget is a shape, which no drafter cuts."""
    target = TableTarget(12, order=1, seed=5)
    seen: list[Budget] = []

    class Noted:
        taps = ()

        def open(self, prompts: Any, capacity: int) -> Any:
            inner = drafters.load("lookup").open(prompts, capacity)
            propose = inner.propose

            def note(rows: Rows, budget: Budget) -> DraftTree:
                seen.append(budget)
                return propose(rows, budget)

            inner.propose = note
            return inner

    fleet = Fleet({"noted": cast(Drafter, Noted())})
    engine = Engine(target, FleetDrafter(fleet, Choice("noted", nodes)), FixedBudget(4, 3, (1, 1, 1)), GumbelNoise(12))
    list(generate(engine, [Request([1, 2, 1, 2, 1], 1, 30)]))
    assert {(budget.nodes, budget.shape) for budget in seen} == {wanted}


def test_loading_leaves_no_thread_behind() -> None:
    """The thread that decodes must be the only one with OpenMP workers, or these sleep between products."""
    loader = elsewhere(threading.current_thread)
    assert loader is not threading.current_thread()
    assert not loader.is_alive()
    with pytest.raises(InputError, match="no drafter 'nonsense'"):
        start("demo", ["nonsense"])


def test_an_interrupt_ends_the_loading_thread() -> None:
    """Or Python would end with a thread inside torch, which aborts the process."""
    seen: list[threading.Thread] = []

    def endless() -> None:
        seen.append(threading.current_thread())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        while True:
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        elsewhere(endless)
    assert not seen[0].is_alive()
