"""What the adaptive budget has learned, kept between runs: a small file in the user's cache directory.

One file for each model, drafter, rule, precision and machine, with costs, acceptance, the scale of each drafter's
confidences and what a mix has learned of its parts. Debts are not kept. Under `coupled` no text depends on it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, runtime_checkable

from .. import kept, machine
from .adaptive import LEARN, AdaptiveBudget

EVERY = 20.0  # seconds between two writes, at least
FORMAT = 5


@runtime_checkable
class Learner(Protocol):
    """What learns from rounds and can hand that on to another run."""

    def state(self) -> Any:
        """As JSON."""

    def restore(self, state: Any) -> None:
        """Take it over; ValueError, KeyError, TypeError or AttributeError where it is none."""


def file_of(device: str, *about: str) -> Path:
    """The file for a model, a drafter and whatever else tells two cases apart, on this machine's device with these
    threads."""
    here = machine.device(device), machine.processor(), str(os.cpu_count()), str(machine.threads())
    text = "\n".join((*about, *here))
    return kept.folder("budgets") / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@dataclass
class Memory:
    """The file of one budget and of what its drafter learns."""

    file: Path
    budget: AdaptiveBudget
    learners: Sequence[Learner] = ()  # of the drafter
    rounds: int = 0  # of the budget when it was last written
    at: float = field(default_factory=monotonic)

    @property
    def parts(self) -> list[Learner]:
        return [self.budget.cost, self.budget.acceptance, *self.learners]

    def recall(self) -> bool:
        """Take over what the file holds; False where there is none, or none that can be read."""
        try:
            state = json.loads(self.file.read_text(encoding="utf-8"))
            if state["format"] != FORMAT:
                return False
            pairs = list(zip(self.parts, state["parts"], strict=True))
            for part, of_part in pairs:
                copy.deepcopy(part).restore(of_part)  # all can be read, or nothing is
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return False
        for part, of_part in pairs:
            part.restore(of_part)
        self.budget.seen = dict.fromkeys(self.budget.cost.draft, LEARN)
        return True

    def keep(self) -> None:
        """Write what there is now, unless that was done a moment ago. A folder that cannot be written is no error."""
        now = monotonic()
        if self.budget.rounds < self.rounds + LEARN or (self.rounds and now - self.at < EVERY):
            return
        self.rounds, self.at = self.budget.rounds, now
        try:
            kept.write(self.file, {"format": FORMAT, "parts": [part.state() for part in self.parts]})
        except OSError:
            self.at = float("inf")  # no further tries
