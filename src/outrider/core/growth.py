"""Growing draft trees by value (EAGLE-2, section 4): a node's value is the product of the confidences on its path."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .price import Price
from .tree import append, from_lists, root_only
from .types import Array, DraftTree, HostRow

# (tree of the nodes fed so far, first one to feed) -> tokens int64 and logs of confidences float32, [b, new nodes, k]
Expand = Callable[[DraftTree, int], tuple[Array, Array]]
Indices = list[list[int]]  # [row][node]: its index among the nodes that were fed; -1: it was not


@dataclass
class Candidates:
    """All candidate nodes, in the order they were drafted, the root first; and which of them are fed."""

    tokens: Array  # int64 [b, n]
    parents: Array  # int64 [n], counted among the fed
    depths: Array  # int64 [b, n]
    values: Array  # float32 [b, n]
    own: Array  # float32 [b, n]: logs of confidences
    fed: DraftTree
    fed_as: Array  # int64 [b, n]: a node's index among the fed, -1: not chosen to be fed
    worth: Array  # float32 [b, fed]: values of the fed, -inf where a row had none left to feed
    chosen: Array  # int64 [b, w]: what is fed next

    @classmethod
    def of(cls, roots: Sequence[int]) -> Candidates:
        """The roots alone, which are fed first."""
        fed = root_only(roots)
        zero = np.zeros((len(roots), 1), np.float32)
        return cls(
            fed.tokens,
            np.zeros(1, np.int64),
            fed.depths,
            zero,
            zero,
            fed,
            np.zeros_like(fed.tokens),
            zero,
            fed.tokens[:, :0],
        )

    def add(self, tokens: Array, confidences: Array, since: int) -> None:
        """The candidates [b, w, k] below the nodes that were fed from `since` on."""
        b, w, k = tokens.shape
        own = np.minimum(confidences, 0).astype(np.float32)
        below = np.repeat(np.arange(since, since + w), k)
        values = (self.worth[:, since:, None] + own).reshape(b, -1)  # -inf stays: below nodes that a row does not have
        self.tokens = np.concatenate([self.tokens, tokens.reshape(b, -1)], 1)
        self.parents = np.concatenate([self.parents, below])
        self.depths = np.concatenate([self.depths, self.fed.depths[:, below] + 1], 1)
        self.values = np.concatenate([self.values, values], 1)
        self.own = np.concatenate([self.own, own.reshape(b, -1)], 1)
        self.fed_as = np.concatenate([self.fed_as, np.full((b, w * k), -1)], 1)

    def choose(self, score: Array, width: int, floor: float) -> Array:
        """The `width` best nodes of each row by score, marked as fed next; their values [b, w], -inf where a row has
        no more. `floor`: nodes that lie below it in every row are left out, since what is below them falls too."""
        top = np.argsort(-score, -1, kind="stable")[:, :width]
        none = np.isneginf(np.take_along_axis(score, top, 1))
        values = np.where(none, np.float32(-np.inf), np.take_along_axis(self.values, top, 1))
        if floor > 0:
            most = int((values > math.log(floor)).sum(-1).max())
            top, values = top[:, :most], values[:, :most]
        index = np.arange(self.fed.nodes, self.fed.nodes + top.shape[1])
        index = np.where(np.isneginf(values), np.take_along_axis(self.fed_as, top, 1), index)
        np.put_along_axis(self.fed_as, top, index, 1)
        self.chosen = top
        return values

    def feed(self, values: Array) -> None:
        """The nodes that were chosen last become fed ones."""
        self.fed = append(self.fed, np.take_along_axis(self.tokens, self.chosen, 1), self.parents[self.chosen])
        self.worth = np.concatenate([self.worth, values], 1)


def grow(
    roots: Sequence[int],
    expand: Expand,
    *,
    depth: int,
    width: int,
    nodes: int,
    floor: float = 0.0,
    reach: float = 0.0,
    price: Price | None = None,
    frontier: Literal["layer", "any"] = "layer",
    steps: int | None = None,
    value: bool = True,
    rerank: bool = True,
) -> tuple[DraftTree, Indices]:
    """A tree of at most `nodes` nodes, root included, and each node's index among the fed nodes.

    `expand(fed, since)` feeds the nodes `fed.tokens[:, since:]` to the drafter; its first call has `since=0` and the
    root alone.

    Args:
        roots: of each row the last committed token.
        depth: of the tree, at most.
        width: nodes that are fed in one step.
        floor: nodes whose value, a probability, lies below it are left out.
        reach: no more is fed once no row has a node to feed whose value lies above it.
        price: cuts the tree to the size that pays best.
        frontier: "layer" feeds the best nodes of the last layer, `depth` times; "any" the best nodes not fed yet,
            whatever their depth, `steps` times. Then all nodes are ranked again and the best are kept.
        value: False feeds the nodes of highest own confidence (EAGLE-2's ablation; the final ranking is by value).
        rerank: False keeps only the nodes that were chosen to be fed, those of the last step included (the same).
    """
    steps = depth if frontier == "layer" or steps is None else steps
    made, since, first = Candidates.of(roots), 0, 1
    for step in range(steps):
        made.add(*expand(made.fed, since), since)
        if step + 1 == steps and rerank:
            break
        score = (made.values if value else made.own).copy()
        closed = (made.fed_as >= 0) | (made.depths >= depth + (frontier == "layer")) | np.isneginf(made.values)
        score[closed] = -np.inf
        if frontier == "layer":
            score[:, :first] = -np.inf
        values = made.choose(score, min(width, score.shape[1] - first), floor if value else 0.0)
        first = made.tokens.shape[1] if frontier == "layer" else 1
        if not values.shape[1] or step + 1 == steps or (reach > 0 and values.max() < math.log(reach)):
            break
        since = made.fed.nodes
        made.feed(values)
    values = made.values if rerank else np.where(made.fed_as < 0, -np.inf, made.values)
    if np.isnan(values).any():  # which `tree.flaw` reports of these roots: sorted by NaN, a tree would be any tree
        return from_lists([([root], [0], [math.nan]) for root in roots]), [[0] for _ in roots]
    return _kept(made, best(values, nodes, floor, price))


def best(values: Array, nodes: int, floor: float, price: Price | None) -> Indices:
    """As `tree.best_of`, of an array [b, n] in which nodes of -inf are none."""
    order = np.argsort(-values, -1, kind="stable")[:, :nodes]
    ranked = np.take_along_axis(values, order, 1)
    good = ranked > (math.log(floor) if floor > 0 else -math.inf)
    good[:, 0] = True
    counts = good.sum(-1).tolist()
    if price is not None:
        most = price.most([row[:n] for row, n in zip(ranked.tolist(), counts, strict=True)])
        counts = [min(n, m) for n, m in zip(counts, most, strict=True)]
    return [sorted(row[:n]) for row, n in zip(order.tolist(), counts, strict=True)]


def _kept(made: Candidates, ids: Indices) -> tuple[DraftTree, Indices]:
    """The tree of these candidates of each row (ascending, closed under parents), and their indices among the fed."""
    rows, parents, fed_nodes = list[HostRow](), made.parents.tolist(), made.fed.nodes
    where: Indices = []
    for r, kept in enumerate(ids):
        tokens, values, fed_as = (part[r, kept].tolist() for part in (made.tokens, made.values, made.fed_as))
        node = {fed: i for i, fed in enumerate(fed_as) if 0 <= fed < fed_nodes}
        rows.append((tokens, [0, *(node[parents[i]] for i in kept[1:])], values))
        where.append([fed if fed < fed_nodes else -1 for fed in fed_as])  # chosen last, and never fed
    return from_lists(rows), where
