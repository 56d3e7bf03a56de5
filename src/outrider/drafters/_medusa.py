"""Medusa in tensors: its network, and how it drafts where no compiled code does (`medusa.py` explains it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ..backends.torch import vocabulary
from ..backends.torch.tensors import TensorRound
from ..checkpoints.target import linear_head
from ..core.protocols import Drafter, Drafting, Round, Target
from ..nets.configs import MedusaConfig
from ..nets.network import Network
from . import _heads, _weights, medusa
from .medusa import MedusaDrafting, MedusaOptions, Request

Head = Callable[[Tensor], Tensor]


class MedusaHead(nn.Module):
    """One head: residual blocks, then an LM head of its own unless it shares the target's."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.blocks = nn.ModuleList([_heads.ResBlock(config.hidden) for _ in range(config.layers)])
        size = config.draft_vocab or config.vocab
        self.lm_head = None if config.share_head else nn.Linear(config.hidden, size, bias=config.bias)


class MedusaNet(nn.Module):
    """K heads of residual blocks, each with an LM head or all with the target's."""

    d2t: Tensor

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList([MedusaHead(config) for _ in range(config.heads)])
        self.fused: tuple[list[tuple[Tensor, Tensor]], Tensor | None, Tensor | None] | None = None
        if config.draft_vocab:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.long))

    def ids(self) -> Int[Tensor, " vd"] | None:
        """The target's token id of every draft token; None: the vocabularies are one."""
        return vocabulary.ids_of(self.d2t) if self.config.draft_vocab else None

    @property
    def device(self) -> torch.device:
        """Of its parameters."""
        return next(self.parameters()).device

    @property
    def parts(self) -> list[MedusaHead]:
        return [part for part in self.heads if isinstance(part, MedusaHead)]

    def forward(self, features: Float[Tensor, "*s h"], head: Head | None = None) -> list[Float[Tensor, "*s v"]]:
        """Logits of every head. `head`: the target's, needed where it is shared."""
        made = []
        for part in self.parts:
            x = features
            for block in part.blocks:
                x = block(x)
            if part.lm_head is None:
                assert head is not None, "shared heads need the target's"
                made.append(head(x))
            else:
                made.append(part.lm_head(x))
        return made

    def fuse(self) -> None:
        """For inference: one matrix per layer of all heads. The parameters become views of it."""
        with torch.inference_mode(False), torch.no_grad():
            layers = []
            for i in range(self.config.layers):
                linears = [part.blocks[i].linear for part in self.parts]
                layers.append((_stacked(linears, "weight"), _stacked(linears, "bias")[:, None]))
            ends = [part.lm_head for part in self.parts]
            own = not self.config.share_head
            weight = _stacked(ends, "weight") if own else None
            self.fused = layers, weight, _stacked(ends, "bias") if own and self.config.bias else None

    def fast(self, x: Float[Tensor, "b h"], heads: int, head: Head) -> Float[Tensor, "b k v"]:
        """Logits of the first k heads, as few operations as there are layers."""
        assert self.fused is not None
        layers, weight, bias = self.fused
        x = x.expand(heads, *x.shape)
        for linear, shift in layers:
            x = x + functional.silu(torch.baddbmm(shift[:heads], x, linear[:heads]))
        if weight is None:
            return head(x.transpose(0, 1))
        logits = torch.bmm(x, weight[:heads]).transpose(0, 1)
        return logits if bias is None else logits + bias[:heads]


def _stacked(layers: Sequence[Any], name: str) -> Tensor:
    """One tensor of several layers' parameters, which become views of it; matrices lie [inputs, outputs], as the
    product of a few rows reads them fastest."""

    def turned(x: Tensor) -> Tensor:
        return x.mT if x.dim() == 2 else x

    joined = torch.stack([turned(getattr(layer, name)) for layer in layers])
    for layer, part in zip(layers, joined, strict=True):
        setattr(layer, name, nn.Parameter(turned(part), requires_grad=False))
    return joined


def fresh(
    target: Target,
    heads: int = 4,
    layers: int = 1,
    share_head: bool = False,
    lossy: bool = False,
    tokens: Int[Tensor, " vd"] | None = None,
) -> MedusaNet:
    """An untrained network: every head is the target's LM head, for all tokens or for those of a draft vocabulary."""
    hidden = target.hidden
    weight, bias = linear_head(target)
    few = 0
    if tokens is not None:
        weight, bias, few = weight[tokens], bias[tokens], len(tokens)
    own = bool(bias.any()) and not share_head
    config = MedusaConfig(target.vocab, hidden, heads, layers, share_head, own, lossy=lossy, draft_vocab=few)
    net = MedusaNet(config).to(weight.device, torch.promote_types(weight.dtype, torch.float32))
    if tokens is not None:
        vocabulary.keep(net.d2t, tokens)
    with torch.no_grad():
        for part in net.parts:
            if part.lm_head is not None:
                part.lm_head.weight.copy_(weight)
                if own:
                    part.lm_head.bias.copy_(bias)
    return net


@dataclass(frozen=True)
class MedusaDrafter(Drafter):
    """Trained Medusa heads for one target, in tensors."""

    net: MedusaNet
    target: Target
    config: MedusaConfig
    options: MedusaOptions
    head: Head  # the target's, for the tokens that can be drafted
    names: Tensor | None  # token ids of the draft vocabulary; None: it is the target's own
    taps: tuple[int, ...] = (-1,)

    @property
    def scale(self) -> float:  # type: ignore[override]
        return self.options.scale

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> TensorMedusaDrafting:
        return TensorMedusaDrafting(self)


@dataclass
class TensorMedusaDrafting(MedusaDrafting):
    """The same in tensors."""

    drafter: MedusaDrafter
    feature: Float[Tensor, "b h"] | None = None  # of the last committed token

    def observe(self, round: Round) -> None:
        self.feature = _heads.last(TensorRound(round, self.drafter.net.device), self.feature)

    def logits(self, depth: int) -> Float[Tensor, "b d v"]:
        assert self.feature is not None, "a prompt comes before a draft"
        return self.drafter.net.fast(self.feature, depth, self.drafter.head)

    def select(self, index: Sequence[int]) -> None:
        if self.feature is not None:
            self.feature = self.feature[list(index)]

    def join(self, other: Drafting) -> None:
        assert isinstance(other, TensorMedusaDrafting)
        assert self.feature is not None
        assert other.feature is not None
        self.feature = torch.cat([self.feature, other.feature])


def load(target: Target | None, path: str | None, request: Request) -> Drafter:
    """Medusa heads from a folder of whatever layout."""
    net: MedusaNet = _weights.network(path, "medusa", target)
    assert target is not None, "or the network would have been refused"
    _weights.fits(path, target, net.config.vocab, net.config.hidden)
    return drafter(net, target, request.options(net.config))


def drafter(net: MedusaNet, target: Target, options: MedusaOptions) -> Drafter:
    """A drafter of heads in memory, which are in the target's precision and are changed: made ready for inference."""
    made = _weights.compiled(medusa.compiled, net, target, options)
    if made is not None:
        return made
    net.fuse()
    ids = net.ids()
    return MedusaDrafter(net, target, net.config, options, _heads.rows(target, ids), ids)


NETWORK = Network(MedusaNet, MedusaConfig)
