"""Figures against a slow, obvious bootstrap, and against counts made by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from instrument import rounds_of

from outrider.bench import metrics
from outrider.bench.document import RoundTime
from outrider.bench.metrics import DRAWS, Figure, Table
from outrider.bench.types import Sample, Turn
from outrider.core.types import Usage

Lists = Sequence[Sequence[float]]


def slow(above: Lists, below: Lists) -> tuple[float, list[float]]:
    """[repeats][chunks] each: the ratio of sums, the median over repeats, and the same for every draw of chunks."""

    def figure(picked: Sequence[int]) -> float:
        ratios = []
        for a, b in zip(above, below, strict=True):
            bottom = sum(b[c] for c in picked)
            ratios.append(sum(a[c] for c in picked) / bottom if bottom else math.nan)
        return math.nan if any(map(math.isnan, ratios)) else statistics.median(ratios)

    chunks = len(above[0])
    draws = []
    for row in metrics.weights(chunks):
        draws.append(figure([c for c in range(chunks) for _ in range(int(row[c]))]))
    return figure(range(chunks)), draws


def quantile(numbers: Sequence[float], share: float) -> float:
    """Between the two nearest in order, as a straight line goes."""
    ordered = sorted(numbers)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def interval(value: float, draws: Sequence[float]) -> list[float]:
    known = [x for x in draws if not math.isnan(x)]  # a draw of prompts that were never tested says nothing
    return [round(x, 5) for x in (value, quantile(known, 0.025), quantile(known, 0.975))]


def sample(
    chunk: int = 0, repeat: int = 0, session: int = 1, tokens: int = 5, seconds: float = 1.25, prefill: float = 0.25,
    usages: Sequence[Usage] = (), method: str = "m",
) -> Sample:  # fmt: skip
    """One prompt, one turn."""
    turn = Turn([list(range(tokens))], seconds, prefill, list(usages))
    return Sample("task", 0.0, 1, method, chunk, repeat, session, chunk, [f"p{chunk}"], [7], [turn])


# -- ratios and their intervals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 2, 7, 80])
def test_weights_are_draws_with_replacement(chunks: int) -> None:
    made = metrics.weights(chunks)
    assert made.shape == (DRAWS, chunks)
    assert (made.sum(1) == chunks).all()
    assert np.array_equal(made, metrics.weights(chunks)), "paired: everything of so many chunks has the same draws"
    assert made.mean(0) == pytest.approx(1, abs=0.15)
    if chunks > 1:
        assert made.var() == pytest.approx(1 - 1 / chunks, abs=0.1), "binomial: each of n picks takes it with 1/n"


@pytest.mark.parametrize(("repeats", "chunks"), [(1, 1), (1, 9), (2, 4), (3, 5), (4, 6)])
def test_ratio_is_the_slow_bootstrap(repeats: int, chunks: int) -> None:
    dice = np.random.default_rng(repeats * 10 + chunks)
    above, below = dice.integers(0, 50, (repeats, chunks)).astype(float), dice.uniform(0.1, 3, (repeats, chunks))
    value, draws = slow(above.tolist(), below.tolist())
    result = metrics.ratio(above, below)
    assert result.value == pytest.approx(value)
    assert result.draws == pytest.approx(draws)
    if chunks == 1:
        assert result.estimate == (pytest.approx(value, abs=2e-5), None, None), "a single prompt has no interval"
    else:
        assert result.estimate == pytest.approx(interval(value, draws), abs=2e-5)
    if repeats == 1:
        assert metrics.ratio(above[0], below[0]).estimate == result.estimate


def test_a_ratio_is_of_sums_and_not_a_mean_of_ratios() -> None:
    result = metrics.ratio(np.array([10, 1]), np.array([1, 10]))
    assert result.value == 1.0
    assert result.estimate == (1.0, 0.1, 10.0)


def test_the_median_repeat_counts() -> None:
    result = metrics.ratio(np.array([[1.0, 1], [2, 2], [90, 90]]), np.ones((3, 2)))
    assert result.estimate == (2.0, 2.0, 2.0)


def test_draws_with_nothing_below_are_left_out() -> None:
    nothing = metrics.ratio(np.array([0, 0]), np.array([0, 0]))
    assert nothing.estimate == (0.0, None, None)
    above, below = [[3.0, 0.0, 4.0]], [[1.0, 0.0, 2.0]]
    value, draws = slow(above, below)
    result = metrics.ratio(np.array(above), np.array(below))
    assert result.estimate == pytest.approx(interval(value, draws), abs=2e-5)
    assert any(map(math.isnan, draws))
    assert result.estimate[1] == 2.0, "no draw of nothing pulls it down"
    assert metrics.quotient(result, nothing).estimate == (0.0, None, None)
    assert metrics.quotient(nothing, result).value == 0.0
    assert metrics.mean([result, result]).value == result.value


def test_quotient_is_paired_draw_by_draw() -> None:
    dice = np.random.default_rng(5)
    seconds = dice.uniform(0.1, 50, 12)
    slow_one, fast = metrics.ratio(np.full(12, 30), seconds), metrics.ratio(np.full(12, 30), seconds / 2)
    assert slow_one.estimate[2] > 1.3 * slow_one.estimate[1]
    assert metrics.quotient(fast, slow_one).estimate == (2.0, 2.0, 2.0), "what all prompts agree on is certain"
    a, b = metrics.ratio(dice.uniform(1, 2, 6), dice.uniform(1, 2, 6)), metrics.ratio(np.ones(6), dice.uniform(1, 2, 6))
    result = metrics.quotient(a, b)
    assert result.value == pytest.approx(a.value / b.value)
    assert result.draws == pytest.approx([x / y for x, y in zip(a.draws, b.draws, strict=True)])


def test_a_draw_of_zero_below_a_quotient_is_left_out() -> None:
    result = metrics.quotient(Figure(1.0, np.array([1.0, 4.0, 0.0]), 3), Figure(2.0, np.array([0.0, 2.0, 0.0]), 3))
    assert result.estimate == (0.5, 2.0, 2.0)


def test_mean_keeps_an_interval_of_its_own() -> None:
    """Tasks are independent: the variances of their draws add up, however many prompts they have."""
    dice = np.random.default_rng(1)
    figures = [metrics.ratio(dice.uniform(1, 9, n), np.ones(n)) for n in (12, 12, 12, 30)]
    result = metrics.mean(figures)
    assert result.value == pytest.approx(sum(f.value for f in figures) / 4)
    assert result.draws.shape == (DRAWS,)
    assert result.draws.mean() == pytest.approx(sum(f.draws.mean() for f in figures) / 4)
    assert result.draws.std() == pytest.approx(math.sqrt(sum(f.draws.var() for f in figures)) / 4, rel=0.1)
    assert metrics.mean(figures[:1]).estimate == figures[0].estimate
    assert metrics.mean([figures[0]] * 4).draws.std() == pytest.approx(figures[0].draws.std() / 2, rel=0.1)


# -- one cell's samples ------------------------------------------------------------------------------------------------


def test_tokens_and_seconds_are_of_decoding_over_all_turns() -> None:
    made = sample(tokens=5, seconds=2.0, prefill=0.5)
    made.turns.append(Turn([[1, 2, 3], [], [7]], 1.0, 0.25))
    assert metrics.tokens(made) == 4 + 2, "without the first token of each row"
    assert metrics.seconds(made) == 1.5 + 0.75
    assert metrics.speed([made]).value == pytest.approx(6 / 2.25)


def test_table_takes_the_chosen_chunks_in_their_order() -> None:
    made = [sample(c, r, tokens=10 * r + c) for r in (1, 0) for c in (2, 0, 1)]
    table = Table.of(made, [1, 0])
    assert [[(s.repeat, s.chunk) for s in run] for run in table.samples] == [[(0, 1), (0, 0)], [(1, 1), (1, 0)]]
    assert table.map(lambda s: s.chunk + 0.5).tolist() == [[1.5, 0.5], [1.5, 0.5]]


def test_incomplete_repeats_are_left_out() -> None:
    made = [sample(c, r) for r in (0, 1, 2) for c in (0, 1, 2) if (r, c) != (1, 2)]
    assert [[s.repeat for s in run] for run in Table.of(made, [0, 1, 2]).samples] == [[0] * 3, [2] * 3]
    assert len(Table.of(made, [0, 1]).samples) == 3, "what is not chosen need not be there"


def test_table_of_a_run_under_way() -> None:
    table = Table.of([sample(c) for c in (0, 2)], [0, 1, 2])
    assert [[s.chunk for s in run] for run in table.samples] == [[0, 2]]
    assert table.rate().value == pytest.approx(4.0)


def test_table_of_nothing() -> None:
    table = Table.of([], [0, 1])
    assert table.samples == []
    assert table.usages() == []
    assert table.faster([]) is None


def test_the_newest_answer_stands_for_an_older_one() -> None:
    table = Table.of([sample(session=1, tokens=3), sample(session=2, tokens=9)], [0])
    assert [[s.session for s in run] for run in table.samples] == [[2]]


def test_rate_is_tokens_by_seconds_of_the_median_repeat() -> None:
    dice = np.random.default_rng(3)
    made = [
        sample(c, r, tokens=int(dice.integers(2, 40)), seconds=float(dice.uniform(1, 2)))
        for r in range(3)
        for c in range(5)
    ]
    runs = [[s for s in made if s.repeat == r] for r in range(3)]
    value, draws = slow(
        [[len(s.turns[0].tokens[0]) - 1 for s in run] for run in runs],
        [[s.turns[0].seconds - 0.25 for s in run] for run in runs],
    )
    assert Table.of(made, range(5)).rate().estimate == pytest.approx(interval(value, draws), abs=2e-5)


def two(
    sessions: Sequence[int], other: Sequence[int], fast: float = 2.0, repeats: int = 1
) -> tuple[list[Sample], list[Sample]]:
    """A method and plain decoding, chunk by chunk in the sessions named; the method is `fast` times as fast."""
    dice = np.random.default_rng(9)
    mine, plain = [], []
    for r in range(repeats):
        for c, (a, b) in enumerate(zip(sessions, other, strict=True)):
            needed, written = float(dice.uniform(0.2, 30)), int(dice.integers(2, 60))
            plain.append(sample(c, r, b, written, 0.25 + needed, method="none"))
            mine.append(sample(c, r, a, written, 0.25 + needed / fast))
    return mine, plain


def faster(mine: Sequence[Sample], plain: Sequence[Sample], chunks: int) -> tuple[float | None, ...] | None:
    result = Table.of(mine, range(chunks)).faster(plain)
    return None if result is None else result.estimate


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_speed_up_equal_on_all_prompts_is_certain(repeats: int) -> None:
    mine, plain = two([1, 1, 2, 2], [1, 1, 2, 2], 2.0, repeats)
    assert faster(mine, plain, 4) == (2.0, 2.0, 2.0)
    assert faster(plain, mine, 4) == (0.5, 0.5, 0.5)


def test_faster_is_the_median_of_the_repeats_ratios() -> None:
    """A machine that slowed down between repeats: each repeat compares with its own plain decoding."""
    mine, plain = [], []
    for r, (load, gain) in enumerate([(1.0, 3.0), (40.0, 2.0), (7.0, 5.0)]):
        for c, needed in enumerate((1.0, 2.0, 4.0)):
            plain.append(sample(c, r, tokens=11, seconds=0.25 + load * needed, method="none"))
            mine.append(sample(c, r, tokens=11, seconds=0.25 + load * needed / gain))
    assert faster(mine, plain, 3) == (3.0, 3.0, 3.0)


def test_faster_against_the_slow_bootstrap() -> None:
    dice = np.random.default_rng(11)
    took = dice.uniform(1, 9, (2, 2, 6))  # [who][repeat][chunk]
    made = [[sample(c, r, tokens=21, seconds=0.25 + float(s)) for (r, c), s in np.ndenumerate(who)] for who in took]
    result = faster(made[0], made[1], 6)
    each = []
    for r in range(2):
        (a, many), (b, others) = (slow([[20.0] * 6], [took[w, r].tolist()]) for w in (0, 1))
        each.append((a / b, [x / y for x, y in zip(many, others, strict=True)]))
    value = statistics.median(v for v, _ in each)
    draws = [statistics.median(pair) for pair in zip(*(d for _, d in each), strict=True)]
    assert result == pytest.approx(interval(value, draws), abs=2e-5)


def test_speeds_of_different_sessions_are_not_compared() -> None:
    assert faster(*two([1, 1, 2], [1, 1, 1], 2.0), 3) == (2.0, 2.0, 2.0), "of the first two"
    assert faster(*two([1, 1], [2, 2]), 2) is None


def test_plain_decoding_of_every_session_is_looked_at() -> None:
    """A method that was added later had plain decoding measured anew; the others keep what they were compared with."""
    mine, plain = two([1, 1, 1], [1, 1, 1], 2.0)
    later, again = two([2, 2, 2], [2, 2, 2], 3.0)
    assert faster(mine, plain + again, 3) == faster(mine, again + plain, 3) == (2.0, 2.0, 2.0)
    assert faster(later, plain + again, 3) == (3.0, 3.0, 3.0)


def test_speeds_are_compared_only_with_whoever_took_part() -> None:
    mine, plain = two([1, 1, 1], [1, 1, 1])
    assert faster(mine, [*plain[:-1], replace(plain[-1], repeat=1)], 3) == (2.0, 2.0, 2.0)
    assert faster(mine, [], 3) is None
    assert faster(mine[:-1], plain, 3) == (2.0, 2.0, 2.0)


def test_times_with_prefill_are_compared() -> None:
    """Ten tokens, eleven with the prompt's: 10 s after 2 s, and 5 s after 2 s."""
    mine, plain = sample(tokens=11, seconds=7.0, prefill=2.0), sample(tokens=11, seconds=12.0, prefill=2.0)
    table = Table.of([mine], [0])
    decoding, full = table.faster([plain]), table.faster([plain], prefill=True)
    assert decoding is not None
    assert full is not None
    assert decoding.value == pytest.approx(2)
    assert full.value == pytest.approx(12 / 7)
    assert metrics.speed([mine], prefill=True).value == pytest.approx(11 / 7)


