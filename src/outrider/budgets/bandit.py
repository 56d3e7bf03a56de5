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
from dataclasses import dataclass, field

from ..core.types import Budget, Rows
from ..params import InputError
from .acceptance import Ratio
from .budgeter import Report, Shape, check_shape, nodes

Play = tuple[int, Shape]  # one of several drafters, counted from 0, and the shape of its trees
PLAIN: Play = (0, ())
ARMS: tuple[Play, ...] = ((0, (3, 3, 2, 1)), (0, (3, 2, 2, 1, 1)), (0, (2, 2, 2, 1, 1, 1)))
KEEP, OUTLIER = 0.9, 4.0  # of a mean of seconds, per round; times the mean that a disturbed round counts at most


@dataclass
class Arm:
    """A shape: what its rounds gave, and the mean seconds of its drafts and passes."""

    play: Play
    gain: Ratio = field(default_factory=Ratio)  # of N (reward exact) or 1/N (paper), over plays
    draft: Ratio = field(default_factory=Ratio)
    verify: Ratio = field(default_factory=Ratio)
    rounds: int = 0  # the first one warms up and is not timed

    @property
    def plays(self) -> float:
        return self.gain.bottom

    def time(self, draft: float, verify: float) -> None:
        """Add the seconds of a round."""
        self.rounds += 1
        if self.rounds > 1:
            for mean, seconds in ((self.draft, draft), (self.verify, verify)):
                mean.add(min(seconds, OUTLIER * mean.value()) if mean.bottom else seconds, keep=KEEP)


@dataclass
class BanditBudget:
    """Chooses a shape each round, or a drafter and its shape. One instance serves a target and its drafters.

    `scope`: rewards are forgotten where a request begins ("request", the paper's mode; in a batch, where all rows
    begin), or kept ("shared"). `discount` below 1 gives old rounds less weight (discounted UCB). Costs are kept in
    either case, by the number of rows. The first two rounds of each number of rows
    draft nothing; the second measures the plain pass.
    """

    arms: tuple[Play, ...] = ARMS
    explore: float = 0.3
    reward: str = "exact"  # or paper
    scope: str = "shared"  # or request
    discount: float = 1.0
    played: dict[int, dict[Play, Arm]] = field(default_factory=dict)  # by the number of rows
    last: Play | None = None  # the arm of this round; None: a measurement

    def __post_init__(self) -> None:
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise InputError("a bandit needs arms, each of them once")
        for part, shape in self.arms:
            check_shape(shape)
            if part < 0:
                raise InputError("drafters are counted from 0 here")
        if not 0 < self.discount <= 1 or not 0 <= self.explore < math.inf:
            raise InputError("discount must lie in (0, 1], and explore must be 0 or more")
        if self.reward not in ("paper", "exact") or self.scope not in ("request", "shared"):
            raise InputError("the reward is paper or exact, and the scope request or shared")

    def choose(self, rows: Rows) -> Budget:
        """The budget of the next round. A shape deeper than the rest of the text is cut."""
        arms, remaining = self._arms(len(rows)), max(rows.remaining) - 1
        if self.scope == "request" and not any(rows.serial):
            for arm in arms.values():
                arm.gain = Ratio()
        self.last = None
        if remaining < 1 or arms[PLAIN].rounds < 2:
            return Budget(1, 0)
        self.last = part, shape = self._best(arms)
        shape = shape[:remaining]
        return Budget(nodes(shape), len(shape), shape=shape or None, part=part)

    def _arms(self, rows: int) -> dict[Play, Arm]:
        return self.played.setdefault(rows, {play: Arm(play) for play in (PLAIN, *self.arms)})

    def _best(self, arms: dict[Play, Arm]) -> Play:
        for play in self.arms:
            if not arms[play].plays or arms[play].rounds < 2:
                return play
        rounds, plain = sum(arms[play].plays for play in self.arms), arms[PLAIN].verify.value()

        def bound(play: Play) -> float:
            width = math.sqrt(2 * math.log(max(1.0, rounds)) / arms[play].plays)
            if self.reward == "exact":
                width *= self._cost(arms[play], plain) * (1 - 1 / (len(play[1]) + 1))
            return self._mean(arms[play], plain) + self.explore * width

        return max(self.arms, key=bound)

    def learn(self, report: Report) -> None:
        """Add what a round cost and gave; nothing where its shape was cut."""
        arms, play = self._arms(report.rows), self.last or PLAIN
        if report.depth < len(play[1]):
            return
        arms[play].time(report.draft_seconds, report.verify_seconds)
        if self.last is None:
            return
        drafting = report.rows if report.drafting is None else max(1, report.drafting)
        tokens = 1 + sum(report.accepted) / drafting
        for arm in arms.values():
            mine = float(arm.play == play)
            arm.gain.add(mine * (tokens if self.reward == "exact" else 1 / tokens), mine, self.discount)

    def _mean(self, arm: Arm, plain: float) -> float:
        """The arm's mean reward, at the present estimate of its cost."""
        gain = arm.gain.value()
        return -self._cost(arm, plain) * (gain if self.reward == "paper" else 1 / gain)

    def _cost(self, arm: Arm, plain: float) -> float:
        """Cost of a round in plain passes, which take `plain` seconds."""
        return (arm.draft.value() + (plain if self.reward == "paper" else arm.verify.value())) / plain

    def means(self, rows: int = 1) -> dict[Play, tuple[float, float]]:
        """(plays, mean reward) of the arms that were played and timed."""
        arms = self._arms(rows)
        plain, known = arms[PLAIN].verify.value(), [a for a in arms.values() if a.plays and a.rounds > 1]
        return {arm.play: (arm.plays, self._mean(arm, plain)) for arm in known}
