"""An exact table target, for tests of your own drafter: an n-gram law in float64 on the CPU, tiny and deterministic.

    target = TableTarget(vocab=11, order=2, seed=3)
    drafting = my_drafter.open(prompts, capacity)         # or a whole run through outrider.engine.generate

The law of the next token is a row of a random table, found by the last `order` tokens before it, so every number can
be looked up (`logits_after`) and a text decoded by hand (`plain`). Its session keeps tokens where a real one keeps keys
and values, at explicit slots; slots that nobody wrote hold poison, and a tree that reads them is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from .core.noise import gumbels
from .core.padding import padded
from .core.protocols import Prefill, Session, TargetOutput
from .core.tree import chain_of, check
from .core.types import DraftTree
from .params import InputError

POISON = -1
LARGEST = 1 << 24  # table entries (128 MB)


@dataclass(frozen=True)
class TableTarget:
    """A target whose next token depends on the last `order` tokens alone. `scale` sharpens the law (0: uniform).

    Features are the logits themselves and `head` is the identity, so a drafter that reads the target's features finds
    what it needs in `TableTarget`; embeddings are one-hot.
    """

    vocab: int
    order: int = 2
    seed: int = 0
    context: int = 256
    scale: float = 1.5
    chunk: int = 8  # tokens of a prompt read at a time
    table: Tensor = field(init=False, repr=False, compare=False)  # float64 [v + 1, ..., v + 1, v]
    device: torch.device = field(default=torch.device("cpu"), init=False)
    dtype: torch.dtype = field(default=torch.float64, init=False)
    layers: int = field(default=1, init=False)
    exact: str = field(default="bits", init=False)
    recorded: bool = field(default=False, init=False)
    lock: AbstractContextManager[Any] = field(default_factory=RLock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.vocab < 1 or self.order < 1 or self.context < 1 or self.chunk < 1:
            raise InputError("vocab, order, context and chunk of a table target must be at least 1")
        # Index `vocab` stands for "before the text's first token".
        shape = (*[self.vocab + 1] * self.order, self.vocab)
        if (self.vocab + 1) ** self.order * self.vocab > LARGEST:
            raise InputError(f"a table of {shape} is too large; choose a smaller vocab or order")
        source = torch.Generator().manual_seed(self.seed)
        object.__setattr__(self, "table", self.scale * torch.randn(shape, generator=source, dtype=torch.float64))

    @property
    def hidden(self) -> int:
        return self.vocab

    @property
    def config_dict(self) -> dict[str, Any]:
        return {}

    def logits_after(self, text: Sequence[int]) -> Float64[Tensor, " v"]:
        """The logits of the token that follows a text."""
        last = [self.vocab] * self.order + list(text)
        return self.table[tuple(last[-self.order :])]

    def embed(self, tokens: Int[Tensor, "*s"]) -> Float64[Tensor, "*s v"]:
        """One-hot rows."""
        return torch.nn.functional.one_hot(tokens, self.vocab).double()

    def head(self, features: Float[Tensor, "*s v"]) -> Float[Tensor, "*s v"]:
        """The features themselves."""
        return features

    def open(self, capacity: int) -> TableSession:
        """An empty session."""
        return TableSession(self, capacity)


@dataclass
class TableSession:
    """One batch. Row b's committed tokens are in slots 0 .. lengths[b] - 1, the last tree's nodes behind them."""

    target: TableTarget
    capacity: int
    lengths: Int[Tensor, " b"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    slots: Int[Tensor, "b c"] = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))

    @property
    def longest(self) -> int:
        return int(self.lengths.max()) if len(self.lengths) else 0

    def prefill(self, prompts: Sequence[Sequence[int]], taps: tuple[int, ...] = ()) -> Iterator[Prefill]:
        """Read and commit the prompts, `target.chunk` tokens at a time."""
        b, n, chunk = len(prompts), max(map(len, prompts)), self.target.chunk
        tokens = padded(prompts)
        sizes = torch.tensor([len(p) for p in prompts])
        self.lengths = torch.zeros(b, dtype=torch.long)
        self.slots = torch.full((b, self.capacity), POISON)
        for first in range(0, n, chunk):
            end = min(first + chunk, n)
            count = (sizes - first).clamp(0, end - first)
            tree = chain_of(tokens[:, first:end], count, matrix=False)
            output = self._output(tree, taps, 0)
            at = (count - 1).clamp(min=0)[:, None, None].expand(b, 1, self.target.vocab)
            self.lengths = self.lengths + count
            last = tuple(first < len(p) <= end for p in prompts)
            following = torch.tensor([p[end] if end < len(p) else -1 for p in prompts])
            yield Prefill(tree, TargetOutput(output.logits.gather(1, at), output.features), count, last, following)

    def forward(
        self, tree: DraftTree, taps: tuple[int, ...] = (), since: int = 0, embeds: Tensor | None = None
    ) -> TargetOutput:
        """Logits [b, n - since, v] of the nodes from `since` on, each by its own path. Commits nothing."""
        if since == 0:
            check(tree)
        return self._output(tree, taps, since, embeds)

    def _output(self, tree: DraftTree, taps: tuple[int, ...], since: int, embeds: Tensor | None = None) -> TargetOutput:
        b, n = tree.tokens.shape
        assert b == len(self.lengths), f"a tree of {b} rows for a session of {len(self.lengths)}"
        self._reserve(self.longest + n)
        tokens = tree.tokens[:, since:] if embeds is None else embeds.argmax(-1)
        index = torch.arange(n)
        real = index < tree.size[:, None]
        here = self.lengths[:, None] + index
        self.slots.scatter_(1, here[:, since:], torch.where(real[:, since:], tokens, POISON))
        logits = self.target.table[self._before(tree.parents, here, real)][:, since:]
        return TargetOutput(logits, dict.fromkeys(taps, logits))

    def _before(self, parents: Int[Tensor, "b n"], here: Int[Tensor, "b n"], real: Tensor) -> tuple[Tensor, ...]:
        """The last `order` tokens up to every node, oldest first; `vocab` where the text has not begun."""
        found, node, place = [], torch.arange(parents.shape[1]).expand_as(parents), here
        for _ in range(self.target.order):
            token = torch.where(place < 0, self.target.vocab, self.slots.gather(1, place.clamp(min=0)))
            assert not bool(((token == POISON) & real).any()), "a node reads a slot that was never written"
            found.append(token.masked_fill(~real, self.target.vocab))
            # The root's predecessor is the last committed token; a committed token's is the one before it.
            up = parents.gather(1, node.clamp(min=0))
            inside = node > 0
            place = torch.where(inside, self.lengths[:, None] + up, place - 1)
            node = torch.where(inside, up, -1)
        return tuple(found[::-1])

    def keep(self, path: Int[Tensor, "b k"], count: Int[Tensor, " b"]) -> None:
        """Commit `path[:, :count]`; what lay behind is forgotten."""
        step = torch.arange(path.shape[1])
        valid = step < count[:, None]
        self._reserve(self.longest + path.shape[1])
        source = self.lengths[:, None] + torch.where(valid, path, step)
        moved = self.slots.gather(1, source)
        assert not bool(((moved == POISON) & valid).any()), "keep: a node that the last pass did not hold"
        self.slots.scatter_(1, self.lengths[:, None] + step, moved)
        self._set(self.lengths + count)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` tokens of every row."""
        new = torch.tensor(list(lengths))
        assert bool(((new >= 0) & (new <= self.lengths)).all()), "rewinding goes back"
        self._set(new)

    def wipe(self, rows: Sequence[int]) -> None:
        pass  # nothing is computed from what a row held

    def select(self, index: Sequence[int]) -> None:
        """Row i := old row index[i]; repeats fork."""
        rows = torch.tensor(list(index), dtype=torch.long)
        self.slots, self.lengths = self.slots[rows], self.lengths[rows]

    def join(self, other: Session) -> None:
        """Append the rows of another session of the same target."""
        assert isinstance(other, TableSession)
        assert other.target == self.target, "only sessions of one target join"
        widest = max(self.slots.shape[1], other.slots.shape[1])
        self._reserve(widest)
        other._reserve(widest)
        self.slots = torch.cat([self.slots, other.slots])
        self.lengths = torch.cat([self.lengths, other.lengths])

    def _set(self, lengths: Int[Tensor, " b"]) -> None:
        self.lengths = lengths
        self.slots[torch.arange(self.slots.shape[1]) >= lengths[:, None]] = POISON

    def _reserve(self, needed: int) -> None:
        more = needed - self.slots.shape[1]
        if more > 0:
            self.slots = torch.nn.functional.pad(self.slots, (0, more), value=POISON)


def plain(target: TableTarget, prompt: Sequence[int], limit: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """Plain decoding by looking the table up: what the `coupled` rule must write, whatever was drafted."""
    text, ids = list(prompt), torch.arange(target.vocab)
    while len(text) - len(prompt) < limit and len(text) < target.context:
        scores = target.logits_after(text)
        if temperature > 0:
            scores = scores + temperature * gumbels([seed], [len(text)], ids)[0]
        text.append(int(scores.argmax()))
    return text[len(prompt) :]
