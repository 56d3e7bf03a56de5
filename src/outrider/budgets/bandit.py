"""Tree shapes as the arms of a bandit (Choi et al. 2025, section 4.2 and appendix A.4).

Each round plays a shape (N1, ..., Ng). It costs one pass of the target and gamma draft steps, and commits N tokens, the
target's own included. In passes of the target, with lambda = T_draft / T_target, a token costs

    paper:  (1 + lambda gamma) * mean of 1/N
    exact:  (T_target(n)/T_target(1) + lambda gamma) / mean of N            T_target(n): a pass over its n nodes

The reward is minus that cost. The paper averages the first over rounds; the second is the time of a token in the long
run. UCB1 plays every arm once, then the arm with the highest mean reward + w * sqrt(2 ln t / n_k): w = 1 in the paper;
beside the exact reward, EXPLORE times the reward's range, from -cost to -cost/(gamma + 1). Costs are
measured in the rounds themselves. Choices depend on past rounds only, so a bandit may be used under every rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..core.types import Budget, Rows
from ..params import InputError
from .acceptance import Ratio
from .budgeter import Report, Shape, check_shape, nodes
from .curve import Mean

Play = tuple[int, Shape]  # one of several drafters, counted from 0, and the shape of its trees
PLAIN: Play = (0, ())
EXPLORE = 0.3  # width of the confidence bound, in ranges of the exact reward


@dataclass
class Arm:
    """What the rounds of a shape gave, and the seconds of its drafts and passes."""

    gain: Ratio = field(default_factory=Ratio)  # of N (exact) or 1/N (paper), over plays
    draft: Mean = field(default_factory=Mean)
    verify: Mean = field(default_factory=Mean)
    warm: bool = False  # after its first round, which is not timed


@dataclass
class BanditBudget:
    """Chooses a shape each round, or a drafter and its shape. One instance serves a target and its drafters.

    `paper`: the paper's reward and bound, and rewards are forgotten where a request begins (in a batch, where all rows
    begin). Costs are kept, by batch size. The first two rounds of each batch size draft nothing; the second measures
    the plain pass.
    """

    arms: tuple[Play, ...]
    paper: bool = False
    played: dict[int, dict[Play, Arm]] = field(default_factory=dict)  # by batch size
    last: Play = PLAIN  # the arm of this round

    def __post_init__(self) -> None:
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise InputError("a bandit needs one or more arms, each of them once")
        for part, shape in self.arms:
            check_shape(shape)
            if part < 0:
                raise InputError("a bandit's drafters are counted from 0")

    def choose(self, rows: Rows) -> Budget:
        """The budget of the next round. A shape deeper than the rest of the text is cut."""
        arms, remaining = self._arms(len(rows)), max(rows.remaining) - 1
        if self.paper and not any(rows.serial):
            for arm in arms.values():
                arm.gain = Ratio()
        measured = remaining > 0 and arms[PLAIN].verify.count > 0
        self.last = part, shape = self._best(arms) if measured else PLAIN
        shape = shape[:remaining]
        return Budget(nodes(shape), len(shape), shape=shape or None, part=part)

    def _arms(self, rows: int) -> dict[Play, Arm]:
        return self.played.setdefault(rows, {play: Arm() for play in (PLAIN, *self.arms)})

    def _best(self, arms: dict[Play, Arm]) -> Play:
        rounds, plain = sum(arms[play].gain.bottom for play in self.arms), arms[PLAIN].verify.value

        def bound(play: Play) -> float:
            arm = arms[play]
            if not arm.gain.bottom or not arm.verify.count:
                return math.inf
            scale = 1.0 if self.paper else EXPLORE * self._cost(arm, plain) * (1 - 1 / (len(play[1]) + 1))
            return self._reward(arm, plain) + scale * math.sqrt(2 * math.log(rounds) / arm.gain.bottom)

        return max(self.arms, key=bound)

    def learn(self, report: Report) -> None:
        """Add what a round cost and gave; nothing where its shape was cut."""
        arm = self._arms(report.rows)[self.last]
        if report.depth < len(self.last[1]):
            return
        if arm.warm:
            arm.draft.add(report.draft_seconds)
            arm.verify.add(report.verify_seconds)
        arm.warm = True
        drafting = report.rows if report.drafting is None else max(1, report.drafting)
        tokens = 1 + sum(report.accepted) / drafting
        arm.gain.add(1 / tokens if self.paper else tokens, keep=1.0)

    def _reward(self, arm: Arm, plain: float) -> float:
        """The arm's mean reward, at the present estimate of its cost; a plain pass takes `plain` seconds."""
        gain = arm.gain.value()
        return -self._cost(arm, plain) * (gain if self.paper else 1 / gain)

    def _cost(self, arm: Arm, plain: float) -> float:
        """Cost of a round in plain passes."""
        return (arm.draft.value + (plain if self.paper else arm.verify.value)) / plain
