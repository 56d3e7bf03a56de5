"""The bandit over tree shapes: its choices by hand, its rewards, what it forgets, and what it refuses."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from outrider.budgets.bandit import EXPLORE, PLAIN, BanditBudget, Play
from outrider.budgets.budgeter import Report, nodes
from outrider.core.noise import GumbelNoise
from outrider.core.types import Rows
from outrider.params import InputError, Sampling

A, B, C = (3, 3, 2, 1), (3, 2, 2, 1, 1), (2, 2, 2, 1, 1, 1)  # the paper's
NONE: tuple[int, ...] = ()


@lru_cache
def rows(serial: int = 0, b: int = 1) -> Rows:
    samplings = (Sampling(),) * b
    return Rows((0,) * b, (5,) * b, (1,) * b, (serial,) * b, samplings, "coupled", (99,) * b, GumbelNoise(11))


def report(shape: tuple[int, ...], tokens: int, b: int = 1, verify: float = 0.010, step: float = 0.001) -> Report:
    """A round of b rows that all commit `tokens`."""
    accepted = [b if d < tokens - 1 else 0 for d in range(len(shape))]
    return Report(b, len(shape), nodes(shape), step * len(shape), verify, 0.0, accepted)


def ready(verify: float = 0.010, b: int = 1, **options: Any) -> BanditBudget:
    """A bandit over shapes that has measured the target's pass, and whose arms are warm."""
    arms = options.pop("arms", (A, B, C))
    bandit = BanditBudget(tuple((0, arm) for arm in arms), **options)
    for t in range(2):
        assert bandit.choose(rows(t, b)).nodes == 1
        bandit.learn(report((), 1, b, verify))
    for play in bandit.arms:
        bandit.played[b][play].warm = True
    return bandit


def rewards(bandit: BanditBudget, b: int = 1) -> dict[Play, tuple[float, float]]:
    """(plays, mean reward) of the arms that were played and timed."""
    arms = bandit._arms(b)
    known = {play: arms[play] for play in bandit.arms if arms[play].gain.bottom and arms[play].verify.count}
    return {p: (arm.gain.bottom, bandit._reward(arm, arms[PLAIN].verify.value)) for p, arm in known.items()}


def test_the_papers_arms() -> None:
    assert [nodes(shape) - 1 for shape in (A, B, C)] == [48, 45, 38]
    assert nodes(NONE) == 1
    budget = ready().choose(rows())
    assert (budget.nodes, budget.depth, budget.shape) == (49, 4, (3, 3, 2, 1))
    assert ready(arms=((),)).choose(rows()).shape is None


def test_rewards() -> None:
    """Choi et al., equation 2: r = -(1/N + lambda gamma/N), averaged; and the time of a token, with the pass's cost."""
    means = {}
    for paper in (True, False):
        bandit = ready(0.008, arms=((), A), paper=paper)
        for shape, tokens, seconds in ((A, 4, 0.024), (A, 1, 0.024)):
            bandit.last = 0, shape
            bandit.learn(report(shape, tokens, verify=seconds))
        means[paper] = {shape: mean for (_, shape), (_, mean) in rewards(bandit).items()}
        assert [plays for plays, _ in rewards(bandit).values()] == [2, 2], "the first plain rounds count"
    drafting = 4 * 0.001 / 0.008
    assert means[True] == pytest.approx({NONE: -1.0, A: -(1 + drafting) * (1 / 4 + 1 / 1) / 2})
    assert means[False] == pytest.approx({NONE: -1.0, A: -2 * (3 + drafting) / 5})


@pytest.mark.parametrize("paper", [True, False])
def test_ucb_by_hand(paper: bool) -> None:
    """Every arm once; then the highest mean + w sqrt(2 ln t / n): w = 1 as in the paper, or EXPLORE of the range."""
    bandit = ready(paper=paper)
    given = {A: [3, 3, 2, 3], B: [4, 4, 5, 4, 4, 3, 5], C: [2, 1, 2, 2]}
    tokens: dict[tuple[int, ...], list[int]] = {shape: [] for shape in (A, B, C)}
    turns = {shape: iter(tokens * 9) for shape, tokens in given.items()}

    def score(shape: tuple[int, ...], t: int) -> float:
        mine, cost = tokens[shape], 1 + len(shape) * 0.1
        reward = -cost * (sum(1 / n for n in mine) / len(mine) if paper else len(mine) / sum(mine))
        w = 1.0 if paper else EXPLORE * (cost - cost / (len(shape) + 1))
        return reward + w * math.sqrt(2 * math.log(t) / len(mine))

    for t in range(24):
        shape = bandit.choose(rows(t)).shape
        assert shape is not None
        missing = [s for s in tokens if not tokens[s]]
        assert shape == (missing[0] if missing else max(tokens, key=lambda s: score(s, t)))
        tokens[shape].append(next(turns[shape]))
        bandit.learn(report(shape, tokens[shape][-1]))
    assert max(tokens, key=lambda s: len(tokens[s])) == B


def played(bandit: BanditBudget, gains: dict[Any, list[int]], rounds: int, seed: int, first: int = 0) -> list[Any]:
    dice, chosen = random.Random(seed), []
    for t in range(rounds):
        shape = bandit.choose(rows(first + t)).shape or ()
        bandit.learn(report(shape, dice.choice(gains[shape])))
        chosen.append(shape)
    return chosen