def test_texts_of_one_token_are_no_speed() -> None:
    """Nothing was decoded: there is nothing to be faster than."""
    made = [sample(c, tokens=1) for c in range(3)]
    assert Table.of(made, range(3)).rate().estimate == (0.0, 0.0, 0.0)
    assert faster(made, made, 3) is None


# -- rounds ------------------------------------------------------------------------------------------------------------


# Three chunks; the second is a batch of two rows. By hand below.
USAGES = [
    [rounds_of([6, 3], [10, 6], rounds=10)],
    [rounds_of([4, 2, 1], [4, 4, 2], rounds=4), rounds_of([1], [2], rounds=3)],
    [rounds_of([], [], rounds=5)],
]


def test_tau_and_alpha_by_hand() -> None:
    new, rounds = [[9 + 10, 7 + 4 + 1 + 3, 5.0]], [[10.0, 7, 5]]
    assert metrics.tau(USAGES).estimate == pytest.approx(interval(*slow(new, rounds)), abs=2e-5)
    assert metrics.tau(USAGES).value == pytest.approx(39 / 22)
    accepted, tested = [[9.0, 8, 0]], [[16.0, 12, 0]]
    assert metrics.alpha(USAGES).estimate == pytest.approx(interval(*slow(accepted, tested)), abs=2e-5)
    assert metrics.alpha(USAGES).value == pytest.approx(17 / 28)


