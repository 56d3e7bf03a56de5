"""Growth by value against dictionaries and sorting; static shapes; what a drafter's options mean."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.core import growth, sampling
from outrider.core import tree as trees
from outrider.core.noise import GumbelNoise
from outrider.core.types import Array, Budget, DraftTree, Rows
from outrider.drafters import _growth, _logits
from outrider.drafters.eagle import STATIC
from outrider.params import InputError, Sampling

Path = tuple[int, ...]


def paths(tree: DraftTree, row: int) -> list[Path]:
    """The tokens from below the root down to every node."""
    out: list[Path] = [()]
    for node in range(1, int(tree.size[row])):
        out.append((*out[int(tree.parents[row, node])], int(tree.tokens[row, node])))
    return out


def candidates(row: int, path: Path, k: int) -> list[tuple[int, float]]:
    """What a drafter would say after a path: distinct tokens with log-confidences, best first."""
    g = random.Random(str((row, path)))
    weights = sorted((g.random() ** 2 + 1e-3 for _ in range(k + 2)), reverse=True)
    tokens = g.sample(range(50), k)
    return [(t, math.log(w / sum(weights))) for t, w in zip(tokens, weights, strict=False)]


def expander(k: int, seen: list[list[Path]]) -> Callable:
    def expand(fed: DraftTree, since: int) -> tuple[Array, Array]:
        trees.check(replace(fed, replacement=True, q=np.zeros((len(fed.tokens), 1, 1))))
        out = []
        for b in range(fed.tokens.shape[0]):
            new = paths(fed, b)[since:]
            seen[b] += new
            out.append([candidates(b, p, k) for p in new])
        data = np.array(out)
        return data[..., 0].astype(np.int64), data[..., 1].astype(np.float32)

    return expand


def slow_growth(
    row: int, k: int, depth: int, width: int, nodes: int, floor: float, layer: bool, steps: int,
    value: bool = True, rerank: bool = True,
) -> tuple[dict[Path, float], list[Path]]:  # fmt: skip
    """EAGLE-2 by dictionaries: expand the best of the last layer (or of all not fed), rank all again, keep the best."""
    values: dict[Path, float] = {(): 0.0}
    own: dict[Path, float] = {}
    fed: list[Path] = []
    now: list[Path] = [()]
    for _ in range(steps):
        born = []
        for path in now:
            fed.append(path)
            for token, confidence in candidates(row, path, k):
                values[(*path, token)] = values[path] + confidence
                own[(*path, token)] = confidence
                born.append((*path, token))
        open_ = born if layer else [p for p in values if p not in fed and len(p) < depth]
        now = sorted(open_, key=lambda p: -(values if value else own)[p])[:width] if open_ else []
        now = [p for p in now if p]
    ranked = sorted(values if rerank else [*fed, *now], key=lambda p: (-values[p], len(p)))
    kept = [p for p in ranked[:nodes] if p == () or floor == 0 or values[p] > math.log(floor)]
    return {p: values[p] for p in kept}, fed


GROWTHS = [
    {"depth": 3, "width": 2, "nodes": 8, "k": 3},
    {"depth": 4, "width": 3, "nodes": 6, "k": 2},
    {"depth": 1, "width": 4, "nodes": 10, "k": 3},
    {"depth": 3, "width": 9, "nodes": 100, "k": 2},
    {"depth": 5, "width": 1, "nodes": 6, "k": 1},
    {"depth": 3, "width": 3, "nodes": 12, "k": 3, "floor": 0.05},
    {"depth": 4, "width": 2, "nodes": 1, "k": 2},
    {"depth": 4, "width": 2, "nodes": 9, "k": 3, "frontier": "any", "steps": 6},
    {"depth": 3, "width": 3, "nodes": 20, "k": 2, "frontier": "any", "steps": 3},
    {"depth": 2, "width": 4, "nodes": 20, "k": 2, "frontier": "any", "steps": 7},  # more steps than there is to feed
    {"depth": 1, "width": 4, "nodes": 20, "k": 3, "frontier": "any", "steps": 4},
    # EAGLE-2's ablations
    {"depth": 4, "width": 2, "nodes": 9, "k": 3, "value": False},
    {"depth": 4, "width": 2, "nodes": 100, "k": 3, "rerank": False},
    {"depth": 4, "width": 2, "nodes": 100, "k": 3, "value": False, "rerank": False},
    {"depth": 3, "width": 3, "nodes": 6, "k": 2, "rerank": False},
    {"depth": 3, "width": 9, "nodes": 100, "k": 2, "value": False, "rerank": False, "floor": 0.03},
    {"depth": 4, "width": 2, "nodes": 9, "k": 3, "frontier": "any", "steps": 5, "value": False},
    {"depth": 4, "width": 2, "nodes": 9, "k": 3, "frontier": "any", "steps": 5, "value": False, "rerank": False},
]


@pytest.mark.parametrize("case", GROWTHS, ids=range(len(GROWTHS)))
def test_growth(case: dict) -> None:
    case = dict(case)
    k, b = case.pop("k"), 4
    seen: list[list[Path]] = [[] for _ in range(b)]
    tree, fed_as = growth.grow(range(100, 100 + b), expander(k, seen), **case)
    trees.check(tree)
    layer = case.get("frontier", "layer") == "layer"
    steps = case.get("steps") or case["depth"]
    assert tree.values is not None
    assert tree.tokens[:, 0].tolist() == [100, 101, 102, 103]
    for row in range(b):
        args = (row, k, case["depth"], case["width"], case["nodes"], case.get("floor", 0.0), layer, steps)
        args = (*args, case.get("value", True), case.get("rerank", True))
        kept, fed = slow_growth(*args)
        result = paths(tree, row)
        assert set(result) == set(kept)
        assert len(result) == len(kept)
        for i, path in enumerate(result):
            assert float(tree.values[row, i]) == pytest.approx(kept[path], abs=1e-5)
            index = fed_as[row][i]
            assert (index >= 0) == (path in fed)
            if index >= 0:
                assert seen[row][index] == path, "the index among the fed nodes"
        assert len(fed_as[row]) == len(result)


@pytest.mark.parametrize("frontier", ["layer", "any"])
def test_what_falls_to_the_floor_is_not_fed(frontier: str) -> None:
    """And the tree is what it is when such nodes are fed and their children thrown away."""
    seen: list[list[Path]] = [[]]
    options = {"depth": 3, "width": 9, "nodes": 40, "floor": 0.04, "frontier": frontier}
    tree, _ = growth.grow([100], expander(3, seen), **options)
    kept, fed = slow_growth(0, 3, 3, 9, 40, 0.04, frontier == "layer", 3)
    everything, _ = slow_growth(0, 3, 3, 9, 1000, 0.0, frontier == "layer", 3)
    assert set(paths(tree, 0)) == set(kept)
    assert all(everything[path] > math.log(0.04) for path in seen[0])
    assert 1 < len(seen[0]) < len(fed)


def test_growth_with_certain_children_stays_connected() -> None:
    """Confidences of exactly 1, and rounded ones above 1, tie or rise: parents still come first."""

    def expand(fed: DraftTree, since: int) -> tuple[Array, Array]:
        w = fed.nodes - since
        tokens = np.tile(np.arange(2 * w).reshape(1, w, 2) + 10 * since, (2, 1, 1))
        return tokens, np.tile(np.array([1e-7, 0.0], np.float32), (2, w, 1))

    for frontier in ("layer", "any"):
        for nodes in range(1, 12):
            tree, _ = growth.grow([0, 0], expand, depth=4, width=2, nodes=nodes, frontier=frontier)  # type: ignore[arg-type]
            trees.check(tree)
            assert tree.values is not None
            assert (tree.values <= 0).all()


def test_the_ablations_choose_otherwise() -> None:
    """A sure child of an unlikely node: its value is low, its own confidence high. Each option must make a tree of its
    own out of the same candidates."""
    says = {(): [(1, 0.9), (2, 0.1)], (1,): [(3, 0.5), (4, 0.4)], (2,): [(5, 0.99), (6, 0.001)]}

    def expand(fed: DraftTree, since: int) -> tuple[Array, Array]:
        rows = [says.get(p, [(7, 0.6), (8, 0.3)]) for p in paths(fed, 0)[since:]]
        data = np.array([rows])
        return data[..., 0].astype(np.int64), np.log(data[..., 1]).astype(np.float32)

    def kept(nodes: int = 100, **options: bool) -> set[Path]:
        tree, _ = growth.grow([0], expand, depth=3, width=2, nodes=nodes, **options)
        trees.check(tree)
        return set(paths(tree, 0))

    assert (1, 3, 7) in kept()
    assert (2, 5, 7) not in kept()
    assert (2, 5, 7) in kept(value=False)
    assert (1, 4, 7) not in kept(value=False)
    assert (2, 6) in kept()
    assert kept(rerank=False) == {(), (1,), (2,), (1, 3), (1, 4), (1, 3, 7), (1, 4, 7)}
    assert kept(rerank=False, value=False) == {(), (1,), (2,), (2, 5), (1, 3), (2, 5, 7), (1, 3, 7)}
    assert kept(5, rerank=False) == {(), (1,), (1, 3), (1, 4), (1, 3, 7)}


def test_confidences_of_nan_are_reported() -> None:
    """Not sorted: the tree says so itself, whichever of the nodes they are."""

    def expand(fed: DraftTree, since: int) -> tuple[Array, Array]:
        w = fed.nodes - since
        logs = np.full((1, w, 2), -0.1, np.float32)
        logs[0, -1, 1] = math.nan if since else -0.2
        return np.arange(2 * w).reshape(1, w, 2), logs

    for frontier in ("layer", "any"):
        tree, _ = growth.grow([9], expand, depth=3, width=2, nodes=4, frontier=frontier)  # type: ignore[arg-type]
        assert "confidences are NaN" in trees.flaw(tree, [9], 100)


# --- what drafters share


def rows(rule: str = "coupled", temperature: float = 1.0, b: int = 2, vocab: int = 13) -> Rows:
    samplings = (Sampling(temperature),) * b
    return Rows((0,) * b, (5,) * b, tuple(range(b)), (0,) * b, samplings, rule, (50,) * b, GumbelNoise(vocab))


def steps(vocab: int, b: int = 2) -> tuple[Array, Callable[[DraftTree, int], Array]]:
    """Logits that depend on the path alone, and those below the root."""

    def of(row: int, path: Path) -> Array:
        return 2 * np.random.default_rng([row, *path]).standard_normal(vocab, np.float32)

    def step(fed: DraftTree, since: int) -> Array:
        return np.stack([np.stack([of(i, p) for p in paths(fed, i)[since:]]) for i in range(b)])

    return np.stack([of(i, ()) for i in range(b)])[:, None], step


def test_the_static_tree_of_eagle_1() -> None:
    assert len(STATIC) == 26, "25 nodes and the root"
    depths = [0]
    for parent in STATIC[1:]:
        depths.append(depths[parent] + 1)
    assert [depths.count(d) for d in range(6)] == [1, 4, 8, 8, 3, 2]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("parents", [STATIC, *(tuple(trees.template(s)) for s in ((3, 2, 2), (1, 1, 1), (2, 2)))])
def test_static_trees(parents: tuple[int, ...], temperature: float, rule: str) -> None:
    """Children are the best by rank (with the noise), or drawn from a q that is kept, in the siblings' order."""
    view, (first, step) = rows(rule, temperature), steps(13)
    made, fed_as = _growth.static(view, first, step, parents, _growth.Growth(scale=1.5))
    trees.check(made)
    assert made.parents[0].tolist() == list(parents)
    inner = max(parents) + 1
    assert fed_as[0] == [i if i in _fed(parents) else -1 for i in range(len(parents))]
    for b in range(2):
        for node, path in enumerate(paths(made, b)[:inner]):
            logits = first[b, 0] if not path else step(trees.chain([[0, *path]] * 2), len(path))[b, 0]
            children = [int(made.tokens[b, i]) for i in range(1, made.nodes) if made.parents[b, i] == node]
            if rule == "rejection" and temperature:
                assert made.q is not None
                assert made.values is None
                assert np.allclose(made.q[b, node], sampling.softmax(logits))
            else:
                assert made.q is None
                assert made.values is not None
                noise = view.noise(len(path) + 1)[b] * temperature if rule == "coupled" else 0
                scores = (logits + noise).astype(np.float32)
                best = np.argsort(-scores, kind="stable")[: len(children)]
                assert children == best.tolist()
                values = made.values[b, [i for i in range(1, made.nodes) if made.parents[b, i] == node]]
                own = np.log(sampling.softmax(scores / 1.5))[best]
                assert np.allclose(values, made.values[b, node] + own, atol=1e-5), "confidences along the path"


