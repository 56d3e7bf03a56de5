"""Tree shapes as the arms of a bandit (Choi et al. 2025, section 3.3 and appendix A.4).

Each round plays a shape (N1, ..., Ng); after it, its reward says how cheap the round's tokens were. A round costs a
pass of the target and gamma passes of the drafter, and gives N tokens, the target's own counted, so N is never 0. In
passes of the target, with lambda = T_draft / T_target, a token costs

    paper:  (1 + lambda gamma) * mean of 1/N                                r = - that: the mean of the rewards
    exact:  (T_target(n)/T_target(1) + lambda gamma) / mean of N            T_target(n): a pass over the shape's n nodes

The first is what the paper averages, round by round; the second the time a token takes in the long run. UCB1 plays the
arm with the highest mean reward + explore * sqrt(2 ln t / n_k), every arm once first; an exact reward lies between
-cost and -cost/(gamma + 1), and its `explore` is in units of that range. Costs are measured here, in the rounds
themselves, and used as they are known now; only past rounds are looked at, so a bandit may be used under every rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.types import Budget, Rows
from ..params import InputError
from .budgeter import Report
from .curve import Curve
from .shapes import Play, Shape, check_shapes, nodes, part_of, shape_of

ARMS: tuple[Shape, ...] = ((3, 3, 2, 1), (3, 2, 2, 1, 1), (2, 2, 2, 1, 1, 1))


@dataclass
class Arm:
    """What an arm gave, in rounds that count less the longer they are ago."""

    play: Play
    plays: float = 0.0
    tokens: float = 0.0  # sum of N
    shares: float = 0.0  # sum of 1/N


@dataclass
class BanditBudget:
    """Chooses a shape each round, or a drafter and its shape. One instance serves a target and its drafters.

    `scope`: what was learnt is forgotten where a request begins ("request", the paper's), or kept ("shared"). In a
    batch a request begins where all rows do. `discount` below 1 forgets by and by, for texts whose nature changes
    (discounted UCB). What passes and drafts cost, by the number of rows, is the machine's and is kept in any case: two
    rounds without a draft measure the plain pass, and the first round of a shape warms up and measures nothing.
    """

    arms: tuple[Play, ...] = ARMS
    explore: float = 0.3
    reward: str = "exact"  # or paper
    scope: str = "shared"  # or request
    discount: float = 1.0
    played: dict[int, list[Arm]] = field(default_factory=dict)  # by the number of rows
    verify: dict[int, Curve] = field(default_factory=dict)  # rows -> seconds of a pass by nodes
    drafts: dict[tuple[int, Play], float] = field(default_factory=dict)  # (rows, arm) -> seconds, a running mean
    sizes: dict[tuple[int, Play], float] = field(default_factory=dict)  # (rows, arm) -> nodes there were, a mean
    warm: set[tuple[int, Play]] = field(default_factory=set)
    last: Play | None = None  # the arm of this round; None: a measurement

    def __post_init__(self) -> None:
        self.arms = tuple((part_of(a), shape_of(a)) if part_of(a) and shape_of(a) else shape_of(a) for a in self.arms)
        if any(part_of(arm) < 0 for arm in self.arms):
            raise InputError("drafters are counted from 0 here")
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise InputError("a bandit needs arms, each of them once")
        check_shapes(tuple(map(shape_of, self.arms)))
        if not 0 < self.discount <= 1 or not 0 <= self.explore < math.inf:
            raise InputError("discount must lie in (0, 1], and explore must be 0 or more")
        if self.reward not in ("paper", "exact") or self.scope not in ("request", "shared"):
            raise InputError("the reward is paper or exact, and the scope request or shared")

    def choose(self, rows: Rows) -> Budget:
        b, remaining = len(rows), max(rows.remaining) - 1
        if self.scope == "request" and not any(rows.serial):
            self.played.clear()
        self.last = None
        if remaining < 1 or b not in self.verify:
            return Budget(1, 0)
        self.last = self._best(b, self._arms(b)).play
        shape = shape_of(self.last)[:remaining]  # cut short it says nothing of itself: see `learn`
        return Budget(nodes(shape), len(shape), shape=shape or None, part=part_of(self.last))

    def _arms(self, rows: int) -> list[Arm]:
        return self.played.setdefault(rows, [Arm(play) for play in self.arms])

    def _best(self, rows: int, arms: Sequence[Arm]) -> Arm:
        for arm in arms:
            if arm.plays == 0 or not self._known(rows, arm.play):
                return arm
        t = max(1.0, sum(arm.plays for arm in arms))

        def bound(arm: Arm) -> float:
            width = math.sqrt(2 * math.log(t) / arm.plays)
            if self.reward == "exact":
                width *= self.cost(rows, arm.play) * (1 - 1 / (len(shape_of(arm.play)) + 1))
            return self.mean(rows, arm) + self.explore * width

        return max(arms, key=bound)

    def _known(self, rows: int, play: Play) -> bool:
        return not play or (rows, play) in self.drafts

    def learn(self, report: Report) -> None:
        b, play = report.rows, self.last
        done = play or ()
        if report.depth < len(shape_of(done)):
            return
        if (b, done) in self.warm:
            self.verify.setdefault(b, Curve()).learn(report.nodes, report.verify_seconds)
            if done:
                _average(self.drafts, (b, done), report.draft_seconds)
                _average(self.sizes, (b, done), float(report.nodes))
        self.warm.add((b, done))
        if play is None:
            return
        given = 1 + sum(report.accepted) / (b if report.drafting is None else max(1, report.drafting))
        for arm in self._arms(b):
            mine = float(arm.play == play)
            arm.plays = self.discount * arm.plays + mine
            arm.tokens = self.discount * arm.tokens + mine * given
            arm.shares = self.discount * arm.shares + mine / given

    def mean(self, rows: int, arm: Arm) -> float:
        """The arm's mean reward, at what its rounds cost by now."""
        gain = arm.shares / arm.plays if self.reward == "paper" else arm.plays / arm.tokens
        return -self.cost(rows, arm.play) * gain

    def cost(self, rows: int, play: Play) -> float:
        """What a round costs, in passes of the target over one node."""
        verify = self.verify[rows]
        one = verify(1)
        draft = self.drafts[rows, play] / one if play else 0.0  # lambda * gamma
        if self.reward == "paper" or not play:
            return draft + 1.0
        return draft + verify(round(self.sizes[rows, play])) / one

    def means(self, rows: int = 1) -> dict[Play, tuple[float, float]]:
        """(plays, mean reward) of the arms that were played and whose cost is known."""
        arms = [arm for arm in self._arms(rows) if arm.plays and self._known(rows, arm.play)]
        return {arm.play: (arm.plays, self.mean(rows, arm)) for arm in arms}


def _average(means: dict[tuple[int, Play], float], key: tuple[int, Play], seen: float) -> None:
    """A running mean that one disturbed round cannot carry off."""
    old = means.setdefault(key, seen)
    means[key] = old + 0.1 * (min(seen, 4 * old) - old)
