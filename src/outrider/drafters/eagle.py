"""EAGLE (Li et al. 2024a, section 4; EAGLE-2: 2024b; HASS: Zhang et al. 2024, the same network): features foretell
features.

    f'_{i+1} = layer(fc(cat(e(t_{i+1}), f_i)))   at position i;   law of t_{i+2} = head(f'_{i+1})

f is the target's hidden state after its final norm, e and head are the target's own embedding and LM head. The token
is one step ahead of the feature, because it is the outcome of the draw that f_i left open. Accepted tokens are fed
again with true features (`_features.py`); trees grow as EAGLE-2's do, or to EAGLE-1's fixed shape (`_growth.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..nn import Attend, Layer, LayerShape, Prefix, Store
from ..types import InputError, Target
from . import _weights
from ._features import FeatureDrafting
from ._growth import Growth, from_ranks

INPUTS = ("feature+shifted", "feature+unshifted", "feature", "token")  # the paper's ablation, the first is EAGLE

# EAGLE-1's tree, 25 nodes of depth 5: how many children the nodes of each layer have, best first.
STATIC = from_ranks(
    [
        *((a,) for a in range(4)),
        *((a, b) for a, n in enumerate((3, 2, 2, 1)) for b in range(n)),
        *((0, b, c) for b, n in enumerate((3, 2, 2)) for c in range(n)),
        (1, 0, 0),
        *((0, 0, 0, d) for d in range(3)),
        *((0, 0, 0, 0, e) for e in range(2)),
    ]
)


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

    def __post_init__(self) -> None:
        if self.inputs not in INPUTS:
            raise InputError(f"the inputs of EAGLE are {', '.join(INPUTS)}, not {self.inputs!r}")
        if not self.layer.hidden == self.layer.inputs == self.target_hidden:
            raise InputError(
                f"EAGLE foretells the target's features, so its layer must be {self.target_hidden} wide, "
                f"not {self.layer.hidden}; EAGLE-3 may differ"
            )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layer": self.layer.to_dict()}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> EagleConfig:
        return cls(**{**given, "layer": LayerShape.from_dict(given["layer"])})


class EagleNet(nn.Module):
    """fc over cat(embedding, feature), and one decoder layer without a norm before its attention."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        h, self.config = config.layer.hidden, config
        self.fc = nn.Linear(2 * h if "+" in config.inputs else h, h, bias=config.bias)
        self.layers = nn.ModuleList([Layer(config.layer)])

    def forward(
        self,
        features: Float[Tensor, "b m h"],
        embeds: Float[Tensor, "b m h"],
        positions: Int[Tensor, "#b m"] | None,
        mask: Float[Tensor, "#b 1 gm s"] | None = None,
        store: Store | None = None,
        turn: Float[Tensor, "#b #m 2 1 d"] | None = None,
        look: Attend | None = None,
    ) -> Float[Tensor, "b m h"]:
        """Foretold features. Pair i is (feature_i, embedding of token_{i+1}) at position i; unshifted: of token_i."""
        kind = self.config.inputs
        if kind == "feature":
            given = features
        elif kind == "token":
            given = embeds
        else:
            given = torch.cat([embeds, features], -1)
        x = self.fc(given)
        return self.layers[0](x, x, positions, mask, store, turn, look)


@dataclass(frozen=True)
class EagleDrafter:
    net: EagleNet
    target: Target
    config: EagleConfig
    growth: Growth
    taps: tuple[int, ...] = (-1,)
    names: None = None

    @property
    def layer(self) -> Layer:
        return self.net.layers[0]  # type: ignore[return-value]

    @property
    def shifted(self) -> bool:
        return self.config.inputs != "feature+unshifted"

    @property
    def vocab(self) -> int:
        return self.target.vocab

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> FeatureDrafting:
        weight = self.net.fc.weight
        return FeatureDrafting(self, Prefix(self.config.layer, len(prompts), capacity, weight.dtype, weight.device))

    def given(self, features: Tensor) -> Tensor:
        return features

    def step(self, vectors: Tensor, tokens: Tensor, mask: Tensor | None, store: Store, turn: Tensor) -> Tensor:
        return self.net(vectors, self.target.embed(tokens), None, mask, store, turn)

    def logits(self, vectors: Tensor) -> Tensor:
        return self.target.head(vectors)


def drafter(net: EagleNet, target: Target, growth: Growth | None = None) -> EagleDrafter:
    """A drafter of a network in memory (of a copy: it is cast, and its matrices fused)."""
    net = copy.deepcopy(net).requires_grad_(False).eval()
    net.to(device=getattr(target, "device", None), dtype=getattr(target, "dtype", None))
    growth = growth or Growth(parents=STATIC, scale=net.config.scale)
    _fits(net.config, target)
    net.layers[0].fuse()  # type: ignore[operator]
    return EagleDrafter(net, target, net.config, growth)


def save(folder: str | Path, net: EagleNet, config: EagleConfig | None = None) -> None:
    """Write a drafter's folder: config.json and model.safetensors."""
    _weights.save(folder, "eagle", net, (config or net.config).to_dict())


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    tree: str = "dynamic",
    shape: tuple[int, ...] = (),
    depth: int = 8,
    width: int = 0,
    kids: int = 10,
    nodes: int = 60,
    scale: float = 0.0,
    value: bool = True,
    rerank: bool = True,
    replacement: bool = False,
) -> EagleDrafter:
    """A trained EAGLE from its folder. Without a shape, the static tree is EAGLE-1's; scale 0: the checkpoint's own."""
    if target is None:
        raise InputError("EAGLE reads its target's features, so it needs the target that it drafts for")
    given, tensors = _weights.read(path, "eagle", target)
    config = _weights.config_of(EagleConfig.from_dict, given, path)
    _fits(config, target)
    scale = scale or config.scale
    parents = () if shape else STATIC
    growth = Growth(tree, shape, parents, depth, width, kids, nodes, scale, value, rerank, replacement)
    net = _weights.fill(lambda: EagleNet(config), tensors, path, target)
    net.layers[0].fuse()  # type: ignore[operator]
    return EagleDrafter(net, target, config, growth)


def _fits(config: EagleConfig, target: Target) -> None:
    _weights.fits("this EAGLE drafter", target, config.vocab, config.target_hidden)
