"""Hydra (Ankner et al. 2024): Medusa's heads, each of which sees the tokens drafted before it.

    p_i = softmax(W_i z_i + b_i),   z_i = blocks_i(cat(f, e(x_1), ..., e(x_i)))      i = 1 .. K, section 3

f is the feature of the last committed token at t, x_1 the root at t + 1, x_2 ... x_i the drafted path below it, e the
target's embedding; p_i is the distribution of the token at t + 1 + i. The first block of a head maps the full width to
one feature's: R x + SiLU(W1 x). The heads begin as the target's LM head of f (R = [I 0 ... 0], W1 = 0).

Hydra++ (`prefix`, section 4.2) puts one decoder layer between the target's features and the heads, so that f knows
more of the text than the target needed for t + 1:  f' = norm(layer(norm(f))) over all committed tokens.

Trees: dynamic (EAGLE-2's growth, one head a depth), static, chain, greedy63, or a FILE of `outrider tune-tree`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.native.draft_vocab import ids_of
from ..backends.native.drafts import Weights
from ..backends.native.hydra import Hydra, HydraHead, Prefix, hydra, prefix
from ..backends.native.weights import rounded
from ..core.protocols import Drafter, Drafting, Round, Target
from ..core.types import Array, Budget, DraftTree, Rows
from ..nets.configs import HydraConfig
from . import _ranks
from ._compiled import PairDrafting, last_features
from ._growth import Grown, Growth, Step
from ._trained import Method, Shapes, in_tensors, layer_shapes

TREES = ("dynamic", "static", "chain")


@dataclass(frozen=True)
class Request:
    """The options of a SPEC. `tree` "": the folder's own, or dynamic; `scale` 0: the folder's."""

    tree: str = ""
    shape: tuple[int, ...] = (4, 2, 2, 1)
    width: int = 0
    top_k: int = 4
    scale: float = 0.0

    def growth(self, config: HydraConfig) -> Growth:
        """The growth of trees for heads of this config."""
        size = config.draft_vocab or config.vocab
        kind, ranks = _ranks.chosen(self.tree, config.tree, TREES, config.heads, size)
        return Growth(
            tree="static" if ranks else kind, shape=tuple(min(s, size) for s in self.shape), depth=config.heads,
            width=self.width, top_k=self.top_k, nodes=1 << 16, scale=self.scale or config.scale, ranks=ranks,
        )  # fmt: skip


@dataclass(frozen=True)
class CompiledHydra(Grown):
    """Trained Hydra heads in compiled code."""

    compiled: Hydra
    config: HydraConfig
    growth: Growth
    vocab: int  # the target's
    prefix: Prefix | None = None  # Hydra++'s layer
    taps: tuple[int, ...] = (-1,)

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> HydraTrees:
        if self.prefix is None:
            return CompiledHydraDrafting(self)
        last = np.zeros((len(prompts), self.config.hidden), np.float32)
        return PrefixDrafting(self, self.prefix.cache(len(prompts), capacity, self.compiled.dtype), last)


class HydraTrees(Drafting):
    """Trees of one call where compiled code can grow them, else a call for each layer."""

    drafter: Any  # a CompiledHydra

    @abstractmethod
    def seen(self) -> Array:
        """What the heads read of each row's last committed token, [b, h], in the heads' precision."""

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        drafter: CompiledHydra = self.drafter
        if (arguments := drafter.growth.compiled(rows, budget)) is not None:
            return drafter.compiled.grow(self.seen(), rows, *arguments)
        return drafter.growth.propose(rows, *self.steps(rows), budget, drafter.compiled.names, drafter.vocab)[0]

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `tune-tree`."""
        drafter: CompiledHydra = self.drafter
        return _ranks.below(rows, *self.steps(rows), truth[:, : drafter.config.heads], k, drafter.compiled.names)

    def steps(self, rows: Rows) -> tuple[Array, Step]:
        """The logits [b, 1, v] below the roots, and those below the nodes of a layer."""
        compiled, feature = self.drafter.compiled, self.seen()
        roots = np.array(rows.root, np.int64)[:, None]

        def step(fed: DraftTree, since: int) -> Array:
            made: Array = compiled.step(feature, fed.tokens, fed.parents, since, fed.deepest)
            return made

        return compiled.step(feature, roots, np.zeros_like(roots), 0, 0), step


