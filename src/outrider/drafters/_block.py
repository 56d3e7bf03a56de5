"""Block drafters in tensors: how they draft where no compiled code does (`block.py` explains them)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..backends.torch import vocabulary
from ..backends.torch.padding import additive
from ..backends.torch.sampling import wide
from ..backends.torch.tensors import TensorRound, tensor
from ..core.protocols import Drafter, Drafting, Round, Target
from ..core.types import Array, Rows
from ..nets.block import BlockNet
from ..nets.configs import BlockConfig
from ..nets.kv_cache import KVCache
from ..nets.network import Network
from . import _heads, _weights, block
from ._features import ends_of
from ._growth import Grown, Growth
from ._waiting import Pending, Waiting
from .block import BlockTrees, Request


@dataclass(frozen=True)
class BlockDrafter(Grown):
    """A trained block drafter for one target."""

    net: BlockNet
    target: Target
    config: BlockConfig
    growth: Growth
    names: Tensor | None  # target ids of the draft vocabulary; None: it is the target's own
    places: Tensor | None  # the draft vocabulary's index of every target id
    block_mask: Float[Tensor, "1 1 m m"]  # who sees whom inside the block
    mask: Float[Tensor, " h"]  # the embedding of the slots after the anchor

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.config.taps

    @property
    def vocab(self) -> int:
        """The target's."""
        return self.target.vocab

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> BlockDrafting:
        config, weight, rows = self.config, self.net.fc.weight, len(prompts)
        with torch.inference_mode(False):
            last = torch.zeros(rows, 1, config.layer.hidden, dtype=weight.dtype, device=weight.device)
        return BlockDrafting(self, KVCache(config.layer, rows, capacity, weight, config.layers), last)

    def logits(self, hidden: Float[Tensor, "b m h"]) -> Float[Tensor, "b m vd"]:
        return _heads.head_of(self.target, hidden) if self.names is None else self.net.lm_head(hidden)


@dataclass
class BlockDrafting(BlockTrees):
    """In tensors. `cache` holds the context's keys and values of all layers, a slot for each committed token before the
    root."""

    drafter: BlockDrafter
    cache: KVCache
    last: Float[Tensor, "b 1 h"]  # every row's last context vector
    waiting: Waiting = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = Waiting([0] * len(self.cache.host))

    def observe(self, round: Round) -> None:
        """Keep the features of what was committed."""
        self.waiting.put(_joined(TensorRound(round, self.cache.keys.device), self.drafter.taps))
        if self.waiting.late:
            self._read()

    def select(self, index: Sequence[int]) -> None:
        if list(index) == list(range(len(self.cache.host))):
            return
        wanted = torch.tensor(list(index), device=self.cache.keys.device)
        self.waiting.select(index, self.cache.keys.device)
        self.last = self.last[wanted]
        self.cache.select(index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, BlockDrafting)
        self._read()
        other._read()
        self.waiting.join(other.waiting)
        self.last = torch.cat([self.last, other.last])
        self.cache.join(other.cache)

    def _read(self) -> None:
        """Write the waiting features' keys and values after each row's text."""
        if (given := self.waiting.merged()) is None:
            return
        features, _, counts = given
        m, net, cache = max(counts), self.drafter.net, self.cache
        if m:
            context = net.context(features[:, :m])
            cache.place(m)(*net.keys_values(context, self._rotary(m)))
            self.last = ends_of(context, counts, self.last)
            cache.advance(counts)

    def corrected(
        self, hidden: Float[Tensor, "b d h"], logits: Tensor, tokens: Array, depth: Array
    ) -> Float[Tensor, "b m vd"]:
        """Logits below tokens [b, m] of these depths [b, m], as the pair head corrects them."""
        at = hidden[torch.arange(len(hidden), device=hidden.device)[:, None], tensor(depth, hidden.device)]
        return self.drafter.net.choice(logits, self.drafter.net.corrected(logits, tensor(tokens, hidden.device), at))

    def scores(self, rows: Rows, hidden: Float[Tensor, "b d h"], candidates: Array) -> Float[Tensor, "b d k k"] | None:
        """What the pair head says of every candidate [b, d, k] below every candidate of the slot above."""
        if self.drafter.config.pair_head == "none":
            return None
        drafter, net, (b, _, k) = self.drafter, self.drafter.net, candidates.shape
        tokens = tensor(candidates, hidden.device)
        above = torch.cat([_roots(rows, hidden.device)[..., None].expand(b, 1, k), tokens[:, :-1]], 1)
        inside = tokens if drafter.places is None else drafter.places[tokens]
        return wide(net.above(above, hidden[:, :, None])) @ wide(net.markov_w2.weight[inside]).transpose(-1, -2)

    def seen(self, rows: Rows, depth: int) -> tuple[Float[Tensor, "b d h"], Float[Tensor, "b d vd"]]:
        hidden = self._hidden(rows)[:, :depth]
        return hidden, self.drafter.logits(hidden)

    def _rotary(self, m: int) -> Tensor:
        """Rotations of the m positions after each row's text."""
        cache = self.cache
        table = self.drafter.net.rope.table(cache.longest + m, cache.keys.dtype, cache.keys.device)
        if cache.level:
            return table[cache.longest : cache.longest + m][None]
        return table[cache.lengths[:, None] + torch.arange(m, device=table.device)]

    def _hidden(self, rows: Rows) -> Float[Tensor, "b d h"]:
        """Every drafting slot's normed hidden state, by one pass over the block."""
        self._read()
        drafter, cache, config = self.drafter, self.cache, self.drafter.config
        assert cache.host == list(rows.start), "one context slot for every token before the root"
        x = drafter.net.slots(
            _heads.embed(drafter.target, _roots(rows, cache.keys.device)).to(cache.keys.dtype), drafter.mask, self.last
        )
        keys, values = (t[:, : cache.longest].transpose(1, 2) for t in (cache.keys, cache.values))
        hidden = drafter.net(x, self._rotary(config.block), keys, values, self._mask())
        return hidden if config.sample_from_anchor else hidden[:, 1:]

    def _mask(self) -> Float[Tensor, "#b 1 m s"]:
        cache, own = self.cache, self.drafter.block_mask
        if cache.level:
            return torch.nn.functional.pad(own, (cache.longest, 0))
        text: Bool[Tensor, "b s"] = torch.arange(cache.longest, device=own.device) < cache.lengths[:, None]
        b, m = len(cache.host), own.shape[2]
        seen = additive(text, own.dtype)[:, None, None].expand(b, 1, m, -1)
        return torch.cat([seen, own.expand(b, -1, -1, -1)], -1)


