"""Calibration: bins and error by hand, the fit on distributions whose scale is known, and texts that do not change."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from outrider import drafters
from outrider.budgets.budgeter import FixedBudget
from outrider.checkpoints import native
from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Drafter, Drafting, Round, TargetOutput
from outrider.core.tree import from_lists
from outrider.core.types import Array, Budget, DraftTree, Rows
from outrider.drafters import eagle
from outrider.drafters._calibrated import BOUNDS, Calibrated, Family, Fit, calibrated, families, score
from outrider.drafters._growth import Growth
from outrider.engine import Engine, Request, generate
from outrider.nets.layer import LayerShape
from outrider.params import InputError, Sampling
from outrider.testing import TableTarget, plain
from papers.reliability import ece, reliability
from papers.watch import Watched

VOCAB = 12
GROWTH = Growth(top_k=4, width=3)


def round_of(
    tokens: list[list[int]], parents: list[list[int]], values: list[list[float]] | None, chosen: list[list[int]]
) -> Round:
    b = len(tokens)
    rows = Rows((0,) * b, (0,) * b, (0,) * b, (0,) * b, (Sampling(),) * b, "coupled", (9,) * b, GumbelNoise(8))
    logs = None if values is None else [[math.log(v) for v in row] for row in values]
    logs = logs or [[0.0] * len(row) for row in tokens]
    tree = from_lists(list(zip(tokens, parents, logs, strict=True)), values=values is not None)
    return Round(rows, tree, TargetOutput(np.zeros((b, tree.nodes, 8))), [[0]] * b, [0] * b, chosen)


def families_of(round: Round) -> list[Family]:
    return families(round.tree, round.tokens)


def shares(family: Family) -> list[float]:
    return [round(math.exp(x), 5) for x in family.logs]


def test_families_by_hand() -> None:
    """The root's children 5 (.6) and 8 (.3), below 5: 6 (.5) and 7 (.4), below 8: 6 (.9), below 5 6: 1 (.2)."""
    one = ([9, 5, 8, 6, 7, 6, 1], [0, 0, 0, 1, 1, 2, 3], [1, 0.6, 0.3, 0.3, 0.24, 0.27, 0.06])
    two = ([9, 4], [0, 0], [1, 0.5])
    results = families_of(round_of(*map(list, zip(one, two, strict=True)), [[5, 7, 2], [3]]))  # type: ignore[arg-type]
    # 5 was accepted and then 7, a leaf; 8's child and the grandchild below 6 were never tested.
    assert [(shares(f), f.hit) for f in results] == [([0.6, 0.3], 0), ([0.5, 0.4], 1), ([0.5], -1)]
    assert [hit for f in results for _, hit in f.pairs] == [True, False, False, True, False]
    assert not families_of(round_of([[9, 5]], [[0, 0]], None, [[5, 1]]))
    assert not families_of(round_of([[9]], [[0]], [[1.0]], [[5]]))


def test_a_node_is_judged_given_its_parent() -> None:
    """Acceptance that ignored the parent would find .27 where the confidence, .52, is right."""
    dice, chosen, n = random.Random(0), [], 4000
    for _ in range(n):
        first, second = dice.random() < 0.52, dice.random() < 0.52
        chosen.append([5, 6, 1] if first and second else [5, 2] if first else [3])
    made = round_of([[9, 5, 6]] * n, [[0, 0, 1]] * n, [[1, 0.52, 0.2704]] * n, chosen)
    pairs = [pair for family in families_of(made) for pair in family.pairs]
    (only,) = reliability(pairs)
    assert only.low == 0.5
    assert 5800 < only.count < 6400  # 4000 and half of them, not 8000
    assert only.acceptance == pytest.approx(0.52, abs=0.03)
    assert ece([only]) < 0.03


def test_reliability_by_hand() -> None:
    pairs = [(0.9, True), (0.92, False), (0.15, False), (0.1999, True), (1.0, True), (0.951, False), (0.0, False)]
    results = reliability(pairs)
    assert [(b.low, b.high, b.count, b.acceptance) for b in results] == [
        (0.0, 0.05, 1, 0.0), (0.15, 0.2, 2, 0.5), (0.9, 0.95, 2, 0.5), (0.95, 1.0, 2, 0.5),
    ]  # fmt: skip
    assert [b.confidence for b in results] == pytest.approx([0.0, 0.17495, 0.91, 0.9755])
    assert ece(reliability(pairs)) == pytest.approx((0 + 2 * 0.32505 + 2 * 0.41 + 2 * 0.4755) / 7)
    assert [b.count for b in reliability(pairs, 0.5)] == [3, 4]
    assert reliability([]) == []
    assert ece([]) == 0


def test_every_edge_opens_its_own_bin() -> None:
    assert [b.low for b in reliability((k / 20, True) for k in range(20))] == [round(k / 20, 9) for k in range(20)]


