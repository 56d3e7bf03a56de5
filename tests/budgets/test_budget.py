"""The budget on a simulated machine: known costs and acceptance in, the right choice out."""

from __future__ import annotations

import copy
import itertools
import math
import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from outrider.budgets.adaptive import STALE, AdaptiveBudget
from outrider.budgets.budgeter import FixedBudget, Report
from outrider.budgets.cost import CostModel
from outrider.budgets.curve import Curve, Mean, nearest
from outrider.budgets.ledger import FORGIVEN, TRIES
from outrider.core import growth
from outrider.core.noise import GumbelNoise
from outrider.core.price import Price
from outrider.core.tree import best_of
from outrider.core.types import Budget, Rows
from outrider.params import Sampling


@lru_cache
def rows(b: int = 1, remaining: int = 100, new: int = 0, temperature: float = 0.0) -> Rows:
    return Rows(
        (0,) * b, (0,) * b, (0,) * b, (0,) * new + (1,) * (b - new), (Sampling(temperature),) * b, "coupled",
        (remaining,) * b, GumbelNoise(8),
    )  # fmt: skip


def play(
    budget: AdaptiveBudget,
    alpha: float,
    rounds: int,
    *,
    node: float = 0.02,
    step: float = 0.05,
    seed: int = 0,
    b: int = 1,
) -> tuple[float, float]:
    """Run a simulated drafter of chains; tokens per unit of time, and the share of rounds that drafted.

    One pass costs 1 + node per extra node, a draft costs `step` per token; noise of 10 % on every measurement.
    """
    dice, time, tokens, drafts = random.Random(seed), 0.0, 0, 0
    for _ in range(rounds):
        wanted = budget.choose(rows(b))
        depth = min(wanted.depth, wanted.nodes - 1)
        accepted = []
        for _ in range(b):
            n = 0
            while n < depth and dice.random() < alpha:
                n += 1
            accepted.append(n)
        verify, draft = 1 + node * depth * b, step * depth
        time += verify + draft
        tokens += sum(accepted) + b
        drafts += depth > 0
        wobble = [1 + 0.1 * dice.gauss(0, 1) for _ in range(2)]
        budget.learn(
            Report(
                b, depth, depth + 1, draft * wobble[0], verify * wobble[1], 0.01,
                [sum(n >= d for n in accepted) for d in range(1, depth + 1)],
            )
        )  # fmt: skip
    return tokens / time / b, drafts / rounds


def test_a_hopeless_drafter_is_left_alone() -> None:
    """Once it has adapted, an always-wrong drafter costs less than 3 %."""
    budget = AdaptiveBudget()
    play(budget, 0.0, 150, node=0.05, step=0.3)
    rate, drafts = play(budget, 0.0, 600, node=0.05, step=0.3)
    assert rate > 0.97
    assert drafts < 0.08


@pytest.mark.parametrize("step", [3.0, 12.0, 40.0])
def test_drafts_that_cost_many_plain_rounds_are_tried_as_rarely(step: float) -> None:
    budget = AdaptiveBudget()
    play(budget, 0.3, 150, step=step)
    assert play(budget, 0.3, 20_000, step=step)[0] > 0.97


def test_a_hard_text_hardly_changes_the_next() -> None:
    """Rows that begin are met with what was usual, and drafts that disappointed in the last text are tried at once."""
    budget, drafted = AdaptiveBudget(), {}
    play(budget, 0.8, 600)
    play(budget, 0.0, 400)
    assert budget.acceptance.shares(1)[0] < 0.35, "0.8 in the text before"
    for new in (0, 1):
        again, drafted[new] = copy.deepcopy(budget), 0
        for i in range(6):
            depth = again.choose(rows(new=new if i == 0 else 0)).depth
            drafted[new] += depth > 0
            again.learn(Report(1, depth, depth + 1, 0.05 * depth, 1 + 0.02 * depth, 0.01, [1] * depth))
    assert drafted[1] >= 5 > drafted[0]


@pytest.mark.parametrize("sampled", [False, True])
def test_sampled_texts_and_others_have_records_of_their_own(sampled: bool) -> None:
    """Drafts are right in greedy texts and wrong in sampled ones: a new text begins with the shares of its own kind."""
    budget = AdaptiveBudget()
    for kind, alpha in ((False, 0.8), (True, 0.0), (False, 0.8), (True, 0.0)):
        budget.choose(rows(new=1, temperature=float(kind)))
        play(budget, alpha, 3000)
    budget.choose(rows(new=1, temperature=float(sampled)))
    assert budget.acceptance.shares(1)[0] == pytest.approx(0.05 if sampled else 0.75, abs=0.08)