def _roots(rows: Rows, device: torch.device) -> Int[Tensor, "b 1"]:
    return torch.tensor(rows.root, device=device)[:, None]


def _joined(round: TensorRound, taps: Sequence[int]) -> Pending:
    """What a round committed, in tensors."""
    path, counts, spelled = round.path, round.count.tolist(), round.tree.tokens
    joined = torch.cat([round.features(tap) for tap in taps], -1)
    if round.tree.ancestors is not None:
        path = path[:, : max(counts)].clamp(min=0)
        spelled = spelled.gather(1, path)
        joined = joined.gather(1, path[..., None].expand(*path.shape, joined.shape[2]))
    return joined, spelled, counts


def drafter(net: BlockNet, target: Target, growth: Growth | None = None) -> Drafter:
    """A drafter of a network in memory (of a copy, which is cast to the target's precision)."""
    net = _weights.placed_on(copy.deepcopy(net), target)
    return _drafter(net, target, growth or Growth(scale=net.config.scale))


def _drafter(net: BlockNet, target: Target, growth: Growth, where: object = "this block drafter") -> Drafter:
    config, ids, weight = net.config, net.ids(), net.fc.weight
    _weights.fits(where, target, config.vocab, config.target_hidden, config.taps)
    _heads.check_embedding(target, config.target_hidden)
    made = _weights.compiled(block.compiled, net, target, growth)
    if made is not None:
        return made
    places = None
    if ids is not None:
        vocabulary.check_ids(ids, config.vocab)
        places = vocabulary.places_of(ids, config.vocab)
    seen = torch.ones(config.block, config.block, dtype=torch.bool, device=weight.device)
    own = additive(seen.tril() if config.causal else seen, weight.dtype)[None, None]
    token = config.mask_token
    mask: Tensor = (
        net.mask_embedding if token < 0 else _heads.embed(target, torch.tensor([token], device=weight.device))[0]
    )
    return BlockDrafter(net, target, config, growth, ids, places, own, mask)


def load(target: Target | None, path: str | None, request: Request) -> Drafter:
    """A trained block drafter from a folder of whatever layout."""
    net: BlockNet = _weights.network(path, "block", target, **request.said)
    assert target is not None, "or the network would have been refused"
    net.config = request.drafts(net.config)
    return _drafter(net, target, request.growth(net.config), path)


NETWORK = Network(BlockNet, BlockConfig)
