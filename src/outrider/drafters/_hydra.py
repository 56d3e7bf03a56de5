"""Hydra in tensors: its network, and how it drafts where no compiled code does (`hydra.py` explains it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ..backends.torch import vocabulary
from ..backends.torch.tensors import TensorRound, tensor
from ..checkpoints.target import linear_head
from ..core.protocols import Drafter, Drafting, Round, Target
from ..core.types import Array, Budget, DraftTree, Rows
from ..nets.configs import HydraConfig
from ..nets.kv_cache import KVCache
from ..nets.layer import Layer, LayerShape, RMSNorm, Store, frozen
from ..nets.network import Network
from . import _growth, _heads, _ranks, _weights, hydra
from ._waiting import merged
from .hydra import Request

FLUSH = 256  # features that may wait: a prompt's chunks are not piled up


class HydraHead(nn.Module):
    """Head i = 0 .. K - 1 reads a feature and i + 1 embeddings."""

    def __init__(self, config: HydraConfig, index: int):
        super().__init__()
        h = config.hidden
        wide = [h * (index + 2), *[None] * (config.layers - 1)]
        self.blocks = nn.ModuleList([_heads.ResBlock(h, inputs) for inputs in wide])
        self.lm_head = nn.Linear(h, config.draft_vocab or config.vocab)
        self.fused: nn.Module | None = None

    def forward(self, x: Float[Tensor, "*s wide"]) -> Float[Tensor, "*s v"]:
        if self.fused is None:
            x = self.blocks[0](x)
        else:
            kept, added = self.fused(x).chunk(2, -1)
            x = kept + functional.silu(added)
        for block in self.blocks[1:]:
            x = block(x)
        return self.lm_head(x)

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """The first block's two maps as one: weights and biases."""
        block: Any = self.blocks[0]
        maps = block.res_connection, block.linear
        with torch.inference_mode(False), torch.no_grad():
            return torch.cat([m.weight for m in maps]), torch.cat([m.bias for m in maps])

    def fuse(self) -> None:
        """For inference: the first block's two maps as one."""
        self.fused = frozen(*self.both)


class HydraPrefix(nn.Module):
    """One decoder layer over the features of the text, normed before and after."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.layer = Layer(shape)
        self.norm = RMSNorm(shape.hidden, shape.eps)

    def forward(
        self,
        features: Float[Tensor, "b m h"],
        positions: Int[Tensor, "#b m"],
        mask: Float[Tensor, "#b 1 gm s"] | None = None,
        store: Store | None = None,
        rotary: Float[Tensor, "#b m 2 1 d"] | None = None,
    ) -> Float[Tensor, "b m h"]:
        return self.norm(self.layer(self.input_layernorm(features), features, positions, mask, store, rotary))


class HydraNet(nn.Module):
    """K heads, and in Hydra++ a decoder layer before them (`prefix`, called once over the text by its user)."""

    d2t: Tensor

    def __init__(self, config: HydraConfig):
        super().__init__()
        self.config = config
        self.prefix = None if config.layer is None else HydraPrefix(config.layer)
        self.heads = nn.ModuleList([HydraHead(config, i) for i in range(config.heads)])
        if config.draft_vocab:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.long))

    def ids(self) -> Int[Tensor, " vd"] | None:
        """The target's token id of every draft token; None: the vocabularies are one."""
        return vocabulary.ids_of(self.d2t) if self.config.draft_vocab else None

    def forward(
        self, head: int, features: Float[Tensor, "*s h"], embeds: Float[Tensor, "*s i h"]
    ) -> Float[Tensor, "*s v"]:
        """Logits of head i = 0 .. K - 1 below a path of i + 1 tokens, the root first. In Hydra++, features are those
        that `prefix` has made."""
        return self.heads[head](torch.cat([features, embeds.flatten(-2)], -1))

    @property
    def parts(self) -> list[HydraHead]:
        return [part for part in self.heads if isinstance(part, HydraHead)]

    def fuse(self) -> None:
        for part in self.parts:
            part.fuse()
        if self.prefix is not None:
            self.prefix.layer.fuse()


def fresh(
    target: Target,
    heads: int = 4,
    layers: int = 1,
    layer: LayerShape | None = None,
    tokens: Int[Tensor, " vd"] | None = None,
) -> HydraNet:
    """An untrained network: every head is the target's LM head, for all tokens or for those of a draft vocabulary.
    With a layer's shape: Hydra++."""
    hidden = target.hidden
    _heads.check_embedding(target, hidden)
    weight, bias = linear_head(target)
    few = 0
    if tokens is not None:
        weight, bias, few = weight[tokens], bias[tokens], len(tokens)
    config = HydraConfig(target.vocab, hidden, heads, layers, layer is not None, layer, draft_vocab=few)
    net = HydraNet(config).to(weight.device, torch.promote_types(weight.dtype, torch.float32))
    if tokens is not None:
        vocabulary.keep(net.d2t, tokens)
    with torch.no_grad():
        for part in net.parts:
            part.lm_head.weight.copy_(weight)
            part.lm_head.bias.copy_(bias)
    return net


@dataclass(frozen=True)
class HydraDrafter(_growth.Grown):
    """Trained Hydra heads for one target."""

    net: HydraNet
    target: Target
    config: HydraConfig
    growth: _growth.Growth
    names: Tensor | None  # token ids of the draft vocabulary; None: it is the target's own
    taps: tuple[int, ...] = (-1,)

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> HydraDrafting:
        shape = self.config.layer
        if shape is None:
            return HydraDrafting(self)
        some = next(self.net.parameters())
        return HydraDrafting(self, prefix=KVCache(shape, len(prompts), capacity, some))


