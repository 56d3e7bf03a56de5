"""Rounds looked at without a clock: what a drafter proposed, what the target thought of it, what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.core.protocols import Drafting, Round
from outrider.core.types import Budget, DraftTree, Rows
from outrider.engine import Engine, Request, generate
from outrider.params import Sampling

Note = Callable[[Round], None]


@dataclass(frozen=True)
class Watched:
    """A drafter beside which every finished round is noted (not the prompts' chunks)."""

    inner: Any
    note: Note

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.inner.taps)

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> WatchedDrafting:
        return WatchedDrafting(self.inner.open(prompts, capacity), self.note)


@dataclass
class WatchedDrafting:
    """A drafting whose rounds, but not its prompts, are noted."""

    inner: Any
    note: Note

    def observe(self, round: Round) -> None:
        if round.tree.ancestors is not None:
            self.note(round)
        self.inner.observe(round)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        tree: DraftTree = self.inner.propose(rows, budget)
        return tree

    def select(self, index: Sequence[int]) -> None:
        self.inner.select(index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, WatchedDrafting)
        self.inner.join(other.inner)


def watch(
    engine: Engine, prompts: Sequence[Sequence[int]], limit: int, temperature: float, note: Callable[[int, Round], None]
) -> None:
    """Decode prompts one by one; `note` is told which prompt, and the round."""
    for i, ids in enumerate(prompts):
        seen = replace(engine, drafter=Watched(engine.drafter, lambda round, i=i: note(i, round)))  # type: ignore[misc]
        for _ in generate(seen, [Request(list(ids), i, limit, Sampling(temperature))], 1):
            pass
