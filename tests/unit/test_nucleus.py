"""Drawing without a sort gives the token of the plain reference, and penalties touch what they did."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from outrider.backends.torch import nucleus, sampling
from outrider.backends.torch.noise import gumbels
from outrider.params import Sampling

SAMPLINGS = [
    Sampling(0.7, top_p=0.9), Sampling(1.0, top_p=0.5), Sampling(1.3, top_k=5), Sampling(1.0, top_k=20, top_p=0.8),
    Sampling(0.8, min_p=0.1), Sampling(2.0, top_k=30, top_p=0.95, min_p=0.02), Sampling(1.0), Sampling(0.0),
    Sampling(0.5, top_p=0.001), Sampling(1.0, min_p=1.0), Sampling(1.0, top_k=1), Sampling(1.0, top_p=0.999),
]  # fmt: skip


def rows(kind: str, b: int, v: int, seed: int) -> Tensor:
    """Logits of one kind."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(b, v, generator=source) * (0.01 if kind == "flat" else 4.0)
    if kind == "ties":
        x = (x / 2).round()
    elif kind == "steps":
        x = torch.arange(v).div(7, rounding_mode="floor").float().expand(b, -1)[:, torch.randperm(v, generator=source)]
        x = x * 0.05
    elif kind == "equal":
        x = torch.zeros(b, v)
    elif kind == "holes":
        x = x.masked_fill(torch.rand(b, v, generator=source) < 0.9, -math.inf)
    elif kind == "one":
        x = torch.full((b, v), -math.inf).scatter(1, torch.randint(v, (b, 1), generator=source), 1.5)
    elif kind == "half":
        x = x.bfloat16()
    return x


@pytest.mark.parametrize("kind", ["random", "flat", "ties", "steps", "equal", "holes", "one", "half"])
@pytest.mark.parametrize("v", [1, 2, 5, 63, 700, 9001])
def test_the_token_is_the_reference_s(kind: str, v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, whatever the sizes of candidates and blocks; `among` is also called where it must be undecided."""
    monkeypatch.setattr(nucleus, "LARGE", 0)
    monkeypatch.setattr(nucleus, "BLOCK", 4 if v < 9000 else 64)
    monkeypatch.setattr(nucleus, "FEW", 8)
    monkeypatch.setattr(nucleus, "MANY", 64)
    samplings = SAMPLINGS * 4
    ids = torch.arange(v, dtype=torch.int32)
    for seed in range(3):
        x = rows(kind, len(samplings), v, seed)

        def noise(index: Sequence[int], some: Tensor | None, seed: int = seed) -> Tensor:
            return gumbels([i + 100 * seed for i in index], [7] * len(index), ids if some is None else some)

        wanted = sampling.draw(x, samplings, noise(range(len(samplings)), None))
        assert torch.equal(nucleus.choose(x, samplings, noise), wanted)


def test_most_rows_are_decided_without_a_sort() -> None:
    params, v, b = Sampling(0.7, top_p=0.9), 20000, 64
    x = rows("random", b, v, 3)
    result, sure = nucleus.among(x, [params] * b, lambda ids: gumbels(range(b), [5] * b, ids), 1024)
    wanted = sampling.draw(x, [params] * b, gumbels(range(b), [5] * b, torch.arange(v, dtype=torch.int32)))
    assert sure.float().mean() > 0.9
    assert torch.equal(result[sure], wanted[sure])


def test_a_doubtful_boundary_is_left_to_the_reference() -> None:
    """Four equal scores, of which a nucleus of 0.6 keeps three by the sort's order: nobody but the sort knows which."""
    x = torch.full((1, 64), -40.0)
    x[0, [3, 9, 27, 50]] = 1.0
    _, sure = nucleus.among(x, [Sampling(1.0, top_p=0.6)], lambda ids: torch.zeros_like(ids, dtype=torch.float32), 8)
    assert not sure.any()


def plain_penalties(x: Tensor, params: Sampling, prompt: list[int], said: list[int]) -> list[float]:
    """The definition, token by token, in float32."""
    out = []
    for token, z in enumerate(x):
        z = z + torch.tensor(params.logit_bias.get(token, 0.0))
        factor, count = torch.tensor(params.repetition_penalty), torch.tensor(float(said.count(token)))
        if token in prompt or count:
            z = z * factor if z < 0 else z / factor
        out.append(
            float(z - params.presence_penalty * float(count > 0) - torch.tensor(params.frequency_penalty) * count)
        )
    return out


def test_penalties_by_definition() -> None:
    samplings = [
        Sampling(1.0, repetition_penalty=1.3), Sampling(0.0, presence_penalty=0.5, frequency_penalty=0.25),
        Sampling(1.0), Sampling(1.0, logit_bias={2: 5.0, 7: -1.0}, repetition_penalty=0.7),
        Sampling(logit_bias={0: 1.0}),
    ]  # fmt: skip
    x = rows("random", len(samplings), 11, 1)
    kept = x.clone()
    history = [([1, 2, 2], [3]), ([1], []), ([4], [4]), ([2, 9], [2, 5, 5]), ([0], [0])]
    path = torch.tensor([[3, 1], [6, 6], [4, 4], [7, 5], [0, 1]])
    made = sampling.penalise(x, samplings, history, path)
    for i, params in enumerate(samplings):
        assert made[i].tolist() == plain_penalties(x[i], params, history[i][0], history[i][1] + path[i].tolist())
    assert torch.equal(x, kept), "the target's own logits stay"


def test_distributions_of_a_batch_equal_those_of_its_rows() -> None:
    x = rows("ties", len(SAMPLINGS), 40, 2).double()
    assert torch.equal(
        sampling.distributions(x, SAMPLINGS),
        torch.stack([sampling.distribution(r, s) for r, s in zip(x, SAMPLINGS, strict=True)]),
    )
