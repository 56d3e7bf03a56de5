"""The state of one batch inside a target: rows of the tree cache, and what a pass over them sees.

A `Pass` is one forward pass before the model's family has its say: which slots it writes, at which positions its tokens
stand, and who sees whom. Targets (`hf.py`, `seq2seq.py`) turn it into their own model's arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...core.protocols import Kept, Prefill, Session, TargetOutput
from ...core.tree import chain
from ...core.types import DraftTree
from ...params import InputError
from .attention import OPEN
from .cache import TreeCache
from .padding import additive
from .tensors import TensorTree, array, tensor

CHUNK = 512  # tokens of a prompt read per pass


@dataclass
class Pass:
    """One pass over m = n - since tokens a row. Row b's node i is written at slot lengths[b] + i."""

    tokens: Int[Tensor, "b m"] | None
    embeds: Float[Tensor, "b m h"] | None
    spots: Int[Tensor, "b n"]  # absolute positions of all n nodes, those before `since` included
    since: int
    lengths: Int[Tensor, " b"]
    prefix: int  # committed slots of the longest row
    level: bool  # have all rows `prefix` committed slots?
    bound: int  # no position lies beyond this one
    ancestors: Bool[Tensor, "#b n n"] | None = None  # None: the first chunk of a prompt, plainly causal
    taps: tuple[int, ...] = ()
    logit_nodes: Int[Tensor, " k"] | None = None  # prompts: the places of a chunk whose logits are wanted

    @property
    def n(self) -> int:
        return self.spots.shape[1]

    @property
    def view(self) -> int:
        """Slots that a query may attend to."""
        return self.prefix + self.n

    @property
    def places(self) -> Int[Tensor, "b m"]:
        """Absolute positions of the tokens read."""
        return self.spots[:, self.since :]

    def stretch(self) -> Int[Tensor, " m"]:
        """Cache slots written when all rows have equal length."""
        return index(self.view, self.spots.device)[self.prefix + self.since :]

    def slots(self, capacity: int) -> Int[Tensor, " bm"]:
        """Where keys and values are written, counted over the batch."""
        b, n = self.spots.shape
        if self.level:
            here = self.stretch()
            if b == 1:
                return here
        else:
            here = self.lengths[:, None] + index(n, self.spots.device)[self.since :]
        return (here + (index(b, self.spots.device) * capacity)[:, None]).flatten()

    def where(self) -> Int[Tensor, "b view"]:
        """The true position of every slot: windows and positional biases count positions."""
        b, n = self.spots.shape
        count = index(self.view, self.spots.device)
        if self.level:
            return torch.cat([count[: self.prefix].expand(b, -1), self.spots], 1)
        return count.expand(b, -1).scatter(1, self.lengths[:, None] + count[:n], self.spots)

    def mask(self, dtype: torch.dtype, window: int | None = None) -> Float[Tensor, "#b 1 m view"]:
        """Who sees whom, as numbers to add to the scores: 0 for the row's text and a node's ancestors, else -inf.

        `window`: only keys at most window - 1 positions back.
        """
        assert self.ancestors is not None
        near = window is None or max(self.view, self.bound + 1) <= window
        if near and self.level and self.n == 1:
            hides_nothing = _zeros(self.view, dtype, self.spots.device)[:, :, :, : self.view]
            hides_nothing.__dict__[OPEN] = True
            return hides_nothing
        if near and self.level:
            own = additive(self.ancestors[:, self.since :], dtype)
            return torch.nn.functional.pad(own, (self.prefix, 0))[:, None]
        seen = self._seen()
        if not near:
            assert window is not None
            seen = seen & (self.where()[:, None] > self.places[..., None] - window)
        return additive(seen, dtype)[:, None]

    def _seen(self) -> Bool[Tensor, "#b m view"]:
        assert self.ancestors is not None
        (b, n), m = self.spots.shape, self.n - self.since
        own = self.ancestors[:, self.since :]
        if self.level:
            return torch.nn.functional.pad(own, (self.prefix, 0), value=True)
        count = index(self.view, self.spots.device)
        text = (count < self.lengths[:, None, None]).expand(b, m, -1)
        here = (self.lengths[:, None] + count[:n])[:, None].expand(b, m, n)
        return text.scatter(2, here, own.expand(b, m, n))


def index(n: int, device: torch.device) -> Int[Tensor, " n"]:
    """0 .. n - 1, from a stock of such vectors."""
    return _arange(max(256, 1 << (n - 1).bit_length()), device)[:n]


