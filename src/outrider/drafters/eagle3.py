"""EAGLE-3 (Li et al. 2025): three layers of the target fused into one vector; it predicts tokens, not features.

g_i     = fc(cat(l_i, m_i, h_i))                   hidden states of three layers, low, middle and high
a_{i+1} = layer(cat(norm(e(t_{i+1})), norm(g_i)))  at position i, residual g_i; then a takes the place of g
law of t_{i+2} = lm_head(norm(a_{i+1}))            over the draft vocabulary; target id = i + d2t[i]

P-EAGLE (Hui et al. 2026, `parallel`) drafts all tokens in one pass. Behind the last pair stand pairs of a mask token
and a learned feature, one for each further token; each sees the pairs and masks before it, and nothing is fed back.
"""

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
from ..backends.torch.compiled import embeddings
from ..backends.torch.products import freeze
from ..backends.torch.recorded import Recorded
from ..core.protocols import Target
from ..core.types import Budget, DraftTree, Rows
from ..nets.compiled import CompiledLayer, Fusing, code_for, compiled
from ..nets.grown import Grower
from ..nets.kv_cache import KVCache
from ..nets.layer import Attend, Layer, LayerShape, RMSNorm, Store
from ..nets.network import Network
from ..params import InputError
from . import _heads, _lattice, _ranks, _weights
from ._features import FeatureDrafting, loader, recorded
from ._growth import STATIC, Growth


@dataclass(frozen=True)
class Eagle3Config:
    """`taps`: indices of the target's hidden states (k: the input of layer k). The flags are those found in published
    checkpoints: the residual is the normed hidden state; norms before fc over the whole or over each tap; the step fed
    back is taken after the final norm. `own_embedding`: the network has one (it must where the widths differ).
    `parallel`: how many tokens one pass drafts (0: they come one after the other), with `layers`; the embedding of
    `mask_token` fills the places behind the last pair."""

    layer: LayerShape
    vocab: int
    draft_vocab: int
    target_hidden: int
    taps: tuple[int, ...]
    scale: float = 1.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    layers: int = 1
    parallel: int = 0
    mask_token: int = 0

    def __post_init__(self) -> None:
        check_taps(self.taps)
        if self.layer.inputs != 2 * self.layer.hidden:
            raise InputError(f"EAGLE-3's attention reads {2 * self.layer.hidden} numbers, not {self.layer.inputs}")
        if self.layer.hidden != self.target_hidden and not self.own_embedding:
            raise InputError("an EAGLE-3 drafter that is not as wide as its target needs an embedding of its own")
        vocabulary.check_size(self.draft_vocab, self.vocab)
        if self.parallel < 0 or self.layers < 1 or (self.layers > 1 and not self.parallel):
            raise InputError("EAGLE-3 has one layer; only one that drafts in parallel may have more")
        if not 0 <= self.mask_token < self.vocab:
            raise InputError(f"the mask token {self.mask_token} lies outside the vocabulary of {self.vocab} tokens")


def default_taps(layers: int) -> tuple[int, int, int]:
    """The published choice, 2, L // 2 and L - 3; refused where they are not three."""
    taps = (2, layers // 2, layers - 3)
    if not 0 < taps[0] < taps[1] < taps[2]:
        raise InputError(f"EAGLE-3's layers 2, L/2, L-3 are not distinct for {layers} layers; name three as taps")
    return taps


def check_taps(taps: tuple[int, ...]) -> None:
    """Raise InputError unless these are three different hidden states, counted from 0."""
    if len(taps) != 3 or len(set(taps)) < 3:
        raise InputError(f"EAGLE-3 fuses three distinct layers of the target, not {list(taps)}; correct its taps")
    if min(taps) < 0:
        raise InputError(f"EAGLE-3's taps count the target's hidden states from 0; {list(taps)} has a negative one")


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

    def given(self, vectors: Float[Tensor, "*s h"], embeds: Float[Tensor, "*s h"]) -> Float[Tensor, "*s h2"]:
        """What compiled code reads, before the norms."""
        return torch.cat([embeds, vectors], -1)

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
        turn: Float[Tensor, "#b #m 2 1 d"] | None = None,
        attention: Attend | None = None,
    ) -> Float[Tensor, "b m h"]:
        """a_{i+1}: what the next step is fed, and what `logits` reads. Pair i is (g_i, embedding of token_{i+1})."""
        layer = self.midlayer
        normed = layer.hidden_norm(hidden)
        x = torch.cat([layer.input_layernorm(embeds), normed], -1)
        residual = normed if self.config.norm_before_residual else hidden
        out = layer(x, residual, positions, mask, store, turn, attention)
        for above in cast("Iterable[UpperLayer]", self.upper):
            out = above(above.input_layernorm(out), out, positions, mask, store, turn)
        return self.norm(out) if self.config.norm_output else out

    def logits(self, hidden: Float[Tensor, "*s h"]) -> Float[Tensor, "*s vd"]:
        hidden = hidden if self.config.norm_output else self.norm(hidden)
        return self.lm_head(hidden)

    def ids(self) -> Int[Tensor, " vd"]:
        """The target's token id of every draft token."""
        return vocabulary.ids_of(self.d2t)


