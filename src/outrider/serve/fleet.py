"""Several drafters in one batch, one per row; a failing drafter does not affect the text.

Requests choose their drafter, or none, and how much it may draft. Rows with the same choice share a drafting; the trees
of all choices are batched, so that the target verifies them in one pass. A drafter that raises an exception or proposes
a broken tree is disabled permanently, and its rows continue without drafts: under `coupled` their text is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..core.price import Price
from ..core.protocols import Drafter, Drafting, Round, TargetOutput
from ..core.tree import flaw, from_lists, root_only
from ..core.types import Budget, DraftTree, HostRow, Rows
from ..params import InputError


@dataclass(frozen=True)
class Choice:
    """A row's drafter ("": none), and its maximum nodes per round, the root included."""

    name: str
    nodes: int = 1 << 30

    @property
    def plain(self) -> bool:
        return not self.name or self.nodes < 2


@dataclass
class Fleet:
    """The loaded drafters, and those that have failed."""

    drafters: dict[str, Drafter]
    drafts: bool = True  # by default, with the first of them
    failed: dict[str, str] = field(default_factory=dict)  # name -> error message
    tell: Callable[[str, Exception], None] = lambda name, error: None

    @property
    def taps(self) -> tuple[int, ...]:
        """The union of their taps: rows of different drafters share the target's pass."""
        return tuple(sorted({tap for drafter in self.drafters.values() for tap in drafter.taps}))

    @property
    def default(self) -> str:
        """The drafter of a request that names none; "": it is decoded plainly."""
        return next(iter(self.drafters), "") if self.drafts else ""

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """An exception inside disables this drafter."""
        try:
            yield
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}"
            self.tell(name, error)


@dataclass(frozen=True)
class FleetDrafter(Drafter):
    """The fleet as the drafter of a new row with this choice."""

    fleet: Fleet
    choice: Choice

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.fleet.taps

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> FleetDrafting:
        made = FleetDrafting(self.fleet, [self.choice] * len(prompts))
        name = self.choice.name
        if not self.choice.plain and name not in self.fleet.failed:
            with self.fleet.guard(name):
                made.parts[self.choice] = self.fleet.drafters[name].open(prompts, capacity)
        return made


@dataclass
class FleetDrafting(Drafting):
    """The draftings of all choices in one batch."""

    fleet: Fleet
    owners: list[Choice]  # one per row
    parts: dict[Choice, Drafting] = field(default_factory=dict)  # by choice; rows in the batch's order
    trees: dict[Choice, DraftTree] = field(default_factory=dict)  # of this round
    last: Round | None = None  # the last round, for display

    @property
    def plain(self) -> list[bool]:
        """Rows that never draft."""
        return [choice not in self.parts or choice.name in self.fleet.failed for choice in self.owners]

    def expect(self, row: int, tokens: Sequence[int]) -> None:
        for choice, part, rows in self._working():
            if row in rows:
                with self.fleet.guard(choice.name):
                    part.expect(rows.index(row), tokens)

    def observe(self, round: Round) -> None:
        prompt = round.tree.ancestors is None
        self.last = None if prompt else round
        for choice, part, rows in self._working():
            with self.fleet.guard(choice.name):
                seen = round if len(rows) == len(self.owners) else take(round, rows)
                part.observe(seen if prompt else narrowed(seen, self.trees.get(choice)))
        self.trees = {}

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        self.trees = {}
        where: dict[Choice, list[int]] = {}
        others, width, drafted = float(len(rows)), 1, 0  # so far: tokens, nodes of the widest row, drafted nodes
        for choice, part, index in self._working():
            view = rows if len(index) == len(self.owners) else rows_of(rows, index)
            if max(view.remaining) < 2:
                continue
            with self.fleet.guard(choice.name):
                price = shared(budget.price, len(index), others - len(index), width, drafted)
                rate = budget.rate * len(rows) / len(index)  # the time is that of all rows
                nodes, shape = (choice.nodes, None) if choice.nodes < budget.nodes else (budget.nodes, budget.shape)
                own = replace(budget, nodes=nodes, shape=shape, price=price, rate=rate)
                tree = part.propose(view, own)
                if wrong := flaw(tree, view.root, view.gumbel.vocab):
                    raise InputError(f"it proposed a broken tree: {wrong}")
                self.trees[choice], where[choice] = tree, index
                width, drafted = max(width, tree.nodes), drafted + int(tree.size.sum()) - len(index)
                if budget.price is not None and tree.values is not None:
                    others += budget.price.trust * float(np.exp(tree.values[:, 1:]).sum())
        if len(self.trees) == 1 and len(next(iter(where.values()))) == len(self.owners):
            return next(iter(self.trees.values()))
        return side_by_side(rows.root, [(where[c], tree) for c, tree in self.trees.items()])

    def select(self, index: Sequence[int]) -> None:
        for choice, part, rows in self._working():
            chosen = [rows.index(i) for i in index if self.owners[i] == choice]
            if not chosen:
                del self.parts[choice]
            elif chosen != list(range(len(rows))):
                with self.fleet.guard(choice.name):
                    part.select(chosen)
        self.owners = [self.owners[i] for i in index]

    def join(self, other: Drafting) -> None:
        assert isinstance(other, FleetDrafting)
        for choice, part, _ in other._working():
            with self.fleet.guard(choice.name):
                if choice in self.parts:
                    self.parts[choice].join(part)
                else:
                    self.parts[choice] = part
        self.owners = self.owners + other.owners

    def _working(self) -> list[tuple[Choice, Drafting, list[int]]]:
        """The draftings whose drafter has not failed, with their rows."""
        self.parts = {choice: part for choice, part in self.parts.items() if choice.name not in self.fleet.failed}
        return [
            (choice, part, [i for i, owner in enumerate(self.owners) if owner == choice])
            for choice, part in self.parts.items()
        ]


