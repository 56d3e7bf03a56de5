"""A drafter's best chain, for engines that verify chains alone (`integrations/vllm.py`).

A chain's worth is the sum of its nodes' values, which are the probabilities that they are accepted: the tokens that it
is expected to gain. The drafter grows a tree, `WIDE` times as large as the chain may be long, and the path of the
highest worth is what it proposes. Without values every node counts alike, and the longest path is taken, of several the
first. A drafter that grows chains (`tree=chain`) proposes what it grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.protocols import Drafter, Drafting, Round
from ..core.tree import chain
from ..core.types import Budget, DraftTree, Rows
from ..params import InputError
from ._mix import translated
from .lookahead import LookaheadDrafter

BLIND = (
    "this drafter reads hidden states or logits of the model, and here only the text is known; "
    "`outrider export` writes the drafters that vLLM and SGLang load themselves"
)
WIDE = 4  # nodes that are grown for each that is proposed


@dataclass(frozen=True)
class ChainDrafter:
    """A drafter of which only the best chain is drafted, of at most `tokens` tokens. It reads nothing but text."""

    inner: Drafter
    tokens: int
    taps: tuple[int, ...] = ()

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> ChainDrafting:
        return ChainDrafting(self.inner.open(prompts, capacity + WIDE * self.tokens), self.tokens)


@dataclass
class ChainDrafting:
    """A drafting whose tree is cut to its best path; it is told of the nodes that it grew itself."""

    inner: Drafting
    tokens: int
    grown: DraftTree | None = None  # the last tree, and of each of its nodes the place in the chain (-1: cut)
    where: Tensor | None = None

    def observe(self, round: Round) -> None:
        if self.grown is not None and self.where is not None:
            round = translated(round, self.grown, self.where)
        self.inner.observe(round)
        self.grown = self.where = None

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        depth = min(budget.depth, budget.nodes - 1, self.tokens)
        self.grown = self.inner.propose(rows, replace(budget, nodes=WIDE * depth + 1, depth=depth))
        tree, self.where = spine(self.grown)
        return tree

    def select(self, index: Sequence[int]) -> None:
        self.inner.select(index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, ChainDrafting)
        self.inner.join(other.inner)


def spine(tree: DraftTree) -> tuple[DraftTree, Tensor]:
    """Each row's path of the highest worth as a chain, and of every node of the tree the place in it (-1: none).

    Below 9 the paths [5 6] and [8], the nodes 5, 6, 8 being accepted with probabilities .6, .5, .7: worths 1.1 and .7,
    so the chain is [9 5 6], and the places are [0 1 2 -1].
    """
    values = torch.zeros(tree.tokens.shape) if tree.values is None else tree.values
    where = torch.full(tree.tokens.shape, -1, dtype=torch.long)
    chains = []
    host = zip(tree.tokens.tolist(), tree.parents.tolist(), values.tolist(), tree.size.tolist(), strict=True)
    for r, (tokens, parents, logs, size) in enumerate(host):
        worth = [0.0] * size
        for i in range(1, size):
            worth[i] = worth[parents[i]] + math.exp(logs[i])
        path = [max(range(size), key=worth.__getitem__)]
        while path[-1]:
            path.append(parents[path[-1]])
        path.reverse()
        where[r, path] = torch.arange(len(path))
        chains.append([tokens[i] for i in path])
    return chain(chains, tree.tokens.device), where.to(tree.tokens.device)


def of(drafter: Drafter, tokens: int) -> ChainDrafter:
    """The best chains of a drafter. Raises InputError for one that reads hidden states or logits of the target."""
    parts = getattr(drafter, "parts", (drafter,))
    if drafter.taps or any(isinstance(part, LookaheadDrafter) for part in parts):
        raise InputError(BLIND)
    return ChainDrafter(drafter, tokens)