def test_a_kind_of_text_that_was_never_met_begins_as_the_other() -> None:
    budget = AdaptiveBudget()
    play(budget, 0.8, 600)
    budget.choose(rows(new=1, temperature=1.0))
    assert budget.acceptance.shares(1)[0] == pytest.approx(0.8, abs=0.08)


def test_plain_rounds_measure_the_machines_speed() -> None:
    """It falls to half of its speed while nothing is drafted: the next draft must not be blamed for that. One disturbed
    round says little."""
    budget = AdaptiveBudget()
    play(budget, 0.0, 600)
    usual = budget.cost.plain(1)
    budget.learn(Report(1, 0, 1, 0.0, 50.0, 0.01, []))
    assert budget.cost.plain(1) < 1.25 * usual
    for _ in range(30):
        depth = budget.choose(rows()).depth
        budget.learn(Report(1, depth, 1 + depth, 0.05 * depth, 2 * (1 + 0.02 * depth), 0.01, [0] * depth))
    assert budget.cost.plain(1) == pytest.approx(2 * usual, rel=0.15)


def test_how_many_nodes_a_draft_has_goes_by_the_rows_of_a_batch() -> None:
    """A single text's drafts of this depth have nine nodes, those of eight texts two each; a batch size that was never
    met has as many in all as the one that is nearest."""
    budget, nodes = AdaptiveBudget(), {1: 9, 8: 2}
    for _ in range(40):
        for b, n in nodes.items():
            budget.learn(Report(b, 2, n, 0.1, 1.0 + 0.1 * b * n, 0.0, [b, 0], total=b * n))
            budget.learn(Report(b, 0, 1, 0.0, 1.0 + 0.1 * b, 0.0, [], total=b))
    for b, n in {**nodes, 4: 3, 16: 2}.items():
        assert budget.cost.rounds_by_depth(b, 8)[2] == pytest.approx(1.1 + 0.1 * b * n, rel=0.05), b


def test_a_forecast_is_kept_for_some_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, calls, full = AdaptiveBudget(), [], CostModel.rounds_by_depth
    play(budget, 0.0, 300)
    monkeypatch.setattr(CostModel, "rounds_by_depth", lambda self, *a: calls.append(a) or full(self, *a))
    play(budget, 0.0, 3000)
    calls = [depth for _, depth in calls if depth == budget.depth]
    assert len(calls) < 1.2 * 3000 / STALE


def test_a_new_text_takes_some_rounds_off_the_debt() -> None:
    """Its share of the batch, squared, of FORGIVEN rounds; so a text cannot cost more than these."""
    budget = AdaptiveBudget()
    play(budget, 0.9, 300)
    play(budget, 0.9, 300, b=4)
    for b, new in ((1, 1), (4, 1)):
        budget.ledger.debt[b] = 50.0
        budget.choose(rows(b, new=new))
        assert budget.ledger.debt[b] == pytest.approx(50 - FORGIVEN * (new / b) ** 2 * budget.cost.plain(b))


def test_one_slow_moment_does_not_end_drafts() -> None:
    budget = AdaptiveBudget()
    play(budget, 0.9, 300)
    budget.learn(Report(1, 2, 3, 0.1, 900.0, 0.0, [1, 1]))
    assert play(budget, 0.9, 50)[1] > 0.8


def test_a_disturbed_start_is_got_over() -> None:
    """Other work made the first passes over drafts six times as long; their trees are cut by what was learnt then."""
    budget, sizes = AdaptiveBudget(), []
    for i in range(1000):
        wanted = budget.choose(rows())
        values = [1.0, *(0.8**k for k in range(1, wanted.nodes))] if wanted.depth else [1.0]
        size = wanted.price.most([[math.log(value) for value in values]])[0] if wanted.price else len(values)
        accepted = [int(size > 2 * d and i % 10 < 8) for d in range(1, wanted.depth + 1)]
        seconds = (6 if i < 10 and size > 1 else 1) * (1 + 0.02 * size)
        budget.learn(
            Report(1, wanted.depth, size, 0.05 * wanted.depth, seconds, 0.01, accepted,
                   sum(values[1:size]), total=size)
        )  # fmt: skip
        sizes.append(size)
    assert sum(size > 6 for size in sizes[900:]) > 80


