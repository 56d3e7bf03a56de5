"""EAGLE in tensors: its network, and how it drafts where no compiled code does (`eagle.py` explains it)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..backends.torch import vocabulary
from ..core.protocols import Drafter, Target
from ..nets.configs import EagleConfig
from ..nets.kv_cache import KVCache
from ..nets.layer import Attend, Layer, Store
from ..nets.network import Network
from . import _eagles, _heads, _weights
from ._features import FeatureDrafting, loader
from ._growth import STATIC, Grown, Growth


class EagleNet(nn.Module):
    """fc over cat(embedding, feature), and one decoder layer without a norm before its attention."""

    d2t: Tensor

    def __init__(self, config: EagleConfig):
        super().__init__()
        h, self.config = config.layer.hidden, config
        self.fc = nn.Linear(2 * h if "+" in config.inputs else h, h, bias=config.bias)
        self.layers = nn.ModuleList([Layer(config.layer)])
        if config.draft_vocab:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.long))

    @property
    def layer(self) -> Layer:
        """The only one."""
        return self.layers[0]  # type: ignore[return-value]

    def ids(self) -> Int[Tensor, " vd"] | None:
        """The target's token id of every draft token; None: the vocabularies are one."""
        return vocabulary.ids_of(self.d2t) if self.config.draft_vocab else None

    def given(self, features: Float[Tensor, "*s h"], embeds: Float[Tensor, "*s h"]) -> Float[Tensor, "*s i"]:
        """What `fc` reads: both, or the one that the paper's ablation leaves."""
        alone = {"feature": features, "token": embeds}.get(self.config.inputs)
        return torch.cat([embeds, features], -1) if alone is None else alone

    def forward(
        self,
        features: Float[Tensor, "b m h"],
        embeds: Float[Tensor, "b m h"],
        positions: Int[Tensor, "#b m"] | None,
        mask: Float[Tensor, "#b 1 gm s"] | None = None,
        store: Store | None = None,
        rotary: Float[Tensor, "#b #m 2 1 d"] | None = None,
        attention: Attend | None = None,
    ) -> Float[Tensor, "b m h"]:
        """Predicted features. Pair i is (feature_i, embedding of token_{i+1}) at position i; unshifted: of token_i."""
        x = self.fc(self.given(features, embeds))
        return self.layer(x, x, positions, mask, store, rotary, attention)


@dataclass(frozen=True)
class EagleDrafter(Grown):
    """A trained EAGLE for one target: its network, the tree it grows, and the head for the tokens that it can draft."""

    net: EagleNet
    target: Target
    config: EagleConfig
    growth: Growth
    head: Callable[[Tensor], Tensor]  # of the draft vocabulary, taken from the target's
    names: Tensor | None  # token ids of the draft vocabulary; None: it is the target's own
    taps: tuple[int, ...] = (-1,)

    @property
    def layer(self) -> Layer:
        return self.net.layer

    @property
    def shifted(self) -> bool:
        return self.config.inputs != "feature+unshifted"

    @property
    def vocab(self) -> int:
        return self.target.vocab

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> FeatureDrafting:
        return FeatureDrafting(self, KVCache(self.config.layer, len(prompts), capacity, self.net.fc.weight))

    def given(self, features: Tensor) -> Tensor:
        return features

    def embed(self, tokens: Tensor) -> Tensor:
        return _heads.embed(self.target, tokens)

    def logits(self, vectors: Tensor) -> Tensor:
        return self.head(vectors)


def drafter(net: EagleNet, target: Target, growth: Growth | None = None) -> Drafter:
    """A drafter of a network in memory (of a copy: it is cast, and its matrices fused)."""
    net = _weights.placed_on(copy.deepcopy(net), target)
    return _drafter(net, target, growth or Growth(parents=STATIC, scale=net.config.scale))


def _drafter(net: EagleNet, target: Target, growth: Growth, where: object = "this EAGLE drafter") -> Drafter:
    _weights.fits(where, target, net.config.vocab, net.config.target_hidden)
    _heads.check_embedding(target, net.config.target_hidden)
    ids = net.ids()
    if (made := _weights.compiled(_eagles.compiled, net, target, growth)) is not None:
        return made
    net.layer.fuse()
    return EagleDrafter(net, target, net.config, growth, _heads.rows(target, ids), ids)


NETWORK = Network(EagleNet, EagleConfig)
load = loader("eagle", _drafter)
