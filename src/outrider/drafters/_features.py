"""Drafting state of the drafters that read the target's features and step on their own: EAGLE, EAGLE-2, HASS, EAGLE-3.

A pair is (feature of position i, token i + 1). Pairs of committed text are fed with the target's true features and stay
in the layer's cache; from the root's pair on, the network continues with its own vectors, which last for one round:

    text       t_0   t_1   ..   t_L = root          L committed tokens before the root
    pairs      (f_0, t_1) .. (f_{L-1}, t_L)         positions 0 .. L - 1, true features
    a node at depth d: (its parent's vector, its token)       position L + d - 1, slot L + (number among the fed) - 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..backends.torch.padding import padded
from ..backends.torch.tensors import TensorRound, tensor
from ..core.protocols import Drafting, Round, Target
from ..core.types import Array, Budget, DraftTree, Rows
from ..nets.kv_cache import KVCache
from ..nets.layer import Layer
from . import _ranks, _weights
from ._eagles import Options
from ._growth import Growth, Step
from ._waiting import Pending, Waiting


@runtime_checkable
class Steps(Protocol):
    """What `FeatureDrafting` needs of a drafter: its network's step and head, and how it grows trees."""

    @property
    def net(self) -> Any:
        """`net(vectors, embeds, positions, mask, store, rotary)`: the next vectors, as EAGLE's network makes them."""

    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def growth(self) -> Growth: ...
    @property
    def layer(self) -> Layer: ...
    @property
    def shifted(self) -> bool:
        """Is feature i paired with token i + 1 (or with token i)?"""

    @property
    def names(self) -> Tensor | None:
        """The token ids of a draft vocabulary."""

    @property
    def vocab(self) -> int: ...
    def given(self, features: Tensor) -> Tensor:
        """What the first step reads of the taps' features, side by side."""

    def embed(self, tokens: Tensor) -> Tensor: ...
    def logits(self, vectors: Tensor) -> Tensor: ...


