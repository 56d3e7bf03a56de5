"""The block drafter's objective: against loops, against decoding, linear starts, bad options."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from objective_world import ROWS, VOCAB, cross_entropy, equals_loops, opened, packed, states, target, texts, value
from objective_world import build as fresh
from torch import Tensor

from outrider.backends.torch import HFTarget
from outrider.drafters import block as network
from outrider.params import InputError
from outrider.training.features import see
from outrider.training.objectives import block
from outrider.training.sizes import FewSizes

TAPS = (1, 3)


def build(of: HFTarget, words: list[int] = (), **options: Any) -> Any:
    given = {"taps": TAPS, "block": 4, "layers": 2, "pair_rank": 5, "anchors": 99, **options}
    objective = fresh("block", of, words, **given)
    if objective.net.config.pair_head != "none":
        torch.nn.init.normal_(objective.net.markov_w2.weight)
    for name, p in objective.net.named_parameters():
        if "_conv." in name or name == "seed.weight":
            torch.nn.init.normal_(p, std=0.3)
    return objective


def alone(of: HFTarget, objective: Any, words: list[int], anchor: int) -> Tensor:
    """Normed states [block, h] of one anchor's slots, its context and block computed by themselves."""
    net, layers, size = objective.net, states(of, words), objective.net.config.block
    features = torch.cat([layers[tap] for tap in TAPS], -1)[None, :anchor]
    turn = net.rope.at(torch.arange(anchor + size)[None], features.dtype)
    keys, values = net.keys_values(net.context(features), turn[:, :anchor])
    context = net.context(features)
    x = torch.cat([of.embed(torch.tensor([[words[anchor]]])), net.mask_embedding.expand(1, size - 1, -1)], 1)
    if net.config.seeded:
        seeds = torch.cat([context[0, -1] if anchor else 0 * x[0, 0], x[0, 0]])
        x = x + (net.seed.weight @ seeds).view(x.shape)
    seen = torch.ones(size, size, dtype=torch.bool)
    seen = seen.tril() if net.config.causal else seen
    own = torch.zeros(size, size, dtype=features.dtype).masked_fill_(~seen, -math.inf)
    mask = torch.cat([torch.zeros(size, anchor, dtype=features.dtype), own], 1)[None, None]
    return net(x, turn[:, anchor:], keys, values, mask)[0]


def slow(of: HFTarget, objective: Any, words: list[int], learn: list[bool]) -> tuple[float, float]:
    """The loss of one text and its weight, anchor by anchor and slot by slot."""
    net, config, last = objective.net, objective.net.config, states(of, words)[-1]
    ids = net.ids().tolist() if net.ids() is not None else list(range(VOCAB))
    total = weight = 0.0
    pace = objective.dpace
    for anchor in range(len(words) - 1):
        if not (learn[anchor] and learn[anchor + 1]):
            continue
        made, block = alone(of, objective, words, anchor), []
        for k in range(config.drafts):
            label = anchor + k + 1
            if label >= len(words) or not learn[label]:
                continue
            teacher = of.head(last[label - 1])
            if words[label] not in ids:
                continue
            state = made[k if config.sample_from_anchor else k + 1]
            student = of.head(state) if net.ids() is None else net.lm_head(state)
            if config.pair_head != "none":
                gate = net.pair_hidden.weight @ state if config.pair_head == "selector" else 1.0
                student = student + net.markov_w2.weight @ (net.markov_w1.weight[words[label - 1]] * gate)
            w = math.exp(-k / objective.decay) if objective.decay else 1.0
            likely = torch.stack([teacher[i] for i in ids])
            apart = (state - last[label - 1]).abs()
            far = torch.where(apart < 1, 0.5 * apart**2, apart - 0.5).mean()
            error = float(cross_entropy(student, likely.softmax(-1)) + objective.regress * far)
            block.append((w, error, student.softmax(-1)[likely.argmax()]))
        for k, (w, loss, _) in enumerate(block):
            if pace:
                reach = [math.prod((1 - pace) * float(q) + pace for *_, q in block[: i + 1]) for i in range(len(block))]
                w = sum(reach[k:])
            total += w * loss
            weight += w
    return total, weight


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_vocab": 40, "decay": 2.0, "dpace": 0.0, "regress": 0.0, "seeded": False},
        {"draft_vocab": 40, "dpace": 0.0},
        {"causal": False, "sample_from_anchor": False, "pair_head": "none", "layers": 1},
        {"causal": False, "sample_from_anchor": False, "pair_head": "selector", "conv": 2},
    ],
)
def test_loss_equals_loops_over_anchors_and_slots(options: dict[str, Any]) -> None:
    """Several texts in a row, blocks that extend beyond a text's end, turns that are not learned."""
    of, rows = target(), [texts(i, sizes) for i, sizes in enumerate(ROWS)]
    equals_loops(of, build(of, [w for row in rows for words, _ in row for w in words], **options), rows, slow)


