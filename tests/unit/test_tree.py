"""Trees: every function against a slow and obvious reference, on ragged batches."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from outrider.core import growth
from outrider.core import tree as trees
from outrider.core.types import DraftTree, HostRow

Path = tuple[int, ...]

MINIATURE: HostRow = ([9, 5, 6, 7, 8], [0, 0, 1, 1, 0], [0.0, -1.0, -2.0, -3.0, -4.0])
FIELDS = ("tokens", "parents", "depths", "size", "ancestors")


def path_of(tree: DraftTree, row: int, node: int) -> Path:
    """The tokens from below the root down to a node."""
    path: list[int] = []
    while node:
        path.insert(0, int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return tuple(path)


def paths(tree: DraftTree, row: int) -> list[Path]:
    return [path_of(tree, row, i) for i in range(int(tree.size[row]))]


def unvalued(tokens: list[list[int]], parents: list[list[int]]) -> DraftTree:
    """A tree without values."""
    rows = [(t, p, [0.0] * len(t)) for t, p in zip(tokens, parents, strict=True)]
    return trees.from_lists(rows, values=False)


def same(a: DraftTree, b: DraftTree) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in FIELDS) and a.deepest == b.deepest


def random_lists(g: random.Random, rows: int, most: int) -> tuple[list[list[int]], list[list[int]]]:
    tokens, parents = [], []
    for _ in range(rows):
        n = 1 + g.randrange(most)
        parents.append([0] + [g.randrange(i) for i in range(1, n)])
        tokens.append(g.sample(range(1000), n))
    return tokens, parents


def slow_ancestors(parents: list[int], n: int) -> list[list[bool]]:
    out = [[False] * n for _ in range(n)]
    for i in range(n):
        node = i if i < len(parents) else 0
        out[i][i] = True
        while node:
            out[i][node] = True
            node = parents[node]
        out[i][0] = True
    return out


def test_miniature() -> None:
    tree = trees.from_lists([MINIATURE])
    assert tree.depths.tolist() == [[0, 1, 2, 2, 1]]
    assert tree.size.tolist() == [5]
    assert tree.deepest == 2
    assert tree.ancestors is not None
    assert tree.ancestors[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 0, 1],
    ]  # fmt: skip
    trees.check(tree)
    trie, where = trees.from_paths([9], [[[5, 6], [5, 7], [8]]])
    assert where == [[[1, 2], [1, 3], [4]]]
    assert same(trie, tree)
    assert trie.values is None
    assert tree.host == [MINIATURE]
    assert replace(tree).host == [MINIATURE], "the arrays hold what the lists say"


@pytest.mark.parametrize("seed", range(6))
def test_random_lists(seed: int) -> None:
    g = random.Random(seed)
    tokens, parents = random_lists(g, 4, 20)
    values = [[-float(i) for i in range(len(t))] for t in tokens]
    tree = trees.from_lists(list(zip(tokens, parents, values, strict=True)))
    trees.check(tree)
    n = tree.nodes
    assert n == max(map(len, tokens))
    assert tree.ancestors is not None
    assert tree.values is not None
    for b in range(4):
        size = len(tokens[b])
        assert tree.tokens[b].tolist() == tokens[b] + [0] * (n - size)
        assert tree.parents[b].tolist() == parents[b] + [0] * (n - size)
        assert tree.ancestors[b].tolist() == slow_ancestors(parents[b], n)
        assert tree.depths[b, :size].tolist() == [len(path_of(tree, b, i)) for i in range(size)]
        assert tree.depths[b, size:].tolist() == [0] * (n - size)
        assert tree.values[b].tolist() == values[b] + [float("-inf")] * (n - size)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9, 16, 17, 33])
def test_ancestors_of_a_long_chain(n: int) -> None:
    """The deepest node has n - 1 ancestors."""
    tree = unvalued([list(range(n))], [[max(0, i - 1) for i in range(n)]])
    assert tree.ancestors is not None
    assert np.array_equal(tree.ancestors[0], np.tri(n, dtype=bool))
    assert tree.depths[0].tolist() == list(range(n))


def test_chains() -> None:
    rows = [[9, 5, 6], [4], [1, 2]]
    tree = trees.chain(rows)
    assert same(tree, unvalued(rows, [[0, 0, 1], [0], [0, 0]]))
    assert tree.deepest == 2
    trees.check(tree)
    prompt = trees.chain(rows, matrix=False)
    assert prompt.ancestors is None
    assert np.array_equal(prompt.depths, tree.depths)
    assert trees.padded([[1], [2, 3]], width=3, fill=-1).tolist() == [[1, -1, -1], [2, 3, -1]]
    assert trees.padded([]).shape == (0, 0)


def test_root_only() -> None:
    tree = trees.root_only([3, 4])
    trees.check(tree)
    assert (tree.nodes, tree.deepest, tree.size.tolist()) == (1, 0, [1, 1])


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
def test_from_paths_is_a_trie(limit: int) -> None:
    g = random.Random(limit)
    wanted = [[[g.randrange(3) for _ in range(g.randrange(5))] for _ in range(g.randrange(6))] for _ in range(3)]
    tree, where = trees.from_paths([7, 8, 9], wanted, limit)
    trees.check(tree)
    assert int(tree.size.max()) <= limit
    for b in range(3):
        seen: list[Path] = [()]
        for path in wanted[b]:
            for k in range(1, len(path) + 1):
                if tuple(path[:k]) in seen:
                    continue
                if len(seen) == limit:
                    break
                seen.append(tuple(path[:k]))
        assert paths(tree, b) == seen
        for path, ids in zip(wanted[b], where[b], strict=True):
            assert [path_of(tree, b, i) for i in ids] == [tuple(path[: k + 1]) for k in range(len(ids))]
            assert len(ids) == len(path) or int(tree.size[b]) == limit


@pytest.mark.parametrize(
    ("shape", "parents"),
    [((), [0]), ((1, 1), [0, 0, 1]), ((2, 1), [0, 0, 0, 1, 2]), ((2, 2), [0, 0, 0, 1, 1, 2, 2]), ((3,), [0, 0, 0, 0])],
)
def test_templates(shape: tuple[int, ...], parents: list[int]) -> None:
    assert trees.template(shape) == parents
    assert len(parents) == sum(math.prod(shape[:i]) for i in range(len(shape) + 1))
    tokens = np.arange(2 * (len(parents) - 1)).reshape(2, -1)
    tree = trees.from_template([50, 60], tokens, parents)
    trees.check(tree)
    assert same(tree, unvalued(tree.tokens.tolist(), [parents] * 2))
    assert tree.deepest == len(shape)
    assert tree.tokens[:, 0].tolist() == [50, 60]
    inner = len(parents) - (math.prod(shape) if shape else 1)
    assert set(parents[1:]) == set(range(inner)), "inner nodes come first"


def test_equal_siblings_that_were_drawn_with_replacement() -> None:
    tree = trees.from_template([0], np.array([[1, 1]]), [0, 0, 0])
    trees.check(replace(tree, q=np.full((1, 1, 4), 0.25), replacement=True))
    with pytest.raises(AssertionError, match="distinct"):
        trees.check(tree)


def test_append() -> None:
    tree = unvalued([[9, 5, 6], [4, 1, 2]], [[0, 0, 1], [0, 0, 0]])
    more = trees.append(tree, np.array([[7, 8], [7, 8]]), np.array([[1, 0], [2, 1]]))
    right = unvalued([[9, 5, 6, 7, 8], [4, 1, 2, 7, 8]], [[0, 0, 1, 1, 0], [0, 0, 0, 2, 1]])
    assert same(replace(more, deepest=right.deepest), right)
    assert more.deepest >= right.deepest
    trees.check(more)


def test_best_breaks_ties_towards_the_root() -> None:
    """A child of confidence 1 has its parent's value; it must never outlive it."""
    values = [[0.0, 0.0, 0.0, 0.0, 0.0], [0.0, -1.0, -0.5, -1.0, -0.5]]
    assert trees.best_of(values, 3, 0.0, None) == [[0, 1, 2], [0, 2, 4]]
    assert trees.best_of(values, 4, 0.0, None) == [[0, 1, 2, 3], [0, 1, 2, 4]]


