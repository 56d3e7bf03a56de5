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

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.native.draft_vocab import ids_of
from ..backends.native.drafts import Shape, Weights
from ..backends.native.lattice import Medusa, MedusaParts, medusa
from ..core.protocols import Drafter, Drafting, Round, Target
from ..core.tree import root_only
from ..core.types import Array, Budget, DraftTree, Rows
from ..nets.configs import MedusaConfig
from ..params import InputError, integer
from . import _ranks
from ._compiled import last_features
from ._logits import rank
from ._trained import Method, Shapes, in_tensors

TREES = ("dynamic", "static", "chain")


@dataclass(frozen=True)
class MedusaOptions:
    """The tree that Medusa drafts. `tree`: dynamic, static (of `shape`), or ranks, best first. `scale`: s of the
    confidences softmax(r / s)."""

    tree: str = "dynamic"
    ranks: tuple[tuple[int, ...], ...] = ()
    shape: tuple[int, ...] = (4, 3, 2, 1)
    top_k: int = 10
    scale: float = 1.0


@dataclass(frozen=True)
class Request:
    """The options of a SPEC. `tree` "": the folder's own, or dynamic; `scale` 0: the folder's."""

    tree: str = ""
    shape: tuple[int, ...] = (4, 3, 2, 1)
    top_k: int = 10
    scale: float = 0.0

    def __post_init__(self) -> None:
        if min(self.shape, default=0) < 1 or integer("top_k", self.top_k) < 1 or not 0 <= self.scale < float("inf"):
            raise InputError("the shape, top_k and scale of Medusa must be positive")

    def options(self, config: MedusaConfig) -> MedusaOptions:
        """The tree for heads of this config."""
        tree, shape = ("static", (1,) * config.heads) if self.tree == "chain" else (self.tree, self.shape)
        kind, ranks = _ranks.chosen(tree, config.tree, TREES, config.heads, config.draft_vocab or config.vocab)
        return MedusaOptions(kind, ranks, shape, self.top_k, self.scale or config.scale)


class MedusaDrafting(Drafting):
    """Trees of what the heads say of each row's last committed token."""

    drafter: Any  # its config, options and names

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        options, config = self.drafter.options, self.drafter.config
        depth, most = self._depth(rows, budget), config.draft_vocab or config.vocab
        if budget.shape is None and options.tree == "ranks":
            paths = _ranks.within(options.ranks, budget.nodes, depth)
        else:
            shape = budget.shape or (options.shape if options.tree == "static" else (options.top_k,) * depth)
            paths = _ranks.candidates(tuple(min(s, most) for s in shape[:depth]), budget.nodes)
        if not paths.paths:
            return root_only(rows.root)
        tokens, confidence = self._rank(rows, paths.depth, paths.top_k, budget.scale)
        return _ranks.plant(rows.root, tokens, confidence, paths, budget.nodes, budget.floor, budget.price)

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `tune-tree`."""
        return self._rank(rows, min(truth.shape[1], self.drafter.config.heads), k)[0]

    @abstractmethod
    def logits(self, depth: int) -> Any:
        """Those of the first `depth` heads, [b, depth, v]."""

    def _depth(self, rows: Rows, budget: Budget) -> int:
        return min(budget.depth, max(rows.remaining) - 1, self.drafter.config.heads)

    def _rank(self, rows: Rows, depth: int, k: int, scale: float | None = None) -> tuple[Array, Array]:
        below = np.tile(np.arange(1, depth + 1), (len(rows), 1))
        own = scale or self.drafter.options.scale
        return rank(self.logits(depth), rows, below, k, own, names=self.drafter.names)


@dataclass(frozen=True)
class CompiledMedusa(Drafter):
    """Trained Medusa heads in compiled code."""

    compiled: Medusa
    config: MedusaConfig
    options: MedusaOptions
    taps: tuple[int, ...] = (-1,)

    @property
    def scale(self) -> float:  # type: ignore[override]
        return self.options.scale

    @property
    def names(self) -> Array | None:
        """Token ids of the draft vocabulary; None: it is the target's own."""
        return self.compiled.names

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> CompiledMedusaDrafting:
        return CompiledMedusaDrafting(self)