@dataclass(frozen=True)
class Eagle3Drafter:
    """A trained EAGLE-3 for one target."""

    net: Eagle3Net
    target: Target
    config: Eagle3Config
    growth: Growth
    names: Tensor | None  # token ids of the draft vocabulary; None: it is the target's own
    mask: Float[Tensor, "1 1 h"] | None = None  # the vector of the places behind the last pair, where it is parallel
    shifted: bool = True
    recorded: Recorded | None = None  # its steps, where the target's passes are recorded
    compiled: CompiledLayer | None = None  # the same, where the target's passes are compiled
    grower: Grower | None = None  # whole trees of these

    @property
    def taps(self) -> tuple[int, ...]:
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
        return self.net.embed_tokens(tokens) if self.config.own_embedding else self.target.embed(tokens)

    def logits(self, vectors: Tensor) -> Tensor:
        return self.net.logits(vectors) if self.compiled is None else self.compiled.logits(vectors)


class ParallelDrafting(FeatureDrafting):
    """P-EAGLE's: one pass reads the pairs that wait and the masks behind them. Only the pairs stay in the cache."""

    drafter: Eagle3Drafter

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        drafter, growth = self.drafter, self.drafter.growth
        depth = min(growth.reach(budget, rows), drafter.config.parallel)
        return _lattice.propose(rows, self._logits(rows, depth), budget, growth, drafter.names, drafter.vocab)

    def candidates(self, rows: Rows, truth: Tensor, k: int) -> Tensor:
        first, step = _lattice.steps(rows, self._logits(rows, truth.shape[1]))
        return _ranks.below(rows, first, step, truth, k, self.drafter.names)

    def _logits(self, rows: Rows, depth: int) -> Float[Tensor, "b d vd"]:
        """Those of the next `depth` tokens."""
        drafter, cache, b, device = self.drafter, self.cache, len(rows), rows.root.device
        assert drafter.mask is not None
        features, tokens, counts = self.waiting.merged() or (None, None, [0] * b)
        m = max(counts)
        n, count = m + max(depth, 1) - 1, torch.tensor(counts, device=device)[:, None]
        given = drafter.mask.expand(b, n, -1)
        spelled = torch.full((b, n), drafter.config.mask_token, device=device)
        if features is not None and tokens is not None:
            here, room = torch.arange(n, device=device) < count, n - m
            pairs = functional.pad(drafter.given(features[:, :m]), (0, 0, 0, room))
            given = torch.where(here[..., None], pairs, given)
            spelled = torch.where(here, functional.pad(tokens[:, :m], (0, room)), spelled)
        made = self._chain(given, spelled) if n else given
        before = made.new_zeros(b, 1, made.shape[2]) if self.last is None else self.last
        at = (count + torch.arange(max(depth, 1), device=device))[..., None].expand(-1, -1, made.shape[2])
        found = torch.cat([before, made], 1).gather(1, at)  # the last pair's output, and the masks' behind it
        self.last = found[:, :1]
        cache.advance(counts)
        assert cache.host == list(rows.start), "one pair for every token but the first, the root included"
        return drafter.logits(found[:, :depth])


def drafter(net: Eagle3Net, target: Target, growth: Growth | None = None) -> Eagle3Drafter:
    """A drafter of a network in memory (of a copy: it is cast, and its matrices fused)."""
    net = _weights.placed_on(copy.deepcopy(net), target)
    return _drafter(net, target, growth or Growth(parents=STATIC, scale=net.config.scale))


def _drafter(net: Eagle3Net, target: Target, growth: Growth, where: object = "this EAGLE-3 drafter") -> Eagle3Drafter:
    config, ids = net.config, net.ids()
    _weights.fits(where, target, config.vocab, config.target_hidden, config.taps)
    if not config.own_embedding:
        _heads.check_embedding(target, config.layer.hidden)
    vocabulary.check_ids(ids, config.vocab)
    own = config.draft_vocab == config.vocab and torch.equal(ids, torch.arange(config.vocab, device=ids.device))
    names = None if own else ids
    if (made := _compiled(net, target)) is not None:
        table = net.embed_tokens.weight if config.own_embedding else embeddings(target, net.fc.weight.dtype)
        grower = None if table is None else Grower(made, table.detach(), names)
        if grower is not None:
            return Eagle3Drafter(net, target, config, growth, names, compiled=made, grower=grower)
    for layer in (net.midlayer, *net.upper):
        layer.fuse()
    freeze(net, "fc", "lm_head")
    mask = None
    if config.parallel:
        _lattice.check(growth.tree)
        mask = net.fuse(net.mask_hidden)
    return Eagle3Drafter(net, target, config, growth, names, mask, recorded=recorded(net, target))


def _compiled(net: Eagle3Net, target: Target) -> CompiledLayer | None:
    """Its layer in compiled code, where the target's passes are: one layer, and none of the checkpoints' flags."""
    config, layer = net.config, net.midlayer
    flags = config.norm_before_residual, config.norm_before_fc, config.fc_norm, config.norm_output
    code = code_for(target, net.fc.weight.dtype)
    if code is None or config.parallel or any(flags):
        return None
    fusing = Fusing(layer.input_layernorm, layer.hidden_norm, net.fc, net.norm)
    return compiled(code, layer, fusing, net.lm_head.weight)


NETWORK = Network(Eagle3Net, Eagle3Config)
load = loader("eagle3", _drafter)
