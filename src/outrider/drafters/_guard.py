"""A drafter that is switched off where it fails: losing drafts costs speed, never the text.

For those who serve many requests at once (`guarded(drafter)`). Once any of its calls has raised an exception, the
drafter proposes nothing more, in this batch and in all others, and `failure` says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.tree import root_only
from ..types import Budget, Drafter, Drafting, DraftTree, Round, Rows

logger = logging.getLogger(__name__)


@dataclass
class GuardedDrafter:
    """`failure` is what the inner drafter raised, None while it works."""

    inner: Drafter
    failure: Exception | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> GuardedDrafting:
        return GuardedDrafting(self, self.ask(lambda: self.inner.open(prompts, capacity)))

    def ask(self, call: Callable[[], Any]) -> Any:
        """What a call into the drafter gives; None where it fails, or has failed before."""
        if self.failure is not None:
            return None
        try:
            return call()
        except Exception as error:
            logger.warning("the drafter failed and is switched off (%s: %s)", type(error).__name__, error)
            self.failure = error
            return None


@dataclass
class GuardedDrafting:
    """A drafting whose exceptions end drafting, and not the text."""

    drafter: GuardedDrafter
    inner: Drafting | None

    def observe(self, round: Round) -> None:
        self._ask(lambda inner: inner.observe(round))

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        tree = self._ask(lambda inner: inner.propose(rows, budget))
        return root_only(rows.root) if tree is None else tree

    def select(self, index: Sequence[int]) -> None:
        self._ask(lambda inner: inner.select(index))

    def join(self, other: Drafting) -> None:
        assert isinstance(other, GuardedDrafting)
        self._ask(lambda inner: inner.join(other.inner))

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        if self.drafter.failure is not None:
            self.inner = None
        return None if self.inner is None else self.drafter.ask(lambda: call(self.inner))


def guarded(drafter: Drafter) -> GuardedDrafter:
    """The drafter, switched off for good at its first exception."""
    return GuardedDrafter(drafter)
