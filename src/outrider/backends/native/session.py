"""The state of one batch inside a native target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.protocols import Kept, Prefill, Session, TargetOutput
from ...core.tree import chain
from ...core.types import Array, DraftTree
from ...params import InputError
from .kv_cache import KVCache
from .passes import Nodes

if TYPE_CHECKING:
    from .target import NativeTarget

CHUNK = 512  # tokens of a prompt that a pass reads


class NativeSession(Session):
    """One batch. Row b has `lengths[b]` committed tokens, in slots 0 .. lengths[b] - 1 of the KV cache."""

    def __init__(self, target: NativeTarget, cache: KVCache):
        self.target, self.cache, self.lengths = target, cache, list[int]()

    def prefill(self, prompts: Sequence[Sequence[int]], taps: tuple[int, ...] = ()) -> Iterator[Prefill]:
        """See `Session.prefill`."""
        if self.lengths:
            raise InputError("this session holds texts already; open another one and join it")
        if not prompts or not all(prompts):
            raise InputError("a prompt is empty; give at least one token (most models have a begin-of-text token)")
        self.cache.begin(len(prompts))
        self.lengths = [0] * len(prompts)
        return self._read(prompts, taps)

    def resume(self, prompt: Sequence[int], taps: tuple[int, ...], kept: Kept, same: int) -> Iterator[Prefill]:
        """See `Session.resume`. Logits inside a prompt are not used: those of copied chunks are zeros."""
        assert 0 < same < len(prompt), "the last token of a prompt is read, for what follows it"
        self.lengths = [0]
        self.cache.fill(kept.layers, same)
        for first in range(0, same, CHUNK):
            end = min(first + CHUNK, same)
            features = {tap: kept.features[tap][None, first:end] for tap in taps}
            logits = np.broadcast_to(np.zeros((1, 1, 1), np.float32), (1, 1, self.target.vocab))
            self.lengths = [end]
            tree = chain([prompt[first:end]], matrix=False)
            yield Prefill(tree, TargetOutput(logits, features), (False,), [prompt[end]])
        yield from self._read([prompt], taps)

    def _read(self, prompts: Sequence[Sequence[int]], taps: tuple[int, ...]) -> Iterator[Prefill]:
        """The prompts from where the rows are, all of them at the same place. A chunk's logits are computed at the last
        tokens of its rows alone."""
        longest = max(map(len, prompts))
        if longest > self.cache.limit:
            raise InputError(
                f"a prompt has {longest} tokens and the cache is limited to {self.cache.limit}; shorten it"
            )
        for first in range(max(self.lengths), longest, CHUNK):
            end = min(first + CHUNK, longest)
            tree = chain([prompt[first:end] for prompt in prompts], matrix=False)
            counts: list[int] = tree.size.tolist()
            ends = np.array([[max(count, 1) - 1] for count in counts], np.int64)
            lengths = np.full(len(prompts), first, np.int64)
            output = self.target.run(self.cache, Nodes.of(tree, lengths, logit_nodes=ends), taps)
            self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
            last = tuple(first < len(prompt) <= end for prompt in prompts)
            following = [prompt[end] if end < len(prompt) else -1 for prompt in prompts]
            yield Prefill(tree, output, last, following)

    def forward(self, tree: DraftTree, taps: tuple[int, ...] = (), since: int = 0, embeds: Any = None) -> TargetOutput:
        """See `Session.forward`. Logits of padding are undefined; features of padding are zeros."""
        assert tree.ancestors is not None, "a tree to verify carries its ancestor matrix"
        lengths = np.array(self.lengths, np.int64)
        return self.target.run(self.cache, Nodes.of(tree, lengths, since, embeds), taps)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """See `Session.keep`. A chain moves nothing."""
        source, destination = [], []
        for row, (length, path) in enumerate(zip(self.lengths, paths, strict=True)):
            start = row * self.cache.capacity + length
            for place, node in enumerate(path):
                if node != place:
                    source.append(start + node)
                    destination.append(start + place)
        if source:
            self.cache.move(source, destination)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def rewind(self, lengths: Sequence[int]) -> None:
        """See `Session.rewind`."""
        if any(not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)):
            raise InputError(f"rewinding goes back: rows of {self.lengths} tokens cannot become {list(lengths)}")
        self.lengths = list(lengths)

    def wipe(self, rows: Sequence[int]) -> None:
        """See `Session.wipe`."""
        self.cache.wipe(rows)

    def select(self, index: Sequence[int]) -> None:
        """See `Session.select`."""
        if list(index) != list(range(len(self.lengths))):
            self.cache.select(index, max(self.lengths))
        self.lengths = [self.lengths[i] for i in index]

    def join(self, other: Session) -> None:
        """See `Session.join`."""
        assert isinstance(other, NativeSession)
        assert other.target is self.target, "sessions of one target join"
        self.cache.join(other.cache, max(other.lengths))
        self.lengths = self.lengths + other.lengths

    def taken(self, row: int, tokens: Sequence[int], features: Mapping[int, Array]) -> Kept:
        """See `Session.taken`."""
        assert len(tokens) <= self.lengths[row]
        return Kept(tuple(tokens), self.cache.taken(row, len(tokens)), features)
