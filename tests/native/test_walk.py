"""The compiled walk against the reference in numpy: the same paths, tokens and noise, and what it leaves alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compiled_code import needs_code

from outrider.backends.native.library import library
from outrider.backends.native.walk import Walk
from outrider.core.changes import Changes
from outrider.core.noise import GumbelNoise
from outrider.core.sampling import draw
from outrider.core.tree import from_lists, root_only
from outrider.core.types import Array, DraftTree, Question, Rows, RowText, Verdict
from outrider.core.verify import judge
from outrider.params import RULES, Sampling

CODE = library("float32", "float32")
pytestmark = needs_code
History = Sequence[tuple[list[int], list[int]]]  # prompt and output of each row


def rows_of(samplings: list[Sampling], seeds: list[int], starts: list[int], vocab: int) -> Rows:
    b = len(samplings)
    return Rows(
        (0,) * b, tuple(starts), tuple(seeds), (0,) * b, tuple(samplings), "coupled", (99,) * b, GumbelNoise(vocab)
    )


def question(rows: Rows, tree: DraftTree, logits: Array, history: History = (), process: Any = None) -> Question:
    texts = [
        RowText(prompt, output, None if (made := Changes.of(s, prompt)) is None else made.upto(output), process)
        for s, (prompt, output) in zip(rows.sampling, history or [([], [])] * len(rows), strict=True)
    ]
    return Question(rows, tree, logits, texts)


def walked(rows: Rows, tree: DraftTree, logits: Array, history: History = ()) -> Verdict | None:
    assert CODE is not None
    return Walk(CODE)(question(rows, tree, logits, history))


def right(rows: Rows, tree: DraftTree, logits: Array, history: History = ()) -> Verdict:
    return judge(question(rows, tree, logits, history))


def of_draws(rows: Rows, logits: Array, dice: random.Random, depth: int) -> DraftTree:
    """Trees whose children are often what is drawn, so that walks go deep. Node i's logits are row i of a table."""
    made = []
    for r, sampling in enumerate(rows.sampling):
        ids, ups, depths = [5], [0], [0]
        for _ in range(dice.randrange(logits.shape[1])):
            up = dice.randrange(len(ids))
            if depths[up] == depth:
                continue
            noise = rows.gumbel.at([rows.seeds[r]], [rows.start[r] + depths[up] + 1])[0]
            drawn = draw(logits[r, up], sampling, noise)
            token = drawn if dice.random() < 0.8 else dice.randrange(logits.shape[2])
            if (token, up) in zip(ids, ups, strict=True):
                continue
            ids.append(token)
            ups.append(up)
            depths.append(depths[up] + 1)
        made.append((ids, ups, [0.0] * len(ids)))
    return from_lists(made)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("vocab", [7, 48, 8203])
@pytest.mark.parametrize("seed", range(6))
def test_walks_are_those_of_the_reference(seed: int, vocab: int) -> None:
    dice, b, n = random.Random(seed), 4, 12
    logits = normal(seed, b, n, vocab) * np.float32(dice.choice((0.5, 3.0)))
    if seed % 2:
        logits = logits.round()  # equals, of which the first is drawn
    heats = [0.0, 1.0, 0.3, 2.5] if seed else [0.0] * 4
    seeds = [dice.randrange(-(1 << 70), 1 << 70) for _ in range(b)]
    rows = rows_of([Sampling(temperature=t) for t in heats], seeds, [dice.randrange(5000) for _ in range(b)], vocab)
    tree = of_draws(rows, logits, dice, 5)
    logits = np.ascontiguousarray(logits[:, : tree.nodes])
    wanted = right(rows, tree, logits)
    assert walked(rows, tree, logits) == wanted
    assert max(map(len, wanted.paths)) > 1
    if not rows.sampled:
        for rule in (rule for rule in RULES if rule != "typical"):
            other = replace(rows, rule=rule)
            assert walked(other, tree, logits) == right(other, tree, logits) == wanted


def test_logits_that_are_nan_or_infinite() -> None:
    """The first NaN is drawn, and where all are excluded the first of all."""
    logits = normal(0, 4, 1, 40)
    logits[1, 0, 17] = math.nan
    logits[2, 0] = -math.inf
    logits[3, 0, 3] = math.inf
    for heat in (0.0, 1.0):
        rows, tree = rows_of([Sampling(temperature=heat)] * 4, [1, 2, 3, 4], [0] * 4, 40), root_only([5] * 4)
        result = walked(rows, tree, logits)
        assert result == right(rows, tree, logits)
        assert result is not None
        assert result.next[1:] == [17, 0, 3]
        assert result.finite == [True, False, False, False]


