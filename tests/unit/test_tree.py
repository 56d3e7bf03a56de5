"""Trees: every function against a slow and obvious reference, on ragged batches."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from outrider.core import tree as trees
from outrider.core.types import DraftTree

Path = tuple[int, ...]

MINIATURE = {"tokens": [[9, 5, 6, 7, 8]], "parents": [[0, 0, 1, 1, 0]]}


def path_of(tree: DraftTree, row: int, node: int) -> Path:
    """The tokens from below the root down to a node."""
    path: list[int] = []
    while node:
        path.insert(0, int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return tuple(path)


def paths(tree: DraftTree, row: int) -> list[Path]:
    return [path_of(tree, row, i) for i in range(int(tree.size[row]))]


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
    tree = trees.from_lists(**MINIATURE)
    assert tree.depths.tolist() == [[0, 1, 2, 2, 1]]
    assert tree.size.tolist() == [5]
    assert tree.deepest == 2
    assert tree.ancestors is not None
    assert tree.ancestors[0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 0, 1],
    ]  # fmt: skip
    assert trees.positions(tree, torch.tensor([40])).tolist() == [[40, 41, 42, 42, 41]]
    assert trees.depths(tree.parents).tolist() == [[0, 1, 2, 2, 1]]
    trees.check(tree)
    same, where = trees.from_paths([9], [[[5, 6], [5, 7], [8]]])
    assert where == [[[1, 2], [1, 3], [4]]]
    assert torch.equal(same.tokens, tree.tokens)
    assert torch.equal(same.parents, tree.parents)


@pytest.mark.parametrize("seed", range(6))
def test_random_lists(seed: int) -> None:
    g = random.Random(seed)
    tokens, parents = random_lists(g, 4, 20)
    values = [[-float(i) for i in range(len(t))] for t in tokens]
    tree = trees.from_lists(tokens, parents, values)
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
    """The doubling must go far enough: the deepest node has n - 1 ancestors."""
    parents = torch.tensor([[max(0, i - 1) for i in range(n)]])
    assert torch.equal(trees.ancestors(parents)[0], torch.ones(n, n).tril().bool())
    assert trees.depths(parents)[0].tolist() == list(range(n))


def test_chains() -> None:
    rows = [[9, 5, 6], [4], [1, 2]]
    tree = trees.chain(rows)
    same = trees.from_lists(rows, [[0, 0, 1], [0], [0, 0]])
    for name in ("tokens", "parents", "depths", "size", "ancestors"):
        assert torch.equal(getattr(tree, name), getattr(same, name)), name
    assert tree.deepest == 2
    trees.check(tree)
    assert trees.chain_of(tree.tokens, tree.size, matrix=False).ancestors is None


def test_root_only() -> None:
    tree = trees.root_only(torch.tensor([3, 4]))
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
    [((), (0,)), ((1, 1), (0, 0, 1)), ((2, 1), (0, 0, 0, 1, 2)), ((2, 2), (0, 0, 0, 1, 1, 2, 2)), ((3,), (0, 0, 0, 0))],
)
def test_templates(shape: tuple[int, ...], parents: tuple[int, ...]) -> None:
    assert trees.template(shape) == parents
    assert len(parents) == sum(math.prod(shape[:i]) for i in range(len(shape) + 1))
    tokens = torch.arange(2 * (len(parents) - 1)).view(2, -1)
    tree = trees.from_template(torch.tensor([50, 60]), tokens, parents)
    trees.check(tree)
    assert tree.deepest == len(shape)
    assert tree.tokens[:, 0].tolist() == [50, 60]
    inner = len(parents) - (math.prod(shape) if shape else 1)
    assert set(parents[1:]) == set(range(inner)), "inner nodes come first"


def test_fields_of_a_template() -> None:
    q = torch.full((1, 1, 4), 0.25)
    tree = trees.from_template(torch.tensor([0]), torch.tensor([[1, 1]]), (0, 0, 0), q=q, replacement=True)
    assert tree.q is q
    assert tree.replacement
    trees.check(tree)  # equal siblings are allowed here


def test_append() -> None:
    tree = trees.from_lists([[9, 5, 6], [4, 1, 2]], [[0, 0, 1], [0, 0, 0]])
    more = trees.append(tree, torch.tensor([[7, 8], [7, 8]]), torch.tensor([[1, 0], [2, 1]]))
    same = trees.from_lists([[9, 5, 6, 7, 8], [4, 1, 2, 7, 8]], [[0, 0, 1, 1, 0], [0, 0, 0, 2, 1]])
    for name in ("tokens", "parents", "depths", "size", "ancestors"):
        assert torch.equal(getattr(more, name), getattr(same, name)), name
    trees.check(more)


@pytest.mark.parametrize("seed", range(6))
def test_prune(seed: int) -> None:
    """Random subsets closed under parents, ragged."""
    g = random.Random(seed)
    tokens, parents = random_lists(g, 3, 15)
    values = [[-0.5 * i for i in range(len(t))] for t in tokens]
    tree = trees.from_lists(tokens, parents, values)
    chosen = []
    for row in parents:
        keep = [0]
        for i in range(1, len(row)):
            if row[i] in keep and g.random() < 0.6:
                keep.append(i)
        chosen.append(keep)
    m = max(map(len, chosen))
    ids = torch.tensor([[*k, *[0] * (m - len(k))] for k in chosen])
    cut = trees.prune(tree, ids, torch.tensor([len(k) for k in chosen]))
    trees.check(cut)
    assert cut.values is not None
    assert cut.nodes == m
    for b, keep in enumerate(chosen):
        assert paths(cut, b) == [path_of(tree, b, i) for i in keep]
        assert cut.values[b, : len(keep)].tolist() == [values[b][i] for i in keep]
        assert bool((cut.values[b, len(keep) :] == float("-inf")).all())
        assert cut.ancestors is not None
        new_parents = cut.parents[b].tolist()[: len(keep)]
        assert cut.ancestors[b].tolist() == slow_ancestors(new_parents, m)


def test_best_breaks_ties_towards_the_root() -> None:
    """A child of confidence 1 has its parent's value; it must never outlive it."""
    values = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0], [0.0, -1.0, -0.5, -1.0, -0.5]])
    ids, count = trees.best(values, 3)
    assert ids.tolist() == [[0, 1, 2], [0, 2, 4]]
    assert count.tolist() == [3, 3]
    ids, count = trees.best(values, 4)
    assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 4]]


