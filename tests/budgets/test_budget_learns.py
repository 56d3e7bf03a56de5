"""The automatic budget on machines of known cost: after twenty rounds what it chooses is near the best fixed depth.

No clock: times come from a table, with a tenth of noise from a seeded generator, and acceptance from known chances. A
choice is judged not by what it happened to yield but by what it yields on average: E(D) tokens for t(D) passes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from operator import mul

import pytest

from outrider.budgets.adaptive import AdaptiveBudget
from outrider.budgets.budgeter import Report
from outrider.core.noise import GumbelNoise
from outrider.core.types import Rows
from outrider.params import Sampling

LEARNT, ROUNDS, SEEDS = 20, 200, 8
ENOUGH = 0.9  # of the tokens per second of the best fixed depth


@dataclass(frozen=True)
class Machine:
    """What a round costs, in plain passes of one row."""

    node: float  # every further node of a pass
    step: float  # every depth of a draft

    def parts(self, depth: int, b: int) -> tuple[float, float, float]:
        """The draft, the pass and the rest of a round in which b rows draft chains of this depth."""
        return self.step * depth, 1 + self.node * (b * (1 + depth) - 1), 0.02


MACHINES = {
    "nodes a fifth, steps cheap": Machine(0.2, 0.01),
    "nodes a fifth, steps dear": Machine(0.2, 0.25),
    "nodes a hundredth, steps cheap": Machine(0.01, 0.01),
    "nodes a hundredth, steps dear": Machine(0.01, 0.25),
}
ACCEPTANCE = {  # [d]: the chance that the token at depth d + 1 is right where those before it are
    "never": [0.0] * 8,
    "rarely": [0.2] * 8,
    "half": [0.5] * 8,
    "mostly": [0.75] * 8,
    "nearly always": [0.95] * 8,
    "falling": [0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.0, 0.0],
    "rising": [0.4, 0.8, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95],  # a copy: found or not found
    "two": [0.9, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
}


@lru_cache
def rows(b: int, new: bool) -> Rows:
    return Rows(
        (0,) * b, (0,) * b, (0,) * b, (int(not new),) * b, (Sampling(),) * b, "coupled", (1000,) * b, GumbelNoise(8)
    )


def worth(machine: Machine, acceptance: list[float], depth: int, b: int) -> tuple[float, float]:
    """Tokens and time of a round of this depth, on average."""
    return b * (1 + sum(accumulate(acceptance[:depth], mul))), sum(machine.parts(depth, b))


def best(machine: Machine, acceptance: list[float], b: int) -> tuple[float, int]:
    """Tokens per pass of the best fixed depth, and that depth."""
    pairs = [(worth(machine, acceptance, depth, b), depth) for depth in range(AdaptiveBudget().depth + 1)]
    return max((tokens / seconds, depth) for (tokens, seconds), depth in pairs)


def chosen(machine: Machine, acceptance: list[float], b: int, seed: int, noise: float = 0.1) -> list[int]:
    """The depths that a fresh budget chooses in a text's rounds."""
    budget, dice, depths = AdaptiveBudget(), random.Random(seed), []
    for i in range(ROUNDS):
        wanted = budget.choose(rows(b, i == 0))
        depth = min(wanted.depth, wanted.nodes - 1)
        accepted = []
        for _ in range(b):
            n = 0
            while n < depth and dice.random() < acceptance[n]:
                n += 1
            accepted.append(n)
        draft, verify, rest = (part * (1 + noise * dice.gauss(0, 1)) for part in machine.parts(depth, b))
        hits = [sum(n > d for n in accepted) for d in range(depth)]
        budget.learn(Report(b, depth, depth + 1, draft, verify, rest, hits))
        depths.append(depth)
    return depths


def share(machine: Machine, acceptance: list[float], b: int) -> float:
    """Tokens per pass of what is chosen once it has learnt, over the best fixed depth's; all seeds together."""
    pairs = [
        worth(machine, acceptance, depth, b)
        for seed in range(SEEDS)
        for depth in chosen(machine, acceptance, b, seed)[LEARNT:]
    ]
    return sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs) / best(machine, acceptance, b)[0]


@pytest.mark.parametrize(("machine", "acceptance", "b"), list(product(MACHINES, ACCEPTANCE, (1, 8))))
def test_after_twenty_rounds_it_is_near_the_best_fixed_depth(machine: str, acceptance: str, b: int) -> None:
    result = share(MACHINES[machine], ACCEPTANCE[acceptance], b)
    assert result >= ENOUGH, f"{result:.3f} of {best(MACHINES[machine], ACCEPTANCE[acceptance], b)}"


@pytest.mark.parametrize("machine", MACHINES)
def test_no_fixed_depth_is_near_the_best_for_every_acceptance(machine: str) -> None:
    """So the bar cannot be held without learning: neither by no draft, nor by a short or a long one."""
    for depth in range(AdaptiveBudget().depth + 1):
        shares = []
        for acceptance in ACCEPTANCE.values():
            tokens, seconds = worth(MACHINES[machine], acceptance, depth, 1)
            shares.append(tokens / seconds / best(MACHINES[machine], acceptance, 1)[0])
        assert min(shares) < ENOUGH