def rows_of(rows: Rows, index: Sequence[int]) -> Rows:
    """Some of the rows."""

    def pick(values: tuple) -> tuple:
        return tuple(values[i] for i in index)

    return replace(
        rows, root=pick(rows.root), start=pick(rows.start), seeds=pick(rows.seeds), serial=pick(rows.serial),
        sampling=pick(rows.sampling), remaining=pick(rows.remaining),
    )  # fmt: skip


def take(round: Round, index: Sequence[int]) -> Round:
    """The part of a round that concerns some of its rows."""
    where, tree, output = list(index), round.tree, round.output

    def pick(x: Any) -> Any:
        return None if x is None else x[where]

    own = replace(
        tree, tokens=tree.tokens[where], parents=tree.parents[where], depths=tree.depths[where], size=tree.size[where],
        ancestors=pick(tree.ancestors), values=pick(tree.values), q=pick(tree.q),
    ).holding([tree.host[i] for i in where])  # fmt: skip
    return Round(
        rows_of(round.rows, index), own,
        TargetOutput(output.logits[where], {tap: seen[where] for tap, seen in output.features.items()}),
        [round.paths[i] for i in index], [round.next[i] for i in index], [round.tokens[i] for i in index],
    )  # fmt: skip


def narrowed(round: Round, tree: DraftTree | None) -> Round:
    """The round with a drafter's own nodes only; without a draft, the root alone."""
    if tree is round.tree:
        return round
    tree = root_only(round.rows.root) if tree is None else tree
    n, output = tree.nodes, round.output
    seen = TargetOutput(output.logits[:, :n], {tap: features[:, :n] for tap, features in output.features.items()})
    return replace(round, tree=tree, output=seen)


def shared(price: Price | None, rows: int, others: float, width: int, drafted: int = 0) -> Price | None:
    """The price of nodes for some rows of a batch, so that all drafters prune their trees by the same measure.

    The rest of the batch yields `others` tokens in any case. Where rows are padded to the widest, nodes up to `width`,
    the widest tree so far, cost nothing; where they are not, `drafted` nodes are already paid for.
    """
    if price is None:
        return None
    if price.summed:
        seconds = price.seconds[min(drafted, len(price.seconds) - 1) :]
    else:
        paid = min(width, len(price.seconds)) - 1
        seconds = tuple(price.seconds[max(i, paid)] for i in range(len(price.seconds)))
    # (rows + others + trust * gain) / seconds is highest where (rows + trust * rows / (rows + others) * gain) is.
    return Price(seconds, price.trust * rows / (rows + others), price.summed)


def side_by_side(roots: Sequence[int], trees: Sequence[tuple[Sequence[int], DraftTree]]) -> DraftTree:
    """Trees of some rows each as one batch; rows without a tree are their roots."""
    rows: list[HostRow] = [([root], [0], [0.0]) for root in roots]
    for index, tree in trees:
        for i, row in zip(index, tree.host, strict=True):
            rows[i] = row
    return from_lists(rows)