def test_depths_by_hand() -> None:
    results = metrics.depths(USAGES)
    assert [(d.depth, d.tested, d.accepted) for d in results] == [(1, 16, 11), (2, 10, 5), (3, 2, 1)]
    counts = [([6.0, 5, 0], [10.0, 6, 0]), ([3.0, 2, 0], [6.0, 4, 0]), ([0.0, 1, 0], [0.0, 2, 0])]
    for depth, (hits, tests) in zip(results, counts, strict=True):
        assert depth.rate == pytest.approx(interval(*slow([hits], [tests])), abs=2e-5)


def test_no_rounds_and_no_tests_are_no_fault() -> None:
    idle = [[Usage(new_tokens=1)], [Usage(new_tokens=1)]]
    assert metrics.tau(idle).estimate == metrics.alpha(idle).estimate == (0.0, None, None)
    assert metrics.depths(idle) == []
    assert metrics.round_ms(idle) == RoundTime(0.0, 0.0, 0.0)


def test_rows_of_a_batch_share_their_rounds() -> None:
    """Two rows of one batch, the second left early: its rounds were the first one's too, and count once."""
    long = rounds_of([], [], 10, draft_seconds=0.1, verify_seconds=0.4, decode_seconds=0.7)
    short = rounds_of([], [], 4, draft_seconds=0.04, verify_seconds=0.16, decode_seconds=0.28)
    other = rounds_of([], [], 30, draft_seconds=0.9, verify_seconds=0.6, decode_seconds=1.7)
    assert metrics.round_ms([[short, long]]) == RoundTime(10.0, 40.0, 20.0)
    assert metrics.round_ms([[long, short], [other]]) == RoundTime(25.0, 25.0, 10.0)