def test_reading_is_no_drafting() -> None:
    """A drafter that reads a new text before its first draft takes long for it, and no draft is dearer for that."""
    budget = AdaptiveBudget()
    play(budget, 0.8, 200)
    before = budget.cost.draft[1](2)
    assert budget.choose(rows(new=1)).depth > 0
    budget.learn(Report(1, 2, 3, 3.0, 1.04, 0.0, [1, 1]))
    assert budget.cost.draft[1](2) == before
    assert budget.choose(rows()).depth > 0, "nor does it end them"
    budget.learn(Report(1, 2, 3, 3.0, 1.04, 0.0, [1, 1]))
    assert budget.cost.draft[1](2) > before, "the second time it was drafting"


@pytest.mark.parametrize(("reading", "most"), [(1.0, 40), (20.0, 18)])
def test_what_takes_long_to_read_is_not_tried_in_every_text(reading: float, most: int) -> None:
    """Texts of 60 tokens, a drafter that is never right: one that reads in a round's time is tried in most."""
    budget, tried = AdaptiveBudget(), []
    for _ in range(40):
        drafts = 0
        for i in range(60):
            depth = budget.choose(rows(new=int(i == 0))).depth
            draft = 0.1 * depth + (reading if depth and not drafts else 0.0)
            budget.learn(Report(1, depth, 1 + depth, draft, 1 + 0.02 * depth, 0.0, [0] * depth))
            drafts += depth > 0
        tried.append(drafts > 0)
    assert sum(tried) <= most
    assert sum(tried[1:]) >= (25 if reading < 2 else 1)


@pytest.mark.parametrize("reading", [1.0, 4.0, 8.0])
def test_predictable_texts_are_drafted_after_many_that_are_not(reading: float) -> None:
    """Texts of 128 tokens, a drafter that reads each for some rounds' time: of no use in twenty of them, and then
    always right. It was never tried again where a text did not pay for its reading."""
    budget, rates = AdaptiveBudget(), []
    for text in range(60):
        drafts = tokens = 0
        seconds = 0.0
        while tokens < 128:
            depth = budget.choose(rows(new=int(tokens == 0))).depth
            right = depth if text >= 20 else 0
            draft = 0.1 * depth + (reading if depth and not drafts else 0.0)
            report = Report(1, depth, 1 + depth, draft, 1 + 0.02 * depth, 0.0, [int(d < right) for d in range(depth)])
            budget.learn(report)
            drafts += depth > 0
            tokens, seconds = tokens + 1 + right, seconds + draft + report.verify_seconds
        rates.append(tokens / seconds)
    assert sum(rates[1:20]) / 19 > 0.96, "little is lost where nothing can be guessed"
    assert min(rates[30:]) > 2, "and what can be guessed is found within ten texts"


def test_a_text_that_does_not_earn_its_reading_is_not_read() -> None:
    """Texts of 60 tokens, drafts that save a tenth of the time, and a drafter that reads each for 20 rounds' time."""
    budget, seconds, tokens = AdaptiveBudget(depth=1), 0.0, 0
    for _ in range(60):
        drafts = 0
        for i in range(60):
            depth = budget.choose(rows(remaining=60 - i, new=int(i == 0))).depth
            hit = int(depth > 0 and (i + tokens) % 4 != 0)
            draft = 0.5 * depth + (20.0 if depth and not drafts else 0.0)
            budget.learn(Report(1, depth, 1 + depth, draft, 1 + 0.05 * depth, 0.0, [hit] * depth))
            drafts, tokens, seconds = drafts + (depth > 0), tokens + 1 + hit, seconds + draft + 1 + 0.05 * depth
    assert tokens / seconds > 0.95


def test_reading_for_a_try_is_paid_for() -> None:
    """A full batch whose drafter is never right and reads, when it drafts, what all rows wrote since: with rows that
    come and go all the time, tries and their reading cost what tries may."""
    budget, lost, unread = AdaptiveBudget(), 0.0, 0
    for i in range(4000):
        depth = budget.choose(rows(32, new=int(i % 2 == 0))).depth
        draft = 0.1 * depth + 0.04 * min(64, unread) if depth else 0.0
        unread = 0 if depth else unread + 1
        budget.learn(Report(32, depth, 1 + depth, draft, 1 + 0.5 * depth, 0.0, [0] * depth))
        lost += draft + 0.5 * depth if i >= 500 else 0.0
    assert 0 < lost / 3500 < 1.5 * TRIES / 32 ** (1 / 3)


