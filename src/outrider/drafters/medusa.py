"""Medusa (Cai et al. 2024): K heads on the target's last hidden state, each predicting one position further.

    p_k = softmax(W2_k (h + SiLU(W1_k h)))    section 2.1.1: h is the feature of the last committed token at t;
                                              the target's own head predicts  t + 1, head k = 1 .. K predicts  t + 1 + k

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ..backends.native.drafts import Shape
from ..backends.native.lattice import Medusa, medusa
from ..backends.torch import vocabulary
from ..backends.torch.tensors import TensorRound, array
from ..checkpoints.target import linear_head
from ..core.protocols import Drafter, Drafting, Round, Target
from ..core.tree import root_only
from ..core.types import Array, Budget, DraftTree, Rows
from ..nets.configs import check_size
from ..nets.network import Network
from ..params import InputError
from . import _heads, _ranks, _weights
from ._common import whole
from ._compiled import code_for
from ._logits import rank

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
    draft_vocab: int = 0  # tokens that can be drafted; 0: all of the target's

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "heads", "layers"):
            whole(f"{name} of Medusa", getattr(self, name))
        _heads.check_blocks(self.heads, self.layers)
        check_size(self.draft_vocab, self.vocab, 0)
        if self.tree is not None:
            object.__setattr__(self, "tree", _ranks.checked(self.tree, "its config"))


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
class MedusaOptions:
    """The tree that Medusa drafts."""

    tree: str = "dynamic"  # dynamic | static | ranks
    ranks: tuple[tuple[int, ...], ...] = ()  # of tree=ranks, best first
    shape: tuple[int, ...] = (4, 3, 2, 1)
    top_k: int = 10
    scale: float = 1.0


@dataclass(frozen=True)
class MedusaDrafter(Drafter):
    """Trained Medusa heads for one target."""

    net: MedusaNet
    target: Target
    config: MedusaConfig
    options: MedusaOptions
    head: Head  # the target's, for the tokens that can be drafted
    names: Tensor | None  # token ids of the draft vocabulary; None: it is the target's own
    compiled: Medusa | None = None  # its heads, and its dynamic trees, where the target's passes are compiled
    taps: tuple[int, ...] = (-1,)

    @property
    def scale(self) -> float:  # type: ignore[override]
        return self.options.scale

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> MedusaDrafting:
        return MedusaDrafting(self)


@dataclass
class MedusaDrafting(Drafting):
    """Each row's feature of its last committed token."""

    drafter: MedusaDrafter
    feature: Float[Tensor, "b h"] | None = None  # of the last committed token

    def observe(self, round: Round) -> None:
        self.feature = _heads.last(TensorRound(round, self.drafter.net.device), self.feature)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        options, config = self.drafter.options, self.drafter.config
        depth, most = min(budget.depth, max(rows.remaining) - 1, config.heads), config.draft_vocab or config.vocab
        if budget.shape is None and options.tree == "ranks":
            paths = _ranks.within(options.ranks, budget.nodes, depth)
        else:
            code = self.drafter.compiled
            if (
                code is not None
                and budget.shape is None
                and options.tree == "dynamic"
                and min(depth, budget.nodes - 1) > 0
            ):
                assert self.feature is not None
                scale = options.scale if budget.scale is None else budget.scale
                asked = Shape(depth, 1, budget.nodes, options.top_k, scale)
                return code.grow(array(self.feature), rows, budget, asked)
            shape = budget.shape or (options.shape if options.tree == "static" else (options.top_k,) * depth)
            paths = _ranks.candidates(
                tuple(min(s, most) for s in shape[:depth]),
                budget.nodes,
            )
        if not paths.paths:
            return root_only(rows.root)
        tokens, confidence = self._rank(rows, paths.depth, paths.top_k, budget.scale)
        return _ranks.plant(rows.root, tokens, confidence, paths, budget.nodes, budget.floor, budget.price)

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `tuning.py`."""
        return self._rank(rows, min(truth.shape[1], self.drafter.config.heads), k)[0]

    def _rank(self, rows: Rows, depth: int, k: int, scale: float | None = None) -> tuple[Array, Array]:
        assert self.feature is not None
        logits = self.drafter.net.fast(self.feature, depth, self.drafter.head)
        below = np.tile(np.arange(1, depth + 1), (len(rows), 1))
        return rank(logits, rows, below, k, scale or self.drafter.options.scale, names=self.drafter.names)

    def select(self, index: Sequence[int]) -> None:
        if self.feature is not None:
            self.feature = self.feature[list(index)]

    def join(self, other: Drafting) -> None:
        assert isinstance(other, MedusaDrafting)
        assert self.feature is not None
        assert other.feature is not None
        self.feature = torch.cat([self.feature, other.feature])


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    tree: str = "",
    shape: tuple[int, ...] = (4, 3, 2, 1),
    top_k: int = 10,
    scale: float = 0.0,
) -> MedusaDrafter:
    """Medusa heads from a folder. `tree` "" is the folder's own, or dynamic; `scale` 0 is the folder's own."""
    net: MedusaNet = _weights.network(path, "medusa", target)
    assert target is not None
    config = net.config
    _weights.fits(path, target, config.vocab, config.hidden)
    if min(shape, default=0) < 1 or whole("top_k", top_k) < 1 or not 0 <= scale < float("inf"):
        raise InputError("the shape, top_k and scale of Medusa must be positive")
    if tree == "chain":
        tree, shape = "static", (1,) * config.heads
    ids = net.ids()
    few = target.vocab if ids is None else len(ids)
    kind, ranks = _ranks.chosen(tree, config.tree, TREES, config.heads, few)
    return drafter(net, target, MedusaOptions(kind, ranks, shape, top_k, scale or config.scale))


def drafter(net: MedusaNet, target: Target, options: MedusaOptions) -> MedusaDrafter:
    """A drafter of heads in memory, which are in the target's precision and are changed: made ready for inference."""
    net.fuse()
    ids = net.ids()
    code = _compiled(net, target, ids)
    return MedusaDrafter(net, target, net.config, options, _heads.rows(target, ids), ids, code)


def _compiled(net: MedusaNet, target: Target, ids: Int[Tensor, " vd"] | None) -> Medusa | None:
    """Heads of one block that share the target's head, in the code that its passes run in."""
    code = code_for(target, target.precision)
    if code is None or not net.config.share_head or net.config.layers != 1:
        return None
    head = _heads.plain_rows(target, ids)
    linears = [part.blocks[0].linear for part in net.parts]
    weights, biases = (torch.stack([getattr(linear, name) for linear in linears]) for name in ("weight", "bias"))
    return None if head is None else medusa(code, array(weights), array(biases), array(head), _weights.names(ids))


NETWORK = Network(MedusaNet, MedusaConfig)
