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
from typing import Any

import numpy as np

from ..core.price import Price
from ..core.tree import from_lists, priced
from ..core.types import Array, Budget, DraftTree, HostRow, Rows
from ..params import InputError
from ._growth import Growth, Step, static
from ._logits import array, rank

Table = Sequence[Sequence[Sequence[float]]]  # [depth][parent's rank][child's order]
Corrected = Callable[[Any, Array, Array], Any]
Scores = Callable[[Array], Any]


def as_they_are(logits: Any, tokens: Array, depth: Array) -> Any:
    """No pair head."""
    return logits


def nothing(tokens: Array) -> None:
    """No pair head."""


def check(tree: str) -> None:
    """Raise InputError for a way to grow that has no meaning here."""
    if tree == "best":
        raise InputError("a dynamic tree of one pass is the best one already; use tree=dynamic")


def propose(
    rows: Rows,
    logits: Any,
    budget: Budget,
    growth: Growth,
    names: Any,
    vocab: int,
    corrected: Corrected = as_they_are,
    scores: Scores = nothing,
) -> DraftTree:
    """The tree of `growth`, from the logits [b, d, vd] of every slot: slot 0 drafts the first token.

    Args:
        logits: arrays or tensors.
        names, vocab: as in `_growth.py`.
        corrected: logits [b, m, vd] below given tokens [b, m] of given depths [b, m], with the pair head; its first
            argument are those of the slots of these depths.
        scores: what it adds for pairs of neighbouring slots' candidates: [b, d, k] -> [b, d, k above, k].
    """
    parents, growth = growth.fixed(budget, logits.shape[1]), growth.scaled(budget)
    if parents is not None:
        return static(rows, *steps(rows, logits, corrected), parents, growth, names, vocab)[0]
    b, d, _ = logits.shape
    depths = np.tile(np.arange(1, d + 1), (b, 1))
    tokens, confidence = rank(logits, rows, depths, growth.top_k, growth.scale, names=names)
    pairs = scores(tokens)
    pairs = None if pairs is None else array(pairs) / np.float32(growth.scale)
    useful = [min(d, remaining - 1) for remaining in rows.remaining]
    logs = conditional(np.minimum(confidence, 0), pairs)
    return lattice(rows.root, tokens, logs, min(growth.nodes, budget.nodes), useful, budget.floor, budget.price)


def steps(rows: Rows, logits: Any, corrected: Corrected = as_they_are) -> tuple[Any, Step]:
    """Logits below the root, and below any fed node, as the drafters that step give them; no pass is needed."""
    row = np.arange(len(rows))[:, None]

    def below(tokens: Array, depth: Array) -> Any:
        return corrected(logits[row, depth], tokens, depth)

    def step(fed: DraftTree, since: int) -> Any:
        return below(fed.tokens[:, since:], fed.depths[:, since:])

    return below(np.array(rows.root)[:, None], np.zeros((len(rows), 1), np.int64)), step


def conditional(confidence: Array, pairs: Array | None) -> Array:
    """log conf(child | parent) of every pair of candidates, [b, d, p, k], of their own [b, d, k]; `pairs`
    [b, d, p, k] are the scores t. One parent without pairs."""
    if pairs is None:
        return confidence[:, :, None]
    raised = confidence[:, :, None] + pairs
    outside = np.maximum(1 - np.exp(confidence).sum(-1), np.float32(1e-6))[..., None]
    total = outside + np.exp(raised).sum(-1)
    made: Array = raised - np.log(total)[..., None]
    return made


def lattice(
    roots: Sequence[int],
    tokens: Array,
    logs: Array,
    nodes: int,
    depths: Sequence[int],
    floor: float = 0.0,
    price: Price | None = None,
) -> DraftTree:
    """The tree of each row's most valuable nodes, at most `nodes` with the root.

    Args:
        roots: of each row the last committed token.
        tokens: int64 [b, d, k], the candidates of every depth.
        logs: [b, d, p, k], log-confidences by (depth, parent's rank among the candidates above, candidate); p = 1:
            no pair head.
        depths: how deep each row may go.
        floor: nodes whose value (a probability) is lower are left out.
        price: cuts the tree to the size that pays best.
    """
    order = np.argsort(-logs, -1, kind="stable")
    sorted_logs = np.take_along_axis(logs, order, -1)
    rows = zip(tokens.tolist(), sorted_logs.tolist(), order.tolist(), roots, depths, strict=True)
    least = math.log(floor) if floor > 0 else -math.inf
    made: list[HostRow] = []
    for names, table, ranks, first, deepest in rows:
        chosen, parents, values = _best(table, ranks, nodes, deepest, least)
        made.append(([first, *(names[d - 1][rank] for d, rank in chosen)], [0, *parents], [0.0, *values]))
    return from_lists(priced(made, price))


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