@pytest.mark.parametrize("from_anchor", [True, False])
def test_training_sees_what_decoding_sees(from_anchor: bool) -> None:
    """Slot states of an anchor equal those of the drafter when that anchor is the root of a round."""
    of, prompt = target(), [3, 1, 4, 1, 5, 9, 2]
    objective = build(of, sample_from_anchor=from_anchor)
    drafter = network.drafter(objective.net, of)
    batch = opened(of, drafter, prompt, 4)
    with torch.no_grad():
        result = drafter.logits(batch.drafting._hidden(batch.view()))[0]
        words = [*prompt, int(batch.root[0])]
        expected = of.head(alone(of, objective, words, len(prompt)))
    torch.testing.assert_close(result, expected if from_anchor else expected[1:], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("options", [{}, {"pair_head": "selector", "loss": "lk"}, {"dpace": 0.0, "decay": 3.0}])
def test_logits_made_in_parts_teach_the_same(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all logits at once are too many they are made in parts: loss, hits and gradients stay what they are."""
    of, rows = target(), [texts(i, sizes) for i, sizes in enumerate([[9, 5], [11]])]
    objective, batch = build(of, **options), packed(rows, 16)
    results = []
    for limit, few in ((1 << 26, nullcontext()), (3 * VOCAB, nullcontext()), (3 * VOCAB, FewSizes())):
        monkeypatch.setattr(block, "AT_ONCE", limit)
        objective.net.zero_grad()
        with few:
            loss, weight, hits = objective(batch, see(of, batch, objective.taps))
        (loss / weight).backward()
        grads = {name: p.grad for name, p in objective.net.named_parameters() if p.grad is not None}
        results.append((loss, weight, hits, grads))
    loss, weight, hits, grads = results[0]
    for again, heavy, others, parts in results[1:]:
        torch.testing.assert_close((again, heavy), (loss, weight))
        torch.testing.assert_close(others, hits)
        torch.testing.assert_close(parts, grads)
    assert len(grads) > 5


def test_anchors_are_a_function_of_step_and_row() -> None:
    of, batch = target(), packed([texts(3, [40]), texts(4, [30])])
    objective = build(of, anchors=5)
    first, again = objective._anchors(batch, 7), objective._anchors(batch, 7)
    assert torch.equal(first[0], again[0])
    swapped = objective._anchors(batch.rows([1, 0]), 7)
    assert sorted(first[0][1][first[1][1]].tolist()) == sorted(swapped[0][0][swapped[1][0]].tolist())
    assert not torch.equal(first[0], objective._anchors(batch, 8)[0])


def test_a_text_without_anchors_costs_nothing() -> None:
    of = target()
    loss, weight, _ = value(build(of), of, packed([[([5, 6, 7], [False] * 3)]]))
    assert float(loss) == float(weight) == 0


@pytest.mark.parametrize("loss", ["kl", "ce", "tv", "lk"])
def test_losses_at_a_perfect_guess(loss: str) -> None:
    """tv and lk vanish where q = p; ce and kl are then the cross entropies that no q beats."""
    objective = build(target(), loss=loss)
    teacher = torch.randn(6, VOCAB).double()
    value, p = objective._loss(teacher, teacher), teacher.softmax(-1)
    expected = {
        "kl": -(p * p.log()).sum(-1),
        "ce": -p.max(-1).values.log(),
        "tv": torch.zeros(6).double(),
        "lk": torch.zeros(6).double(),
    }
    torch.testing.assert_close(value, expected[loss])
    student = torch.randn(6, VOCAB).double()
    q = student.softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    apart = {"tv": 1 - overlap, "lk": -overlap.log(), "kl": -(p * q.log()).sum(-1)}
    if loss in apart:
        torch.testing.assert_close(objective._loss(student, teacher), apart[loss])


def test_bad_options() -> None:
    of = target()
    for options, says in (
        ({"loss": "l2"}, "kl, ce, tv, lk"),
        ({"anchors": 0}, "anchors"),
        ({"dpace": 1.5}, "between 0 and 1"),
        ({"decay": 4.0}, "decay needs dpace=0"),
        ({"regress": -1.0}, "at least 0"),
        ({"taps": (1, 1)}, "distinct"),
    ):
        with pytest.raises(InputError, match=says):
            build(of, **options)


@pytest.mark.parametrize("from_anchor", [True, False])
def test_seeded_slots_begin_as_the_nearest_linear_maps(from_anchor: bool) -> None:
    of = target()
    objective = build(of, sample_from_anchor=from_anchor)
    net, hidden = objective.net, objective.net.config.layer.hidden
    batch = packed([texts(i, [30, 25, 4]) for i in range(60)], 64)
    seen = see(of, batch, objective.taps)
    objective.prepare([(batch.rows([i]), see(of, batch.rows([i]), objective.taps)) for i in range(60)])
    with torch.no_grad():
        given, true = objective._seeds(batch, seen)
        size = true.pow(2).mean((0, 1)).sqrt()
        torch.testing.assert_close(net.norm.weight.detach(), size)
        best = torch.linalg.lstsq(given, true.flatten(1)).solution
        made = (given @ net.seed.weight.T).unflatten(1, (-1, hidden))
        made[:, 0] += given[:, hidden:]  # the anchor's own vector
        far = ((made * size - true) ** 2).mean()
        assert float(far) == pytest.approx(float(((given @ best - true.flatten(1)) ** 2).mean()), rel=1e-3)
        words = texts(0, [30, 25, 4])[0][0]
        last = net.context(torch.cat([states(of, words)[tap] for tap in TAPS], -1)[9])
        first = net.seed.weight[:hidden] @ torch.cat([last, of.embed(torch.tensor(words[10]))])
        result = alone(of, objective, words, 10)[0]
        torch.testing.assert_close(result, net.norm(first + of.embed(torch.tensor(words[10]))))


def test_too_few_places_for_linear_maps_leave_slots_as_they_are() -> None:
    of = target()
    objective = build(of)
    before = objective.net.seed.weight.clone()
    batch = packed([texts(0, [9])])
    objective.prepare([(batch, see(of, batch, objective.taps))])
    assert torch.equal(objective.net.seed.weight, before)