def test_a_new_row_counts_by_its_share_of_the_batch() -> None:
    budget = AdaptiveBudget()
    play(budget, 0.8, 600, b=4)
    play(budget, 0.0, 150, b=4)
    before, usual = budget.acceptance.shares(1)[0], budget.acceptance.earlier[False][0].value()
    budget.choose(rows(4, new=1))
    assert before < budget.acceptance.shares(1)[0] < 0.5 * (before + usual)


@pytest.mark.parametrize("alpha", [0.6, 0.8, 0.9])
@pytest.mark.parametrize("b", [1, 4])
def test_a_good_drafter_is_used_to_the_depth_that_pays(alpha: float, b: int) -> None:
    budget = AdaptiveBudget()
    play(budget, alpha, 150, b=b)
    rate, _ = play(budget, alpha, 500, b=b)
    best = max((1 - alpha ** (g + 1)) / (1 - alpha) / (1 + (0.02 * b + 0.05) * g) for g in range(1, budget.depth + 1))
    assert rate > 0.9 * best


def test_a_drafter_that_becomes_good_is_used_again() -> None:
    budget = AdaptiveBudget()
    play(budget, 0.0, 300)
    play(budget, 0.9, 600)
    rate, drafts = play(budget, 0.9, 300)
    assert drafts > 0.9
    assert rate > 2


def test_rounds_in_which_no_row_may_draft_teach_nothing() -> None:
    """A server's requests without speculation, thousands of them, must not switch drafting off for the others."""
    budget = AdaptiveBudget()
    play(budget, 0.75, 200)
    before = copy.deepcopy(budget)
    for _ in range(1000):
        assert budget.choose(rows(remaining=1)) == Budget(1, 0)
        budget.learn(Report(1, 0, 1, 0.0, 1.0, 0.0, [], drafting=0))
    assert budget == before
    assert play(budget, 0.75, 64)[1] > 0.8


def test_rows_that_may_not_draft_do_not_count_as_misses() -> None:
    """One of four rows drafts: what it accepts is its own, and the other three give a token each."""
    budget, four = AdaptiveBudget(), replace(rows(4), remaining=(99, 1, 1, 1))
    for _ in range(60):
        depth = budget.choose(four).depth
        hits = [1] * min(depth, 2) + [0] * max(0, depth - 2)
        budget.learn(Report(4, depth, 1 + depth, 0.01 * depth, 1.0, 0.0, hits, drafting=1))
    assert budget.acceptance.shares(2) == pytest.approx([1, 1], abs=0.1)
    _, _, rate = budget._forecast(4, 1)
    assert rate == pytest.approx((4 + 2) / budget.cost.rounds_by_depth(4, 8)[2], rel=0.1)


def test_drafts_that_slow_decoding_are_dropped_despite_the_forecast() -> None:
    """Passes over trees are slower where texts are mixed than those that were measured: the forecast is wrong."""
    budget = AdaptiveBudget()
    play(budget, 0.5, 60, node=0.01, step=0.05)
    drafts = 0
    for _ in range(200):
        depth = budget.choose(rows()).depth
        drafts += depth > 0
        budget.cost.verify.points.update({size: Mean(1.0, 9) for size in (2, 4, 8)})  # as if a draft cost nothing
        budget.learn(
            Report(1, depth, depth + 1, 0.0, 3.0 if depth else 1.0, 0.0, [1] * min(depth, 1) + [0] * (depth - 1))
        )
    assert drafts < 50
    for _ in range(300):  # and when they pay again they are used again
        depth = budget.choose(rows()).depth
        budget.learn(Report(1, depth, depth + 1, 0.0, 1.0, 0.0, [1] * depth))
    assert budget.choose(rows()).depth > 0


def test_a_new_batch_size_costs_what_others_of_as_many_nodes_cost() -> None:
    budget = AdaptiveBudget()
    play(budget, 0.8, 200, node=0.1, b=4)
    wanted = budget.choose(rows(8))
    assert wanted.price is not None, "no round is spent on measuring"
    assert budget.cost.price(8, 4, 32, 1.0).seconds[1] == pytest.approx(
        budget.cost.price(4, 4, 32, 1.0).seconds[3], rel=0.1
    )