FILTERS = (
    {"top_p": 0.9}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_p": 0.05}, {"top_k": 1}, {"top_k": 5}, {"top_k": 100},
    {"min_p": 0.05}, {"min_p": 0.9}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.1},
    {"top_k": 3, "top_p": 0.7, "min_p": 0.2}, {},
)  # fmt: skip


@pytest.mark.parametrize("vocab", [48, 8203, 49152])
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_filtered_distributions_are_drawn_as_by_the_reference(vocab: int, spread: float) -> None:
    """Every filter, flat distributions and narrow ones; nearly always the code draws by itself."""
    sure, n = 0, 3
    for seed in range(8):
        logits = normal(seed, len(FILTERS), n, vocab) * np.float32(spread)
        samplings = [Sampling(temperature=(0.4, 1.0, 1.7)[seed % 3], **filters) for filters in FILTERS]
        rows = rows_of(samplings, [seed * 100 + i for i in range(len(FILTERS))], [7 * seed] * len(FILTERS), vocab)
        tree = of_draws(rows, logits, random.Random(seed), 2)
        logits = np.ascontiguousarray(logits[:, : tree.nodes])
        result = walked(rows, tree, logits)
        assert result is None or result == right(rows, tree, logits)
        sure += result is not None
    assert sure >= 7


def test_what_rounding_could_decide_is_left_to_the_reference() -> None:
    """Equal logits at the edge of what a filter keeps; and where the edge is elsewhere they are drawn."""
    logits, tree = np.full((1, 1, 64), -20.0, np.float32), root_only([5])
    logits[0, 0, :4] = 0.0
    for sampling, sure in (
        ({"top_p": 0.5}, False),
        ({"top_p": 0.99}, True),
        ({"top_k": 4}, True),
        ({"top_p": 0.75}, False),
    ):
        for seed in range(20):
            rows = rows_of([Sampling(temperature=1.0, **sampling)], [seed], [0], 64)
            result = walked(rows, tree, logits)
            assert (result is not None) == sure
            assert result is None or result == right(rows, tree, logits)


def test_logits_and_sums_that_nearly_tie_are_left_to_the_reference() -> None:
    """Two logits that rounding by T could order otherwise at the k-th place; a sum that is top-p but for rounding."""
    tree = root_only([5])
    near, edge = (np.full((1, 1, 64), low, np.float32) for low in (-20.0, -60.0))
    near[0, 0, :2] = 0.0, -5e-6
    edge[0, 0, :2] = np.log([0.6, 0.4])
    for logits, sampling in ((near, {"top_k": 1}), (edge, {"top_p": 0.60001})):
        results = []
        for seed in range(20):
            rows = rows_of([Sampling(temperature=1.0, **sampling)], [seed], [0], 64)
            results.append(walked(rows, tree, logits))
            assert results[-1] is None or results[-1] == right(rows, tree, logits)
        assert None in results
    assert any(results), "the likelier token's draw is sure"


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_no_token_is_passed_over_whose_noise_could_win(temperature: float, spread: float) -> None:
    """Whole vocabularies: noise is looked up only where it can still win, and the winners are the reference's."""
    b, vocab = 64, 49_152
    logits, tree = normal(3, b, 1, vocab) * np.float32(spread), root_only([5] * b)
    rows = rows_of([Sampling(temperature=temperature)] * b, list(range(b)), list(range(b)), vocab)
    assert walked(rows, tree, logits) == right(rows, tree, logits)


PENALTIES = (
    {"repetition_penalty": 1.3}, {"repetition_penalty": 0.8, "temperature": 0.0}, {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4}, {"logit_bias": {3: 4.0, 5: -100.0}}, {},
    {"repetition_penalty": 1.1, "top_p": 0.9, "logit_bias": {2: 2.5}},
    {"frequency_penalty": 1.0, "top_k": 5, "temperature": 0.6},
)  # fmt: skip


@pytest.mark.parametrize("vocab", [7, 48, 8203])
@pytest.mark.parametrize("seed", range(5))
def test_penalties_and_biases_are_those_of_the_reference(seed: int, vocab: int) -> None:
    """Rows of every kind side by side, down trees whose paths say tokens again; the logits are left as they were."""
    dice, b, n = random.Random(seed), len(PENALTIES), 12
    logits = normal(seed, b, n, vocab) * np.float32(2)
    rows = rows_of(
        [Sampling(**{"temperature": 1.0, **sampling}) for sampling in PENALTIES], list(range(b)), [9] * b, vocab
    )
    history = [
        ([dice.randrange(vocab) for _ in range(5)], [dice.randrange(min(vocab, 9)) for _ in range(6)]) for _ in range(b)
    ]
    tree = of_draws(rows, logits, dice, 5)
    logits = np.ascontiguousarray(logits[:, : tree.nodes])
    before = logits.copy()
    for some in (2, 6):  # the text grows
        grown = [(prompt, output[:some]) for prompt, output in history]
        wanted = right(rows, tree, logits, grown)
        assert walked(rows, tree, logits, grown) == wanted
        assert np.array_equal(logits, before)
    assert max(map(len, wanted.paths)) > 1