def _fed(parents: tuple[int, ...]) -> set[int]:
    """Nodes that the drafter is fed: those with children."""
    return set(parents)


def test_sampled_siblings_are_drawn_in_order() -> None:
    """The first of three is drawn from q: over many rounds, here side by side, as often as q says."""
    q, n = np.array([0.5, 0.3, 0.15, 0.05]), 2000
    first = np.tile(np.log(q), (n, 1, 1))
    view = replace(rows("rejection", 1.0, n, 4), serial=tuple(range(n)))
    made, _ = _growth.static(view, first, lambda *_: first, (0, 0, 0, 0), _growth.Growth())
    counts = np.bincount(made.tokens[:, 1], minlength=4)
    assert np.allclose(counts / n, q, atol=0.03)


def test_a_draft_vocabulary() -> None:
    """Columns stand for other ids: the same tree as with -inf elsewhere, with the noise of the ids meant."""
    names = np.array([2, 3, 7, 8, 12])
    first, step = steps(5)

    def spread(x: Array) -> Array:
        made = np.full((*x.shape[:2], 13), -np.inf, np.float32)
        made[..., names] = x
        return made

    def wide(fed: DraftTree, since: int) -> Array:
        return spread(step(fed, since))

    for rule in ("coupled", "rejection"):
        for kind in ("dynamic", "static", "best"):
            options = _growth.Growth(kind, parents=(0, 0, 0, 1, 1, 2), width=3, top_k=3, depth=3)
            a, _ = options.propose(rows(rule), first, step, Budget(20, 3), names, 13)
            b, _ = options.propose(rows(rule), spread(first), wide, Budget(20, 3))
            assert np.array_equal(a.tokens, b.tokens)
            assert np.array_equal(a.parents, b.parents)
            assert (a.q is None) == (b.q is None)
            assert a.q is None or b.q is None or np.allclose(a.q, b.q)


