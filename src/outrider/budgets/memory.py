"""What the adaptive budget has learned, kept between runs: a small file in the user's cache directory.

One file for each model, drafter, rule, precision and machine, with costs, acceptance, the scale of each drafter's
confidences and what a mix has learned of its parts. All of these are dataclasses, whose fields are kept; other
attributes belong to one run. Under `coupled` no text depends on the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from .. import kept, machine
from ..schema import from_dict, to_dict
from .adaptive import LEARN, AdaptiveBudget

EVERY = 20.0  # seconds between two writes, at least
FORMAT = 6
LARGEST = 1e9  # nothing that is learned is larger, or below 0


def file_of(device: str, *about: str) -> Path:
    """The file for a model, a drafter and what else costs depend on, on this machine's device with these threads."""
    here = machine.device(device), machine.processor(), str(os.cpu_count()), str(machine.threads())
    text = "\n".join((*about, *here))
    return kept.folder("budgets") / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@dataclass
class Memory:
    """The file of one budget and of what its drafter learns."""

    file: Path
    budget: AdaptiveBudget
    learners: Sequence[Any] = ()  # of the drafter (`Drafter.learners`)
    rounds: int = 0  # of the budget when it was last written
    at: float = -math.inf  # when

    @property
    def parts(self) -> list[Any]:
        return [self.budget.cost, self.budget.acceptance, *self.learners]

    def recall(self) -> bool:
        """Take over what the file holds; False where there is none, or none that is valid."""
        try:
            text = self.file.read_text(encoding="utf-8")
            state = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_number)
            if state["format"] != FORMAT:
                return False
            pairs = zip(self.parts, state["parts"], strict=True)
            learned = [(part, from_dict(type(part), values)) for part, values in pairs]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False
        for part, new in learned:
            vars(part).update(vars(new))
        return True

    def keep(self) -> None:
        """Write what there is now, unless that was done a moment ago. A folder that cannot be written is no error."""
        now = monotonic()
        if self.budget.rounds < self.rounds + LEARN or now < self.at + EVERY:
            return
        self.rounds, self.at = self.budget.rounds, now
        try:
            kept.write(self.file, {"format": FORMAT, "parts": [to_dict(part) for part in self.parts]})
        except OSError:
            self.at = math.inf  # no further tries


def _number(text: str) -> float:
    """A number of a file; ValueError for one that nothing learns."""
    value = int(text) if text.isdigit() else float(text)
    if not 0 <= value < LARGEST:
        raise ValueError(text)
    return value
