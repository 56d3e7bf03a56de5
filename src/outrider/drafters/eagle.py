"""EAGLE (Li et al. 2024a, section 4; EAGLE-2: 2024b; HASS: Zhang et al. 2024, the same network): predicts
the next hidden state of the target from the last one and the next token.

    f'_{i+1} = layer(fc(cat(e(t_{i+1}), f_i)))   at position i;   law of t_{i+2} = head(f'_{i+1})

f is the target's hidden state after its final norm, e and head are the target's own embedding and LM head (its rows of
a trimmed draft vocabulary, where the drafter has one). The token
is one step ahead of the feature, because it is the outcome of the draw that f_i left open. Accepted tokens are fed
again with true features (`_features.py`); trees grow as EAGLE-2's do, or to EAGLE-1's fixed shape (`_growth.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..backends.torch import vocabulary
from ..backends.torch.compiled import embeddings
from ..backends.torch.products import freeze
from ..backends.torch.recorded import Recorded
from ..core.protocols import Target
from ..nets.compiled import CompiledLayer, code_for, compiled
from ..nets.grown import Grower
from ..nets.kv_cache import KVCache
from ..nets.layer import Attend, Layer, LayerShape, Store
from ..nets.network import Network
from ..params import InputError
from . import _heads, _weights
from ._features import FeatureDrafting, loader, recorded
from ._growth import STATIC, Growth

INPUTS = ("feature+shifted", "feature+unshifted", "feature", "token")  # the paper's ablation, the first is EAGLE


@dataclass(frozen=True)
class EagleConfig:
    """`inputs`: what a step reads (INPUTS). `scale`: s of the confidences softmax(r / s)."""

    layer: LayerShape
    vocab: int
    target_hidden: int
    inputs: str = INPUTS[0]
    bias: bool = False
    scale: float = 1.0
    trained: str = "eagle"  # or hass: who trained it, for those who ask
    draft_vocab: int = 0  # tokens that can be drafted; 0: all of the target's

    def __post_init__(self) -> None:
        if self.inputs not in INPUTS:
            raise InputError(f"the inputs of EAGLE are {', '.join(INPUTS)}, not {self.inputs!r}")
        vocabulary.check_size(self.draft_vocab, self.vocab, 0)
        if not self.layer.hidden == self.layer.inputs == self.target_hidden:
            raise InputError(
                f"EAGLE predicts the target's features, so its layer must be {self.target_hidden} wide, "
                f"not {self.layer.hidden}; EAGLE-3 may differ"
            )


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
        turn: Float[Tensor, "#b #m 2 1 d"] | None = None,
        attention: Attend | None = None,
    ) -> Float[Tensor, "b m h"]:
        """Predicted features. Pair i is (feature_i, embedding of token_{i+1}) at position i; unshifted: of token_i."""
        x = self.fc(self.given(features, embeds))
        return self.layer(x, x, positions, mask, store, turn, attention)


@dataclass(frozen=True)
class EagleDrafter:
    """A trained EAGLE for one target: its network, the tree it grows, and the head for the tokens that it can draft."""

    net: EagleNet
    target: Target
    config: EagleConfig
    growth: Growth
    head: Callable[[Tensor], Tensor]  # of the draft vocabulary, taken from the target's
    names: Tensor | None  # token ids of the draft vocabulary; None: it is the target's own
    taps: tuple[int, ...] = (-1,)
    recorded: Recorded | None = None  # its steps, where the target's passes are recorded
    compiled: CompiledLayer | None = None  # its steps, where the target's passes are compiled
    grower: Grower | None = None  # whole trees of these

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
        return self.target.embed(tokens)

    def logits(self, vectors: Tensor) -> Tensor:
        return self.head(vectors)


def drafter(net: EagleNet, target: Target, growth: Growth | None = None) -> EagleDrafter:
    """A drafter of a network in memory (of a copy: it is cast, and its matrices fused)."""
    net = _weights.placed_on(copy.deepcopy(net), target)
    return _drafter(net, target, growth or Growth(parents=STATIC, scale=net.config.scale))


def _drafter(net: EagleNet, target: Target, growth: Growth, where: object = "this EAGLE drafter") -> EagleDrafter:
    _weights.fits(where, target, net.config.vocab, net.config.target_hidden)
    _heads.check_embedding(target, net.config.target_hidden)
    ids = net.ids()
    code = code_for(target, net.fc.weight.dtype)
    made = None if code is None else compiled(code, net.layer, net.fc, _heads.plain_rows(target, ids))
    if made is not None:
        table = embeddings(target, net.fc.weight.dtype) if net.config.inputs == INPUTS[0] else None
        grower = None if table is None else Grower(made, table, ids)
        return EagleDrafter(net, target, net.config, growth, made.logits, ids, compiled=made, grower=grower)
    net.layer.fuse()
    freeze(net, "fc")
    return EagleDrafter(net, target, net.config, growth, _heads.rows(target, ids), ids, recorded=recorded(net, target))


NETWORK = Network(EagleNet, EagleConfig)
load = loader("eagle", _drafter)