@pytest.mark.parametrize("paper", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_the_best_arm_wins_and_regret_grows_slowly(seed: int, paper: bool) -> None:
    gains = {A: [2, 3, 4], B: [3, 4, 5], C: [1, 2, 3], (): [1]}
    bandit = ready(arms=((), A, B, C), paper=paper)
    chosen = played(bandit, gains, 800, seed)
    assert chosen[-200:].count(B) > 150
    cost = {s: (1 + 0.1 * len(s)) * sum(1 / n for n in gains[s]) / len(gains[s]) for s in gains}
    lost = [sum(cost[s] for s in chosen[:n]) - n * min(cost.values()) for n in (200, 800)]  # regret
    assert 0 <= lost[0] <= lost[1] < 3 * lost[0]  # four times as many rounds


def test_exact_rewards_find_the_faster_arm_where_the_mean_of_shares_does_not() -> None:
    """1 or 3 tokens for 1.4 passes: 0.7 passes a token, though 1.4 * (1 + 1/3) / 2 is nearly as dear as no draft."""
    gains = {(1, 1): [1, 3], (): [1]}
    for paper, expected in ((False, (1, 1)), (True, ())):
        bandit = ready(arms=((), (1, 1)), paper=paper)
        dice, chosen = random.Random(3), []
        for t in range(600):
            shape = bandit.choose(rows(t)).shape or ()
            slow = 0.0135 if shape else 0.010
            step = 0.0030 if paper else 0.0003
            bandit.learn(report(shape, dice.choice(gains[shape]), verify=slow, step=step))
            chosen.append(shape)
        assert chosen[-300:].count(expected) > 200


def test_a_bad_or_cold_first_play_is_forgiven() -> None:
    """The best arm first gives nothing, and its first round is slow: it comes back all the same."""
    bandit = BanditBudget(arms=((0, A), (0, B)))
    for t in range(2):
        bandit.choose(rows(t))
        bandit.learn(report((), 1))
    dice, chosen, seen = random.Random(1), [], set()
    for t in range(500):
        shape = bandit.choose(rows(t)).shape or ()
        n = {A: 2, B: 1 if chosen.count(B) < 2 else dice.choice([4, 5])}[shape]
        slow = 1.0 if shape in seen else 30.0
        bandit.learn(report(shape, n, verify=0.02 * slow, step=0.001 * slow))
        seen.add(shape)
        chosen.append(shape)
    assert chosen[-100:].count(B) > 80
    arm = bandit.played[1][0, B]
    assert (arm.draft.value, arm.verify.value) == pytest.approx((0.005, 0.02)), "the cold round is not timed"


def test_requests() -> None:
    """In the paper's scope a new request begins anew; what a pass costs is kept."""
    for paper, kept in ((True, 1), (False, 4)):
        bandit = ready(paper=paper)
        played(bandit, {s: [3] for s in (A, B, C)}, 3, 0, first=1)
        bandit.choose(rows(0, b=1))
        bandit.learn(report(bandit.last[1], 3))
        assert sum(bandit.played[1][play].gain.bottom for play in bandit.arms) == kept
        assert bandit.played[1][PLAIN].verify.value > 0


def test_a_shape_deeper_than_the_remaining_text_is_cut_and_not_learnt_from() -> None:
    bandit = ready(arms=(A, (2, 1), ()))
    short = replace(rows(), remaining=(3,))
    for _ in range(6):
        budget = bandit.choose(short)
        assert (budget.shape, budget.depth, budget.nodes) == (A[:2], 2, nodes(A[:2]))
        bandit.learn(report(A[:2], 2))
    assert (0, A) not in rewards(bandit)
    assert bandit.choose(replace(rows(), remaining=(1,))).nodes == 1


def test_numbers_of_rows_have_arms_of_their_own() -> None:
    bandit = ready(b=2, arms=(A,), paper=True)
    bandit.choose(rows(b=2))
    bandit.learn(replace(report(A, 3, b=2), accepted=[2, 1, 0, 0]))  # three tokens, and two
    assert rewards(bandit, 2)[0, A][1] == pytest.approx(-1.4 / 2.5)
    assert rewards(bandit) == {}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"arms": ()}, "one or more arms"),
        ({"arms": ((0, A), (0, A))}, "each of them once"),
        ({"arms": ((0, A), (-1, A))}, "counted from 0"),
        ({"arms": ((0, (3, 0)),)}, "1 or more children"),
        ({"arms": ((0, (9, 9, 9, 9)),)}, "at most 256 nodes"),
    ],
)
def test_malformed(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        BanditBudget(**options)


def test_pairs_of_drafter_and_shape() -> None:
    """The same shape of two drafters are two arms: the one whose drafts are right more often is played."""
    bandit = BanditBudget(((0, NONE), (0, A), (1, A)))
    chosen = []
    for t in range(300):
        budget = bandit.choose(rows(t))
        assert budget.shape in (None, A)
        bandit.learn(report(budget.shape or (), {None: 1, A: 2 + 2 * budget.part}[budget.shape]))
        chosen.append(budget.part)
    assert chosen[100:].count(1) > 150
    assert set(rewards(bandit)) == {(0, NONE), (0, A), (1, A)}
