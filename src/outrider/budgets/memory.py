"""What the adaptive budget has learned, kept between runs: a small file in the user's cache directory.

One file for each model, drafter, rule, precision and machine, with costs, acceptance, the scale of each drafter's
confidences and what a mix has learned of its parts. All of these are dataclasses, whose fields are kept; other
attributes belong to one run. A file of another FORMAT, or one that was damaged or edited (its checksum differs), is
ignored. Under `coupled` no text depends on the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from .. import kept, machine
from ..schema import from_dict, to_dict
from .adaptive import AdaptiveBudget

EVERY = 20.0  # seconds between two writes, at least
FORMAT = 11


def file_of(device: str, *about: str) -> Path:
    """The file for a model, a drafter and what else costs depend on, on this machine's device with these threads."""
    here = machine.device(device), machine.processor(), str(os.cpu_count()), str(machine.threads())
    return kept.folder("budgets") / f"{_digest([*about, *here])[:32]}.json"


@dataclass
class Memory:
    """The file of one budget and of what its drafter learns."""

    file: Path
    budget: AdaptiveBudget
    learners: Sequence[Any] = ()  # of the drafter (`Drafter.learners`)
    at: float = -math.inf  # when it was last written

    @property
    def parts(self) -> list[Any]:
        return [self.budget.cost, self.budget.acceptance, *self.learners]

    def recall(self) -> bool:
        """Take over what the file holds; False where there is none, or none that is valid."""
        state = kept.read(self.file)
        saved = state.get("parts", [])
        if state.get("format") != FORMAT or state.get("sha256") != _digest(saved):
            return False
        try:
            learned = [(part, from_dict(type(part), values)) for part, values in zip(self.parts, saved, strict=True)]
        except (TypeError, ValueError):  # of another version of the program
            return False
        for part, new in learned:
            vars(part).update(vars(new))
        return True

    def keep(self) -> None:
        """Write what there is now, unless that was done a moment ago. A folder that cannot be written is no error."""
        now = monotonic()
        if self.budget.measuring or now < self.at + EVERY:
            return
        self.at = now
        saved = [to_dict(part) for part in self.parts]
        with suppress(OSError):
            kept.write(self.file, {"format": FORMAT, "sha256": _digest(saved), "parts": saved})


def _digest(value: Any) -> str:
    """The SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