def test_a_large_draft_vocabulary_is_raced_by_its_best() -> None:
    vocab = sampling.POOLED + 1000
    dice = np.random.default_rng(0)
    names = np.sort(dice.permutation(2 * vocab)[:vocab])
    view = rows("coupled", 1.0, 1, 2 * vocab)
    logits = 3 * dice.standard_normal((1, 2, vocab), np.float32)
    full = np.full((1, 2, 2 * vocab), -np.inf, np.float32)
    full[..., names] = logits
    a, b = (sampling.rank(x, view, 1, 5, names=n) for x, n in ((logits, names), (full, None)))
    assert np.array_equal(a[0], b[0])
    assert np.allclose(a[1], b[1])


@pytest.mark.parametrize(
    ("budget", "options", "expected"),
    [
        (Budget(60, 5), {}, 26),
        (Budget(10, 5), {}, 10),
        (Budget(60, 2), {}, 13),
        (Budget(60, 5), {"nodes": 7}, 7),
        (Budget(60, 5), {"shape": (2, 2), "parents": ()}, 7),
        (Budget(6, 5), {"shape": (2, 2), "parents": ()}, 6),
        (Budget(6, 5), {"shape": (300, 300, 300, 300), "parents": ()}, 6),
        (Budget(60, 5, shape=(3, 1)), {}, 7),
        (Budget(60, 4), {"tree": "chain"}, 5),
        (Budget(60, 4), {"tree": "chain", "depth": 2}, 3),
    ],
)
def test_shapes_stay_within_the_budget(budget: Budget, options: dict, expected: int) -> None:
    options = {"tree": "static", "parents": STATIC, **options}
    first, step = steps(13)
    made, _ = _growth.Growth(**options).propose(rows(), first, step, budget)
    trees.check(made)
    assert made.nodes == expected


