"""The budget on a simulated machine: known costs and acceptance in, the right choice out."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.budgets.adaptive import AdaptiveBudget, Curve, FixedBudget, Report, nearest
from outrider.core.noise import RaceNoise
from outrider.types import Budget, Rows, Sampling


def rows(b: int = 1, room: int = 100) -> Rows:
    zero = torch.zeros(b, dtype=torch.long)
    return Rows(zero, zero, (0,) * b, (0,) * b, (0,) * b, (Sampling(),) * b, "coupled", (room,) * b, RaceNoise(8))


def play(
    budget: AdaptiveBudget,
    alpha: float,
    rounds: int,
    *,
    node: float = 0.02,
    step: float = 0.05,
    seed: int = 0,
    b: int = 1,
) -> tuple[float, float]:
    """Run a simulated drafter of chains; tokens per unit of time, and the share of rounds that drafted.

    One pass costs 1 + node per extra node, a draft costs `step` per token; noise of 10 % on every measurement.
    """
    dice, time, tokens, drafts = random.Random(seed), 0.0, 0, 0
    for _ in range(rounds):
        wanted = budget.choose(rows(b))
        depth = min(wanted.depth, wanted.nodes - 1)
        accepted = []
        for _ in range(b):
            n = 0
            while n < depth and dice.random() < alpha:
                n += 1
            accepted.append(n)
        verify, draft = 1 + node * depth * b, step * depth
        time += verify + draft
        tokens += sum(accepted) + b
        drafts += depth > 0
        wobble = [1 + 0.1 * dice.gauss(0, 1) for _ in range(2)]
        budget.learn(
            Report(
                b, depth, depth + 1, draft * wobble[0], verify * wobble[1], 0.01,
                [sum(n >= d for n in accepted) for d in range(1, depth + 1)],
            )
        )  # fmt: skip
    return tokens / time / b, drafts / rounds


def test_a_hopeless_drafter_is_left_alone() -> None:
    """Once it has adapted, an always-wrong drafter costs less than 5 %."""
    budget = AdaptiveBudget()
    play(budget, 0.0, 150, node=0.05, step=0.3)
    rate, drafts = play(budget, 0.0, 600, node=0.05, step=0.3)
    assert rate > 0.95
    assert drafts < 0.03


@pytest.mark.parametrize("alpha", [0.6, 0.8, 0.9])
@pytest.mark.parametrize("b", [1, 4])
def test_a_good_drafter_is_used_to_the_depth_that_pays(alpha: float, b: int) -> None:
    budget = AdaptiveBudget()
    play(budget, alpha, 150, b=b)
    rate, _ = play(budget, alpha, 800, b=b)
    best = max((1 - alpha ** (g + 1)) / (1 - alpha) / (1 + (0.02 * b + 0.05) * g) for g in range(1, budget.depth + 1))
    assert rate > 0.9 * best


def test_a_drafter_that_becomes_good_is_found_again() -> None:
    budget = AdaptiveBudget()
    play(budget, 0.0, 300)
    play(budget, 0.9, 600)
    rate, drafts = play(budget, 0.9, 300)
    assert drafts > 0.9
    assert rate > 2


def test_no_room_no_draft() -> None:
    for room in (0, 1):
        assert AdaptiveBudget().choose(rows(room=room)) == Budget(1, 0)
    assert AdaptiveBudget().choose(rows(room=3)).depth == 2
    assert AdaptiveBudget(nodes=1).choose(rows()) == Budget(1, 0)


def test_the_first_rounds_measure_with_and_without_a_draft() -> None:
    budget = AdaptiveBudget()
    first = budget.choose(rows())
    assert first.nodes > 1
    budget.learn(Report(1, 4, 5, 0.1, 1.1, 0.0, [1, 0, 0, 0]))
    assert budget.choose(rows()) == Budget(1, 0)


def test_curve() -> None:
    curve = Curve(prior_slope=0.1)
    assert curve(5) == 0
    curve.learn(1, 10.0)
    assert curve(11) == pytest.approx(20)
    curve.learn(8, 24.0)
    assert curve(4) == pytest.approx(16)
    assert curve(16) == pytest.approx(40)
    curve.learn(9, 2400.0)  # an outlier moves the estimate of its power of two by a bounded step
    assert curve(8) == pytest.approx(25.2)
    assert curve.slope(2) == pytest.approx((curve(4) - curve(2)) / 2)
    curve.learn(8, 15.2)  # and back again, faster
    assert curve(8) == pytest.approx(21.2)
    falling = Curve()
    falling.learn(1, 10.0)
    falling.learn(8, 5.0)  # so the first was disturbed: a part never costs more than all
    assert falling(1) == falling(8) == pytest.approx(5)
    first = Curve()
    first.learn(4, 500.0)  # a recording
    first.learn(4, 7.0)
    assert first(4) == pytest.approx(7)


@pytest.mark.parametrize(("size", "power"), [(1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (11, 8), (12, 16), (33, 32)])
def test_nearest(size: int, power: int) -> None:
    assert nearest(size) == power


def test_fixed() -> None:
    budget = FixedBudget(12, 3, (2, 1, 1))
    assert budget.choose(rows()) == Budget(12, 3, shape=(2, 1, 1))