@dataclass
class HydraDrafting(Drafting):
    """Plain Hydra knows the feature of the last committed token. Hydra++ also keeps the keys and values of its prefix
    layer; features are fed to it only before a draft, so that rounds without one cost nothing."""

    drafter: HydraDrafter
    feature: Float[Tensor, "b h"] | None = None  # in Hydra++ what the prefix made of it
    prefix: KVCache | None = None
    waiting: list[tuple[Tensor, Tensor, list[int]]] = field(default_factory=list)  # features, path, count of a row

    def observe(self, round: Round) -> None:
        given = TensorRound(round, next(self.drafter.net.parameters()).device)
        if self.prefix is None:
            self.feature = _heads.last(given, self.feature)
            return
        counts = [len(path) for path in round.paths]
        path, seen = given.path[:, : max(counts)], given.features(-1)
        self.waiting.append((seen.gather(1, path[..., None].expand(-1, -1, seen.shape[-1])), path, counts))
        if sum(path.shape[1] for _, path, _ in self.waiting) > FLUSH:
            self._read()

    def _read(self) -> None:
        """Feed the waiting features to the prefix layer."""
        net, prefix = self.drafter.net.prefix, self.prefix
        if net is None or prefix is None or not self.waiting:
            return
        features, _, counts = merged(self.waiting) if len(self.waiting) > 1 else self.waiting[0]
        self.waiting, m = [], features.shape[1]
        if m == 0:
            return
        positions = prefix.lengths[:, None] + torch.arange(m, device=features.device)
        rotary = net.layer.rope.table(prefix.longest + m, features.dtype, features.device)[positions]
        own = torch.ones(1, m, m, dtype=torch.bool, device=features.device).tril_()
        mask = prefix.mask(own, features.dtype, net.layer.groups)
        made = net(features, positions, mask, prefix.place(m), rotary)
        prefix.advance(counts)
        count = torch.tensor(counts, device=features.device)
        end = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, made.shape[2])
        last = made.gather(1, end)[:, 0]
        self.feature = last if self.feature is None else torch.where(count[:, None] > 0, last, self.feature)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        self._read()
        drafter = self.drafter
        path = Walk(drafter, rows, self.feature)
        return drafter.growth.propose(rows, path.first, path.step, budget, drafter.names, drafter.target.vocab)[0]

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `training/tree_tuning.py`."""
        self._read()
        path = Walk(self.drafter, rows, self.feature)
        return _ranks.below(rows, path.first, path.step, truth[:, : self.drafter.config.heads], k, self.drafter.names)

    def select(self, index: Sequence[int]) -> None:
        self._read()
        if self.feature is not None:
            self.feature = self.feature[list(index)]
        if self.prefix is not None:
            self.prefix.select(index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, HydraDrafting)
        self._read()
        other._read()
        assert self.feature is not None
        assert other.feature is not None
        self.feature = torch.cat([self.feature, other.feature])
        if self.prefix is not None and other.prefix is not None:
            self.prefix.join(other.prefix)


@dataclass
class Walk:
    """One tree being grown, a head per depth. A node's input is its parent's and its own embedding after it."""

    drafter: HydraDrafter
    rows: Rows
    feature: Float[Tensor, "b h"] | None
    inputs: Float[Tensor, "b w wide"] = field(init=False)  # of the layer fed last
    since: int = 0  # where that layer begins among the fed nodes

    def __post_init__(self) -> None:
        assert self.feature is not None, "a prompt comes before a draft"
        roots = torch.tensor(self.rows.root, device=self.feature.device)
        self.inputs = torch.cat([self.feature, _heads.embed(self.drafter.target, roots)], -1)[:, None]

    @property
    def first(self) -> Float[Tensor, "b 1 v"]:
        return self.drafter.net.heads[0](self.inputs)

    def step(self, fed: DraftTree, since: int) -> Float[Tensor, "b w v"]:
        device = self.inputs.device
        embeds = _heads.embed(self.drafter.target, tensor(fed.tokens[:, since:], device))
        above = tensor(fed.parents[:, since:] - self.since, device)[..., None].expand(-1, -1, self.inputs.shape[-1])
        self.inputs, self.since = torch.cat([self.inputs.gather(1, above), embeds], -1), since
        return self.drafter.net.heads[fed.deepest](self.inputs)


def load(target: Target | None, path: str | None, request: Request) -> Drafter:
    """Hydra heads from a folder of whatever layout."""
    net: HydraNet = _weights.network(path, "hydra", target)
    assert target is not None, "or the network would have been refused"
    _weights.fits(path, target, net.config.vocab, net.config.hidden)
    _heads.check_embedding(target, net.config.hidden)
    if (ids := net.ids()) is not None:
        vocabulary.check_ids(ids, target.vocab)
    return drafter(net, target, request.growth(net.config))


def drafter(net: HydraNet, target: Target, growth: _growth.Growth) -> Drafter:
    """A drafter of heads in memory, which are in the target's precision and are changed: made ready for inference."""
    made = _weights.compiled(hydra.compiled, net, target, growth)
    if made is not None:
        return made
    net.fuse()
    return HydraDrafter(net, target, net.config, growth, net.ids())


NETWORK = Network(HydraNet, HydraConfig)