@dataclass
class CompiledMedusaDrafting(MedusaDrafting):
    """In compiled code: dynamic trees of one call, and logits for the others."""

    drafter: CompiledMedusa
    feature: Array | None = None  # [b, h], of each row's last committed token

    def observe(self, round: Round) -> None:
        self.feature = last_features(round, self.feature)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        options, depth = self.drafter.options, self._depth(rows, budget)
        if budget.shape is not None or options.tree != "dynamic" or min(depth, budget.nodes - 1) < 1:
            return super().propose(rows, budget)
        scale = options.scale if budget.scale is None else budget.scale
        assert self.feature is not None, "a prompt comes before a draft"
        shape = Shape(depth, 1, budget.nodes, options.top_k, scale)
        return self.drafter.compiled.grow(self.feature, rows, budget, shape)

    def logits(self, depth: int) -> Array:
        assert self.feature is not None, "a prompt comes before a draft"
        return self.drafter.compiled.logits(self.feature, depth)

    def select(self, index: Sequence[int]) -> None:
        if self.feature is not None:
            self.feature = self.feature[list(index)]

    def join(self, other: Drafting) -> None:
        assert isinstance(other, CompiledMedusaDrafting)
        assert self.feature is not None
        assert other.feature is not None
        self.feature = np.concatenate([self.feature, other.feature])


def _shapes(config: MedusaConfig) -> Shapes | None:
    h, v = config.hidden, config.draft_vocab or config.vocab
    shapes: Shapes = {"d2t": (v,)} if config.draft_vocab else {}
    for k in range(config.heads):
        at = f"heads.{k}"
        shapes |= {f"{at}.blocks.0.linear.weight": (h, h), f"{at}.blocks.0.linear.bias": (h,)}
        if not config.share_head:
            shapes |= {f"{at}.lm_head.weight": (v, h)} | ({f"{at}.lm_head.bias": (v,)} if config.bias else {})
    return shapes if config.layers == 1 else None


METHOD: Method[MedusaConfig] = Method("medusa", MedusaConfig, _shapes)


def compiled(config: MedusaConfig, weights: Weights, target: Target, options: MedusaOptions) -> Drafter | None:
    """The drafter of a network in compiled code; None where that has no such network or target."""
    code, names = METHOD.code(config, target), None
    if code is None:
        return None
    if config.draft_vocab:
        names = ids_of(weights["d2t"], config.vocab)
    shared = target.head_rows(names) if config.share_head else None
    if config.share_head and shared is None:
        return None

    def each(name: str) -> list[Array]:
        return [weights[f"heads.{k}.{name}"] for k in range(config.heads)]

    own = None if config.share_head or not config.bias else np.stack(each("lm_head.bias"))
    heads = each("lm_head.weight") if shared is None else [shared]
    blocks, bias = (np.stack(each(f"blocks.0.linear.{name}")) for name in ("weight", "bias"))
    cap = 0.0 if shared is None else target.logit_cap
    made = medusa(code, MedusaParts(blocks, bias, heads, own, names, cap))
    return None if made is None else CompiledMedusa(made, config, options)


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    tree: str = "",
    shape: tuple[int, ...] = (4, 3, 2, 1),
    top_k: int = 10,
    scale: float = 0.0,
) -> Drafter:
    """Medusa heads from a folder. The options are the fields of `Request`.

    Raises:
        InputError: the folder is damaged, holds another drafter, or belongs to another target.
    """
    request = Request(tree, shape, top_k, scale)
    read = METHOD.opened(target, path)
    made = None
    if target is not None and read is not None:
        made = compiled(*read, target, request.options(read[0]))
    return in_tensors("medusa").load(target, path, request) if made is None else made


def __getattr__(name: str) -> Any:
    """The network and its drafter in tensors (`_medusa.py`), imported on first use."""
    return getattr(in_tensors("medusa"), name)