EXTREME = (
    {"temperature": 1e9}, {"temperature": 1e9, "top_p": 0.6}, {"temperature": 1e-9}, {"temperature": 1e-9, "top_k": 3},
    {"top_k": 2**63 + 2**40}, {"top_k": 2**64 + 5}, {"logit_bias": {3: 1e9, 5: 1e9, 6: -1e9}},
    {"repetition_penalty": 1e9, "temperature": 1e9}, {"repetition_penalty": 1e-9, "frequency_penalty": -1e9},
    {"temperature": 1e-9, "top_p": 0.9, "presence_penalty": 1e9, "logit_bias": {2: -1e9}},
)  # fmt: skip


@pytest.mark.parametrize("vocab", [7, 40, 8203])
def test_the_ends_of_every_range_are_drawn_as_by_the_reference(vocab: int) -> None:
    """No sum or quotient is infinite there, no lane beyond the vocabulary's end is drawn, and counts do not wrap."""
    sure, history = 0, [([1, 2, 3], [3, 3, 5, 6])]
    for seed in range(8):
        logits = normal(seed, len(EXTREME), 1, vocab) * np.float32(3)
        for i, sampling in enumerate(EXTREME):  # one by one: where rounding could decide for one row, it is left alone
            rows = rows_of([Sampling(**{"temperature": 1.0, **sampling})], [seed], [9], vocab)
            own, tree = np.ascontiguousarray(logits[i : i + 1]), root_only([5])
            result, wanted = walked(rows, tree, own, history), right(rows, tree, own, history)
            assert 0 <= wanted.next[0] < vocab
            assert result is None or result == wanted
            sure += result is not None
    assert sure >= 0.8 * 8 * len(EXTREME)


@pytest.mark.parametrize("flaw", [math.nan, math.inf])
def test_filtered_logits_that_are_nan_or_infinite_are_left_to_the_reference(flaw: float) -> None:
    logits, tree = normal(0, 1, 1, 40), root_only([5])
    logits[0, 0, 17] = flaw
    for sampling in ({"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        assert walked(rows_of([Sampling(temperature=1.0, **sampling)], [1], [0], 40), tree, logits) is None
    logits[:] = -math.inf
    assert walked(rows_of([Sampling(temperature=1.0, top_p=0.9)], [1], [0], 40), tree, logits) is None


def test_unsupported_rows_are_left_to_python() -> None:
    """Logits of another precision, other rules, and a caller's own processing."""
    assert CODE is not None
    tree, logits, rows = root_only([5]), normal(0, 1, 1, 40), rows_of([Sampling()], [1], [0], 40)
    walk = Walk(CODE)
    assert walk(question(rows, tree, logits)) is not None
    assert walk(question(rows, tree, logits.astype(np.float64))) is None
    assert walk(question(rows, tree, logits, process=lambda output, scores: scores)) is None
    hot = rows_of([Sampling(temperature=1.0)], [1], [0], 40)
    assert walk(question(hot, tree, logits)) is not None
    assert walk(question(replace(hot, rule="rejection"), tree, logits)) is None


def test_every_token_of_a_filtered_distribution_comes_as_often_as_it_should() -> None:
    """Ten thousand draws of eight tokens under top-p 0.8: those kept in their proportions, the others never."""
    b = 10_000
    chances = np.array([0.3, 0.25, 0.2, 0.1, 0.06, 0.05, 0.03, 0.01], np.float32)
    logits = np.ascontiguousarray(np.broadcast_to(np.log(chances), (b, 1, 8)))
    rows = rows_of([Sampling(temperature=1.0, top_p=0.8)] * b, list(range(b)), [0] * b, 8)
    result = walked(rows, root_only([5] * b), logits)
    assert result is not None
    share = np.bincount(result.next, minlength=8) / b
    kept = np.array([0.3, 0.25, 0.2, 0.1, 0, 0, 0, 0]) / 0.85
    assert np.abs(share - kept).max() < 0.02
    assert share[4:].tolist() == [0.0] * 4