def test_every_turn_of_a_chat_has_rounds_of_its_own() -> None:
    first = rounds_of([], [], 100, draft_seconds=0.1, verify_seconds=1.0, decode_seconds=1.1)
    second = rounds_of([], [], 20, draft_seconds=0.2, verify_seconds=0.8, decode_seconds=1.0)
    made = sample(0, usages=[first])
    made.turns.append(replace(made.turns[0], usages=[second]))
    assert metrics.round_ms(Table.of([made], [0]).turns()) == RoundTime(2.5, 15.0, 0.0)


def test_usages_are_the_first_repeats_or_none() -> None:
    a, b = rounds_of([1], [2], 3), rounds_of([2], [2], 4)
    made = [sample(c, r, usages=[u]) for r, u in enumerate((a, b)) for c in (0, 1)]
    made[1].turns.append(replace(made[1].turns[0], usages=[b]))
    assert Table.of(made, [0, 1]).usages() == [[a], [a, b]]
    made[0].turns[0].usages.clear()
    assert Table.of(made, [0, 1]).usages() == [], "a method that counts rounds counts them everywhere"


# -- texts that repeat themselves --------------------------------------------------------------------------------------


def test_loops_by_hand() -> None:
    assert metrics.loops([]) == metrics.loops(range(7)) == metrics.loops(range(40)) == 0.0
    assert metrics.loops([5] * 8) == 0.0, "one 8-gram"
    assert metrics.loops([5] * 9) == 0.5
    assert metrics.loops([1, 2, 3] * 6) == pytest.approx(1 - 3 / 11)
    assert metrics.loops([1, 2, 1, 2, 1], 2) == 0.5


def test_most_texts_of_a_batch_must_loop() -> None:
    loop, text = [5] * 30, list(range(30))

    def made(*rows: list[int], later: Sequence[list[int]] = ()) -> Sample:
        one = sample()
        one.turns = [Turn(list(rows), 1.0, 0.5)] + [Turn([row], 1.0, 0.5) for row in later]
        return one

    assert metrics.looping(made(loop))
    assert metrics.looping(made(loop, text, loop))
    assert not metrics.looping(made(loop, text)), "half is not most"
    assert not metrics.looping(made(loop, later=[text]))
    assert metrics.looping(made(loop, later=[loop, text]))
    assert not metrics.looping(made([], []))
    almost = [*range(40), *range(40, 50), *range(40, 57)]  # 10 of its 60 8-grams
    assert 0 < metrics.loops(almost) < metrics.LOOP_SHARE
    assert not metrics.looping(made(almost))
