"""The interface of budgets, and the one that never changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Protocol, runtime_checkable

from ..core.protocols import Drafting
from ..core.types import Budget, Rows
from ..params import InputError

Shape = tuple[int, ...]  # children of every node of a depth; (): do not draft
MOST = 256  # nodes of a tree, the root included: what a cache holds beyond the context


@dataclass(frozen=True)
class Report:
    """What one round cost and gave: the budget's only input."""

    rows: int
    depth: int  # the depth requested; 0 for no draft
    nodes: int  # nodes of the widest row, root included
    draft_seconds: float
    verify_seconds: float
    rest_seconds: float
    accepted: Sequence[int]  # [d]: of the rows that may draft, those that accepted depth d + 1, to that depth
    promised: float = 0.0  # the sum of the drafted nodes' values in all rows: tokens that they should be worth
    drafting: int | None = None  # rows that may draft; None: all of them
    total: int = 0  # nodes of all rows, where padding costs nothing; 0: it does

    @property
    def computed(self) -> int:
        """Nodes that the pass computed: padding is counted where it costs as much."""
        return self.total or self.rows * self.nodes


@runtime_checkable
class Budgeter(Protocol):
    """Decides before each round how much to draft, and learns from what the round cost and gave."""

    def choose(self, rows: Rows) -> Budget:
        """How much to draft for these rows in the round that begins. A row with one token left does not draft."""

    def learn(self, report: Report) -> None:
        """Add what that round cost and gave."""


def may_draft(rows: Rows, drafting: Drafting) -> Rows:
    """The rows as a budget sees them: those that never draft, as `drafting.plain` says, have one token left.
    (True: none of them drafts.)"""
    never = drafting.plain
    if isinstance(never, bool):
        return replace(rows, remaining=(1,) * len(rows)) if never else rows
    pairs = zip(rows.remaining, never, strict=True)
    return replace(rows, remaining=tuple(min(left, 1) if plain else left for left, plain in pairs))


def nodes(shape: Shape) -> int:
    """Nodes of a tree of this shape, the root included."""
    return 1 + sum(accumulate(shape, mul))


def check_shape(shape: Shape) -> None:
    """Raise InputError where a tree of this shape could not be drafted."""
    if any(width < 1 for width in shape) or nodes(shape) > MOST:
        raise InputError(f"a shape has 1 or more children at every depth and at most {MOST} nodes, not {shape}")


@dataclass
class FixedBudget:
    """Always the same budget: for comparisons, and for texts under `rejection` that must not depend on the clock."""

    nodes: int = 16
    depth: int = 6
    shape: Shape | None = None

    def choose(self, rows: Rows) -> Budget:
        return Budget(self.nodes, self.depth, shape=self.shape)

    def learn(self, report: Report) -> None:
        del report