def test_best_with_a_floor() -> None:
    values = torch.tensor([[0.9, 0.5, 0.2, 0.05], [0.1, 0.1, 0.1, 0.1]]).log()
    ids, count = trees.best(values, 9, floor=0.15)
    assert ids.tolist() == [[0, 1, 2], [0, 0, 0]]  # the place that no row needs is not computed
    assert count.tolist() == [3, 1]  # the root always stays
    values[0, 1] = float("-inf")
    assert trees.best(values, 9)[1].tolist() == [3, 4]


# --- check


def broken() -> list[tuple[str, DraftTree]]:
    good = trees.from_lists(**MINIATURE)
    assert good.ancestors is not None
    wrong = good.ancestors.clone()
    wrong[0, 2, 4] = True
    return [
        ("no matrix", replace(good, ancestors=None)),
        ("parent after child", replace(good, parents=torch.tensor([[0, 2, 0, 1, 0]]))),
        ("depths", replace(good, depths=torch.tensor([[0, 1, 2, 1, 1]]))),
        ("matrix", replace(good, ancestors=wrong)),
        ("deepest", replace(good, deepest=1)),
        ("size", replace(good, size=torch.tensor([6]))),
        ("siblings", replace(good, tokens=torch.tensor([[9, 5, 6, 6, 8]]))),
    ]


@pytest.mark.parametrize(("what", "tree"), broken(), ids=[what for what, _ in broken()])
def test_check_finds_what_is_broken(what: str, tree: DraftTree) -> None:
    with pytest.raises(AssertionError):
        trees.check(tree)
