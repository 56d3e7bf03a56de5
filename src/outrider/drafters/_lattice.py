"""Trees from one block's marginals: the best nodes of a lattice of K candidates per slot.

A node's value is the product of its path's confidences, as everywhere. The confidence of candidate c at depth d below
candidate p of depth d - 1 is the slot's own, corrected by the pair head:

    log conf(c | p) = log conf(c) + t(p, c) - log(1 - sum_K conf + sum_K conf e^t),    t = pair score / s

so the mass outside the K candidates keeps its place, and without a pair head nothing changes. Children of a node depend
on its depth and token alone; a heap takes the best node, and then offers that node's next sibling and its first child.
Values never rise along a path or among ordered siblings, so the first n nodes taken are the n best (DDTree's argument).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core import sampling
from ..core.price import Price
from ..core.tree import Sketch
from ..core.types import Budget, DraftTree, HostRow, Rows
from ..params import InputError
from ._growth import Growth, Step, static

Table = Sequence[Sequence[Sequence[float]]]  # [depth][parent's rank][child's order]
Corrected = Callable[[Tensor, Tensor, Tensor], Tensor]
Scores = Callable[[Tensor], Tensor | None]


def as_they_are(logits: Tensor, tokens: Tensor, depth: Tensor) -> Tensor:
    """No pair head."""
    return logits


def nothing(tokens: Tensor) -> None:
    """No pair head."""


def check(tree: str) -> None:
    """Raise InputError for a way to grow that has no meaning here."""
    if tree == "best":
        raise InputError("a dynamic tree of one pass is the best one already; use tree=dynamic")


def propose(
    rows: Rows,
    logits: Float[Tensor, "b d vd"],
    budget: Budget,
    growth: Growth,
    names: Int[Tensor, " vd"] | None,
    vocab: int,
    corrected: Corrected = as_they_are,
    scores: Scores = nothing,
) -> DraftTree:
    """The tree that `growth` asks for, from the logits of every slot: slot 0 drafts the first token.

    names, vocab   as in `_growth.py`
    corrected      logits [b, m, vd] below given tokens [b, m] of given depths [b, m], with the pair head
    scores         what it adds for pairs of neighbouring slots' candidates: [b, d, k] -> [b, d, k above, k]
    """
    parents, growth = growth.fixed(budget, logits.shape[1]), growth.scaled(budget)
    if parents is not None:
        return static(rows, *steps(rows, logits, corrected), parents, growth, names, vocab)[0]
    b, d, _ = logits.shape
    depths = torch.arange(1, d + 1, device=logits.device).repeat(b, 1)
    tokens, confidence = sampling.rank(logits, rows, depths, growth.top_k, growth.scale, names=names)
    pairs = scores(tokens)
    pairs = None if pairs is None else pairs.float() / growth.scale
    useful = [min(d, remaining - 1) for remaining in rows.remaining]
    logs = conditional(confidence.clamp(max=0), pairs)
    return lattice(rows.root, tokens, logs, min(growth.nodes, budget.nodes), useful, budget.floor, budget.price)


def steps(rows: Rows, logits: Float[Tensor, "b d vd"], corrected: Corrected = as_they_are) -> tuple[Tensor, Step]:
    """Logits below the root, and below any fed node, as the drafters that step give them; no pass is needed."""

    def below(tokens: Tensor, depth: Tensor) -> Tensor:
        found = logits.gather(1, depth[..., None].expand(*depth.shape, logits.shape[2]))
        return corrected(found, tokens, depth)

    def step(fed: DraftTree, since: int) -> Tensor:
        return below(fed.tokens[:, since:], fed.depths[:, since:])

    return below(rows.root[:, None], torch.zeros_like(rows.root)[:, None]), step


def conditional(confidence: Float[Tensor, "b d k"], pairs: Float[Tensor, "b d p k"] | None) -> Float[Tensor, "b d p k"]:
    """log conf(child | parent) of every pair of candidates; `pairs` are the scores t. One parent without pairs."""
    if pairs is None:
        return confidence[:, :, None]
    raised = confidence[:, :, None] + pairs
    outside = (1 - confidence.exp().sum(-1)).clamp(min=1e-6)[..., None]
    total = outside + raised.exp().sum(-1)
    return raised - total.log()[..., None]


def lattice(
    root: Int[Tensor, " b"],
    tokens: Int[Tensor, "b d k"],
    logs: Float[Tensor, "b d p k"],
    nodes: int,
    depths: Sequence[int],
    floor: float = 0.0,
    price: Price | None = None,
) -> DraftTree:
    """The tree of each row's most valuable nodes, at most `nodes` with the root.

    tokens  the candidates of every depth
    logs    log-confidences by (depth, parent's rank among the candidates above, candidate); p = 1: no pair head
    depths  how deep each row may go
    floor   nodes whose value (a probability) lies below are left out
    price   cuts the tree to the size that pays best
    """
    order = logs.sort(dim=-1, descending=True, stable=True)
    rows = zip(tokens.tolist(), order.values.tolist(), order.indices.tolist(), root.tolist(), depths, strict=True)
    least = math.log(floor) if floor > 0 else -math.inf
    made: list[HostRow] = []
    for names, table, ranks, first, deepest in rows:
        chosen, parents, values = _best(table, ranks, nodes, deepest, least)
        made.append(([first, *(names[d - 1][rank] for d, rank in chosen)], [0, *parents], [0.0, *values]))
    return Sketch(made).cut(price).tree(root.device)


def _best(
    table: Table, ranks: Sequence[Sequence[Sequence[int]]], nodes: int, deepest: int, least: float
) -> tuple[list[tuple[int, int]], list[int], list[float]]:
    """(depth, candidate's rank) of the best nodes in the order they were taken, their parents' ids, their values."""
    chosen: list[tuple[int, int]] = []
    parents: list[int] = []
    values: list[float] = []
    heap: list[tuple[float, int, int, int, int, float]] = []  # -value, depth, parent id, parent rank, order, above

    def offer(depth: int, parent: int, rank: int, order: int, above: float) -> None:
        row = table[depth - 1]
        below = row[rank if len(row) > 1 else 0]
        if order < len(below) and (value := above + below[order]) > least:
            heapq.heappush(heap, (-value, depth, parent, rank, order, above))

    if deepest > 0:
        offer(1, 0, 0, 0, 0.0)
    while heap and len(chosen) < nodes - 1:
        negative, depth, parent, rank, order, above = heapq.heappop(heap)
        row = ranks[depth - 1]
        taken = row[rank if len(row) > 1 else 0][order]
        chosen.append((depth, taken))
        parents.append(parent)
        values.append(-negative)
        offer(depth, parent, rank, order + 1, above)
        if depth < deepest:
            offer(depth + 1, len(chosen), taken, 0, -negative)
    return chosen, parents, values
