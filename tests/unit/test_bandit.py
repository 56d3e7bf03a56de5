"""The bandit over tree shapes: its choices by hand, its rewards, what it forgets, and what it refuses."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.bandit import ARMS, BanditBudget, nodes, parse, regret
from outrider.budget import Report
from outrider.noise import RaceNoise
from outrider.types import InputError, Rows, Sampling

A, B, C = ARMS


def rows(serial: int = 0, b: int = 1) -> Rows:
    zero = torch.zeros(b, dtype=torch.long)
    laws = (Sampling(),) * b
    return Rows(zero, zero + 5, (5,) * b, (1,) * b, (serial,) * b, laws, "coupled", (99,) * b, RaceNoise(11))


def report(shape: tuple[int, ...], tokens: int, b: int = 1, verify: float = 0.010, step: float = 0.001) -> Report:
    """A round of b rows that all commit `tokens`."""
    accepted = [b if d < tokens - 1 else 0 for d in range(len(shape))]
    return Report(b, len(shape), nodes(shape), step * len(shape), verify, 0.0, accepted, len(shape))


def ready(verify: float = 0.010, b: int = 1, **options: Any) -> BanditBudget:
    """A bandit that has measured the target's pass."""
    bandit = BanditBudget(**options)
    for t in range(2):
        assert bandit.choose(rows(t, b)).nodes == 1
        bandit.learn(report((), 1, b, verify))
    assert bandit.means() == {}
    return bandit


def test_the_papers_arms() -> None:
    assert [nodes(shape) - 1 for shape in ARMS] == [48, 45, 38]
    assert nodes(()) == 1
    budget = ready().choose(rows())
    assert (budget.nodes, budget.depth, budget.shape) == (49, 4, (3, 3, 2, 1))
    assert ready(arms=((),)).choose(rows()).shape is None


def test_rewards() -> None:
    """Choi et al., equation 2: r = -(1/N + lambda gamma/N); and with the pass's own cost."""
    bandit = ready(0.008, arms=((), A), reward="paper")
    assert bandit.choose(rows()).nodes == 1
    bandit.learn(report((), 1, verify=0.008))
    bandit.choose(rows(1))
    bandit.learn(report(A, 4, verify=0.024))
    assert bandit.means() == {(): (1.0, -1.0), A: (1.0, pytest.approx(-(1 / 4 + (0.001 / 0.008) * 4 / 4)))}
    exact = ready(0.008, arms=((), A), reward="exact")
    for shape, tokens, seconds in (((), 1, 0.008), (A, 4, 0.024)):
        exact.choose(rows(1))
        exact.learn(report(shape, tokens, verify=seconds))
    assert exact.means()[A][1] == pytest.approx(-(3 + 0.5) / 4)


def test_ucb_by_hand() -> None:
    """Every arm once; then the highest mean + explore * sqrt(2 ln t / n)."""
    bandit = ready(explore=0.3, reward="paper")
    given = {A: [3, 3, 2, 3], B: [4, 4, 5, 4, 4, 3, 5], C: [2, 1, 2, 2]}
    sums: dict[tuple[int, ...], list[float]] = {shape: [] for shape in ARMS}
    turns = {shape: iter(tokens * 9) for shape, tokens in given.items()}
    for t in range(24):
        shape = bandit.choose(rows(t)).shape
        assert shape is not None
        missing = [s for s in ARMS if not sums[s]]
        scores = {s: sum(r) / len(r) + 0.3 * math.sqrt(2 * math.log(t) / len(r)) for s, r in sums.items() if r}
        assert shape == (missing[0] if missing else max(scores, key=lambda s: scores[s]))
        n = next(turns[shape])
        bandit.learn(report(shape, n))
        sums[shape].append(-(1 + len(shape) * 0.1) / n)
    assert max(sums, key=lambda s: len(sums[s])) == B


def played(bandit: BanditBudget, law: dict[Any, list[int]], rounds: int, seed: int, first: int = 0) -> list[Any]:
    dice, chosen = random.Random(seed), []
    for t in range(rounds):
        shape = bandit.choose(rows(first + t)).shape or ()
        bandit.learn(report(shape, dice.choice(law[shape])))
        chosen.append(shape)
    return chosen


@pytest.mark.parametrize("seed", range(3))
def test_the_best_arm_is_found_and_regret_grows_slowly(seed: int) -> None:
    law = {A: [2, 3, 4], B: [3, 4, 5], C: [1, 2, 3], (): [1]}
    bandit = ready(arms=((), *ARMS))
    chosen = played(bandit, law, 400, seed)
    assert chosen[-200:].count(B) > 170
    cost = {shape: (1 + 0.1 * len(shape)) * sum(1 / n for n in law[shape]) / len(law[shape]) for shape in law}
    lost = [regret([cost[s] for s in chosen[:n]], [[cost[s]] * n for s in law]) for n in (100, 400)]
    assert 0 <= lost[0] <= lost[1] < 2 * lost[0] + 1
    assert lost[1] < 0.15 * 400 * cost[B]


def test_forgetting() -> None:
    """Where the text changes its nature, a discounted bandit changes its mind and a plain one hardly does."""
    before, after = {A: [5], B: [2], C: [2]}, {A: [1], B: [5], C: [2]}
    late = {}
    for discount in (1.0, 0.95):
        bandit = ready(discount=discount)
        played(bandit, before, 300, 1)
        late[discount] = played(bandit, after, 60, 2, first=300).count(B)
    assert late[0.95] > 30 > late[1.0]


def test_requests() -> None:
    """In the paper's scope a new request begins anew; what a pass costs is kept."""
    for scope, kept in (("request", 1), ("shared", 4)):
        bandit = ready(scope=scope)
        played(bandit, {s: [3] for s in ARMS}, 3, 0)
        bandit.choose(rows(0, b=1))
        bandit.learn(report(bandit.last or (), 3))
        assert sum(arm.plays for arm in bandit.played) == kept
        assert bandit.verify[1].points


def test_the_end_of_a_text_says_nothing_of_a_shape() -> None:
    bandit = ready(arms=(A,))
    bandit.choose(rows())
    bandit.learn(replace(report(A, 2), depth=2, accepted=[1, 0]))
    assert bandit.means() == {}


def test_batches_share_an_arm() -> None:
    bandit = ready(b=2, arms=(A,), reward="paper")
    bandit.choose(rows(b=2))
    bandit.learn(replace(report(A, 3, b=2), accepted=[2, 1, 0, 0]))  # three tokens, and two
    assert bandit.means()[A][1] == pytest.approx(-1.4 / 2.5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"arms": ()}, "needs arms"),
        ({"arms": (A, A)}, "each of them once"),
        ({"arms": ((3, 0),)}, "1 or more children"),
        ({"arms": ((9, 9, 9, 9),)}, "at most 1,024 nodes"),
        ({"discount": 0.0}, "discount"),
        ({"explore": -1.0}, "explore"),
        ({"reward": "best"}, "paper or exact"),
    ],
)
def test_malformed(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        BanditBudget(**options)


def test_arms_as_they_are_written() -> None:
    assert parse("3,3,2,1 2x2 none") == ((3, 3, 2, 1), (2, 2), ())
    with pytest.raises(InputError, match="not '3,b'"):
        parse("3,b")