def test_best_with_a_floor() -> None:
    values = np.log([[0.9, 0.5, 0.2, 0.05], [0.1, 0.1, 0.1, 0.1]])
    assert trees.best_of(values.tolist(), 9, 0.15, None) == [[0, 1, 2], [0]]  # the root always stays
    values[0, 1] = -np.inf
    assert trees.best_of(values.tolist(), 9, 0.0, None) == [[0, 2, 3], [0, 1, 2, 3]]
    assert growth.best(values.astype(np.float32), 9, 0.0, None) == trees.best_of(values.tolist(), 9, 0.0, None)


@pytest.mark.parametrize("floor", [0.0, 0.2])
@pytest.mark.parametrize("nodes", [1, 3, 30])
def test_the_best_of_an_array_are_those_of_its_lists(nodes: int, floor: float) -> None:
    source = np.random.default_rng(nodes)
    values = -source.integers(0, 9, (5, 20)).cumsum(1).astype(np.float32) / 8
    values[:, 0] = 0.0
    assert growth.best(values, nodes, floor, None) == trees.best_of(values.tolist(), nodes, floor, None)


# --- check


def broken() -> list[tuple[str, DraftTree]]:
    good = trees.from_lists([MINIATURE])
    assert good.ancestors is not None
    wrong = good.ancestors.copy()
    wrong[0, 2, 4] = True
    return [
        ("its ancestor matrix is not bool", replace(good, ancestors=None)),
        ("parent", replace(good, parents=np.array([[0, 2, 0, 1, 0]]))),
        ("its parent.s plus one", replace(good, depths=np.array([[0, 1, 2, 1, 1]]))),
        ("does not follow from its parents", replace(good, ancestors=wrong)),
        ("deeper than the tree.s deepest", replace(good, deepest=1)),
        ("more than 5", replace(good, size=np.array([6]))),
        ("siblings carry distinct tokens", replace(good, tokens=np.array([[9, 5, 6, 6, 8]]))),
    ]


@pytest.mark.parametrize(("what", "tree"), broken(), ids=[what for what, _ in broken()])
def test_check_reports_every_broken_field(what: str, tree: DraftTree) -> None:
    with pytest.raises(AssertionError, match=what):
        trees.check(tree)