@dataclass
class CompiledHydraDrafting(HydraTrees):
    """Heads that read the target's features themselves."""

    drafter: CompiledHydra
    feature: Array | None = None  # [b, h], of each row's last committed token

    def seen(self) -> Array:
        assert self.feature is not None, "a prompt comes before a draft"
        return self.feature

    def observe(self, round: Round) -> None:
        self.feature = last_features(round, self.feature)

    def select(self, index: Sequence[int]) -> None:
        if self.feature is not None:
            self.feature = self.feature[list(index)]

    def join(self, other: Drafting) -> None:
        assert isinstance(other, CompiledHydraDrafting)
        self.feature = np.concatenate([self.seen(), other.seen()])


class PrefixDrafting(HydraTrees, PairDrafting):
    """Hydra++: features are fed to its layer only before a draft."""

    @property
    def reader(self) -> Prefix:
        layer: Prefix = self.drafter.prefix
        return layer

    def seen(self) -> Array:
        self.read()
        return rounded(self.last) if self.drafter.compiled.dtype == np.uint16 else self.last


def _shapes(config: HydraConfig) -> Shapes | None:
    h, v = config.hidden, config.draft_vocab or config.vocab
    shapes: Shapes = {"d2t": (v,)} if config.draft_vocab else {}
    if config.layer is not None:
        shapes |= layer_shapes(config.layer, "prefix.layer.")
        shapes |= {"prefix.input_layernorm.weight": (h,), "prefix.norm.weight": (h,)}
    for k in range(config.heads):
        for name in ("linear", "res_connection"):
            at = f"heads.{k}.blocks.0.{name}"
            shapes |= {f"{at}.weight": (h, (k + 2) * h), f"{at}.bias": (h,)}
        shapes |= {f"heads.{k}.lm_head.weight": (v, h), f"heads.{k}.lm_head.bias": (v,)}
    return shapes if config.layers == 1 else None


METHOD: Method[HydraConfig] = Method("hydra", HydraConfig, _shapes)


def compiled(config: HydraConfig, weights: Weights, target: Target, growth: Growth) -> Drafter | None:
    """The drafter of a network in compiled code; None where that has no such network or target."""
    code, table = METHOD.code(config, target), target.embeddings
    if code is None or table is None or table.shape[1] != config.hidden:
        return None
    names = ids_of(weights["d2t"], config.vocab) if config.draft_vocab else None
    heads = []
    for k in range(config.heads):
        block, bias = (
            np.concatenate([weights[f"heads.{k}.blocks.0.{part}.{name}"] for part in ("res_connection", "linear")])
            for name in ("weight", "bias")
        )
        heads.append(HydraHead(block, bias, *(weights[f"heads.{k}.lm_head.{name}"] for name in ("weight", "bias"))))
    made, layer = hydra(code, heads, table, names), None
    if config.layer is not None:
        layer = prefix(code, config.layer, weights)
    if made is None or (layer is None and config.prefix):
        return None
    return CompiledHydra(made, config, growth, target.vocab, layer)


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    tree: str = "",
    shape: tuple[int, ...] = (4, 2, 2, 1),
    width: int = 0,
    top_k: int = 4,
    scale: float = 0.0,
) -> Drafter:
    """Hydra heads from a folder. The options are the fields of `Request`.

    Raises:
        InputError: the folder is damaged, holds another drafter, or belongs to another target.
    """
    request = Request(tree, shape, width, top_k, scale)
    read = METHOD.opened(target, path)
    made = None
    if target is not None and read is not None:
        made = compiled(*read, target, request.growth(read[0]))
    return in_tensors("hydra").load(target, path, request) if made is None else made


def __getattr__(name: str) -> Any:
    """The network and its drafter in tensors (`_hydra.py`), imported on first use."""
    return getattr(in_tensors("hydra"), name)
