"""An exact table target, for tests of your own drafter: an n-gram distribution in float64, tiny and deterministic.

    target = TableTarget(vocab=11, order=2, seed=3)
    drafting = my_drafter.open(prompts, capacity)         # or decode with outrider.engine.generate

The distribution of the next token is a row of a random table, indexed by the last `order` tokens before it, so every
number can be looked up (`logits_after`) and a text decoded by hand (`plain`). Its session keeps tokens where a real one
keeps keys and values, at explicit slots; unwritten slots hold POISON, and a tree that reads them is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import numpy as np

from .core.noise import gumbels
from .core.protocols import Prefill, Session, Target, TargetOutput
from .core.tree import chain, check
from .core.types import Array, DraftTree
from .params import InputError

POISON = -1
LARGEST = 1 << 24  # table entries (128 MB)


@dataclass(frozen=True)
class TableTarget(Target):
    """A target whose next token depends on the last `order` tokens alone. `scale` sharpens the distribution (0:
    uniform).

    Features are the logits themselves and `head` is the identity, so a drafter that reads the target's features can
    use `TableTarget`; embeddings are one-hot.
    """

    vocab: int
    order: int = 2
    seed: int = 0
    context: int = 256
    scale: float = 1.5
    chunk: int = 8  # tokens of a prompt read at a time
    table: Array = field(init=False, repr=False, compare=False)  # float64 [v + 1, ..., v + 1, v]
    precision: str = field(default="float64", init=False)
    hidden: int = field(init=False)
    layers: int = field(default=1, init=False)
    exact: str = field(default="bits", init=False)  # type: ignore[assignment]
    lock: AbstractContextManager[Any] = field(default_factory=RLock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.vocab < 1 or self.order < 1 or self.context < 1 or self.chunk < 1:
            raise InputError("vocab, order, context and chunk of a table target must be at least 1")
        # Index `vocab` stands for "before the text's first token".
        shape = (*[self.vocab + 1] * self.order, self.vocab)
        if (self.vocab + 1) ** self.order * self.vocab > LARGEST:
            raise InputError(f"a table of {shape} is too large; choose a smaller vocab or order")
        object.__setattr__(self, "hidden", self.vocab)
        object.__setattr__(self, "table", self.scale * np.random.default_rng(self.seed).standard_normal(shape))

    @property
    def config_dict(self) -> dict[str, Any]:
        return {}

    def turn(self) -> AbstractContextManager[Any]:
        return self.lock

    def logits_after(self, text: Sequence[int]) -> Array:
        """The logits [v] of the token that follows a text."""
        last = [self.vocab] * self.order + list(text)
        row: Array = self.table[tuple(last[-self.order :])]
        return row

    def embed(self, tokens: Any) -> Array:
        """One-hot rows."""
        rows: Array = np.eye(self.vocab)[np.asarray(tokens)]
        return rows

    def head(self, features: Any) -> Any:
        """The features themselves."""
        return features

    def open(self, capacity: int) -> TableSession:
        """An empty session."""
        return TableSession(self, capacity)


@dataclass
class TableSession(Session):
    """One batch. Row b's committed tokens are in slots 0 .. lengths[b] - 1, the last tree's nodes after them."""

    target: TableTarget
    capacity: int
    lengths: list[int] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)

    def prefill(self, prompts: Sequence[Sequence[int]], taps: tuple[int, ...] = ()) -> Iterator[Prefill]:
        """Read and commit the prompts, `target.chunk` tokens at a time."""
        n, chunk = max(map(len, prompts)), self.target.chunk
        self.lengths, self.slots = [0] * len(prompts), [[POISON] * self.capacity for _ in prompts]
        for first in range(0, n, chunk):
            parts = [list(prompt[first : first + chunk]) for prompt in prompts]
            tree = chain(parts, matrix=False)
            output = self._output(tree, taps, 0)
            counts = [len(part) for part in parts]
            last = np.maximum(np.array(counts) - 1, 0)
            logits = output.logits[np.arange(len(parts)), last][:, None]
            self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
            end = first + chunk
            following = [prompt[end] if end < len(prompt) else -1 for prompt in prompts]
            ends = tuple(first < len(prompt) <= end for prompt in prompts)
            yield Prefill(tree, TargetOutput(logits, output.features), ends, following)

    def forward(self, tree: DraftTree, taps: tuple[int, ...] = (), since: int = 0, embeds: Any = None) -> TargetOutput:
        """Logits [b, n - since, v] of the nodes from `since` on, each by its own path. Commits nothing."""
        if since == 0:
            check(tree)
        return self._output(tree, taps, since, embeds)

    def _output(self, tree: DraftTree, taps: tuple[int, ...], since: int, embeds: Any = None) -> TargetOutput:
        b, n = tree.tokens.shape
        assert b == len(self.lengths), f"a tree of {b} rows for a session of {len(self.lengths)}"
        tokens = tree.tokens[:, since:] if embeds is None else np.asarray(embeds).argmax(-1)
        logits = np.zeros((b, n - since, self.target.vocab))
        for r in range(b):
            length, size, parents = self.lengths[r], int(tree.size[r]), tree.parents[r].tolist()
            slots = self.slots[r]
            slots += [POISON] * (length + n - len(slots))
            for node in range(since, n):
                slots[length + node] = int(tokens[r, node - since]) if node < size else POISON
            for node in range(since, size):
                logits[r, node - since] = self.target.logits_after(self._before(slots, length, parents, node))
        return TargetOutput(logits, dict.fromkeys(taps, logits))

    def _before(self, slots: list[int], length: int, parents: list[int], node: int) -> list[int]:
        """The last `order` tokens up to a node, oldest first; fewer where the text has not begun. In a prompt's chunk
        each node's parent is the one before it."""
        text: list[int] = []
        while len(text) < self.target.order:
            text.append(slots[length + node])
            if node == 0:
                missing = self.target.order - len(text)
                text += slots[max(0, length - missing) : length][::-1]
                break
            node = parents[node]
        assert POISON not in text, "a node reads a slot that was never written"
        return text[::-1]

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit each row's path; the rest is forgotten."""
        for r, path in enumerate(paths):
            nodes = self.slots[r][self.lengths[r] :]
            assert max(path) < len(nodes), "keep: a node that the last pass did not hold"
            moved = [nodes[node] for node in path]
            assert POISON not in moved, "keep: a node that the last pass did not hold"
            self.slots[r][self.lengths[r] : self.lengths[r] + len(path)] = moved
        self._set([length + len(path) for length, path in zip(self.lengths, paths, strict=True)])

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` tokens of every row."""
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)), "rewinding goes back"
        self._set(list(lengths))

    def wipe(self, rows: Sequence[int]) -> None:
        pass  # nothing is computed from what a row held

    def select(self, index: Sequence[int]) -> None:
        """Row i := old row index[i]; repeats fork."""
        self.slots, self.lengths = [list(self.slots[i]) for i in index], [self.lengths[i] for i in index]

    def join(self, other: Session) -> None:
        """Append the rows of another session of the same target."""
        assert isinstance(other, TableSession)
        assert other.target == self.target, "only sessions of one target join"
        self.slots += other.slots
        self.lengths = self.lengths + other.lengths

    def _set(self, lengths: list[int]) -> None:
        self.lengths = lengths
        for slots, length in zip(self.slots, lengths, strict=True):
            slots[length:] = [POISON] * (len(slots) - length)


def plain(target: TableTarget, prompt: Sequence[int], limit: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """Plain decoding by looking the table up: what the `coupled` rule must write, whatever was drafted."""
    text, ids = list(prompt), np.arange(target.vocab)
    while len(text) - len(prompt) < limit and len(text) < target.context:
        scores = target.logits_after(text)
        if temperature > 0:
            scores = scores + np.float32(temperature) * gumbels([seed], [len(text)], ids)[0]
        text.append(int(scores.argmax()))
    return text[len(prompt) :]
