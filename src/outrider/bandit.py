"""Tree shapes as the arms of a bandit (Choi et al. 2025, section 3.3 and appendix A.4).

Each round plays a shape (N1, ..., Ng); after it, its reward says how cheap the round's tokens were. A round costs a
pass of the target and gamma passes of the drafter, and gives N tokens, the target's own counted, so N is never 0. In
passes of the target, with lambda = T_draft / T_target, a token costs

    paper:  1/N + lambda gamma/N                   r = - that
    exact:  (T_target(n)/T_target(1) + lambda gamma) / N        T_target(n): a pass over the n nodes of the shape

UCB1 plays the arm with the highest mean reward + explore * sqrt(2 ln t / n_k), every arm once first. All costs are
measured here, in the rounds themselves, and only past rounds are looked at, so the bandit may be used under every rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .budget import Curve, Report, nearest
from .types import Budget, InputError, Rows

Shape = tuple[int, ...]  # children of every node of a depth; (): do not speculate
MEASURE = 2
ARMS: tuple[Shape, ...] = ((3, 3, 2, 1), (3, 2, 2, 1, 1), (2, 2, 2, 1, 1, 1))


def nodes(shape: Shape) -> int:
    """Nodes of the tree, the root included."""
    count, layer = 1, 1
    for width in shape:
        layer *= width
        count += layer
    return count


def parse(text: str) -> tuple[Shape, ...]:
    """Arms as they are written: `3,3,2,1 2,2,1 none`."""
    found: list[Shape] = []
    for part in text.split():
        try:
            found.append(() if part == "none" else tuple(int(x) for x in part.replace("x", ",").split(",")))
        except ValueError:
            raise InputError(f"an arm is a shape such as 3,2,1, or none, not {part!r}") from None
    return tuple(found)


@dataclass
class Arm:
    shape: Shape
    plays: float = 0.0  # discounted
    total: float = 0.0  # of the rewards, discounted

    @property
    def mean(self) -> float:
        return self.total / self.plays


@dataclass
class BanditBudget:
    """Chooses a shape each round. One instance serves a target and a drafter.

    `scope`: what was learnt is forgotten where a request begins ("request", the paper's), or kept ("shared"). In a
    batch a request begins where all rows do. `discount` below 1 forgets by and by, for texts whose nature changes
    (discounted UCB). What passes cost is the machine's and is kept in any case: the first MEASURE rounds of a number of
    rows draft nothing and measure the target's pass.
    """

    arms: tuple[Shape, ...] = ARMS
    explore: float = 0.1
    reward: str = "exact"  # or paper
    scope: str = "shared"  # or request
    discount: float = 1.0
    played: list[Arm] = field(default_factory=list)
    verify: dict[int, Curve] = field(default_factory=dict)  # batch rows -> seconds of a pass by nodes
    drafts: dict[tuple[int, int], float] = field(default_factory=dict)  # (rows, gamma) -> seconds of drafting, a mean
    plain: dict[int, int] = field(default_factory=dict)  # batch rows -> rounds without a draft
    last: Shape | None = None  # the arm of this round; None: it measures

    def __post_init__(self) -> None:
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise InputError("a bandit needs arms, each of them once")
        for shape in self.arms:
            if any(width < 1 for width in shape) or nodes(shape) > 1024:
                raise InputError(f"an arm has 1 or more children at every depth and at most 1,024 nodes, not {shape}")
        if not 0 < self.discount <= 1 or not 0 <= self.explore < math.inf:
            raise InputError("discount must lie in (0, 1], and explore must be 0 or more")
        if self.reward not in ("paper", "exact") or self.scope not in ("request", "shared"):
            raise InputError("the reward is paper or exact, and the scope request or shared")
        self.reset()

    def reset(self) -> None:
        """Forget the rewards."""
        self.played = [Arm(shape) for shape in self.arms]

    def choose(self, rows: Rows) -> Budget:
        if self.scope == "request" and not any(rows.serial):
            self.reset()
        if self.plain.get(len(rows), 0) < MEASURE:
            self.last = None
            return Budget(1, 0)
        self.last = self._best().shape
        return Budget(nodes(self.last), len(self.last), shape=self.last or None)

    def _best(self) -> Arm:
        for arm in self.played:
            if arm.plays == 0:
                return arm
        t = sum(arm.plays for arm in self.played)
        return max(
            self.played, key=lambda arm: arm.mean + self.explore * math.sqrt(2 * math.log(max(t, 1)) / arm.plays)
        )

    def learn(self, report: Report) -> None:
        b, shape = report.rows, self.last
        self.verify.setdefault(b, Curve()).learn(report.nodes, report.verify_seconds)
        if report.depth == 0:
            self.plain[b] = self.plain.get(b, 0) + 1
        else:
            old = self.drafts.setdefault((b, report.depth), report.draft_seconds)
            self.drafts[b, report.depth] = old + 0.1 * (min(report.draft_seconds, 4 * old) - old)
        if shape is None or report.depth < len(shape):
            return  # a measurement, or cut short by the end of its text, which says nothing of the shape
        reward = -self.cost(b, len(shape), report.nodes) / (1 + sum(report.accepted) / b)
        for arm in self.played:
            arm.plays, arm.total = self.discount * arm.plays, self.discount * arm.total
            if arm.shape == shape:
                arm.plays, arm.total = arm.plays + 1, arm.total + reward

    def cost(self, rows: int, depth: int, count: int) -> float:
        """What a round costs, in passes of the target over one node."""
        verify = self.verify[rows]
        one = verify(1)
        draft = self.drafts[rows, depth] / one if depth else 0.0  # lambda * gamma
        return draft + (1.0 if self.reward == "paper" else verify(nearest(count)) / one)

    def means(self) -> dict[Shape, tuple[float, float]]:
        """(plays, mean reward) of the arms that were played."""
        return {arm.shape: (arm.plays, arm.mean) for arm in self.played if arm.plays}


def regret(costs: Sequence[float], fixed: Sequence[Sequence[float]]) -> float:
    """What the choices cost beyond the best fixed arm in hindsight: sums of costs, one list for every arm."""
    return sum(costs) - min(sum(arm) for arm in fixed)
