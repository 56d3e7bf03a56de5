"""A clock for the parts of a round, so that the code that is timed reads as if it were not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Clock:
    """Seconds by part: `with clock("draft"): ...`, then `clock["draft"]`; a part may be entered several times."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.parts: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = perf_counter()
        yield
        self.parts[part] += perf_counter() - began

    def __getitem__(self, part: str) -> float:
        """Seconds spent in a part so far; 0 for one that was never entered."""
        return self.parts[part]

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return perf_counter() - self.began
