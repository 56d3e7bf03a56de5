"""EAGLE and HASS against loops over positions and lists of keys; packing; noise; sizes; one sample learned by heart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from objective_world import (
    VOCAB,
    continued,
    cross_entropy,
    decoded,
    overfit,
    packed,
    passes,
    sharp,
    smooth_l1,
    states,
    target,
    texts,
    value,
)  # fmt: skip
from torch import Tensor

from outrider import drafters
from outrider.backends.torch import HFTarget
from outrider.drafters._eagle import EagleNet
from outrider.nets.configs import INPUTS, EagleConfig
from outrider.nets.layer import LayerShape
from outrider.params import InputError
from outrider.training import objectives
from outrider.training.features import see


def build(of: HFTarget, name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    objective = objectives.build(name, of, [], options)
    objective.to(of.dtype)
    return objective


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


ROWS = [[7, 5], [9], [3, 6, 2]]


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
    of = target()
    objective = build(of, name, **options)
    rows = [texts(i, sizes) for i, sizes in enumerate(ROWS)]
    with torch.no_grad():
        loss, weight, _ = value(objective, of, packed(rows, 14))
        found = [slow(of, objective, *text, bool(options.get("published"))) for row in rows for text in row]
    assert float(weight) * objective.passes == pytest.approx(sum(c for _, c in found))
    assert float(loss) == pytest.approx(sum(total for total, _ in found), rel=2e-5)


@pytest.mark.parametrize("inputs", INPUTS)
def test_it_begins_as_the_nearest_linear_map(inputs: str) -> None:
    of = target()
    words = [texts(seed, [12, 9]) for seed in range(40)]
    batch = packed(words, 24)
    objective = build(of, "eagle", inputs=inputs, noise=0.0)
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
    found, best = ((x @ w - y).square().sum() for w in (net.fc.weight.T, exact))
    assert best <= found <= 1.01 * best + 1e-6 * y.square().sum()
    features, embeds = torch.randn(2, 1, 3, of.hidden, dtype=of.dtype)
    torch.testing.assert_close(net(features, embeds, torch.arange(3)[None]), net.fc(net.given(features, embeds)))
    assert float(value(objective, of, batch)[0]) < before


def test_it_begins_by_chance_if_asked_or_if_there_is_too_little() -> None:
    of, few, many = target(), packed([texts(1, [8])]), packed([texts(seed, [12, 9]) for seed in range(40)], 24)
    for linear, batch in ((False, many), (True, few)):
        objective = build(of, "hass", linear=linear)
        before = objective.net.fc.weight.clone()
        objective.prepare(iter([(batch, see(of, batch, (-1,)))]))
        assert torch.equal(objective.net.fc.weight, before)


def test_published_mask_is_another_one() -> None:
    of, rows = target(), [texts(3, [8])]
    losses = [value(build(of, "hass", noise=0.0, published=p), of, packed(rows))[0] for p in (False, True)]
    assert abs(float(losses[0] - losses[1])) > 1e-3
    losses = [value(build(of, "hass", noise=0.0, passes=1, published=p), of, packed(rows))[0] for p in (False, True)]
    assert float(losses[0]) == float(losses[1])  # pass 1 hides nothing


def test_gradient_flows_through_all_passes() -> None:
    """A numerical derivative of the loss in one weight: nothing is detached between passes."""
    of, batch = target(), packed([texts(5, [9])])
    objective = build(of, "hass", noise=0.0)
    seen = see(of, batch, objective.taps)
    weight = objective.net.fc.weight
    objective(batch, seen)[0].backward()
    direction, step = torch.randn_like(weight), 1e-3
    slope = float((weight.grad * direction).sum())
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * step * direction)
            ends.append(float(objective(batch, seen)[0]))
            weight.sub_(sign * step * direction)
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=5e-3)


def test_rows_of_several_texts_are_sums_of_texts() -> None:
    of, rows = target(), [texts(i, sizes) for i, sizes in enumerate(ROWS)]
    objective = build(of, "hass", noise=0.0)
    loss, weight, _ = value(objective, of, packed(rows))
    alone = [value(objective, of, packed([[text]])) for row in rows for text in row]
    assert float(loss) == pytest.approx(sum(float(a) for a, _, _ in alone), rel=1e-6)
    assert float(weight) == pytest.approx(sum(float(w) for _, w, _ in alone))


def test_noise() -> None:
    """Within its bounds, another one at every step, the same for a row wherever it lies, none in evaluation."""
    of, rows = target(), [texts(i, [12]) for i in range(3)]
    objective, batch = build(of, "eagle"), packed(rows)
    like = torch.zeros(3, 12, 32, dtype=torch.float64)
    noise = objective._noise(batch, like, 7)
    assert float(noise.abs().max()) <= 0.1
    assert float(noise.std()) == pytest.approx(0.2 / 12**0.5, rel=0.1)
    assert not torch.equal(noise, objective._noise(batch, like, 8))
    part = batch.rows([2, 0])
    assert torch.equal(objective._noise(part, like[:2], 7), noise[[2, 0]])
    learning, quiet = value(objective, of, batch)[0], value(objective.eval(), of, batch)[0]
    assert float(learning) != float(quiet)
    assert float(quiet) == float(value(build(of, "eagle", noise=0.0), of, batch)[0])


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "intermediate", "billions"),
    [(4096, 32, 32, 11008, 0.24), (5120, 40, 40, 13824, 0.37), (8192, 64, 8, 28672, 0.99)],
)
def test_sizes_as_published(hidden: int, heads: int, kv_heads: int, intermediate: int, billions: float) -> None:
    shape = LayerShape(hidden, heads, kv_heads, 128, intermediate, hidden)
    with torch.device("meta"):
        net = EagleNet(EagleConfig(shape, 32000, hidden))
    assert round(sum(p.numel() for p in net.parameters()) / 1e9, 2) == billions


@pytest.mark.parametrize("name", ["eagle", "hass"])
def test_half_precision(name: str) -> None:
    of, batch = target(torch.float32), packed([texts(2, [12, 9])])
    objective = build(of, name, noise=0.0)
    seen = see(of, batch, objective.taps)
    plain = value(objective, of, batch)[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, _ = objective(batch, seen)
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(plain), rel=0.03)
    assert all(bool(p.grad.isfinite().all()) for p in objective.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["eagle", "hass"])
def test_one_sample_is_learned_by_heart(name: str, tmp_path: Path) -> None:
    of = sharp()
    words = continued(of, [3, 1, 4, 1, 5], 14)
    batch = packed([[(words, [False] * 5 + [True] * 14)]])
    objective = build(of, name, noise=0.0, **({"passes": 4} if name == "hass" else {}))
    hits = overfit(objective, of, batch)
    assert min(hits.values()) == 1.0, hits
    objective.save(tmp_path / "d")
    drafter = drafters.load(f"eagle:{tmp_path / 'd'}", of)
    depth = 4 if name == "hass" else 1  # EAGLE's pairs are learned with true features: a draft of one reads only those
    output, usage = decoded(of, drafter, words[:5], 12, depth)
    assert output == words[5:17]
    assert usage.accepted == usage.drafted > 0


def test_bad_options() -> None:
    of = target()
    with pytest.raises(InputError, match="no loss"):
        build(of, "hass", loss="best")
    with pytest.raises(InputError, match="at least 1"):
        build(of, "hass", passes=0)
    with pytest.raises(InputError, match="no option 'passes'"):
        build(of, "eagle", passes=2)
    assert objectives.options_of("eagle") == {
        "inputs": INPUTS[0],
        "noise": 0.1,
        "cls": 0.1,
        "draft_vocab": -1,
        "linear": True,
    }
    assert build(of, "hass", k=500).k == VOCAB
