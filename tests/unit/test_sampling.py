"""Logits to law: equal to transformers' processors, drawing exactly, ranking as the page says."""

from __future__ import annotations

import math
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

from outrider.core import sampling
from outrider.core.noise import GumbelNoise, gumbels
from outrider.core.types import Rows
from outrider.params import Rule, Sampling

GREEDY, PLAIN = Sampling(), Sampling(temperature=1.0)
INF = float("inf")


def g(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stock(logits: Tensor, s: Sampling) -> Tensor:
    """transformers' warpers in transformers' order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(s.temperature))])
    if s.top_k:
        warpers.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        warpers.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        warpers.append(MinPLogitsWarper(s.min_p))
    return warpers(torch.zeros(logits.shape[0], 1, dtype=torch.long), logits)


def some_logits(v: int, ties: bool) -> Tensor:
    x = torch.randn(20, v, generator=g(v)) * 3
    return x.round() if ties else x


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("v", [3, 17, 300])
def test_filters_are_those_of_transformers(v: int, dtype: torch.dtype, ties: bool) -> None:
    x = some_logits(v, ties).to(dtype)
    for t, k, p, m in product((0.3, 1.0, 1.7), (0, 1, 5, 1000), (1.0, 0.9, 0.5, 0.01), (0.0, 0.05, 0.7, 1.0)):
        s = Sampling(temperature=t, top_k=k, top_p=p, min_p=m)
        want = stock(x, s)
        got = sampling.narrow(x, s)
        assert got.dtype == dtype
        assert torch.equal(got == -INF, want == -INF), s
        assert torch.equal(got[got > -INF], x[got > -INF]), "not divided by T"
        torch.testing.assert_close(sampling.law(x, s), want.softmax(-1), rtol=1e-6, atol=1e-7)
        assert bool((sampling.law(x, s).sum(-1) - 1).abs().max() < 1e-5)


def test_filters_after_a_mask() -> None:
    """Logits that are -inf already (a drafter's smaller vocabulary) stay so, and do no harm."""
    x = some_logits(12, False)
    x[:, 5:] = -INF
    s = Sampling(temperature=0.8, top_k=7, top_p=0.9, min_p=0.01)
    assert torch.equal(sampling.narrow(x, s) == -INF, stock(x, s) == -INF)
    assert bool((sampling.law(x, s)[:, 5:] == 0).all())


def test_shapes_and_precision() -> None:
    x = torch.randn(2, 3, 4, 9, generator=g())
    s = Sampling(temperature=0.7, top_k=4, top_p=0.8)
    flat = sampling.narrow(x.view(-1, 9), s)
    assert torch.equal(sampling.narrow(x, s), flat.view_as(x))
    assert torch.equal(sampling.narrow(x[0, 0, 0], s), flat[0])
    assert sampling.narrow(x.bfloat16(), s).dtype == torch.float32
    assert sampling.law(x.bfloat16(), s).dtype == torch.float32
    assert sampling.law(x.double(), s).dtype == torch.float64
    assert sampling.law(x.bfloat16(), GREEDY).dtype == torch.float32
    assert torch.equal(sampling.narrow(x, Sampling(top_k=1)), x), "T = 0: nothing to filter"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_greedy_is_the_first_argmax(dtype: torch.dtype) -> None:
    """One tie-break everywhere: the lowest id, in any dtype, layout and batch, at any length of the loop's tail."""
    for v in (2, 7, 64, 1000, 4099):
        x = torch.randint(0, 3, (6, v), generator=g(v)).to(dtype)
        want = torch.tensor([row.index(max(row)) for row in x.tolist()])
        assert torch.equal(sampling.draw(x, [GREEDY] * 6, None), want)
        assert torch.equal(sampling.law(x, GREEDY).argmax(-1), want)
        assert torch.equal(sampling.law(x, GREEDY).sum(-1), torch.ones(6, dtype=sampling.law(x, GREEDY).dtype))
        strided = torch.stack([x, x], -1)[..., 0]
        assert torch.equal(sampling.draw(strided, [GREEDY] * 6, None), want)
        assert torch.equal(torch.cat([sampling.draw(r[None], [GREEDY], None) for r in x]), want)


# --- penalties


def test_repetition_penalty_is_that_of_transformers() -> None:
    v = 30
    x = torch.randn(3, v, generator=g()) * 4
    prompts = [[1, 2, 3], [4], [5, 5, 6, 29]]
    outputs = [[7, 8], [], [9]]
    path = torch.tensor([[10, 1], [11, 12], [0, 0]])
    for penalty in (1.3, 0.7):
        s = Sampling(temperature=1.0, repetition_penalty=penalty)
        got = sampling.penalise(x, [s] * 3, list(zip(prompts, outputs, strict=True)), path)
        for i in range(3):
            ids = torch.tensor([[*prompts[i], *outputs[i], *path[i].tolist()]])
            want = RepetitionPenaltyLogitsProcessor(penalty)(ids, x[i : i + 1])
            assert torch.equal(got[i], want[0])


def test_logit_bias_is_that_of_transformers_and_comes_first() -> None:
    x = torch.randn(2, 10, generator=g())
    bias = {3: 2.5, 7: -1.25}
    s = Sampling(temperature=1.0, logit_bias=bias, repetition_penalty=1.5)
    got = sampling.penalise(x, [s, s], [([3], [0]), ([1], [2])])
    ids = torch.tensor([[3, 0], [1, 2]])
    want = SequenceBiasLogitsProcessor({(k,): v for k, v in bias.items()})(ids, x)
    want = RepetitionPenaltyLogitsProcessor(1.5)(ids, want)
    torch.testing.assert_close(got, want)


def test_presence_and_frequency_look_at_the_output_and_the_path_alone() -> None:
    x = torch.zeros(1, 6)
    s = Sampling(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    got = sampling.penalise(x, [s], [([0, 0, 1], [1, 2, 2])], torch.tensor([[2, 4]]))
    assert got.tolist() == [[0.0, -0.75, -1.25, 0.0, -0.75, 0.0]]


def test_rows_of_other_penalties_are_left_alone() -> None:
    x = torch.randn(3, 8, generator=g())
    x[1, 0] = -INF
    strict = Sampling(temperature=1.0, repetition_penalty=2.0, presence_penalty=1.0)
    history = [([1], [2])] * 3
    path = torch.tensor([[1], [1], [1]])
    got = sampling.penalise(x, [PLAIN, strict, GREEDY], history, path)
    assert torch.equal(got[[0, 2]], x[[0, 2]])
    assert torch.equal(got[1], sampling.penalise(x[1:2], [strict], history[:1], path[:1])[0])
    assert got[1, 0] == -INF
    assert sampling.penalise(x, [PLAIN] * 3, history, path) is x
    assert sampling.penalise(x.bfloat16(), [strict] * 3, history).dtype == torch.float32


# --- draw

MIXED = (
    Sampling(temperature=0.8),
    GREEDY,
    Sampling(temperature=0.8),
    Sampling(temperature=1.2, top_k=5),
    Sampling(temperature=0.5, top_p=0.6),
    Sampling(temperature=1.2, top_k=5),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_is_drawn_as_if_alone(dtype: torch.dtype) -> None:
    for v in (5, 63, 1027):
        x = (torch.randn(6, v, generator=g(v)) * 2).to(dtype)
        noise = gumbels(range(6), range(6), torch.arange(v))
        together = sampling.draw(x, MIXED, noise)
        alone = [sampling.draw(x[i : i + 1], MIXED[i : i + 1], noise[i : i + 1]) for i in range(6)]
        assert torch.equal(together, torch.cat(alone))
        for i, s in enumerate(MIXED):
            want = sampling.narrow(x[i], s) + s.temperature * noise[i]
            assert int(together[i]) == int(want.argmax())
    assert sampling.draw(x, [GREEDY] * 6, None).shape == (6,)


def test_scaled_noise_is_not_fused() -> None:
    """The same sums, bit for bit, in every place of a batch: ties of equal logits and equal noise stay ties."""
    v = 37  # body and tail of any vector width
    noise = torch.full((4, v), 1.2345678)
    x = torch.full((4, v), 0.1234567)
    assert sampling.draw(x, [Sampling(temperature=0.7)] * 4, noise).tolist() == [0] * 4


@pytest.mark.parametrize(
    "s",
    [PLAIN, Sampling(temperature=0.6), Sampling(temperature=1.5, top_k=4), Sampling(temperature=0.9, top_p=0.8)],
    ids=range(4),
)
def test_draws_follow_the_law(s: Sampling) -> None:
    """G-test of 2e5 draws with the real noise; 99 % power at TV 0.01."""
    v, n = 8, 200_000
    x = torch.randn(v, generator=g(4)) * 1.5
    p = sampling.law(x.double(), s)
    noise = gumbels([11] * n, range(n), torch.arange(v))
    counts = torch.bincount(sampling.draw(x.expand(n, v), [s] * n, noise), minlength=v).double()
    assert bool((counts[p == 0] == 0).all())
    live = p > 0
    chi = 2 * float((counts[live] * (counts[live] / (n * p[live])).log()).sum())
    assert stats.chi2.sf(chi, int(live.sum()) - 1) > 1e-4


# --- rank and sample


def rows(b: int, laws: tuple[Sampling, ...], rule: Rule = "coupled", v: int = 50, serial: int = 0) -> Rows:
    start = tuple(10 * i for i in range(b))
    root = torch.zeros(b, dtype=torch.long)
    return Rows(root, torch.tensor(start), start, tuple(range(b)), (serial,) * b, laws, rule, (9,) * b, GumbelNoise(v))


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
def test_greedy_ranking_is_that_of_eagle(rule: Rule) -> None:
    x = torch.randn(2, 3, 50, generator=g())
    tokens, confidence = sampling.rank(x, rows(2, (GREEDY, GREEDY), rule), 2, 4)
    top = x.log_softmax(-1).topk(4)
    assert torch.equal(tokens, top.indices)
    torch.testing.assert_close(confidence, top.values)


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_only_coupled_ranks_by_noise(rule: Rule) -> None:
    x = torch.randn(2, 3, 50, generator=g())
    tokens, _ = sampling.rank(x, rows(2, (PLAIN, PLAIN), rule), 1, 4)
    assert torch.equal(tokens, x.topk(4).indices)


def test_coupled_ranking() -> None:
    """r = log q + T * G(position + depth), its confidence softmax(r / s)."""
    laws = (Sampling(temperature=0.5), GREEDY, Sampling(temperature=1.3, top_k=2))
    x = torch.randn(3, 2, 50, generator=g())
    r = rows(3, laws)
    for depth, scale in ((1, 1.0), (3, 0.5)):
        noise = gumbels(r.seeds, [p + depth for p in r.start], torch.arange(50))
        gumbel = x.log_softmax(-1) + torch.tensor([0.5, 0.0, 1.3]).view(3, 1, 1) * noise[:, None]
        top = gumbel.topk(5)
        tokens, confidence = sampling.rank(x, r, depth, 5, scale)
        assert torch.equal(tokens, top.indices)
        torch.testing.assert_close(confidence, (gumbel / scale).log_softmax(-1).gather(-1, top.indices))
        assert bool((confidence <= 0).all())


def peaked(n: int, v: int) -> Tensor:
    """Logits like a language model's: the probability falls with a power of the rank."""
    ranks = torch.stack([torch.randperm(v, generator=g(i)) for i in range(n)]) + 1.0
    return -2.5 * ranks.log() + 0.3 * torch.randn(n, v, generator=g(v))


def test_the_drafter_that_is_the_target_is_always_right() -> None:
    """Its best candidate is the target's own draw, at any temperature and under any filter."""
    laws = (PLAIN, Sampling(temperature=0.6), Sampling(temperature=1.4, top_k=3), Sampling(temperature=1.0, top_p=0.5))
    for v in (50, 5000):
        x = peaked(4, v)[:, None]
        r = rows(4, laws, v=v)
        drawn = sampling.draw(x[:, 0], laws, r.noise(1))
        tokens, _ = sampling.rank(x, r, 1, 1, warp=True)
        assert torch.equal(tokens[:, 0, 0], drawn)


def test_pooling_changes_little() -> None:
    """Above 4,096 tokens only the best 64 of q are raced: of the best four by noise, nearly all are among them."""
    x = peaked(100, 5000).view(2, 50, 5000)
    r = rows(2, (PLAIN, PLAIN), v=5000)
    tokens, confidence = sampling.rank(x, r, 1, 4)
    gumbel = x.log_softmax(-1) + r.noise(1)[:, None]
    pool = x.topk(64).indices
    inside = torch.full_like(gumbel, -INF).scatter(-1, pool, gumbel.gather(-1, pool))
    assert torch.equal(tokens, inside.topk(4).indices)
    assert float((tokens[..., :1] == gumbel.argmax(-1, keepdim=True)).float().mean()) > 0.95
    torch.testing.assert_close(confidence, inside.log_softmax(-1).gather(-1, tokens))
    assert sampling.rank(x, r, 1, 100)[0].shape == (2, 50, 100), "never fewer than k"
    assert sampling.rank(x[..., :3], rows(2, (GREEDY,) * 2, v=3), 1, 9)[0].shape == (2, 50, 3)


def test_confidences_never_exceed_one() -> None:
    x = torch.zeros(1, 1, 8)
    x[..., 3] = 200.0
    for scale in (1.0, 0.3, 3.0):
        _, confidence = sampling.rank(x, rows(1, (GREEDY,), v=8), 1, 2, scale)
        assert float(confidence.max()) == 0.0


def many(b: int, serial: int = 0) -> Rows:
    root = torch.zeros(b, dtype=torch.long)
    seeds = tuple(range(b))
    return Rows(root, root, (0,) * b, seeds, (serial,) * b, (PLAIN,) * b, "rejection", (9,) * b, GumbelNoise(5))


@pytest.mark.parametrize("replacement", [False, True])
def test_children_are_drawn_from_q_in_order(replacement: bool) -> None:
    """G-test of ordered pairs: q(x) q(y) / (1 - q(x)) without replacement, q(x) q(y) with."""
    q = torch.tensor([0.45, 0.25, 0.2, 0.1, 0.0])
    n = 60_000
    pairs = sampling.sample(q.expand(n, 1, 5), 2, many(n), 3, replacement)[:, 0]
    counts = torch.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25).view(5, 5).double()
    law = q[:, None] * q[None] / (1 if replacement else 1 - q[:, None])
    if not replacement:
        law.fill_diagonal_(0)
    live = law > 0
    assert float(counts[~live].sum()) == 0
    chi = 2 * float((counts[live] * (counts[live] / (n * law[live])).log()).sum())
    assert stats.chi2.sf(chi, int(live.sum()) - 1) > 1e-4


def test_sampling_is_keyed_by_seed_round_and_node() -> None:
    """The same node in another batch or another call draws the same; nodes, rounds and races differ."""
    q = torch.full((40, 2, 5), 0.2)
    r = many(40)
    both = sampling.sample(q, 3, r, 4, True)
    assert torch.equal(sampling.sample(q[:, 1:], 3, r, 5, True), both[:, 1:])
    assert torch.equal(both[:, 0], sampling.sample(q[:, :1], 3, r, 4, True)[:, 0])
    for other in (both[:, 1], sampling.sample(q[:, :1], 3, many(40, 1), 4, True)[:, 0], both[:, 0].roll(1, -1)):
        assert 0.05 < float((other == both[:, 0]).float().mean()) < 0.4
    without = sampling.sample(q, 5, r, 0)
    assert torch.equal(without.sort(-1).values, torch.arange(5).expand(40, 2, 5))


def test_sampling_goes_on_where_q_has_run_out() -> None:
    q = torch.tensor([0.0, 1.0, 0.0]).expand(4, 1, 3)
    drawn = sampling.sample(q, 3, many(4))
    assert bool((drawn[:, 0, 0] == 1).all())
    assert torch.equal(drawn.sort(-1).values, torch.arange(3).expand(4, 1, 3))


def test_independence_of_draws_from_the_target_race() -> None:
    """Draft and target randomness of one (seed, number) are unrelated: else rejection would be biased."""
    n, v = 4000, 5
    q = torch.full((n, 1, v), 0.2)
    drafted = sampling.sample(q, 1, many(n))[:, 0, 0]
    target = sampling.draw(torch.zeros(n, v), [PLAIN] * n, gumbels(range(n), [0] * n, torch.arange(v)))
    table = torch.bincount(drafted * v + target, minlength=v * v).view(v, v).numpy()
    assert stats.chi2_contingency(np.maximum(table, 1)).pvalue > 1e-4
    assert math.isclose(float((drafted == target).float().mean()), 0.2, abs_tol=0.03)
