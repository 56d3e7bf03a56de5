"""Medusa (Cai et al. 2024): K heads on the target's last hidden state, each foretelling one position further.

    p_k = softmax(W2_k (h + SiLU(W1_k h)))    section 2.1.1: h is the feature of the last committed token at t;
                                              the target's own head foretells t + 1, head k = 1 .. K foretells t + 1 + k

The heads begin as the target's LM head (W1 = 0, W2 = its weights), or share it. A head sees no drafted token, so every
node at one depth has the same candidates and a tree is a set of paths of ranks: [0, 2] is the third candidate of the
second head below the best one of the first. Which set:

    dynamic    the `budget.nodes` nodes with the highest product of confidences, each round anew (default)
    static     the Cartesian product of the s_k best of head k: `shape` (section 2.1.2)
    chain      the best of every head
    greedy63   63 nodes grown greedily from assumed accuracies (`_ranks.py`)
    FILE       the same grown from measured accuracies, by `outrider tune-tree` (section 2.3.3)

Under `coupled` the candidates of a depth are ranked by the noise of their own position. Under `rejection` they are
deterministic, and judged as point masses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from .. import sampling
from ..tree import root_only
from ..types import Budget, Drafting, DraftTree, InputError, Round, Rows, Target
from . import _heads, _ranks, _weights
from ._common import whole

Head = Callable[[Tensor], Tensor]
TREES = ("dynamic", "static", "chain")


@dataclass(frozen=True)
class MedusaConfig:
    """`heads`: K. `layers`: residual blocks per head. `bias`: has the LM head one? (The published heads have none.)
    `lossy`: trained together with the target (Medusa-2), which is another model since. `tree`: paths of ranks, best
    first, used unless another tree is asked for."""

    vocab: int
    hidden: int
    heads: int = 4
    layers: int = 1
    share_head: bool = False
    bias: bool = False
    scale: float = 1.0
    lossy: bool = False
    tree: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "heads", "layers"):
            whole(f"{name} of Medusa", getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> MedusaConfig:
        tree = given.get("tree")
        return cls(**{**given, "tree": None if tree is None else _ranks.checked(tree, "its config")})


class MedusaHead(nn.Module):
    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.blocks = nn.ModuleList([_heads.ResBlock(config.hidden) for _ in range(config.layers)])
        self.lm_head = None if config.share_head else nn.Linear(config.hidden, config.vocab, bias=config.bias)


class MedusaNet(nn.Module):
    """K heads of residual blocks, each with an LM head or all with the target's."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList([MedusaHead(config) for _ in range(config.heads)])
        self.fused: tuple[list[tuple[Tensor, Tensor]], Tensor | None, Tensor | None] | None = None

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
    target: Target, heads: int = 4, layers: int = 1, share_head: bool = False, lossy: bool = False
) -> tuple[MedusaNet, MedusaConfig]:
    """An untrained network: every head is the target's LM head."""
    hidden = _heads.width(target)
    weight, bias = _heads.lm_head(target, hidden)
    biased = bool(bias.any())
    config = MedusaConfig(target.vocab, hidden, heads, layers, share_head, biased and not share_head, lossy=lossy)
    net = MedusaNet(config).to(weight.device, torch.promote_types(weight.dtype, torch.float32))
    with torch.no_grad():
        for part in net.parts:
            if part.lm_head is not None:
                part.lm_head.weight.copy_(weight)
                if biased:
                    part.lm_head.bias.copy_(bias)
    return net, config


@dataclass(frozen=True)
class MedusaOptions:
    tree: str = "dynamic"  # dynamic | static | ranks
    ranks: tuple[tuple[int, ...], ...] = ()  # of tree=ranks, best first
    shape: tuple[int, ...] = (4, 3, 2, 1)
    kids: int = 10
    scale: float = 1.0


@dataclass(frozen=True)
class MedusaDrafter:
    net: MedusaNet
    target: Target
    config: MedusaConfig
    options: MedusaOptions
    taps: tuple[int, ...] = (-1,)

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> MedusaDrafting:
        return MedusaDrafting(self)


@dataclass
class MedusaDrafting:
    drafter: MedusaDrafter
    feature: Float[Tensor, "b h"] | None = None  # of the last committed token

    def observe(self, round: Round) -> None:
        self.feature = _heads.last(round, round.look.features[-1], self.feature)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        options, depth = self.drafter.options, min(budget.depth, max(rows.room) - 1, self.drafter.config.heads)
        if budget.shape is None and options.tree == "ranks":
            paths = _ranks.within(options.ranks, budget.nodes, depth)
        else:
            shape = budget.shape or (options.shape if options.tree == "static" else (options.kids,) * depth)
            paths = _ranks.candidates(tuple(min(s, self.drafter.config.vocab) for s in shape[:depth]), budget.nodes)
        if not paths.paths:
            return root_only(rows.root)
        tokens, confidence = self._rank(rows, paths.depth, paths.kids)
        floor = budget.floor if rows.rule == "coupled" else 0.0
        return _ranks.plant(rows.root, tokens, confidence, paths, budget.nodes, floor)

    def candidates(self, rows: Rows, truth: Tensor, k: int) -> Tensor:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `tuning.py`."""
        return self._rank(rows, min(truth.shape[1], self.drafter.config.heads), k)[0]

    def _rank(self, rows: Rows, depth: int, k: int) -> tuple[Tensor, Tensor]:
        assert self.feature is not None
        logits = self.drafter.net.fast(self.feature, depth, self.drafter.target.head)
        below = torch.arange(1, depth + 1, device=logits.device).repeat(len(rows), 1)
        return sampling.rank(logits, rows, below, k, self.drafter.options.scale)

    def select(self, index: Sequence[int]) -> None:
        if self.feature is not None:
            self.feature = self.feature[list(index)]

    def join(self, other: Drafting) -> None:
        assert isinstance(other, MedusaDrafting)
        assert self.feature is not None
        assert other.feature is not None
        self.feature = torch.cat([self.feature, other.feature])


def save(folder: str | Path, net: MedusaNet, config: MedusaConfig | None = None) -> None:
    """Write a native folder, which `load` reads."""
    _weights.save(folder, "medusa", net, (config or net.config).to_dict())


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    tree: str = "",
    shape: tuple[int, ...] = (4, 3, 2, 1),
    kids: int = 10,
    scale: float = 0.0,
) -> MedusaDrafter:
    """Medusa heads from a folder. `tree` "" is the folder's own, or dynamic; `scale` 0 is the folder's own."""
    if target is None:
        raise InputError("Medusa heads need the target that they draft for")
    found, tensors = _weights.read(path, "medusa")
    config = _weights.config_of(MedusaConfig.from_dict, found, path)
    _ranks.check_target(config.vocab, config.hidden, _heads.width(target), target, path)
    if min(shape, default=0) < 1 or whole("kids", kids) < 1 or not 0 <= scale < float("inf"):
        raise InputError("the shape, kids and scale of Medusa must be positive")
    if tree == "chain":
        tree, shape = "static", (1,) * config.heads
    kind, ranks = _ranks.chosen(tree, config.tree, TREES, config.heads, target.vocab)
    net = _weights.fill(lambda: MedusaNet(config), tensors, path, target)
    net.fuse()
    return MedusaDrafter(net, target, config, MedusaOptions(kind, ranks, shape, kids, scale or config.scale))