@dataclass
class FeatureDrafting(Drafting):
    """The drafting state of EAGLE-type drafters: a queue of features, the layer's keys and values, the last step."""

    drafter: Steps
    cache: KVCache
    waiting: Waiting = field(init=False)
    last: Float[Tensor, "b 1 h"] | None = None  # the step after the last pair: it predicts the root's feature

    def __post_init__(self) -> None:
        self.waiting = Waiting([0] * len(self.cache.host))

    def observe(self, round: Round) -> None:
        """Queue the true features of committed tokens, each with its token."""
        self.waiting.put(self._joined_pairs(TensorRound(round, self.cache.keys.device), round.tokens))
        if self.waiting.late:
            self._read()

    def _joined_pairs(self, round: TensorRound, tokens: Sequence[Sequence[int]]) -> Pending:
        features = [round.features(tap) for tap in self.drafter.taps]
        joined = features[0] if len(features) == 1 else torch.cat(features, -1)
        if round.tree.ancestors is None:
            counts, spelled = round.count.tolist(), round.tree.tokens
            if self.drafter.shifted:
                upcoming = round.next.clamp(min=0)[:, None]  # -1: the row's prompt ended in an earlier chunk
                spelled = torch.cat([spelled[:, 1:], upcoming], 1)
                spelled = spelled.scatter(1, (round.count - 1).clamp(min=0)[:, None], upcoming)
        else:
            counts = [len(row) for row in tokens]
            path = round.path[:, : max(counts)].clamp(min=0)
            spelled = padded(tokens, path.device) if self.drafter.shifted else round.tree.tokens.gather(1, path)
            if joined.shape[1] > 1:
                joined = joined.gather(1, path[..., None].expand(*path.shape, joined.shape[2]))
        return joined, spelled, counts

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        drafter = self.drafter
        first, step = self._start(rows)
        return drafter.growth.propose(rows, first, step, budget, drafter.names, drafter.vocab)[0]

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `training/tree_tuning.py`."""
        first, step = self._start(rows)
        return _ranks.below(rows, first, step, truth, k, self.drafter.names)

    def _start(self, rows: Rows) -> tuple[Tensor, Step]:
        """The logits below the root, and the step that follows."""
        drafter, vectors = self.drafter, self._last(rows)

        def step(fed: DraftTree, since: int) -> Tensor:
            nonlocal vectors
            made = self._step(fed, since, vectors)
            vectors = torch.cat([vectors, made], 1)
            return drafter.logits(made)

        return drafter.logits(vectors), step

    def _last(self, rows: Rows) -> Float[Tensor, "b 1 h"]:
        """The vectors below the root, all pairs read."""
        self._read()
        assert self.last is not None
        assert self.cache.host == list(rows.start), "one pair for every token but the first, the root included"
        return self.last

    def select(self, index: Sequence[int]) -> None:
        if list(index) == list(range(len(self.cache.host))):
            return
        wanted = torch.tensor(list(index), device=self.cache.keys.device)
        self.waiting.select(index, self.cache.keys.device)
        self.last = None if self.last is None else self.last[wanted]
        self.cache.select(index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, FeatureDrafting)
        self._read()
        other._read()
        assert self.last is not None
        assert other.last is not None
        self.last = torch.cat([self.last, other.last])
        self.waiting.join(other.waiting)
        self.cache.join(other.cache)

    def _read(self) -> None:
        """Feed the queued pairs, as one chain per row."""
        if (given := self.waiting.merged()) is None:
            return
        features, tokens, counts = given
        m, cache = max(counts), self.cache
        if m == 0:
            return
        made = self._chain(self.drafter.given(features[:, :m]), tokens[:, :m])
        self.last = ends_of(made, counts, self.last)
        cache.advance(counts)

    def _chain(self, given: Float[Tensor, "b m h"], tokens: Int[Tensor, "b m"]) -> Float[Tensor, "b m h"]:
        """Vectors and tokens after each row's text, each seeing those before it."""
        m, cache, mask = tokens.shape[1], self.cache, None
        if cache.longest and (m > 1 or not cache.level):
            lower = torch.ones(1, m, m, dtype=torch.bool, device=tokens.device).tril_()
            mask = cache.mask(lower, given.dtype, self.drafter.layer.groups)
        rotary = self._rotary(m, given.dtype, torch.arange(m, device=tokens.device))
        return self._fed(given, tokens, mask, rotary)

    def _step(self, fed: DraftTree, since: int, vectors: Float[Tensor, "b n h"]) -> Float[Tensor, "b m h"]:
        """Vectors of the nodes from `since` on, each fed its parent's vector. Node 0 is the root's pair, which is
        committed."""
        drafter, cache, (b, n) = self.drafter, self.cache, fed.tokens.shape
        above = fed.parents[:, since:]
        spelled = fed.tokens[:, since:] if drafter.shifted else np.take_along_axis(fed.tokens, above, 1)
        parents, tokens = (tensor(x, vectors.device) for x in (above, spelled))
        given = vectors.gather(1, parents[..., None].expand(b, n - since, vectors.shape[2]))
        mask = None
        if not (cache.level and n == fed.deepest + 1 == since + 1):  # a chain sees everything before it
            assert fed.ancestors is not None
            mask = cache.mask(
                tensor(fed.ancestors[:, since:, 1:], vectors.device), vectors.dtype, self.drafter.layer.groups
            )
        if drafter.growth.tree == "best":
            rotary = self._rotary(fed.deepest, vectors.dtype, tensor(fed.depths[:, since:] - 1, vectors.device))
        else:
            rotary = self._rotary(fed.deepest, vectors.dtype, None, fed.deepest - 1)
        return self._fed(given, tokens, mask, rotary, since - 1)

    def _fed(
        self,
        given: Float[Tensor, "b m h"],
        tokens: Int[Tensor, "b m"],
        mask: Tensor | None,
        rotary: Tensor,
        first: int = 0,
    ) -> Float[Tensor, "b m h"]:
        """A step of the network, whose keys and values go to slots first .. first + m - 1 after each row's text."""
        place = self.cache.place(tokens.shape[1], first)
        made: Tensor = self.drafter.net(given, self.drafter.embed(tokens), None, mask, place, rotary)
        return made

    def _rotary(self, reach: int, dtype: torch.dtype, places: Tensor | None, place: int = 0) -> Tensor:
        """Rotations at positions `lengths + places`, or all at `lengths + place`; [#b, #m, 2, 1, d]."""
        cache, rope = self.cache, self.drafter.layer.rope
        table = rope.table(cache.longest + reach + 1, dtype, cache.keys.device)
        if places is None:
            if cache.level:
                return table[cache.longest + place][None, None]
            return table[cache.lengths + place][:, None]
        if places.dim() == 1 and cache.level:
            return table[cache.longest : cache.longest + len(places)][None]
        return table[cache.lengths[:, None] + places]


def ends_of(
    made: Float[Tensor, "b m h"], counts: Sequence[int], before: Float[Tensor, "b 1 h"] | None
) -> Float[Tensor, "b 1 h"]:
    """Each row's vector after its last pair; rows without new ones keep the one of `before`."""
    if made.shape[1] == 1 and min(counts) == 1:
        return made
    at = torch.tensor([max(c, 1) - 1 for c in counts], device=made.device)
    ends = made.gather(1, at[:, None, None].expand(-1, 1, made.shape[2]))
    if before is None or min(counts) > 0:
        return ends
    fed = torch.tensor([c > 0 for c in counts], device=made.device)
    return torch.where(fed[:, None, None], ends, before)


def loader(method: str, build: Callable[[Any, Target, Growth, object], Any]) -> Callable[..., Any]:
    """`load(target, path, options)` of a network that steps on features.

    `build(net, target, growth, where)` makes the drafter of a network that is filled, cast and frozen.
    """

    def load(target: Target | None, path: str | None, options: Options) -> Any:
        net = _weights.network(path, method, target)
        assert target is not None, "or the network would have been refused"
        return build(net, target, options.growth(net.config.scale), path)

    return load
