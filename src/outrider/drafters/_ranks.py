"""Trees of ranks: which candidate of which depth. The path (0, 2) is the third best below the best.

A tree of ranks is fixed before anything is drafted; its tokens are filled in each round. They come from

    product      all paths of ranks below a shape, (s_1, ..., s_g): Medusa's Cartesian product (section 2.1.2)
    greedy       the paths with the highest product of accuracies, one after the other (section 2.3.3)
    candidates   whatever can be among the n best nodes if all nodes of a depth share their candidates (`plant` chooses)

Nodes are in breadth-first order, siblings by rank: parents come first and ties go to the shallower node.

    paths  (0) (1) (0 0) (0 1) (1 0)      nodes  0 1 2 3 4 5      parents  0 0 0 1 1 2
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path as File
from typing import Any

import numpy as np

from ..core.growth import best
from ..core.price import Price
from ..core.tree import append, from_lists, root_only
from ..core.types import Array, DraftTree, HostRow, Rows
from ..nets.configs import Path, Paths, check_paths
from ..params import InputError
from ._logits import rank

Step = Callable[[DraftTree, int], Any]  # logits [b, fed - since, v] of the nodes fed from `since` on

# Assumed, not measured: how often the right token is head k's candidate of rank i. The best candidates of heads 1 to 4
# are right in 60, 45, 35 and 30 % of the cases, and rank i is right (i + 1)^1.5 times less often than the best.
ASSUMED = tuple(tuple(top / (i + 1) ** 1.5 for i in range(10)) for top in (0.60, 0.45, 0.35, 0.30))


@dataclass(frozen=True)
class Ranks:
    """The non-root nodes of a tree, as paths in breadth-first order."""

    paths: Paths

    def __post_init__(self) -> None:
        assert list(self.paths) == sorted(set(self.paths), key=lambda p: (len(p), p)), "breadth first, each once"

    @cached_property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    @cached_property
    def top_k(self) -> int:
        """One more than the highest rank."""
        return 1 + max((r for p in self.paths for r in p), default=0)

    @cached_property
    def parents(self) -> Path:
        node = {p: i for i, p in enumerate(self.paths, 1)}
        return (0, *(node[p[:-1]] if len(p) > 1 else 0 for p in self.paths))


def ordered(paths: Sequence[Path]) -> Ranks:
    """Paths as a tree, parents before children."""
    return Ranks(tuple(sorted(paths, key=lambda p: (len(p), p))))


@lru_cache(maxsize=256)
def candidates(widths: Path, nodes: int) -> Ranks:
    """Every path, with ranks below `widths`, that can be among the best `nodes` (root included).

    A path is outdone by all paths of its own or a smaller length whose ranks are nowhere higher: there are
    sum over j of (r_1 + 1) ... (r_j + 1) of them, itself included, so at most nodes - 1 may be.
    """
    paths: list[Path] = []

    def go_on(path: Path, product: int, above: int) -> None:
        if len(path) == len(widths):
            return
        for r in range(widths[len(path)]):
            here = product * (r + 1)
            if above + here > nodes - 1:
                break
            paths.append((*path, r))
            go_on((*path, r), here, above + here)

    go_on((), 1, 0)
    return ordered(paths)


@lru_cache(maxsize=256)
def within(paths: Paths, nodes: int, depth: int) -> Ranks:
    """The first nodes - 1 of the paths that are at most `depth` long; paths are given best first, parents first."""
    return ordered([p for p in paths if len(p) <= depth][: max(0, nodes - 1)])


def greedy(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[Paths, tuple[float, ...]]:
    """The `nodes` non-root paths with the highest products of accuracies[depth][rank], best first, and the products.

    One node at a time, always the most valuable one whose parent is there (ties: the shallower, then the better
    ranks). A path is never worth more than its parent, so this is the best tree of that size: it maximises
    1 + sum of values, the tokens that a round commits, as far as the accuracies of different depths multiply.
    """
    assert all(a >= b for depth in accuracies for a, b in itertools.pairwise(depth)), "accuracies fall with the rank"
    paths: list[Path] = []
    values: list[float] = []
    heap: list[tuple[float, int, Path, float]] = []

    def offer(parent: Path, worth: float, rank: int) -> None:
        d = len(parent)
        if d < len(accuracies) and rank < len(accuracies[d]) and (value := worth * accuracies[d][rank]) > 0:
            heapq.heappush(heap, (-value, d + 1, (*parent, rank), worth))

    offer((), 1.0, 0)
    while heap and len(paths) < nodes:
        value, _, path, above = heapq.heappop(heap)
        paths.append(path)
        values.append(-value)
        offer(path[:-1], above, path[-1] + 1)
        offer(path, -value, 0)
    return tuple(paths), tuple(values)


@lru_cache(maxsize=1)
def greedy63() -> Paths:
    """The 63 most valuable paths under the accuracies that Medusa's authors assumed."""
    return greedy(ASSUMED, 63)[0]


