"""Choi et al. 2025, section 4.2: the bandit's equations, held against the bandit in rounds that are made up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from math import isclose, log, sqrt

from outrider.budgets.bandit import BanditBudget
from outrider.budgets.budgeter import Report, Shape, nodes
from outrider.core.noise import GumbelNoise
from outrider.core.types import Rows
from outrider.params import Sampling

from ..evidence import Evidence, finding
from ..figures import Check, true

TEST = "pytest tests/budgets/test_bandit.py"
PASS, STEP, ROUNDS = 0.010, 0.001, 60  # seconds of a pass of the target, and of a draft step
TOKENS = {(3, 3, 2, 1): (3, 4, 2, 3), (3, 2, 2, 1, 1): (4, 4), (2, 2, 2, 1, 1, 1): (2, 1, 2, 2)}  # of a round, by shape


@dataclass(frozen=True)
class Played:
    """The shape and tokens of each round, the mean rewards at last, and how many choices were the equation's."""

    rounds: list[tuple[Shape, int]]
    means: dict[Shape, float]
    right: int

    def of(self, shape: Shape) -> list[int]:
        return [tokens for played, tokens in self.rounds if played == shape]


def cost(shape: Shape) -> float:
    """1 + lambda gamma: seconds of a round in passes of the target."""
    return 1 + STEP / PASS * len(shape)


def arms_of(bandit: BanditBudget) -> dict[Shape, tuple[float, float]]:
    """(plays, mean reward) by shape: one drafter, so an arm is its shape."""
    return {shape: mean for (_, shape), mean in bandit.means().items()}


def play() -> Played:
    bandit = BanditBudget(tuple((0, shape) for shape in TOKENS), explore=0.3, reward="paper")
    rows = Rows((0,), (5,), (1,), (0,), (Sampling(),), "coupled", (99,), GumbelNoise(11))
    for _ in range(2):  # the plain pass is measured
        bandit.choose(rows)
        bandit.learn(Report(1, 0, 1, 0.0, PASS, 0.0, []))
    for shape in TOKENS:
        bandit.played[1][0, shape].rounds = 1  # warm
    given, rounds, right = {shape: cycle(tokens) for shape, tokens in TOKENS.items()}, [], 0
    for t in range(ROUNDS):
        arms = arms_of(bandit)
        bound = {shape: mean + 0.3 * sqrt(2 * log(t) / n) for shape, (n, mean) in arms.items()} if t else {}
        missing = [shape for shape in TOKENS if shape not in bound]
        shape = bandit.choose(rows).shape or ()
        right += shape == (missing or [max(bound, key=lambda s: bound[s])])[0]
        tokens = next(given[shape])
        rounds.append((shape, tokens))
        accepted = [int(d < tokens - 1) for d in range(len(shape))]
        bandit.learn(Report(1, len(shape), nodes(shape), STEP * len(shape), PASS, 0.0, accepted))
    return Played(rounds, {shape: mean for shape, (_, mean) in arms_of(bandit).items()}, right)


@finding("Ma-eq1", TEST)
def upper_bound(e: Evidence) -> list[Check]:
    words = f"choices that are the equation's over {len(TOKENS)} arms, computed now"
    right = play().right
    return [true(f"{words}: {right} of {ROUNDS}", right == ROUNDS)]


@finding("Ma-eq2", TEST)
def reward(e: Evidence) -> list[Check]:
    played, right = play(), 0
    for shape, mean in played.means.items():
        rewards = [-cost(shape) / tokens for tokens in played.of(shape)]
        right += isclose(mean, sum(rewards) / len(rewards), rel_tol=1e-6)
    return [true(f"mean rewards as by hand, computed now: {right} of {len(TOKENS)} arms", right == len(TOKENS))]


@finding(
    "Ma-eq5", TEST,
    "The mean of 1/N is above the time of a token in the long run, and a pass over a tree costs more than one over a "
    "token; `reward=exact` knows both ([methods](methods.md)).",
)  # fmt: skip
def derivation(e: Evidence) -> list[Check]:
    played, ratios = play(), {}
    for shape, mean in played.means.items():
        tokens = played.of(shape)
        ratios[shape] = -mean / (cost(shape) * len(tokens) / sum(tokens))
    even = [ratios[shape] for shape in TOKENS if len(set(played.of(shape))) == 1]
    words = "minus the mean reward over the passes that a token took, computed now"
    return [
        true(f"{words}, where rounds are alike: {even[0]:.2f}", isclose(even[0], 1, rel_tol=1e-6)),
        true(f"{words}, over all arms at least 1: {min(ratios.values()):.2f} to {max(ratios.values()):.2f}",
             min(ratios.values()) > 1 - 1e-6),
    ]  # fmt: skip