@lru_cache(maxsize=64)
def _arange(n: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(n, device=device)


def _zeros(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _zeros_of(max(256, 1 << (n - 1).bit_length()), dtype, device)


@lru_cache(maxsize=64)
def _zeros_of(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, 1, 1, n, dtype=dtype, device=device)


@runtime_checkable
class Companion(Protocol):
    """What a row has beside its tree cache (an encoder's output), carried along when rows move."""

    def select(self, index: Sequence[int]) -> None: ...
    def join(self, other: Companion) -> None: ...


@runtime_checkable
class Runner(Protocol):
    """A target as its sessions see it."""

    device: str
    vocab: int

    def read(
        self, session: TreeSession, prompts: Sequence[Sequence[int]], taps: tuple[int, ...]
    ) -> Iterator[Prefill]: ...
    def run(self, session: TreeSession, pass_: Pass) -> TargetOutput: ...


@dataclass
class TreeSession(Session):
    """One batch. Row b has `lengths[b]` committed tokens, in slots 0 .. lengths[b] - 1."""

    target: Runner
    cache: TreeCache
    lengths: list[int] = field(default_factory=list)
    there: Int[Tensor, " b"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))  # on the device
    companion: Companion | None = None

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], taps: tuple[int, ...] = ()) -> Iterator[Prefill]:
        """Read and commit the prompts, a chunk at a time."""
        if self.lengths:
            raise InputError("this session holds texts already; open another one and join it")
        if not prompts or not all(prompts):
            raise InputError("a prompt is empty; give at least one token (most models have a begin-of-text token)")
        self._set([0] * len(prompts))
        yield from self.target.read(self, prompts, taps)

    @torch.no_grad()
    def resume(self, prompt: Sequence[int], taps: tuple[int, ...], kept: Kept, same: int) -> Iterator[Prefill]:
        """As `prefill` of one prompt, whose first `same` tokens are copied from `kept`, chunk by chunk too.

        Nobody reads logits inside a prompt: those of copied chunks are zeros.
        """
        assert 0 < same < len(prompt), "the last token of a prompt is read, for what follows it"
        self._set([0])
        self.cache.fill(kept.layers, same)
        for first in range(0, same, CHUNK):
            end = min(first + CHUNK, same)
            features = {tap: kept.features[tap][None, first:end] for tap in taps}
            self.advance([end - first])
            tree, logits = chain([prompt[first:end]], matrix=False), np.zeros((1, 1, self.target.vocab), np.float32)
            yield Prefill(tree, TargetOutput(logits, features), (False,), [prompt[end]])
        yield from self.target.read(self, [prompt], taps)

    def taken(self, row: int, tokens: Sequence[int], features: Mapping[int, Any]) -> Kept | None:
        """A copy of what this row has read: `tokens`, its first ones. None for an encoder's rows."""
        if self.companion is not None:
            return None
        assert len(tokens) <= self.lengths[row]
        return Kept(tuple(tokens), self.cache.taken(row, len(tokens)), features)

    def forward(self, tree: DraftTree, taps: tuple[int, ...] = (), since: int = 0, embeds: Any = None) -> TargetOutput:
        """Logits [b, n - since, v] of the nodes from `since` on; the nodes before are in the cache. Commits nothing."""
        assert tree.ancestors is not None, "a tree to verify carries its ancestor matrix"
        prefix, nodes = max(self.lengths), TensorTree.of(tree, self.target.device)
        output = self.pass_over(
            Pass(
                tokens=None if embeds is not None else nodes.tokens[:, since:] if since else nodes.tokens,
                embeds=None if embeds is None else tensor(embeds, self.target.device),
                spots=self.there[:, None] + nodes.depths,
                since=since,
                lengths=self.there,
                prefix=prefix,
                level=min(self.lengths) == prefix,
                bound=prefix + tree.deepest,
                ancestors=nodes.ancestors,
                taps=taps,
            )
        )
        return out(output)

    @torch.no_grad()
    def pass_over(self, pass_: Pass) -> TargetOutput:
        """Aim the cache and run the model."""
        cache = self.cache
        if pass_.ancestors is not None:
            cache.reserve(pass_.view)
            cache.view = pass_.view
            cache.span = (pass_.prefix + pass_.since, pass_.n - pass_.since) if pass_.level else None
            if not pass_.level:
                cache.slots = pass_.slots(cache.capacity)
        output = self.target.run(self, pass_)
        if cache.fresh:
            cache.pack()
        return output

    def advance(self, counts: Sequence[int]) -> None:
        """So many more slots of every row are text from now on."""
        self._set([length + count for length, count in zip(self.lengths, counts, strict=True)])

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit the accepted paths: move their slots after each row's length (a chain moves nothing)."""
        source, destination = [], []
        for b, path in enumerate(paths):
            start = b * self.cache.capacity + self.lengths[b]
            for i, node in enumerate(path):
                if node != i:
                    source.append(start + node)
                    destination.append(start + i)
        if source:
            self.cache.move(torch.tensor(source), torch.tensor(destination))
        self.advance([len(path) for path in paths])

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` tokens of every row."""
        if any(not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)):
            raise InputError(f"rewinding goes back: rows of {self.lengths} tokens cannot become {list(lengths)}")
        self._set(list(lengths))

    def select(self, index: Sequence[int]) -> None:
        """Row i := old row index[i]; repeats fork."""
        self.cache.select(index, max(self.lengths, default=0))
        if self.companion is not None:
            self.companion.select(index)
        self._set([self.lengths[i] for i in index])

    def wipe(self, rows: Sequence[int]) -> None:
        """Overwrite what these rows hold by zeros: they failed, and will be left out."""
        self.cache.wipe(rows)

    def join(self, other: Session) -> None:
        """Append the rows of another session of the same target."""
        assert isinstance(other, TreeSession)
        assert other.target is self.target, "sessions of one target join"
        self.cache.join(other.cache, max(other.lengths))
        if self.companion is not None:
            assert other.companion is not None
            self.companion.join(other.companion)
        self._set(self.lengths + other.lengths)

    def _set(self, lengths: list[int]) -> None:
        self.lengths, self.there = lengths, torch.tensor(lengths, dtype=torch.long, device=self.target.device)


def out(output: TargetOutput) -> TargetOutput:
    """What a pass computed as the engine reads it: arrays where that was on the CPU."""
    logits = output.logits
    if logits.device.type != "cpu":
        return output
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return TargetOutput(array(wide), {tap: array(states) for tap, states in output.features.items()})
