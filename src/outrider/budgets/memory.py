"""What the adaptive budget has learnt, kept between runs: a small file in the user's cache directory.

One file for each model, drafter, rule, precision and machine. It holds what passes and drafts cost, how often each
depth was accepted, the scale of each drafter's confidences, and what a mix has learnt of its parts. Under `coupled` no
text depends on it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from .. import kept, machine
from .adaptive import LEARN, SUMMED, AdaptiveBudget
from .calibration import BOUNDS, Fit, Learner
from .curve import LONGEST, Curve, measured
from .record import Usual

EVERY = 20.0  # seconds between two writes at least
FORMAT = 3
CURVES = "verify", "draft", "size"  # one for each number of batch rows
GREEDY, SAMPLED = "greedy", "sampled"  # texts


def file_of(device: str, *about: str) -> Path:
    """The file for a model, a drafter and whatever else tells two cases apart, on this machine's device with these
    threads."""
    here = machine.device(device), machine.processor(), str(os.cpu_count()), str(machine.threads())
    text = "\n".join((*about, *here))
    return kept.folder("budgets") / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@dataclass
class Memory:
    """The file of one budget and of its drafter's fits."""

    file: Path
    budget: AdaptiveBudget
    fits: Sequence[Fit] = ()
    learners: Sequence[Learner] = ()  # of the drafter, where it is a mix
    rounds: int = 0  # of the budget when it was last written
    at: float = field(default_factory=monotonic)

    def recall(self) -> bool:
        """Take over what the file holds; False where there is none, or none that can be read."""
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
            if found["format"] != FORMAT or len(found["scales"]) != len(self.fits):
                return False
            curves = {name: {int(b): measured(p) for b, p in found[name].items()} for name in CURVES}
            step = measured(found["step"])
            usual = {kind == SAMPLED: _usual(found["usual"][kind]) for kind in found["usual"]}
            rest, scales = float(found["rest"]), [float(s) for s in found["scales"]]
            alike = len({len(one.asked) for one in usual.values()}) == 1
            if not alike or not 0 <= rest < LONGEST or not all(BOUNDS[0] <= s <= BOUNDS[1] for s in scales):
                return False
            for learner, state in zip(self.learners, found["learners"], strict=True):
                copy.deepcopy(learner).restore(state)  # all can be read, or nothing is
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return False
        budget = self.budget
        budget.verify = {b: Curve(points=p) for b, p in curves["verify"].items()}
        budget.draft = {b: Curve(prior_slope=0.5, mean=True, points=p) for b, p in curves["draft"].items()}
        budget.size = {b: Curve(prior_slope=1.0, mean=True, points=p) for b, p in curves["size"].items()}
        budget.step = Curve(prior_slope=0.5, points=step)
        budget.rest, budget.usual = rest, usual
        budget.sampled, one = next(iter(usual.items()))
        budget.hits, budget.asked = [*one.hits], [*one.asked]
        known = budget.draft.keys() if SUMMED in budget.verify else budget.verify.keys() & budget.draft.keys()
        budget.seen = dict.fromkeys(known, LEARN)
        for fit, scale in zip(self.fits, scales, strict=True):
            fit.scale = scale
        for learner, state in zip(self.learners, found["learners"], strict=True):
            learner.restore(state)
        return True

    def keep(self) -> None:
        """Write what there is now, unless that was done a moment ago. A folder that cannot be written is no error."""
        now = monotonic()
        if self.budget.rounds < self.rounds + LEARN or (self.rounds and now - self.at < EVERY):
            return
        self.rounds, self.at = self.budget.rounds, now
        b = self.budget
        usual = {SAMPLED if sampled else GREEDY: one.faded() for sampled, one in b.usual.items()}
        found: dict[str, Any] = {
            "format": FORMAT,
            **{name: {str(rows): c.points for rows, c in getattr(b, name).items()} for name in CURVES},
            "step": b.step.points,
            "usual": {kind: {"hits": one.hits, "asked": one.asked} for kind, one in usual.items()},
            "rest": b.rest,
            "scales": [fit.scale for fit in self.fits],
            "learners": [learner.state() for learner in self.learners],
        }
        try:
            kept.write(self.file, found)
        except OSError:
            self.at = float("inf")  # no further tries


def _usual(given: Mapping[str, Any]) -> Usual:
    """The shares of one kind of texts; ValueError, KeyError or TypeError where they are none."""
    made = Usual([float(x) for x in given["hits"]], [float(x) for x in given["asked"]])
    if not all(0 <= hits <= asked and asked > 0 for hits, asked in zip(made.hits, made.asked, strict=True)):
        raise ValueError("no shares")
    return made
