"""EAGLE-3 in tensors: its network, and how it drafts where no compiled code does (`eagle3.py` explains it)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ..backends.torch import vocabulary
from ..core.protocols import Drafter, Target
from ..core.types import Array, Budget, DraftTree, Rows
from ..nets.configs import Eagle3Config
from ..nets.kv_cache import KVCache
from ..nets.layer import Attend, Layer, LayerShape, RMSNorm, Store
from ..nets.network import Network
from . import _eagles, _heads, _lattice, _ranks, _weights
from ._features import FeatureDrafting, loader
from ._growth import STATIC, Grown, Growth


class MidLayer(Layer):
    """The decoder layer with its two input norms."""

    def __init__(self, shape: LayerShape):
        super().__init__(shape)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)


class UpperLayer(Layer):
    """A plain decoder layer above that one."""

    def __init__(self, shape: LayerShape):
        super().__init__(replace(shape, inputs=shape.hidden))
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)


class Eagle3Net(nn.Module):
    """`fuse` once per true token, `forward` per step, `logits` over the draft vocabulary."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__()
        h, wide, eps, self.config = config.layer.hidden, config.target_hidden, config.layer.eps, config
        self.fc = nn.Linear(3 * wide, h, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(3 * wide, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList([RMSNorm(wide, eps) for _ in range(3)])
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab, h)
        self.midlayer = MidLayer(config.layer)
        self.upper = nn.ModuleList([UpperLayer(config.layer) for _ in range(config.layers - 1)])
        if config.parallel:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, 3 * wide))
        self.norm = RMSNorm(h, eps)
        self.lm_head = nn.Linear(h, config.draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab) < config.draft_vocab)

    def fuse(self, features: Float[Tensor, "*s h3"]) -> Float[Tensor, "*s h"]:
        """The target's three hidden states [.., 3 H], low to high, as one vector."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(3, -1)
            features = torch.cat([norm(p) for norm, p in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def forward(
        self,
        hidden: Float[Tensor, "b m h"],
        embeds: Float[Tensor, "b m h"],
        positions: Int[Tensor, "#b m"] | None,
        mask: Float[Tensor, "#b 1 gm s"] | None = None,
        store: Store | None = None,
        rotary: Float[Tensor, "#b #m 2 1 d"] | None = None,
        attention: Attend | None = None,
    ) -> Float[Tensor, "b m h"]:
        """a_{i+1}: what the next step is fed, and what `logits` reads. Pair i is (g_i, embedding of token_{i+1})."""
        layer = self.midlayer
        normed = layer.hidden_norm(hidden)
        x = torch.cat([layer.input_layernorm(embeds), normed], -1)
        residual = normed if self.config.norm_before_residual else hidden
        out = layer(x, residual, positions, mask, store, rotary, attention)
        for above in cast("Iterable[UpperLayer]", self.upper):
            out = above(above.input_layernorm(out), out, positions, mask, store, rotary)
        return self.norm(out) if self.config.norm_output else out

    def logits(self, hidden: Float[Tensor, "*s h"]) -> Float[Tensor, "*s vd"]:
        hidden = hidden if self.config.norm_output else self.norm(hidden)
        return self.lm_head(hidden)

    def ids(self) -> Int[Tensor, " vd"]:
        """The target's token id of every draft token."""
        return vocabulary.ids_of(self.d2t)


@dataclass(frozen=True)
class Eagle3Drafter(Grown):
    """A trained EAGLE-3 for one target."""

    net: Eagle3Net
    target: Target
    config: Eagle3Config
    growth: Growth
    names: Tensor | None  # token ids of the draft vocabulary; None: it is the target's own
    mask: Float[Tensor, "1 1 h"] | None = None  # the vector of the places after the last pair, where it is parallel
    shifted: bool = True

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.config.taps

    @property
    def layer(self) -> Layer:
        return self.net.midlayer

    @property
    def vocab(self) -> int:
        return self.target.vocab

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> FeatureDrafting:
        cache = KVCache(self.config.layer, len(prompts), capacity, self.net.fc.weight, self.config.layers)
        return FeatureDrafting(self, cache) if self.mask is None else ParallelDrafting(self, cache)

    def given(self, features: Tensor) -> Tensor:
        return self.net.fuse(features)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.net.embed_tokens(tokens) if self.config.own_embedding else _heads.embed(self.target, tokens)

    def logits(self, vectors: Tensor) -> Tensor:
        return self.net.logits(vectors)


