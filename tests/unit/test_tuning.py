"""Trees of ranks: greedy growth against brute force, planting, measuring against a count by hand, files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.budgets.budgeter import FixedBudget
from outrider.core import tree
from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Drafter, Drafting, Round
from outrider.core.sampling import softmax
from outrider.core.types import Array, Budget, DraftTree, Rows
from outrider.drafters import _growth, _ranks, load
from outrider.engine import Engine, Request
from outrider.params import InputError, Sampling
from outrider.testing import TableTarget
from outrider.training import tree_tuning as tuning

Paths = Sequence[tuple[int, ...]]


def value(path: tuple[int, ...], accuracies: Sequence[Sequence[float]]) -> float:
    made = 1.0
    for depth, rank in enumerate(path):
        made *= accuracies[depth][rank]
    return made


def every(widths: Sequence[int]) -> list[tuple[int, ...]]:
    return [p for d in range(1, len(widths) + 1) for p in itertools.product(*map(range, widths[:d]))]


def closed(paths: Paths) -> bool:
    return all(len(p) == 1 or p[:-1] in paths for p in paths)


def falling_shares(widths: Sequence[int], seed: int) -> list[list[float]]:
    source = np.random.default_rng(seed)
    return [sorted((source.random(w) / w).tolist(), reverse=True) for w in widths]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("widths", [(3, 3), (2, 2, 2), (4, 1, 2)])
def test_greedy_growth_is_the_best_of_all_trees(widths: tuple[int, ...], seed: int) -> None:
    accuracies = falling_shares(widths, seed)
    for nodes in range(1, 6):
        paths, values = _ranks.greedy(accuracies, nodes)
        best = max(
            sum(value(p, accuracies) for p in subset)
            for subset in itertools.combinations(every(widths), nodes)
            if closed(subset)
        )
        assert len(paths) == nodes
        assert closed(paths)
        assert sum(values) == pytest.approx(best, abs=1e-12)
        assert list(values) == pytest.approx([value(p, accuracies) for p in paths])


def test_any_first_part_of_a_grown_tree_is_the_best_smaller_tree() -> None:
    accuracies = falling_shares((4, 3, 2, 2), 3)
    full, values = _ranks.greedy(accuracies, 40)
    assert list(values) == sorted(values, reverse=True)
    for nodes in (1, 7, 23):
        assert _ranks.greedy(accuracies, nodes)[0] == full[:nodes]
        assert _ranks.within(full, nodes + 1, 9).paths == tuple(sorted(full[:nodes], key=lambda p: (len(p), p)))


def test_impossible_candidates_are_left_out() -> None:
    assert _ranks.greedy([[0.5, 0.0], [0.0]], 9)[0] == ((0,),)


def test_the_template_has_63_nodes_over_four_heads() -> None:
    paths = _ranks.greedy63()
    assert len(paths) == 63
    assert closed(paths)
    assert {len(p) for p in paths} == {1, 2, 3, 4}
    parents = _growth.from_ranks(paths)
    assert len(parents) == 64


def planted(confidence: Array, widths: tuple[int, ...], nodes: int, floor: float = 0.0) -> DraftTree:
    b, d, k = confidence.shape
    dice = np.random.default_rng(0)
    tokens = np.stack([dice.permutation(50)[:k] for _ in range(b * d)]).reshape(b, d, k)
    ranks = _ranks.candidates(widths, nodes)
    return _ranks.plant([9] * b, tokens, confidence, ranks, nodes, floor)


@pytest.mark.parametrize("nodes", [2, 5, 16, 40])
@pytest.mark.parametrize("ties", [False, True])
def test_planting_keeps_the_best_nodes_of_the_full_product(nodes: int, ties: bool) -> None:
    widths = (5, 4, 3)
    logits = 2 * np.random.default_rng(nodes).standard_normal((3, 3, 5))
    confidence = -np.sort(-np.log(softmax(logits)), -1).astype(np.float32)
    if ties:
        confidence = np.round(2 * confidence) / 2
    made = planted(confidence, widths, nodes)
    tree.check(made)
    assert made.values is not None
    for row in range(3):
        accuracies = np.exp(confidence[row]).tolist()
        right = sorted((value(p, accuracies) for p in every(widths)), reverse=True)[: nodes - 1]
        result = np.exp(made.values[row]).tolist()
        assert result[0] == 1.0
        assert sorted(result[1:], reverse=True) == pytest.approx(right, rel=1e-5)


def test_planting_a_full_tree_cuts_nothing_and_a_floor_does() -> None:
    confidence = np.log(np.array([[[0.6, 0.3], [0.5, 0.2]]], np.float32))
    tokens = np.array([[[5, 6], [7, 8]]])
    ranks = _ranks.candidates((2, 2), 7)
    made = _ranks.plant([9], tokens, confidence, ranks, 7)
    tree.check(made)
    assert made.tokens.tolist() == [[9, 5, 6, 7, 8, 7, 8]]
    assert made.parents.tolist() == [[0, 0, 0, 1, 1, 2, 2]]
    made = _ranks.plant([9], tokens, confidence, ranks, 7, floor=0.25)
    assert made.tokens[0, : made.size[0]].tolist() == [9, 5, 6, 7]
    none = _ranks.candidates((2, 2), 1)
    assert _ranks.plant([9], tokens, confidence, none, 1).nodes == 1


def test_candidates_are_few() -> None:
    assert len(_ranks.candidates((10,) * 4, 64).paths) < 900
    assert len(_ranks.candidates((10,) * 5, 16).paths) < 200


def test_pool_adjacent_violators() -> None:
    assert tuning.falling([0.5, 0.1, 0.2, 0.1]) == pytest.approx((0.5, 0.15, 0.15, 0.1))
    assert tuning.falling([0.1, 0.2, 0.6]) == pytest.approx((0.3, 0.3, 0.3))
    assert tuning.falling([0.6, 0.3, 0.1]) == (0.6, 0.3, 0.1)


@dataclass(frozen=True)
class Oracle(Drafter):
    """Its candidate of rank (position + depth) % 3 is right, and its calls are recorded."""

    asked: list[tuple[int, int]] = field(default_factory=list)
    deepest: int = 3

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> OracleDrafting:
        return OracleDrafting(self)


@dataclass
class OracleDrafting(Drafting):
    drafter: Oracle

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        deep = min(truth.shape[1], self.drafter.deepest)
        result = np.full((len(rows), deep, k), -1)
        for b, at in enumerate(rows.start):
            for d in range(deep):
                result[b, d, (at + d + 1) % 3] = truth[b, d]
        self.drafter.asked.extend(zip(rows.seeds, rows.start, strict=True))
        return result

    def observe(self, round: Round) -> None: ...
    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        return tree.root_only(rows.root)

    def select(self, index: Sequence[int]) -> None: ...
    def join(self, other: Any) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_measuring_counts_what_a_hand_counts(temperature: float) -> None:
    target, drafter = TableTarget(11, seed=2), Oracle()
    engine = Engine(target, drafter, FixedBudget(8, 3), GumbelNoise(11))
    sampling, lengths = Sampling(temperature), [21, 9, 13, 3]  # no round has one token left: it would not draft
    requests = [Request([1 + i, 3, 4][: i + 1], 5 + i, n, sampling) for i, n in enumerate(lengths)]
    measured = tuning.measure(engine, requests, ranks=4, depth=5, batch_size=2)
    hits, tested = [[0] * 4 for _ in range(3)], [0] * 3
    for i, n in enumerate(lengths):
        # The first token comes from the prompt; then each round writes two drafted tokens and one of the target's own.
        size = min(i + 1, 3)
        for at in range(size, size + n - 1, 3):
            for d in range(3):
                if at + d + 1 < size + n:
                    tested[d] += 1
                    hits[d][(at + d + 1) % 3] += 1
    assert measured.tested == (*tested, 0, 0)
    assert [list(h) for h in measured.hits[:3]] == hits
    assert len(measured.accuracies) == 3
    grown = tuning.grow(measured, 12)
    assert len(grown.paths) == 11
    assert grown.tau == pytest.approx(1 + sum(grown.values))


def test_what_cannot_be_measured() -> None:
    target = TableTarget(11)
    request = Request([1, 2], 0, 12)

    def engine(drafter: Any) -> Engine:
        return Engine(target, drafter, FixedBudget(4, 2), GumbelNoise(11))

    with pytest.raises(InputError, match="does not rank candidates"):
        tuning.measure(engine(load("none")), [request])
    with pytest.raises(InputError, match="at least one prompt"):
        tuning.measure(engine(Oracle()), [])
    with pytest.raises(InputError, match="too short"):
        tuning.measure(engine(Oracle()), [Request([1, 2], 0, 1)])
    with pytest.raises(InputError, match="at least 2"):
        tuning.grow(tuning.Measured(((3,),), (4,)), 1)
    with pytest.raises(InputError, match="none of the drafter's candidates was right"):
        tuning.grow(tuning.Measured(((0, 0),), (4,)), 5)


def test_a_tree_goes_to_a_file_and_back(tmp_path: Path) -> None:
    measured = tuning.Measured(((6, 2, 1), (5, 2, 0)), (10, 10))
    tuned = tuning.grow(measured, 5)
    assert tuned.paths == ((0,), (0, 0), (1,), (0, 1))
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(tuning.document(tuned, measured, {"drafter": "x"})))
    assert _ranks.read(str(file)) == tuned.paths
    assert json.loads(file.read_text())["expected_tau"] == pytest.approx(1 + 0.6 + 0.3 + 0.2 + 0.12)


@pytest.mark.parametrize(
    "paths",
    [None, [], {}, [[]], [["a"]], [[0, 0]], [[0], [0]], [[1]], [[0], [0, 1]], [[-1]], [[True]], [0]],
    ids=str,
)
def test_a_tree_that_is_none_is_refused(paths: Any, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"paths": paths}))
    with pytest.raises(InputError, match="must be paths of ranks"):
        _ranks.read(str(file))


def test_files_that_are_no_trees(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="or a file of outrider tune-tree"):
        _ranks.chosen("nowhere", None, ("dynamic", "static"), 4, 99)
    (tmp_path / "bad").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        _ranks.read(str(tmp_path / "bad"))
    with pytest.raises(InputError, match="cannot be read"):
        _ranks.read(str(tmp_path))
    with pytest.raises(InputError, match="no config for a tree"):
        tuning.store(str(tmp_path), tuning.Tuned(((0,),), (0.5,)))


def test_which_tree_is_chosen() -> None:
    names, stored = ("dynamic", "static"), ((0,), (1,), (0, 0), (0, 0, 0))
    assert _ranks.chosen("", None, names, 4, 99) == ("dynamic", ())
    assert _ranks.chosen("static", stored, names, 4, 99) == ("static", ())
    assert _ranks.chosen("", stored, names, 2, 99) == ("ranks", ((0,), (1,), (0, 0)))
    assert _ranks.chosen("", stored, names, 4, 1) == ("ranks", ((0,), (0, 0), (0, 0, 0)))
    assert len(_ranks.chosen("greedy63", None, names, 4, 99)[1]) == 63
