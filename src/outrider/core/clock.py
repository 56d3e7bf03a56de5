"""Seconds by part of a round.

A GPU runs asynchronously, so a part ends when the device has finished the work that the part launched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any


class Clock:
    """Seconds by part: `with clock("draft"): ...`, then `clock["draft"]`. A part may be entered several times, never
    within another one. `settle` waits for the device that the parts compute on."""

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        self.settle = settle
        self.began = perf_counter()
        self.parts: dict[str, float] = defaultdict(float)
        self.part, self.entered = "", 0.0

    def __call__(self, part: str) -> Clock:
        self.part = part
        return self

    def __enter__(self) -> None:
        self.entered = perf_counter()

    def __exit__(self, *failure: Any) -> None:
        self.settle()
        self.parts[self.part] += perf_counter() - self.entered

    def __getitem__(self, part: str) -> float:
        """Seconds spent in a part so far; 0 for one that was never entered."""
        return self.parts[part]

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return perf_counter() - self.began
