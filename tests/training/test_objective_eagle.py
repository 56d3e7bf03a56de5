"""EAGLE and HASS against loops over positions and lists of keys; packing; noise; sizes; overfitting one sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from objective_world import (
    ROWS,
    VOCAB,
    build,
    cross_entropy,
    equals_loops,
    packed,
    passes,
    smooth_l1,
    states,
    target,
    texts,
    value,
)  # fmt: skip
from torch import Tensor

from outrider.backends.torch import HFTarget
from outrider.drafters._eagle import EagleNet
from outrider.nets.configs import INPUTS, EagleConfig
from outrider.nets.layer import LayerShape
from outrider.params import InputError
from outrider.training import objectives
from outrider.training.features import see


def slow(
    of: HFTarget, objective: Any, words: list[int], learn: list[bool], published: bool = False
) -> tuple[float, int]:
    """The loss of one text, summed over its positions, and how many these are (all passes')."""
    net, kind, o = objective.net, objective.net.config.inputs, objective
    features, embedding = states(of, words)[-1], of.model.get_input_embeddings().weight

    def inputs(read: Tensor, t: int) -> tuple[Tensor, Tensor]:
        shifted = embedding[words[t + 1]] if t + 1 < len(words) else torch.zeros_like(read)
        given = {
            "feature+shifted": torch.cat([shifted, read]),
            "feature+unshifted": torch.cat([embedding[words[t]], read]),
            "feature": read,
            "token": shifted,
        }[kind]
        x = net.fc(given)
        return x, x

    made = passes(net.layers[0], features, inputs, o.passes, published)
    total, count = 0.0, 0
    for j in range(1, o.passes + 1):
        for t in range(j - 1, len(words) - 2):
            if not learn[t + 2]:
                continue
            foretold, truth = made[j - 1][t], features[t + 1]
            student, p = of.head(foretold), of.head(truth).softmax(-1)
            loss = smooth_l1(foretold, truth) + o.cls * cross_entropy(student, p)
            if o.topk:
                for x in p.topk(o.k).indices:
                    loss = loss - o.topk * p[x] * student.log_softmax(-1)[x]
            total, count = total + o.beta ** (j - 1) * float(loss), count + 1
    return total, count


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("eagle", {"inputs": inputs, "noise": 0.0}) for inputs in INPUTS),
        ("hass", {"noise": 0.0}),
        ("hass", {"noise": 0.0, "passes": 5, "beta": 0.5, "topk": 0.5, "k": 3, "cls": 0.3}),
        ("hass", {"noise": 0.0, "passes": 3, "published": True}),
    ],
)
def test_loss_equals_loops_over_positions(name: str, options: dict[str, Any]) -> None:
    of, published = target(), bool(options.get("published"))
    objective = build(name, of, **options)
    rows = [texts(i, sizes) for i, sizes in enumerate(ROWS)]
    equals_loops(of, objective, rows, lambda *given: slow(*given, published), objective.passes)


@pytest.mark.parametrize("inputs", INPUTS)
def test_it_begins_as_the_nearest_linear_map(inputs: str) -> None:
    of = target()
    words = [texts(seed, [12, 9]) for seed in range(40)]
    batch = packed(words, 24)
    objective = build("eagle", of, inputs=inputs, noise=0.0)
    before = float(value(objective, of, batch)[0])
    objective.prepare(iter([(batch, see(of, batch, (-1,)))]))
    net, embedding = objective.net, of.model.get_input_embeddings().weight
    read, true = [], []
    for row in words:
        for text, learn in row:
            features = states(of, text)[-1]
            for t in range(len(text) - 2):
                if learn[t + 2]:
                    shown = embedding[text[t] if inputs == "feature+unshifted" else text[t + 1]]
                    parts = {"feature": [features[t]], "token": [shown]}.get(inputs, [shown, features[t]])
                    read.append(torch.cat(parts)), true.append(features[t + 1])
    x, y = torch.stack(read), torch.stack(true)
    exact = torch.linalg.lstsq(x, y).solution
    result, best = ((x @ w - y).square().sum() for w in (net.fc.weight.T, exact))
    assert best <= result <= 1.01 * best + 1e-6 * y.square().sum()
    features, embeds = torch.randn(2, 1, 3, of.hidden, dtype=of.dtype)
    torch.testing.assert_close(net(features, embeds, torch.arange(3)[None]), net.fc(net.given(features, embeds)))
    assert float(value(objective, of, batch)[0]) < before


def test_it_begins_at_random_by_option_or_with_too_little_text() -> None:
    of, few, many = target(), packed([texts(1, [8])]), packed([texts(seed, [12, 9]) for seed in range(40)], 24)
    for linear, batch in ((False, many), (True, few)):
        objective = build("hass", of, linear=linear)
        before = objective.net.fc.weight.clone()
        objective.prepare(iter([(batch, see(of, batch, (-1,)))]))
        assert torch.equal(objective.net.fc.weight, before)


def test_published_mask_is_another_one() -> None:
    of, rows = target(), [texts(3, [8])]
    losses = [value(build("hass", of, noise=0.0, published=p), of, packed(rows))[0] for p in (False, True)]
    assert abs(float(losses[0] - losses[1])) > 1e-3
    losses = [value(build("hass", of, noise=0.0, passes=1, published=p), of, packed(rows))[0] for p in (False, True)]
    assert float(losses[0]) == float(losses[1])  # pass 1 hides nothing


def test_noise() -> None:
    """Within its bounds, another one at every step, the same for a row wherever it lies, none in evaluation."""
    of, rows = target(), [texts(i, [12]) for i in range(3)]
    objective, batch = build("eagle", of), packed(rows)
    like = torch.zeros(3, 12, 32, dtype=torch.float64)
    noise = objective._noise(batch, like, 7)
    assert float(noise.abs().max()) <= 0.1
    assert float(noise.std()) == pytest.approx(0.2 / 12**0.5, rel=0.1)
    assert not torch.equal(noise, objective._noise(batch, like, 8))
    part = batch.rows([2, 0])
    assert torch.equal(objective._noise(part, like[:2], 7), noise[[2, 0]])
    learning, quiet = value(objective, of, batch)[0], value(objective.eval(), of, batch)[0]
    assert float(learning) != float(quiet)
    assert float(quiet) == float(value(build("eagle", of, noise=0.0), of, batch)[0])


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "intermediate", "billions"),
    [(4096, 32, 32, 11008, 0.24), (5120, 40, 40, 13824, 0.37), (8192, 64, 8, 28672, 0.99)],
)
def test_sizes_as_published(hidden: int, heads: int, kv_heads: int, intermediate: int, billions: float) -> None:
    shape = LayerShape(hidden, heads, kv_heads, 128, intermediate, hidden)
    with torch.device("meta"):
        net = EagleNet(EagleConfig(shape, 32000, hidden))
    assert round(sum(p.numel() for p in net.parameters()) / 1e9, 2) == billions


def test_bad_options() -> None:
    of = target()
    with pytest.raises(InputError, match="no loss"):
        build("hass", of, loss="best")
    with pytest.raises(InputError, match="at least 1"):
        build("hass", of, passes=0)
    with pytest.raises(InputError, match="no option 'passes'"):
        build("eagle", of, passes=2)
    assert objectives.options_of("eagle") == {
        "inputs": INPUTS[0],
        "noise": 0.1,
        "cls": 0.1,
        "draft_vocab": -1,
        "linear": True,
    }
    assert build("hass", of, k=500).k == VOCAB