def distribution(r: Sequence[float], scale: float) -> list[float]:
    top = max(r)
    weights = [math.exp((x - top) / scale) for x in r]
    return [w / sum(weights) for w in weights]


def test_score_is_the_slope_of_the_likelihood() -> None:
    """Where all candidates are drafted nothing is unknown: finite differences of log c_y, and its variance."""
    r, h, logs = [2.0, 1.0, -0.5], 1e-5, []
    for scale in (0.7 * math.exp(-h), 0.7, 0.7 * math.exp(h)):
        logs.append([math.log(c) for c in distribution(r, scale)])
    slopes = [(logs[2][y] - logs[0][y]) / (2 * h) for y in range(3)]
    for y in range(3):
        result, information = score(Family(tuple(logs[1]), y))
        assert result == pytest.approx(slopes[y], abs=1e-6)
        expected = sum(math.exp(c) * s * s for c, s in zip(logs[1], slopes, strict=True))
        assert information == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kept", [1, 3, 8])
@pytest.mark.parametrize("true", [0.3, 1.0, 2.0])
def test_the_expected_score_leads_to_the_true_scale(true: float, kept: int) -> None:
    """Exactly 0 at the true s, up below it and down above, however little of the distribution was drafted."""
    dice = random.Random(kept)
    for _ in range(20):
        r = sorted((1.5 * dice.gauss(0, 1) for _ in range(30)), reverse=True)
        truth = distribution(r, true)[:kept]
        chances = [(-1, 1 - sum(truth)), *enumerate(truth)]
        for factor in (0.5, 0.8, 1.0, 1.25, 2.0):
            logs = tuple(math.log(c) for c in distribution(r, factor * true)[:kept])
            mean = sum(p * score(Family(logs, y))[0] for y, p in chances)
            if factor == 1:
                assert abs(mean) < 1e-3  # what is left over is 1e-4 at least
            elif 1 - sum(distribution(r, factor * true)[:kept]) > 1e-3:
                assert mean * (1 - factor) > 0


def synthetic(true: float, fit: Fit, rounds: int, seed: int = 0) -> Iterator[float]:
    """The target draws from softmax(r / true); 1 to 4 of 40 candidates are drafted, with the confidences of the fit."""
    dice = random.Random(seed)
    for _ in range(rounds):
        r = sorted((dice.choice((0.5, 2.0)) * dice.gauss(0, 1) for _ in range(40)), reverse=True)
        logs = [math.log(c) for c in distribution(r, fit.scale)[: dice.randint(1, 4)]]
        y = dice.choices(range(40), distribution(r, true))[0]
        fit.learn(Family(tuple(logs), y if y < len(logs) else -1))
        yield fit.scale