@pytest.mark.parametrize(
    ("width", "nodes", "depth", "expected"),
    [
        (0, 60, 6, [10] * 5),
        (0, 16, 6, [3] * 5),
        (0, 8, 3, [3] * 2),
        (0, 2, 1, []),
        (0, 200, 4, [10] * 3),
        (4, 60, 3, [4] * 2),
    ],
)
def test_a_step_expands_as_many_nodes_as_the_tree_has_per_layer(
    width: int, nodes: int, depth: int, expected: list[int]
) -> None:
    fed, (first, step) = [], steps(40)

    def counted(tree: DraftTree, since: int) -> Array:
        fed.append(tree.nodes - since)
        return step(tree, since)

    grown = _growth.Growth(width=width, nodes=nodes)
    grown.propose(rows(vocab=40), first, counted, Budget(nodes=nodes, depth=depth))
    assert fed == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tree": "oak"}, "tree must be dynamic, best, static, chain, greedy63 or a file"),
        ({"top_k": 0}, "must be positive"),
        ({"width": -1}, "0 or more"),
        ({"nodes": 1}, "at least 2"),
        ({"scale": -1.0}, "scale must be a positive number"),
        ({"parents": (0, 0, 1, 1, 0, 4)}, "inner nodes first"),
        ({"parents": (0, 0, 5)}, "an earlier node"),
    ],
)
def test_options_that_make_no_sense(options: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        _growth.Growth(**options)


@pytest.mark.parametrize("ranks", [[(0,), (0, 0, 0)], [(1,)], [(0,), (1,), (1, 0)]])
def test_trees_by_rank_that_make_no_sense(ranks: list[Path]) -> None:
    with pytest.raises(InputError, match="static tree"):
        _growth.from_ranks(ranks)


@pytest.mark.parametrize("names", [None, np.arange(4000, 2000, -1)[::-1] * 2])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tensors_are_ranked_as_arrays_are(temperature: float, names: Array | None) -> None:
    """One depth for all nodes or one for each; with filters; of a small vocabulary and of a large one."""
    for vocab in (40, 5000) if names is None else (2000,):
        logits = 3 * np.random.default_rng(1).standard_normal((2, 3, vocab), np.float32)
        all_ids = vocab if names is None else 9000
        view = replace(rows("coupled", temperature, vocab=all_ids), sampling=(Sampling(temperature, top_k=7),) * 2)
        for depth in (2, np.array([[1, 2, 2], [3, 1, 1]])):
            for warp in (False, True):
                a, b = (_logits.rank(x, view, depth, 5, 1.5, warp, names) for x in (logits, torch.from_numpy(logits)))
                assert np.array_equal(a[0], b[0])
                assert np.allclose(a[1], b[1], atol=1e-5)