class ParallelDrafting(FeatureDrafting):
    """P-EAGLE's: one pass reads the pairs that wait and the masks after them. Only the pairs stay in the cache."""

    drafter: Eagle3Drafter

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        drafter, growth = self.drafter, self.drafter.growth
        depth = min(growth.reach(budget, rows), drafter.config.parallel)
        return _lattice.propose(rows, self._logits(rows, depth), budget, growth, drafter.names, drafter.vocab)

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        first, step = _lattice.steps(rows, self._logits(rows, truth.shape[1]))
        return _ranks.below(rows, first, step, truth, k, self.drafter.names)

    def _logits(self, rows: Rows, depth: int) -> Float[Tensor, "b d vd"]:
        """Those of the next `depth` tokens."""
        drafter, cache, b, device = self.drafter, self.cache, len(rows), self.cache.keys.device
        assert drafter.mask is not None
        features, tokens, counts = self.waiting.merged() or (None, None, [0] * b)
        m = max(counts)
        n, count = m + max(depth, 1) - 1, torch.tensor(counts, device=device)[:, None]
        given = drafter.mask.expand(b, n, -1)
        spelled = torch.full((b, n), drafter.config.mask_token, device=device)
        if features is not None and tokens is not None:
            here, missing = torch.arange(n, device=device) < count, n - m
            pairs = functional.pad(drafter.given(features[:, :m]), (0, 0, 0, missing))
            given = torch.where(here[..., None], pairs, given)
            spelled = torch.where(here, functional.pad(tokens[:, :m], (0, missing)), spelled)
        made = self._chain(given, spelled) if n else given
        before = made.new_zeros(b, 1, made.shape[2]) if self.last is None else self.last
        at = (count + torch.arange(max(depth, 1), device=device))[..., None].expand(-1, -1, made.shape[2])
        outputs = torch.cat([before, made], 1).gather(1, at)  # the last pair's output, and the masks' after it
        self.last = outputs[:, :1]
        cache.advance(counts)
        assert cache.host == list(rows.start), "one pair for every token but the first, the root included"
        return drafter.logits(outputs[:, :depth])


def drafter(net: Eagle3Net, target: Target, growth: Growth | None = None) -> Drafter:
    """A drafter of a network in memory (of a copy: it is cast, and its matrices fused)."""
    net = _weights.placed_on(copy.deepcopy(net), target)
    return _drafter(net, target, growth or Growth(parents=STATIC, scale=net.config.scale))


def _drafter(net: Eagle3Net, target: Target, growth: Growth, where: object = "this EAGLE-3 drafter") -> Drafter:
    config, ids = net.config, net.ids()
    _weights.fits(where, target, config.vocab, config.target_hidden, config.taps)
    if not config.own_embedding:
        _heads.check_embedding(target, config.layer.hidden)
    vocabulary.check_ids(ids, config.vocab)
    own = config.draft_vocab == config.vocab and torch.equal(ids, torch.arange(config.vocab, device=ids.device))
    names = None if own else ids
    if (made := _weights.compiled(_eagles.compiled, net, target, growth)) is not None:
        return made
    for layer in (net.midlayer, *net.upper):
        layer.fuse()
    mask = None
    if config.parallel:
        _lattice.check(growth.tree)
        mask = net.fuse(net.mask_hidden)
    return Eagle3Drafter(net, target, config, growth, names, mask)


NETWORK = Network(Eagle3Net, Eagle3Config)
load = loader("eagle3", _drafter)