@pytest.mark.parametrize("start", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("true", [0.3, 0.6, 1.5])
def test_the_fit_finds_the_true_scale(true: float, start: float) -> None:
    results = list(synthetic(true, Fit(start), 4000))
    assert sum(results[-1000:]) / 1000 == pytest.approx(true, rel=0.08)
    assert max(results[-1000:]) < 1.3 * true
    assert min(results[-1000:]) > true / 1.3


def test_a_fit_follows_a_changing_distribution() -> None:
    fit = Fit()
    for true in (0.4, 1.2):
        results = list(synthetic(true, fit, 4000))
        assert sum(results[-500:]) / 500 == pytest.approx(true, rel=0.12)


def test_certainty_that_fails_moves_a_bounded_step() -> None:
    fit = Fit()
    fit.learn(Family((0.0,), -1))
    assert 1.0 < fit.scale <= math.exp(0.25)
    for _ in range(1000):
        fit.learn(Family((0.0,), -1))
    assert fit.scale == BOUNDS[1]


@dataclass(frozen=True)
class TableDrafter(Drafter):
    """Knows a table of distributions by the last token."""

    table: Array
    growth: Growth = GROWTH

    @property
    def scale(self) -> float:  # type: ignore[override]
        return self.growth.scale

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> TableDrafting:
        return TableDrafting(self)


@dataclass
class TableDrafting(Drafting):
    drafter: TableDrafter

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        table = self.drafter.table
        step = lambda fed, since: table[fed.tokens[:, since:]]  # noqa: E731
        return self.drafter.growth.propose(rows, table[list(rows.root)][:, None], step, budget)[0]

    def observe(self, round: Round) -> None: ...
    def select(self, index: Sequence[int]) -> None: ...
    def join(self, other: Drafting) -> None: ...


def world(noise: float = 0.8) -> tuple[TableTarget, TableDrafter]:
    """A target, and a drafter that knows its distribution but for noise."""
    target = TableTarget(VOCAB, order=1, seed=5, scale=2.0)
    more = np.random.default_rng(1).standard_normal(target.table.shape)
    return target, TableDrafter(target.table + noise * more)


def network() -> tuple[TableTarget, eagle.EagleDrafter]:
    torch.manual_seed(2)
    shape = LayerShape(VOCAB, heads=2, kv_heads=1, head_dim=4, intermediate=16, inputs=VOCAB)
    target = world()[0]
    return target, eagle.drafter(eagle.EagleNet(eagle.EagleConfig(shape, VOCAB, VOCAB)).double(), target, GROWTH)


def prompt(i: int) -> list[int]:
    return [1 + i % 9, 2, 3][: 1 + i % 3]


def run(
    target: TableTarget, drafter: Drafter, temperature: float, rule: str = "coupled", n: int = 4
) -> list[list[int]]:
    """n texts of unequal length; rows leave, and those beyond 24 join."""
    engine = Engine(target, drafter, FixedBudget(10, 4), GumbelNoise(VOCAB), rule)
    made = [Request(prompt(i), i, 60 - 7 * (i % 4), Sampling(temperature)) for i in range(n)]
    rows = {p.row.index: p.row for p in generate(engine, made, 2 if n == 4 else 24)}
    return [rows[i].output for i in range(n)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make", [world, network])
def test_a_fitted_drafter_writes_the_same(make, temperature: float) -> None:  # type: ignore[no-untyped-def]
    target, drafter = make()
    fitted = calibrated(drafter)
    truth = [plain(target, prompt(i), 60 - 7 * i, temperature, seed=i) for i in range(4)]
    assert run(target, fitted, temperature) == truth
    assert fitted.fit.scale != 1.0
    assert drafter.growth.scale == 1.0  # the drafter itself is as it was


def test_the_fit_steers_the_trees() -> None:
    """Trees are grown by what was learnt, and late ones are better calibrated."""
    target, drafter = world()
    fitted: list[Family] = []
    raw: list[Family] = []
    fit = Fit()
    run(target, Watched(Calibrated(drafter, fit), lambda round: fitted.extend(families_of(round))), 1.0, n=60)
    run(target, Watched(drafter, lambda round: raw.extend(families_of(round))), 1.0, n=60)
    assert min(len(fitted), len(raw)) > 1000
    assert fit.scale < 0.8  # with the noise, the draft model agrees with the target more often than at s = 1
    late = fitted[-len(fitted) // 2 :]
    assert ece(reliability(p for f in late for p in f.pairs)) < 0.5 * ece(reliability(p for f in raw for p in f.pairs))


class Floored(FixedBudget):
    """A budget that keeps likely nodes alone, as the adaptive one does."""

    def choose(self, rows: Rows) -> Budget:
        return replace(super().choose(rows), floor=0.2)


def test_drafts_come_back_where_s_left_none() -> None:
    """Hot texts raise s until every node lies below the floor, and a draft without nodes teaches nothing."""
    target, drafter = world()
    fit = Fit(20.0)
    engine = Engine(target, Calibrated(drafter, fit), Floored(10, 4), GumbelNoise(VOCAB))
    pieces = list(generate(engine, [Request(prompt(0), 0, 200, Sampling())]))
    assert fit.scale < 5
    assert pieces[-1].row.usage.accepted > 20


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_under_other_rules_s_stays_as_it_is(rule: str) -> None:
    """A text there may depend on s, so s may not depend on other requests."""
    target, drafter = world()
    fitted = Calibrated(drafter, Fit(0.3))
    assert run(target, fitted, 1.0, rule) == run(target, drafter, 1.0, rule)
    assert fitted.fit == Fit(0.3)


def test_a_drafter_without_confidences_stays_as_it_is() -> None:
    none = drafters.load("none")
    assert calibrated(none) is none
    with pytest.raises(InputError, match="no option 'scale'"):
        drafters.load("none?scale=auto")


def test_the_spec(tmp_path) -> None:  # type: ignore[no-untyped-def]
    target = world()[0]
    shape = LayerShape(VOCAB, heads=2, kv_heads=1, head_dim=4, intermediate=16, inputs=VOCAB)
    native.save(tmp_path, "eagle", eagle.EagleNet(eagle.EagleConfig(shape, VOCAB, VOCAB, scale=0.7)).double())
    loaded = drafters.load(f"eagle:{tmp_path}?width=3", target)
    assert isinstance(loaded, Calibrated)
    assert loaded.fit.scale == 0.7  # the checkpoint's own is where it starts
    assert loaded.inner.growth.width == 3  # type: ignore[attr-defined]
    assert isinstance(drafters.load(f"eagle:{tmp_path}?scale=0.5", target), eagle.EagleDrafter)
    with pytest.raises(InputError, match="scale must be a number"):
        drafters.load(f"eagle:{tmp_path}?scale=often", target)