def test_no_remaining_tokens_no_draft() -> None:
    for remaining in (0, 1):
        assert AdaptiveBudget().choose(rows(remaining=remaining)) == Budget(1, 0)
    assert AdaptiveBudget().choose(rows(remaining=3)).depth == 2
    assert AdaptiveBudget(nodes=1).choose(rows()).nodes == 1


def test_the_first_rounds_measure_with_and_without_a_draft() -> None:
    budget = AdaptiveBudget()
    first = budget.choose(rows())
    assert first.nodes > 1
    budget.learn(Report(1, 4, 5, 0.1, 1.1, 0.0, [1, 0, 0, 0]))
    assert budget.choose(rows()) == Budget(1, 0)


@pytest.mark.parametrize(("b", "nodes"), [(1, 16), (4, 16), (8, 12), (32, 3), (64, 2)])
def test_a_try_in_a_batch_is_a_small_one(b: int, nodes: int) -> None:
    assert AdaptiveBudget().choose(rows(b)).nodes == nodes


def test_curve() -> None:
    curve = Curve(slope=0.1)
    assert curve(5) == 0
    curve.learn(1, 10.0)
    assert curve(11) == pytest.approx(20)
    curve.learn(8, 24.0)
    assert curve(4) == pytest.approx(16)
    assert curve(16) == pytest.approx(40)
    curve.learn(8, 2400.0)  # an outlier moves the mean by a bounded step
    assert curve(8) == pytest.approx((24 + 3 * 24) / 2)
    for _ in range(60):
        curve.learn(8, 24.0)  # and is forgotten
    assert curve(8) == pytest.approx(24, rel=0.01)
    falling = Curve()
    falling.learn(1, 10.0)
    falling.learn(8, 5.0)  # so the first was disturbed: a part never costs more than all
    assert falling(1) == falling(8) == pytest.approx(5)


def test_of_the_first_measurements_the_least_counts() -> None:
    curve = Curve(settling=3)
    for seconds, left in ((30.0, True), (10.0, True), (50.0, False), (12.0, False)):
        curve.learn(4, seconds)
        assert curve.settles(4) == left
    assert curve(4) == pytest.approx((3 * 10 + 12) / 4)
    assert curve.settles(1)


@pytest.mark.parametrize("sizes", [(1, 6, 7), (1, 2, 5, 11), (4, 6, 12, 22)])
def test_sizes_between_powers_of_two_do_not_pass_for_these(sizes: tuple[int, ...]) -> None:
    """A straight line is learnt as it is, although a pass over 6 nodes is counted under 8."""
    curve = Curve()
    for _ in range(40):
        for size in sizes:
            curve.learn(size, 10.0 + 2 * size)
    for size in (4, 8, 16):
        assert curve(size) == pytest.approx(10 + 2 * size, rel=0.02)


def test_a_newcomer_among_many_makes_drafts_that_fail_little_more_likely() -> None:
    shares = {}
    for b in (1, 16):
        budget, drafts = AdaptiveBudget(), 0
        play(budget, 0.0, 200, node=0.05, step=0.3, b=b)
        for i in range(25):  # a row in sixteen is new every eight rounds, or the only one
            budget.choose(rows(b, 100, 1))
            drafts += play(budget, 0.0, 7, node=0.05, step=0.3, seed=i, b=b)[1] * 7
        shares[b] = drafts / 25 / 8
    assert shares[16] < 0.05 < shares[1]


@pytest.mark.parametrize("b", [4, 8, 16])
@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.6])
def test_drafts_that_nearly_pay_cost_batches_little(alpha: float, b: int) -> None:
    """Some tries pay by chance; over all of them a set share of the time is lost at most. Texts end and begin."""
    budget = AdaptiveBudget()
    play(budget, alpha, 150, node=0.15, b=b)
    rates = []
    for i in range(40):
        budget.choose(rows(b, 100, 1))
        rates.append(play(budget, alpha, 20, node=0.15, seed=i, b=b)[0])
    assert sum(rates) / len(rates) > 0.97


