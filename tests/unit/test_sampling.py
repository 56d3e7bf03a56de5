"""Logits to a distribution: equal to transformers' processors, drawing exactly, ranking as the page says.

`core.sampling` is the reference; the tensors of `backends.torch.sampling` are held to it, bit for bit where they draw.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.backends.torch import sampling as tensors
from outrider.backends.torch.tensors import TensorRows
from outrider.core import sampling
from outrider.core.noise import GumbelNoise, gumbels
from outrider.core.types import Array, Rows
from outrider.params import Rule, Sampling

GREEDY, PLAIN = Sampling(), Sampling(temperature=1.0)
INF = float("inf")


def source(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def stock(logits: Array, s: Sampling) -> Tensor:
    """transformers' warpers in transformers' order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(s.temperature))])
    if s.top_k:
        warpers.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        warpers.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        warpers.append(MinPLogitsWarper(s.min_p))
    return warpers(torch.zeros(logits.shape[0], 1, dtype=torch.long), torch.from_numpy(logits))


def some_logits(v: int, ties: bool) -> Array:
    x = source(v).normal(size=(20, v)) * 3
    return x.round() if ties else x


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("v", [3, 17, 300])
def test_filters_are_those_of_transformers(v: int, dtype: str, ties: bool) -> None:
    x = some_logits(v, ties).astype(dtype)
    for t, k, p, m in product((0.3, 1.0, 1.7), (0, 1, 5, 1000), (1.0, 0.9, 0.5, 0.01), (0.0, 0.05, 0.7, 1.0)):
        s = Sampling(temperature=t, top_k=k, top_p=p, min_p=m)
        want = stock(x, s)
        got = np.stack([sampling.narrow(row, s) for row in x])
        of_tensors = tensors.narrow(torch.from_numpy(x), s)
        assert got.dtype == dtype
        assert np.array_equal(got == -INF, of_tensors.numpy() == -INF) or ties, "ties at the edge may be cut elsewhere"
        assert np.array_equal(got[got > -INF], x[got > -INF]), "not divided by T"
        assert torch.equal(of_tensors == -INF, want == -INF), s
        p_of = np.stack([sampling.distribution(row, s) for row in x])
        assert np.abs(p_of.sum(-1) - 1).max() < 1e-5
        if not ties:
            assert np.array_equal(got == -INF, want.numpy() == -INF), s
            np.testing.assert_allclose(p_of, want.softmax(-1).numpy(), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(tensors.distribution(torch.from_numpy(x), s), want.softmax(-1), rtol=1e-6, atol=1e-7)


def test_filters_after_a_mask() -> None:
    """Logits that are -inf already (a drafter's smaller vocabulary) stay so, and do no harm."""
    x = some_logits(12, False)
    x[:, 5:] = -INF
    s = Sampling(temperature=0.8, top_k=7, top_p=0.9, min_p=0.01)
    assert np.array_equal(np.stack([sampling.narrow(row, s) for row in x]) == -INF, (stock(x, s) == -INF).numpy())
    assert not np.stack([sampling.distribution(row, s) for row in x])[:, 5:].any()


def test_shapes_and_precision_of_tensors() -> None:
    x = torch.from_numpy(source().normal(size=(2, 3, 4, 9)).astype(np.float32))
    s = Sampling(temperature=0.7, top_k=4, top_p=0.8)
    flat = tensors.narrow(x.view(-1, 9), s)
    assert torch.equal(tensors.narrow(x, s), flat.view_as(x))
    assert torch.equal(tensors.narrow(x[0, 0, 0], s), flat[0])
    assert tensors.narrow(x.bfloat16(), s).dtype == torch.float32
    assert tensors.distribution(x.bfloat16(), s).dtype == torch.float32
    assert tensors.distribution(x.double(), s).dtype == torch.float64
    assert tensors.distribution(x.bfloat16(), GREEDY).dtype == torch.float32
    assert torch.equal(tensors.narrow(x, Sampling(top_k=1)), x), "T = 0: nothing to filter"
    row = x[0, 0, 0].numpy()
    assert sampling.narrow(row, Sampling(top_k=1)) is row


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_greedy_is_the_first_argmax(dtype: str) -> None:
    """One tie-break everywhere: the lowest id, in any precision, layout and batch, at any length of a loop's tail."""
    for v in (2, 7, 64, 1000, 4099):
        x = source(v).integers(0, 3, (6, v)).astype(dtype)
        want = [row.index(max(row)) for row in x.tolist()]
        assert [sampling.draw(row, GREEDY, None) for row in x] == want
        assert [int(sampling.distribution(row, GREEDY).argmax()) for row in x] == want
        assert all(sampling.distribution(row, GREEDY).sum() == 1 for row in x)
        strided = np.stack([x, x], -1)[..., 0]
        assert [sampling.draw(row, GREEDY, None) for row in strided] == want
        assert tensors.draw(torch.from_numpy(x), [GREEDY] * 6, None).tolist() == want


# --- penalties


def test_repetition_penalty_is_that_of_transformers() -> None:
    x = (source().normal(size=(3, 30)) * 4).astype(np.float32)
    prompts, outputs = [[1, 2, 3], [4], [5, 5, 6, 29]], [[7, 8, 10, 1], [11, 12], [9, 0, 0]]
    for penalty, (row, prompt, output) in product((1.3, 0.7), zip(x, prompts, outputs, strict=True)):
        got = sampling.penalise(row, Sampling(temperature=1.0, repetition_penalty=penalty), prompt, output)
        ids = torch.tensor([[*prompt, *output]])
        want = RepetitionPenaltyLogitsProcessor(penalty)(ids, torch.from_numpy(row[None].copy()))
        assert np.array_equal(got, want[0].numpy())


def test_logit_bias_is_that_of_transformers_and_comes_first() -> None:
    x, bias = source().normal(size=10).astype(np.float32), {3: 2.5, 7: -1.25}
    got = sampling.penalise(x, Sampling(temperature=1.0, logit_bias=bias, repetition_penalty=1.5), [3], [0])
    ids = torch.tensor([[3, 0]])
    want = SequenceBiasLogitsProcessor({(k,): v for k, v in bias.items()})(ids, torch.from_numpy(x[None].copy()))
    want = RepetitionPenaltyLogitsProcessor(1.5)(ids, want)
    np.testing.assert_allclose(got, want[0].numpy(), rtol=1e-6)


def test_top_p_drops_what_reaches_the_rest_exactly() -> None:
    """As transformers does: of four equals and top_p = 0.5 two stay."""
    assert np.isfinite(sampling.narrow(np.zeros(4, np.float32), Sampling(temperature=1.0, top_p=0.5))).sum() == 2


def test_the_largest_biases_leave_the_distribution_among_their_tokens() -> None:
    """In float32 a logit plus 1e9 would lose all its digits."""
    x, s = np.array([0.5, 3.0, 1.0, 2.0], np.float32), Sampling(temperature=1.0, logit_bias={0: 1e9, 2: 1e9})
    p = sampling.distribution(sampling.penalise(x, s, [], []), s)
    np.testing.assert_allclose(p, [1 / (1 + np.exp(0.5)), 0, 1 / (1 + np.exp(-0.5)), 0], atol=3e-4)
    assert sampling.penalise(x, Sampling(logit_bias={0: 1e9, 2: 1e9}), [], []).argmax() == 2


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    s = Sampling(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    got = sampling.penalise(np.zeros(6, np.float32), s, [0, 0, 1], [1, 2, 2, 2, 4])
    assert got.tolist() == [0.0, -0.75, -1.25, 0.0, -0.75, 0.0]


def test_the_logits_themselves_stay() -> None:
    x = source().normal(size=8).astype(np.float32)
    x[0] = -INF
    kept, strict = x.copy(), Sampling(temperature=1.0, repetition_penalty=2.0, presence_penalty=1.0)
    got = sampling.penalise(x, strict, [1, 0], [2, 1])
    assert got[0] == -INF
    assert np.array_equal(x, kept)
    assert sampling.penalise(x, PLAIN, [1], [2]) is x


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_penalties_in_tensors_have_the_same_bits(dtype: str) -> None:
    samplings = (
        PLAIN, GREEDY, Sampling(1.0, repetition_penalty=1.3), Sampling(presence_penalty=0.5, frequency_penalty=0.25),
        Sampling(1.0, logit_bias={2: 5.0, 7: -1.0}, repetition_penalty=0.7, frequency_penalty=-1.1),
    )  # fmt: skip
    history = [([1, 2, 2], [3]), ([1], []), ([4], [4, 9]), ([2, 9], [2, 5, 5]), ([0], [0])]
    x, path = (source(1).normal(size=(5, 11)) * 3).astype(dtype), [[3, 1], [6, 6], [4, 4], [7, 5], [0, 1]]
    result = tensors.penalise(torch.from_numpy(x), samplings, history, torch.tensor(path))
    for row, s, (prompt, output), tail, made in zip(x, samplings, history, path, result, strict=True):
        assert np.array_equal(sampling.penalise(row, s, prompt, [*output, *tail]), made.numpy())


# --- draw

MIXED = (
    Sampling(temperature=0.8),
    GREEDY,
    Sampling(temperature=0.8),
    Sampling(temperature=1.2, top_k=5),
    Sampling(temperature=0.5, top_p=0.6),
    Sampling(temperature=1.2, min_p=0.05),
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tensors_draw_the_same_token(dtype: str) -> None:
    for v in (5, 63, 1027):
        x, noise = (source(v).normal(size=(6, v)) * 2).astype(dtype), gumbels(range(6), range(6), np.arange(v))
        together = tensors.draw(torch.from_numpy(x), MIXED, torch.from_numpy(noise)).tolist()
        assert [sampling.draw(*row) for row in zip(x, MIXED, noise, strict=True)] == together
        for row, s, n, token in zip(x, MIXED, noise, together, strict=True):
            assert token == int((sampling.narrow(row, s) + np.float32(s.temperature) * n).argmax())


def test_scaled_noise_is_not_fused() -> None:
    """The same sums, bit for bit, in every place of a batch: ties of equal logits and equal noise stay ties."""
    v = 37  # body and tail of any vector width
    noise, x = np.full((4, v), 1.2345678, np.float32), np.full((4, v), 0.1234567, np.float32)
    heat = Sampling(temperature=0.7)
    assert sampling.draw(x[0], heat, noise[0]) == 0
    assert tensors.draw(torch.from_numpy(x), [heat] * 4, torch.from_numpy(noise)).tolist() == [0] * 4


@pytest.mark.parametrize(
    "s",
    [PLAIN, Sampling(temperature=0.6), Sampling(temperature=1.5, top_k=4), Sampling(temperature=0.9, top_p=0.8)],
    ids=range(4),
)
def test_draws_follow_the_distribution(s: Sampling) -> None:
    """G-test of 1e5 draws with the real noise; 99 % power at TV 0.015."""
    v, n = 8, 100_000
    x = (source(4).normal(size=v) * 1.5).astype(np.float32)
    p, noise = sampling.distribution(x, s), gumbels([11] * n, range(n), np.arange(v))
    scores = sampling.narrow(x, s) + noise * np.float32(s.temperature)
    drawn = scores.argmax(-1)
    assert [sampling.draw(x, s, row) for row in noise[:500]] == drawn[:500].tolist()
    assert fits(np.bincount(drawn, minlength=v), p)


def fits(counts: Array, p: Array) -> bool:
    """Do these counts follow p, by a G-test, with none where p is 0?"""
    live, n = p > 0, counts.sum()
    chi = 2 * float((counts[live] * np.log(np.maximum(counts[live], 1) / (n * p[live]))).sum())
    return not counts[~live].any() and float(stats.chi2.sf(chi, int(live.sum()) - 1)) > 1e-4


# --- rank and sample


def rows(b: int, samplings: tuple[Sampling, ...], rule: Rule = "coupled", v: int = 50, serial: int = 0) -> Rows:
    start = tuple(10 * i for i in range(b))
    return Rows((0,) * b, start, tuple(range(b)), (serial,) * b, samplings, rule, (9,) * b, GumbelNoise(v))


def best(x: Array, k: int) -> Array:
    return np.argsort(-x, -1, kind="stable")[..., :k]


def logs(x: Array) -> Array:
    return np.log(sampling.softmax(x))


def normal(*shape: int, seed: int = 0) -> Array:
    return source(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("k", [1, 4, 30])
@pytest.mark.parametrize("v", [30, 64, 1000, 50_001])
def test_the_largest(v: int, k: int) -> None:
    for x in (normal(2, 3, v), normal(2, 3, v).round(1)):
        result = sampling.largest(x, k)
        assert np.array_equal(np.take_along_axis(x, result, -1), np.take_along_axis(x, best(x, k), -1))
        assert all(len(set(row)) == k for row in result.reshape(-1, k).tolist())
    assert np.array_equal(sampling.largest(normal(2, 3, v), k), best(normal(2, 3, v), k))


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
def test_greedy_ranking_is_that_of_eagle(rule: Rule) -> None:
    x = normal(2, 3, 50)
    tokens, confidence = sampling.rank(x, rows(2, (GREEDY, GREEDY), rule), 2, 4)
    assert np.array_equal(tokens, best(x, 4))
    np.testing.assert_allclose(confidence, np.take_along_axis(logs(x), tokens, -1), rtol=1e-5)


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_only_coupled_ranks_by_noise(rule: Rule) -> None:
    x = normal(2, 3, 50)
    assert np.array_equal(sampling.rank(x, rows(2, (PLAIN, PLAIN), rule), 1, 4)[0], best(x, 4))


def test_coupled_ranking() -> None:
    """r = log q + T * G(position + depth), its confidence softmax(r / s)."""
    samplings, x = (Sampling(temperature=0.5), GREEDY, Sampling(temperature=1.3, top_k=2)), normal(3, 2, 50)
    r = rows(3, samplings)
    for depth, scale in ((1, 1.0), (3, 0.5)):
        noise = gumbels(r.seeds, [p + depth for p in r.start], np.arange(50))
        raced = logs(x) + np.array([0.5, 0.0, 1.3]).reshape(3, 1, 1) * noise[:, None]
        tokens, confidence = sampling.rank(x, r, depth, 5, scale)
        assert np.array_equal(tokens, best(raced, 5))
        np.testing.assert_allclose(
            confidence, np.take_along_axis(logs(raced / scale), tokens, -1), rtol=1e-4, atol=1e-6
        )
        assert (confidence <= 0).all()


def peaked(n: int, v: int) -> Array:
    """Logits like a language model's: the probability falls with a power of the rank."""
    ranks = np.stack([source(i).permutation(v) for i in range(n)]) + 1.0
    return (-2.5 * np.log(ranks) + 0.3 * source(v).normal(size=(n, v))).astype(np.float32)


def test_the_drafter_that_is_the_target_is_always_right() -> None:
    """Its best candidate is the target's own draw, at any temperature and under any filter."""
    samplings = (
        PLAIN,
        Sampling(temperature=0.6),
        Sampling(temperature=1.4, top_k=3),
        Sampling(temperature=1.0, top_p=0.5),
    )
    for v in (50, 5000):
        x, r = peaked(4, v)[:, None], rows(4, samplings, v=v)
        drawn = [sampling.draw(z, s, n) for z, s, n in zip(x[:, 0], samplings, r.noise(1), strict=True)]
        assert sampling.rank(x, r, 1, 1, warp=True)[0][:, 0, 0].tolist() == drawn


def test_pooling_changes_little() -> None:
    """Above 4,096 tokens only the best 64 of q are raced: of the best four by noise, nearly all are among them."""
    x = peaked(100, 5000).reshape(2, 50, 5000)
    r = rows(2, (PLAIN, PLAIN), v=5000)
    tokens, confidence = sampling.rank(x, r, 1, 4)
    raced = logs(x) + r.noise(1)[:, None]
    inside = np.full_like(raced, -INF)
    np.put_along_axis(inside, best(x, 64), np.take_along_axis(raced, best(x, 64), -1), -1)
    assert np.array_equal(tokens, best(inside, 4))
    assert (tokens[..., 0] == raced.argmax(-1)).mean() > 0.95
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(confidence, np.take_along_axis(logs(inside), tokens, -1), rtol=1e-4, atol=1e-5)
    assert sampling.rank(x, r, 1, 100)[0].shape == (2, 50, 100), "never fewer than k"
    assert sampling.rank(x[..., :3], rows(2, (GREEDY,) * 2, v=3), 1, 9)[0].shape == (2, 50, 3)


@pytest.mark.parametrize("v", [50, 5000])
@pytest.mark.parametrize("levels", [False, True])
def test_tensors_rank_the_same(v: int, levels: bool) -> None:
    """At one depth and at a depth of each node's own, with a scale, filters and names."""
    samplings = (Sampling(temperature=0.5, top_p=0.9), GREEDY, Sampling(temperature=1.3, top_k=7))
    x, depth = peaked(6, v).reshape(3, 2, v), np.array([[1, 2], [3, 1], [2, 2]]) if levels else 2
    names = np.sort(source(3).permutation(2 * v)[:v])
    for rule, warp, named in product(("coupled", "rejection"), (False, True), (None, names)):
        r = rows(3, samplings, rule, 2 * v if named is not None else v)  # type: ignore[arg-type]
        mine = sampling.rank(x, r, depth, 5, 1.5, warp=warp, names=named)
        given = torch.from_numpy(depth) if isinstance(depth, np.ndarray) else depth
        ids = None if named is None else torch.from_numpy(named)
        theirs = tensors.rank(torch.from_numpy(x), TensorRows(r), given, 5, 1.5, warp=warp, names=ids)
        kept = np.isfinite(mine[1])  # where a filter leaves fewer, the rest are equals
        assert kept[..., 0].all()
        assert np.array_equal(mine[0][kept], theirs[0].numpy()[kept])
        np.testing.assert_allclose(mine[1], theirs[1].numpy(), rtol=1e-4, atol=1e-5)


def test_confidences_never_exceed_one() -> None:
    x = np.zeros((1, 1, 8), np.float32)
    x[..., 3] = 200.0
    for scale in (1.0, 0.3, 3.0):
        assert float(sampling.rank(x, rows(1, (GREEDY,), v=8), 1, 2, scale)[1].max()) == 0.0


def many(b: int, serial: int = 0) -> Rows:
    zeros = (0,) * b
    return Rows(zeros, zeros, tuple(range(b)), (serial,) * b, (PLAIN,) * b, "rejection", (9,) * b, GumbelNoise(5))


@pytest.mark.parametrize("replacement", [False, True])
def test_children_are_drawn_from_q_in_order(replacement: bool) -> None:
    """G-test of ordered pairs: q(x) q(y) / (1 - q(x)) without replacement, q(x) q(y) with."""
    q, n = np.array([0.45, 0.25, 0.2, 0.1, 0.0]), 20_000
    pairs = sampling.sample(np.tile(q, (n, 1, 1)), 2, many(n), 3, replacement)[:, 0]
    params = q[:, None] * q[None] / (1 if replacement else 1 - q[:, None])
    if not replacement:
        np.fill_diagonal(params, 0)
    assert fits(np.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25), params.ravel())


def test_sampling_is_keyed_by_seed_round_and_node() -> None:
    """The same node in another batch or another call draws the same; nodes, rounds and races differ."""
    q, r = np.full((40, 2, 5), 0.2), many(40)
    both = sampling.sample(q, 3, r, 4, True)
    assert np.array_equal(sampling.sample(q[:, 1:], 3, r, 5, True), both[:, 1:])
    assert np.array_equal(both[:, 0], sampling.sample(q[:, :1], 3, r, 4, True)[:, 0])
    later = sampling.sample(q[:, :1], 3, many(40, 1), 4, True)[:, 0]
    for other in (both[:, 1], later, np.roll(both[:, 0], 1, -1)):
        assert 0.05 < (other == both[:, 0]).mean() < 0.4
    without = sampling.sample(q, 5, r, 0)
    assert np.array_equal(np.sort(without, -1), np.tile(np.arange(5), (40, 2, 1)))


def test_sampling_goes_on_where_q_has_run_out() -> None:
    drawn = sampling.sample(np.tile(np.array([0.0, 1.0, 0.0]), (4, 1, 1)), 3, many(4))
    assert (drawn[:, 0, 0] == 1).all()
    assert np.array_equal(np.sort(drawn, -1), np.tile(np.arange(3), (4, 1, 1)))


def test_independence_of_draws_from_the_target_race() -> None:
    """Draft and target randomness of one (seed, number) are unrelated: else rejection would be biased."""
    n, v = 4000, 5
    drafted = sampling.sample(np.full((n, 1, v), 0.2), 1, many(n))[:, 0, 0]
    target = gumbels(range(n), [0] * n, np.arange(v)).argmax(-1)
    table = np.bincount(drafted * v + target, minlength=v * v).reshape(v, v)
    assert stats.chi2_contingency(np.maximum(table, 1)).pvalue > 1e-4
    assert (drafted == target).mean() == pytest.approx(0.2, abs=0.03)