def plant(
    roots: Sequence[int],
    tokens: Array,
    confidence: Array,
    ranks: Ranks,
    nodes: int,
    floor: float = 0.0,
    price: Price | None = None,
) -> DraftTree:
    """The best `nodes` nodes (root included) of a tree of ranks whose depths have candidates independent of the path.

    Args:
        roots: of each row the last committed token.
        tokens: int64 [b, d, k], the candidates of each depth, best first.
        confidence: float32 [b, d, k], the logs of their confidences.
    """
    if not ranks.paths:
        return root_only(roots)
    parents, rows = ranks.parents, list[HostRow]()
    own = np.array([(len(p) - 1, p[-1]) for p in ranks.paths]).T
    above = np.array(parents)
    names = np.concatenate([np.array(roots)[:, None], tokens[:, own[0], own[1]]], 1)
    values: Array = np.zeros(names.shape, np.float32)
    values[:, 1:] = np.minimum(confidence[:, own[0], own[1]], 0)
    for depth in range(2, ranks.depth + 1):  # from above: no child may be worth more than its parent
        level = 1 + np.flatnonzero(own[0] == depth - 1)
        values[:, level] += values[:, above[level]]
    chosen = best(values, nodes, floor, price)
    for ids, spelled, logs in zip(chosen, names.tolist(), values.tolist(), strict=True):
        new = {old: i for i, old in enumerate(ids)}
        rows.append(([spelled[i] for i in ids], [new[parents[i]] for i in ids], [logs[i] for i in ids]))
    return from_lists(rows)


def below(rows: Rows, first: Any, step: Step, truth: Array, k: int, names: Any = None) -> Array:
    """The k candidates at each depth below a path of known tokens, which is fed one by one: for `tune-tree`.

    Args:
        first: logits [b, 1, v] below the roots.
        truth: int64 [b, d], the path.

    Returns:
        int64 [b, d, k].
    """
    fed, logits, candidates = root_only(rows.root), first, []
    for depth in range(1, truth.shape[1] + 1):
        candidates.append(rank(logits, rows, depth, k, names=names)[0])
        if depth < truth.shape[1]:
            since = fed.nodes
            fed = append(fed, truth[:, depth - 1 : depth], np.full((len(rows), 1), since - 1))
            logits = step(fed, since)
    return np.concatenate(candidates, 1)


def read(file: str) -> Paths:
    """The paths of a file that `outrider tune-tree` wrote."""
    try:
        content = json.loads(File(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"the tree {file} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise InputError(f"the tree {file} is not JSON; make it by outrider tune-tree") from None
    return check_paths(content.get("paths") if isinstance(content, dict) else None, file)


def chosen(tree: str, stored: Paths | None, names: Sequence[str], most: int, vocab: int) -> tuple[str, Paths]:
    """The value of `tree=`: one of `names`, or "ranks" and the paths (greedy63, a file, or the drafter's own).

    Paths with more than `most` ranks, or with ranks that a vocabulary has not, are left out.
    """
    if tree == "" and stored is None:
        return names[0], ()
    if tree in names:
        return tree, ()
    paths = named(tree, names) if tree else stored
    assert paths is not None
    return "ranks", tuple(p for p in paths if len(p) <= most and max(p) < vocab)


def named(tree: str, names: Sequence[str]) -> Paths:
    """The paths of greedy63 or of a file."""
    if tree == "greedy63":
        return greedy63()
    if not File(tree).is_file() and (File(tree).suffix or File(tree).name != tree):
        raise InputError(f"tree={tree}: there is no such file; outrider tune-tree writes one")
    if not File(tree).is_file():
        raise InputError(f"tree must be {', '.join(names)}, greedy63 or a file of outrider tune-tree, not {tree!r}")
    return read(tree)