@pytest.mark.parametrize(("size", "power"), [(1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (11, 8), (12, 16), (33, 32)])
def test_nearest(size: int, power: int) -> None:
    assert nearest(size) == power


def test_fixed() -> None:
    budget = FixedBudget(12, 3, (2, 1, 1))
    assert budget.choose(rows()) == Budget(12, 3, shape=(2, 1, 1))


@pytest.mark.parametrize("seed", range(30))
def test_a_tree_is_cut_where_it_pays_best(seed: int) -> None:
    """No other set of nodes, closed under parents, gives more tokens per second: all of them are tried."""
    dice, n = random.Random(seed), 6
    parents, values = [], []
    for _ in range(2):
        up, worth = [0], [0.0]
        for _ in range(n - 1):
            up.append(dice.randrange(len(up)))
            worth.append(worth[up[-1]] + math.log(dice.uniform(0.05, 0.95)))
        parents.append(up)
        values.append(worth)
    seconds = list(itertools.accumulate([1.0, *(dice.choice((0.0, 0.1, 0.6)) for _ in range(n - 1))]))
    price = Price(tuple(seconds), dice.choice((0.5, 1.0, 2.0)))

    def rate(sets: list[set[int]]) -> float:
        worth = sum(math.exp(values[row][i]) for row, ids in enumerate(sets) for i in ids)
        return (2 + price.trust * worth) / seconds[max(map(len, sets))]

    def closed(row: int) -> list[set[int]]:
        sets = itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n))
        return [set(c) for c in sets if all(parents[row][i] in {0, *c} for i in c)]

    best = max(rate([a, b]) for a in closed(0) for b in closed(1))
    chosen = best_of(values, n, 0.0, price)
    assert growth.best(np.array(values, np.float32), n, 0.0, price) == chosen
    for up, ids in zip(parents, chosen, strict=True):
        assert all(up[i] in ids for i in ids), "closed under parents"
    assert rate([set(ids) - {0} for ids in chosen]) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_where_padding_costs_nothing_every_row_has_the_size_that_pays(seed: int) -> None:
    """No other sizes give more tokens per second."""
    dice = random.Random(seed)
    values = [[0.0, *sorted((math.log(dice.uniform(0.01, 0.95)) for _ in range(4)), reverse=True)] for _ in range(3)]
    seconds = tuple(itertools.accumulate([1.0, *(dice.choice((0.02, 0.1, 0.2)) for _ in range(12))]))
    seconds = tuple(sorted(1 + (s - 1) ** 1.3 for s in seconds))  # every further node costs more
    price = Price(seconds, dice.choice((0.5, 1.0, 2.0)), summed=True)

    def rate(counts: tuple[int, ...]) -> float:
        gain = sum(math.exp(v) for row, n in zip(values, counts, strict=True) for v in row[1:n])
        return (3 + price.trust * gain) / seconds[sum(counts) - 3]

    best = max(map(rate, itertools.product(range(1, 6), repeat=3)))
    assert rate(tuple(price.most(values))) == pytest.approx(best, rel=1e-5)
    assert price.between(3, 2, 3) == pytest.approx(seconds[6] - seconds[3])


def test_passes_without_padding_are_known_by_the_nodes_of_all_rows() -> None:
    budget = AdaptiveBudget()
    for i in range(40):
        depth = budget.choose(rows(4)).depth
        total = 4 + (4 + i % 5) * (depth > 0)
        budget.learn(Report(4, depth, 5, 0.1 * depth, 1 + 0.1 * total, 0.0, [2] * depth, total=total))
    assert budget.cost.rounds_by_depth(1, 8)[0] == pytest.approx(1.1, rel=0.2)
    assert budget.cost.rounds_by_depth(8, 8)[0] == pytest.approx(1.8, rel=0.1)
    price = budget.cost.price(4, 2, 32, 1.0)
    assert price.summed
    assert price.seconds[8] - price.seconds[0] == pytest.approx(0.8, rel=0.2)


def test_the_budget_learns_what_values_are_worth_and_prices_by_it() -> None:
    """Values that promise twice what comes: half the trust; and the price of a tree is that of this machine."""
    budget = AdaptiveBudget()
    for i in range(300):
        depth = budget.choose(rows()).depth
        hit = int(depth > 0 and i % 2 == 0)
        promised = 1.0 if depth else 0.0
        budget.learn(Report(1, depth, 1 + depth, 0.1 * depth, 1 + 0.1 * depth, 0.0, [hit] * min(1, depth), promised))
    assert budget.acceptance.trust == pytest.approx(0.5, abs=0.12)
    price = budget.cost.price(1, 4, 32, budget.acceptance.trust)
    assert len(price.seconds) == budget.nodes
    assert list(price.seconds) == sorted(price.seconds)
    assert price.seconds[4] - price.seconds[0] == pytest.approx(0.4, abs=0.15)
    assert AdaptiveBudget().acceptance.trust == 1.0
