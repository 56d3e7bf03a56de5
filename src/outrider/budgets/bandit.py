"""Tree shapes as the arms of a bandit (Choi et al. 2025, section 4.2 and appendix A.4).

Each round plays a shape (N1, ..., Ng). It costs one pass of the target and gamma draft steps, and commits N tokens, the
target's own included. In passes of the target, with lambda = T_draft / T_target, a token costs

    paper:  (1 + lambda gamma) * mean of 1/N
    exact:  (T_target(n)/T_target(1) + lambda gamma) / mean of N            T_target(n): a pass over its n nodes

The reward is minus that cost. The paper averages the first over rounds; the second is the time of a token in the long
run. UCB1 plays every arm once, then the arm with the highest mean reward + explore * sqrt(2 ln t / n_k). An exact
reward lies between -cost and -cost/(gamma + 1), and its `explore` is in units of that range. Costs are measured in the
rounds themselves. Choices depend on past rounds only, so a bandit may be used under every rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.types import Budget, Rows
from ..params import InputError
from .budgeter import Report
from .shapes import Play, Shape, check_shapes, nodes, part_of, shape_of

ARMS: tuple[Shape, ...] = ((3, 3, 2, 1), (3, 2, 2, 1, 1), (2, 2, 2, 1, 1, 1))
RECENT, OUTLIER = 0.1, 4.0  # weight of a round in a mean of seconds, and how many times the mean it counts at most


@dataclass
class Arm:
    """A shape: the discounted sums of its rounds, and the mean seconds of its drafts and passes."""

    play: Play
    plays: float = 0.0
    tokens: float = 0.0  # sum of N
    shares: float = 0.0  # sum of 1/N
    rounds: int = 0  # the first one warms up and is not timed
    draft: float = 0.0
    verify: float = 0.0

    def time(self, draft: float, verify: float) -> None:
        """Add the seconds of a round; one that was disturbed moves a mean by a bounded step."""
        self.rounds += 1
        if self.rounds == 2:
            self.draft, self.verify = draft, verify
        elif self.rounds > 2:
            self.draft += RECENT * (min(draft, OUTLIER * self.draft) - self.draft)
            self.verify += RECENT * (min(verify, OUTLIER * self.verify) - self.verify)


@dataclass
class BanditBudget:
    """Chooses a shape each round, or a drafter and its shape. One instance serves a target and its drafters.

    `scope`: rewards are forgotten where a request begins ("request", the paper's mode; in a batch, where all rows
    begin), or kept ("shared"). `discount` below 1 gives old rounds less weight (discounted UCB). Costs are kept in
    either case, by the number of rows. The first two rounds draft nothing and measure the plain pass.
    """

    arms: tuple[Play, ...] = ARMS
    explore: float = 0.3
    reward: str = "exact"  # or paper
    scope: str = "shared"  # or request
    discount: float = 1.0
    played: dict[int, dict[Play, Arm]] = field(default_factory=dict)  # by the number of rows; (): plain decoding
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
        """The budget of the next round. A shape deeper than the rest of the text is cut."""
        arms, remaining = self._arms(len(rows)), max(rows.remaining) - 1
        if self.scope == "request" and not any(rows.serial):
            for arm in arms.values():
                arm.plays = arm.tokens = arm.shares = 0.0
        self.last = None
        if remaining < 1 or arms[()].rounds < 2:
            return Budget(1, 0)
        self.last = self._best([arms[play] for play in self.arms], arms[()].verify).play
        shape = shape_of(self.last)[:remaining]
        return Budget(nodes(shape), len(shape), shape=shape or None, part=part_of(self.last))

    def _arms(self, rows: int) -> dict[Play, Arm]:
        return self.played.setdefault(rows, {play: Arm(play) for play in ((), *self.arms)})

    def _best(self, arms: Sequence[Arm], plain: float) -> Arm:
        for arm in arms:
            if arm.plays == 0 or arm.rounds < 2:
                return arm
        t = max(1.0, sum(arm.plays for arm in arms))

        def bound(arm: Arm) -> float:
            width = math.sqrt(2 * math.log(t) / arm.plays)
            if self.reward == "exact":
                width *= self._cost(arm, plain) * (1 - 1 / (len(shape_of(arm.play)) + 1))
            return self._mean(arm, plain) + self.explore * width

        return max(arms, key=bound)

    def learn(self, report: Report) -> None:
        """Add what a round cost and gave; nothing where its shape was cut."""
        arms, play = self._arms(report.rows), self.last or ()
        if report.depth < len(shape_of(play)):
            return
        arms[play].time(report.draft_seconds, report.verify_seconds)
        if self.last is None:
            return
        drafting = report.rows if report.drafting is None else max(1, report.drafting)
        given = 1 + sum(report.accepted) / drafting
        for arm in arms.values():
            mine = float(arm.play == play)
            arm.plays = self.discount * arm.plays + mine
            arm.tokens = self.discount * arm.tokens + mine * given
            arm.shares = self.discount * arm.shares + mine / given

    def _mean(self, arm: Arm, plain: float) -> float:
        """The arm's mean reward, at the present estimate of its cost."""
        gain = arm.shares / arm.plays if self.reward == "paper" else arm.plays / arm.tokens
        return -self._cost(arm, plain) * gain

    def _cost(self, arm: Arm, plain: float) -> float:
        """Cost of a round in plain passes, which take `plain` seconds."""
        return (arm.draft + (plain if self.reward == "paper" else arm.verify)) / plain

    def means(self, rows: int = 1) -> dict[Play, tuple[float, float]]:
        """(plays, mean reward) of the arms that were played and timed."""
        arms = self._arms(rows)
        known = [arms[play] for play in self.arms if arms[play].plays and arms[play].rounds > 1]
        return {arm.play: (arm.plays, self._mean(arm, arms[()].verify)) for arm in known}
