"""Trees grown by a drafter that steps: what model, Mamba, EAGLE, EAGLE-3, block and Hydra share.

`step(fed, since)` gives the logits [b, fed - since, v] below the nodes `fed.tokens[:, since:]`; `first` [b, 1, v] are
those below the root. Logits are numpy arrays or tensors; trees are built on the host. Under `coupled` candidates are
ranked by the shared noise of their positions. Under `rejection` a static shape is sampled and keeps its distributions
q; a dynamic tree offers deterministic children, judged as point masses (a sampled tree must never be re-ranked or cut
by its own scores).

`names` [v] are the token ids of the logits' columns, for drafters with a vocabulary of their own within the target's,
of `vocab` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from ..backends.native.drafts import Shape
from ..core import sampling
from ..core.growth import Indices, grow
from ..core.protocols import Drafter
from ..core.tree import append, from_lists, root_only, template
from ..core.types import Array, Budget, DraftTree, Rows
from ..params import InputError
from . import _ranks
from ._logits import array, rank

Step = Callable[[DraftTree, int], Any]
TREES = ("dynamic", "best", "static", "chain")
WIDEST = 10  # the paper's k: nodes expanded per layer


class Grown(Drafter):
    """A drafter that grows its trees by a `Growth`."""

    growth: Growth
    samples = True

    @property
    def scale(self) -> float:  # type: ignore[override]
        """s of its confidences."""
        return self.growth.scale


@dataclass(frozen=True)
class Growth:
    """How a drafter grows its trees.

    dynamic  EAGLE-2's growth: expand the `width` best nodes of the last layer, re-rank, keep the best. `width` 0: as
             many as the budget has nodes for each layer, 10 at most (60 nodes at depth 6 make the paper's 10)
    best     the same, best first: expand the `width` best nodes that were not expanded yet, whatever their depth
    static   a fixed shape: (N1, ..., Ng), or `parents`, where given; a chain of gamma tokens is (1, 1, ..., 1)
    FILE     a static tree that `outrider tune-tree` wrote, cut to its most valuable nodes; greedy63: see `_ranks.py`

    `nodes` caps the budget and counts the root, as the papers' code does (60 are 59 drafted tokens and the root).
    `value`, `rerank`: EAGLE-2's ablations, see `growth.grow`.
    """

    tree: str = "dynamic"
    shape: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    depth: int = 8  # at most; the budget decides below it
    width: int = 0
    top_k: int = 10
    nodes: int = 60
    scale: float = 1.0  # s of the confidences softmax(r / s)
    value: bool = True
    rerank: bool = True
    replacement: bool = False
    ranks: _ranks.Paths = ()  # a static tree as paths of ranks, best first

    def __post_init__(self) -> None:
        if self.tree not in TREES:
            object.__setattr__(self, "ranks", _ranks.named(self.tree, TREES))
            object.__setattr__(self, "tree", "static")
        if min(self.shape, default=1) < 1 or min(self.depth, self.top_k) < 1 or self.width < 0 or self.nodes < 2:
            raise InputError(
                "the shape, depth and top_k of a tree must be positive, its width 0 or more, and its nodes at least 2"
            )
        if not 0 < self.scale < float("inf"):
            raise InputError(f"scale must be a positive number, not {self.scale}")
        if len(self.parents) > 1:
            plan(self.parents)

    def scaled(self, budget: Budget) -> Growth:
        """The same with the budget's scale of confidences, where it has one."""
        return self if budget.scale is None else replace(self, scale=budget.scale)

    def reach(self, budget: Budget, rows: Rows) -> int:
        """How deep a draft may go."""
        return min(budget.depth, self.depth, max(rows.remaining) - 1)

    def wide(self, nodes: int, depth: int) -> int:
        """How many nodes a step expands in a tree of `nodes` nodes, the root included, and this depth."""
        return self.width or max(1, min(WIDEST, -(-(nodes - 1) // max(1, depth))))

    def fixed(self, budget: Budget, depth: int) -> tuple[int, ...] | None:
        """The parents of this round's static tree, fixed before anything is drawn; None: it is dynamic."""
        if budget.shape is not None:
            return tuple(template(budget.shape[:depth]))
        if self.tree in ("dynamic", "best"):
            return None
        nodes = min(self.nodes, budget.nodes)
        if self.tree == "static" and self.ranks:
            return ranked(self.ranks, nodes, depth)
        if self.tree == "static" and self.parents:
            return cut(self.parents, depth, nodes)
        return tuple(template((1,) * depth if self.tree == "chain" else self.shape[:depth], nodes))

    def compiled(self, rows: Rows, budget: Budget) -> tuple[Budget, Shape] | None:
        """The arguments of compiled growth, which makes EAGLE-2's trees and chains. None: this tree is another."""
        depth = self.reach(budget, rows)
        parents, scale = self.fixed(budget, depth), self.scale if budget.scale is None else budget.scale
        if depth < 1:
            return None
        if parents is None:
            nodes = min(self.nodes, budget.nodes)
            plain = self.tree == "dynamic" and self.value and self.rerank
            return (budget, Shape(depth, self.wide(nodes, depth), nodes, self.top_k, scale)) if plain else None
        n = len(parents)
        if (
            rows.rule != "coupled"
            or parents[1:] != tuple(range(n - 1))
            or any(s.warped for s in rows.sampling)
            or n < 2
        ):
            return None
        return replace(budget, floor=0.0, reach=0.0, price=None), Shape(n - 1, 1, n, 1, scale)

    def compiled_lattice(self, budget: Budget, depth: int) -> Shape | None:
        """The shape of the best tree of a lattice, which compiled code makes of a pass. None: this tree is another."""
        if depth < 1 or self.fixed(budget, depth) is not None:
            return None
        scale = self.scale if budget.scale is None else budget.scale
        return Shape(depth, 1, min(self.nodes, budget.nodes), self.top_k, scale)

    def propose(
        self, rows: Rows, first: Any, step: Step, budget: Budget, names: Any = None, vocab: int = 0
    ) -> tuple[DraftTree, Indices]:
        """A tree, and each node's index among the nodes that were fed (-1: never fed)."""
        depth = self.reach(budget, rows)
        parents = self.fixed(budget, depth)
        if parents is None:
            return dynamic(rows, first, step, budget, depth, self.scaled(budget), names)
        return static(rows, first, step, parents, self.scaled(budget), names, vocab)


def dynamic(
    rows: Rows, first: Any, step: Step, budget: Budget, depth: int, growth: Growth, names: Any = None
) -> tuple[DraftTree, Indices]:
    """Layer by layer or best first; deterministic given the noise."""
    any_depth = growth.tree == "best"

    def expand(fed: DraftTree, since: int) -> tuple[Array, Array]:
        logits = step(fed, since) if since else first
        below = fed.depths[:, since:] + 1 if any_depth else fed.deepest + 1
        return rank(logits, rows, below, growth.top_k, growth.scale, names=names)

    nodes = min(growth.nodes, budget.nodes)
    frontier: Literal["layer", "any"] = "any" if any_depth else "layer"
    return grow(
        rows.root,
        expand,
        depth=depth,
        width=growth.wide(nodes, depth),
        nodes=nodes,
        floor=budget.floor,
        reach=budget.reach,
        price=budget.price,
        frontier=frontier,
        value=growth.value,
        rerank=growth.rerank,
    )


def static(
    rows: Rows, first: Any, step: Step, parents: tuple[int, ...], growth: Growth, names: Any = None, vocab: int = 0
) -> tuple[DraftTree, Indices]:
    """A tree of fixed shape. Its inner nodes come first, so that a fed node's index is its own.

    What is ranked leaves its confidences in the tree, by which a scale can be fitted; what is sampled leaves its
    distributions. Filtered distributions leave none: they are surer than those that other trees are ranked by.
    """
    b, n, layers = len(rows), len(parents), plan(parents)
    sampled = rows.rule in ("rejection", "block") and rows.sampled
    fed, since, above = root_only(rows.root), 0, np.array(parents)
    tokens, values, q = np.zeros((b, n), np.int64), np.zeros((b, n), np.float32), None
    tokens[:, 0] = rows.root
    columns: Any = slice(None) if names is None else array(names)
    for depth, layer in enumerate(layers, 1):
        logits = step(fed, since) if since else first
        if logits.shape[-1] < layer.most and not (sampled and growth.replacement):
            raise InputError(f"a node cannot have {layer.most} children in a vocabulary of {logits.shape[-1]}")
        if sampled:
            p = _distributions(logits, rows)
            children = sampling.sample(p, layer.most, rows, since, growth.replacement)
            children = children if names is None else columns[children]
            if q is None:
                q = np.zeros((b, 1 + sum(each.inner for each in layers), p.shape[2] if names is None else vocab))
            q[:, since : since + p.shape[1]][..., columns] = p
        else:
            chain = layer.most == 1
            children, own = rank(logits, rows, depth, layer.most, growth.scale, warp=chain, names=names)
        ids, ranks = list(layer.ids), list(layer.ranks)
        tokens[:, ids] = children.reshape(b, -1)[:, ranks]
        if not sampled:
            values[:, ids] = values[:, above[ids]] + np.minimum(own.reshape(b, -1)[:, ranks], 0)
        if layer.inner:
            since = fed.nodes
            more = slice(since, since + layer.inner)
            fed = append(fed, tokens[:, more], np.tile(above[more], (b, 1)))
    filtered = any(s.warped for s in rows.sampling) and any(layer.most == 1 for layer in layers)
    rows_of = [(row, list(parents), logs) for row, logs in zip(tokens.tolist(), values.tolist(), strict=True)]
    made = from_lists(rows_of, values=not sampled and not filtered)
    if q is not None:
        made = replace(made, q=q, replacement=growth.replacement)
    return made, [[i if i < fed.nodes else -1 for i in range(n)] for _ in range(b)]


def _distributions(logits: Any, rows: Rows) -> Array:
    """The distribution below every node and row, over the draft vocabulary: float64 [b, w, v]."""
    return np.array([
        [sampling.distribution(z, s) for z in row] for row, s in zip(array(logits), rows.sampling, strict=True)
    ])  # fmt: skip


@dataclass(frozen=True)
class Level:
    """How the children of one level of a static tree come out of its inner nodes' ranked children [inner * most]."""

    most: int  # children of the node that has most
    ids: tuple[int, ...]  # the nodes below
    ranks: tuple[int, ...]  # where each is among the ranked children
    inner: int  # how many of them have children themselves


@lru_cache(maxsize=256)
def plan(parents: tuple[int, ...]) -> tuple[Level, ...]:
    """The levels of a static tree, whose inner nodes must come first, layer by layer."""
    n = len(parents)
    children: list[list[int]] = [[] for _ in range(n)]
    for i in range(1, n):
        if not 0 <= parents[i] < i:
            raise InputError(f"node {i} of a tree must have an earlier node as its parent, not {parents[i]}")
        children[parents[i]].append(i)
    levels, layer, since = [], [0] if n > 1 else [], 0
    while layer:
        most = max(len(children[i]) for i in layer)
        ids = [c for i in layer for c in children[i]]
        ranks = [most * at + rank for at, i in enumerate(layer) for rank in range(len(children[i]))]
        since += len(layer)
        layer = sorted(c for c in ids if children[c])
        if layer != list(range(since, since + len(layer))):
            raise InputError("a static tree names its inner nodes first, layer by layer, and then its leaves")
        levels.append(Level(most, tuple(ids), tuple(ranks), len(layer)))
    return tuple(levels)


def from_ranks(paths: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Parents of the static tree with these nodes, each a path of ranks from the root: (0,), (1,), (0, 0) ...

    Inner nodes come first, as q and `plan` want them; among siblings, an inner one must have the better rank, since
    the order of siblings is the order in which they are drawn.
    """
    known = sorted({tuple(p) for p in paths}, key=lambda p: (len(p), p))
    inner = {p[:-1] for p in known}
    if any((p[:-1] and p[:-1] not in known) or (p[-1] and (*p[:-1], p[-1] - 1) not in known) for p in known):
        raise InputError("a static tree needs every node's parent and its better-ranked siblings too")
    if any(p in inner and p[-1] and (*p[:-1], p[-1] - 1) not in inner for p in known):
        raise InputError("in a static tree, a node with children may not follow a sibling without")
    order: list[tuple[int, ...]] = [(), *(p for p in known if p in inner), *(p for p in known if p not in inner)]
    place = {p: i for i, p in enumerate(order)}
    return (0, *(place[p[:-1]] for p in order[1:]))


@lru_cache(maxsize=256)
def ranked(paths: _ranks.Paths, nodes: int, depth: int) -> tuple[int, ...]:
    """Parents of the first `nodes` - 1 paths that are at most `depth` long, and the root."""
    return from_ranks(_ranks.within(paths, nodes, depth).paths)


@lru_cache(maxsize=256)
def cut(parents: tuple[int, ...], depth: int, nodes: int) -> tuple[int, ...]:
    """The tree without what lies deeper, and its first `nodes` nodes, the shallow and better-ranked ones."""
    paths: list[tuple[int, ...]] = [()]
    count = [0] * len(parents)
    for p in parents[1:]:
        paths.append((*paths[p], count[p]))
        count[p] += 1
    kept = sorted((p for p in paths[1:] if len(p) <= depth), key=lambda p: (len(p), p))[: max(0, nodes - 1)]
    return from_ranks(kept)


# EAGLE-1's tree, 25 nodes of depth 5: how many children the nodes of each layer have, best first.
STATIC = from_ranks(
    [
        *((a,) for a in range(4)),
        *((a, b) for a, n in enumerate((3, 2, 2, 1)) for b in range(n)),
        *((0, b, c) for b, n in enumerate((3, 2, 2)) for c in range(n)),
        (1, 0, 0),
        *((0, 0, 0, d) for d in range(3)),
        *((0, 0, 0, 0, e) for e in range(2)),
    ]
)
