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

from ..core.protocols import Drafter, Drafting, Round
from ..core.tree import chain
from ..core.types import Budget, DraftTree, Rows
from ..params import InputError
from ._mix import Places, translated
from .lookahead import LookaheadDrafter

BLIND = (
    "this drafter reads hidden states or logits of the model, and here only the text is known; "
    "`outrider export` writes the drafters that vLLM and SGLang load themselves"
)
WIDE = 4  # nodes that are grown for each that is proposed


@dataclass(frozen=True)
class ChainDrafter(Drafter):
    """A drafter of which only the best chain is drafted, of at most `tokens` tokens. It reads nothing but text."""

    inner: Drafter
    tokens: int

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> ChainDrafting:
        return ChainDrafting(self.inner.open(prompts, capacity + WIDE * self.tokens), self.tokens)


@dataclass
class ChainDrafting(Drafting):
    """A drafting whose tree is cut to its best path; it observes the nodes that it grew itself."""

    inner: Drafting
    tokens: int
    grown: DraftTree | None = None  # the last tree, and of each of its nodes the place in the chain (-1: cut)
    where: Places | None = None

    def expect(self, row: int, tokens: Sequence[int]) -> None:
        self.inner.expect(row, tokens)

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


def spine(tree: DraftTree) -> tuple[DraftTree, Places]:
    """Each row's path of the highest worth as a chain, and of every node of the tree the place in it (-1: none).

    Below 9 the paths [5 6] and [8], the nodes 5, 6, 8 being accepted with probabilities .6, .5, .7: worths 1.1 and .7,
    so the chain is [9 5 6], and the places are [0 1 2 -1].
    """
    chains, where = [], []
    for tokens, parents, logs in tree.host:
        worth = [0.0] * len(tokens)
        for i in range(1, len(tokens)):
            worth[i] = worth[parents[i]] + math.exp(logs[i])
        path = [max(range(len(tokens)), key=worth.__getitem__)]
        while path[-1]:
            path.append(parents[path[-1]])
        path.reverse()
        place = {node: i for i, node in enumerate(path)}
        where.append([place.get(i, -1) for i in range(len(tokens))])
        chains.append([tokens[i] for i in path])
    return chain(chains), where


def of(drafter: Drafter, tokens: int) -> ChainDrafter:
    """The best chains of a drafter. Raises InputError for one that reads hidden states or logits of the target."""
    if drafter.taps or any(isinstance(part, LookaheadDrafter) for part in (drafter, *drafter.parts)):
        raise InputError(BLIND)
    return ChainDrafter(drafter, tokens)
