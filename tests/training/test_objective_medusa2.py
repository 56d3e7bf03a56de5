"""Medusa-2 and self-distillation: two losses, two stages, an adapter that can be taken off, what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from objective_world import continued, cross_entropy, decoded, overfit, packed, sharp, states, target, texts, value
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider import drafters
from outrider.backends.torch import HFTarget
from outrider.params import InputError
from outrider.training import objectives
from outrider.training.data import Batch
from outrider.training.features import TargetFeatures, see

pytest.importorskip("peft")


def build(of: HFTarget, spread: float = 0.0, **options: Any) -> Any:
    """`spread`: how far adapter and heads are from their start."""
    torch.manual_seed(1)
    objective = objectives.build("medusa2", of, [], {"rank": 4, "alpha": 4, **options})
    objective.to(of.dtype)
    with torch.no_grad():
        for p in objective.parameters():
            p.add_(spread * torch.randn_like(p))
    return objective


def batch() -> Batch:
    return packed([texts(0, [9, 5]), texts(1, [11])])


def gradients(objective: Any, of: HFTarget, step: int) -> tuple[Tensor, Tensor]:
    """Of the heads, and of the adapter, flat."""
    objective.zero_grad()
    objective(batch(), TargetFeatures({}), step)[0].backward()
    heads, low = ([p.grad for p in g["params"]] for g in objective.groups())
    return tuple(torch.cat([torch.zeros(1) if g is None else g.flatten() for g in gs]) for gs in (heads, low))  # type: ignore[return-value]


@pytest.mark.parametrize("distil", [False, True])
def test_loss_equals_loops_over_positions(distil: bool) -> None:
    of, before = target(), target()
    objective = build(of, 0.1, distil=distil, weight=0.3, heads=2)
    rows = [texts(0, [9, 5]), texts(1, [11])]
    expected, count = 0.0, 0
    with torch.no_grad():
        for words, learn in [text for row in rows for text in row]:
            features, old = states(of, words)[-1], states(before, words)[-1]
            assert not torch.allclose(features, old)
            for t in range(len(words) - 1):
                if not learn[t + 1]:
                    continue
                count, student = count + 1, of.head(features[t])
                if distil:
                    p = before.head(old[t]).softmax(-1)
                    expected += float(cross_entropy(student, p) + (p * p.log()).sum())
                else:
                    expected -= float(student.log_softmax(-1)[words[t + 1]])
            for t in range(len(words) - 2):
                if learn[t + 2]:
                    for k, made in enumerate(objective.heads.net(features[t]), 1):
                        if t + 1 + k < len(words) and learn[t + 1 + k]:
                            expected -= 0.3 * 0.8**k * float(made.log_softmax(-1)[words[t + 1 + k]])
        loss, weight, _ = value(objective, of, packed(rows))
    assert float(weight) == count
    assert float(loss) == pytest.approx(expected, rel=2e-5)


def test_two_stages() -> None:
    """First the heads alone; then the backbone feels the heads by and by. The loss itself does not jump."""
    of = target()
    objective = build(of, 0.1, heads_only=2, ramp=4, weight=5.0)
    losses = {float(value(objective, of, batch(), step)[0]) for step in range(8)}
    assert max(losses) - min(losses) < 1e-4 * max(losses)
    resting = gradients(objective, of, 1)
    assert float(resting[1].abs().max()) == 0
    assert [objective.backbone_scale(step) for step in range(7)] == [0, 0, 0.25, 0.5, 0.75, 1, 1]
    steps = [gradients(objective, of, step) for step in (2, 3, 5)]
    for heads, _ in steps:
        torch.testing.assert_close(heads, resting[0], rtol=1e-4, atol=1e-5)
    quarter, half, full = (low for _, low in steps)
    torch.testing.assert_close(half - quarter, (full - quarter) / 3, rtol=1e-3, atol=1e-4)
    objective.weight = 0.0
    language = gradients(objective, of, 5)[1]
    torch.testing.assert_close(full - language, 4 * (quarter - language), rtol=1e-3, atol=1e-4)


def test_heads_learn_four_times_as_fast() -> None:
    of = target()
    objective = build(of)
    heads, low = objective.groups()
    assert (heads["scale"], low["scale"]) == (4.0, 1.0)
    trained = {id(p) for p in of.model.parameters() if p.requires_grad}
    assert trained == {id(p) for p in low["params"]}
    assert {id(p) for p in objective.parameters()} == trained | {id(p) for p in heads["params"]}
    assert objectives.build("medusa2", target(), [], {"distil": True}).weight == 0.01  # type: ignore[attr-defined]


def test_distillation_begins_at_nothing() -> None:
    of = target()
    objective = build(of, distil=True, weight=0.0)
    assert abs(float(value(objective, of, batch())[0])) < 1e-5
    heads, low = gradients(objective, of, 0)
    assert float(heads.abs().max()) == 0
    assert float(low.abs().max()) < 1e-5


def test_what_is_written_is_the_changed_target_and_its_heads(tmp_path: Path) -> None:
    of = sharp()
    words = continued(of, [3, 1, 4, 1, 5], 14)
    objective = build(of, heads_only=10, ramp=10)
    hits = overfit(objective, of, packed([[(words, [False] * 5 + [True] * 14)]]), rate=1e-3)
    assert min(hits.values()) == 1.0, hits
    objective.save(tmp_path / "d")
    assert json.loads((tmp_path / "d" / "config.json").read_text())["lossy"] is True
    assert "not the original" in json.loads((tmp_path / "d" / "target" / "config.json").read_text())["outrider_changed"]
    changed = HFTarget(AutoModelForCausalLM.from_pretrained(tmp_path / "d" / "target", dtype=torch.float32))
    new, old = states(changed, words)[-1], states(sharp(), words)[-1]
    torch.testing.assert_close(new, states(of, words)[-1], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(new, old, atol=1e-2)
    text = continued(changed, words[:5], 12)
    for target_now in (of, changed):  # the one in training, and the one that was written
        output, usage = decoded(target_now, drafters.load(f"medusa:{tmp_path / 'd'}", target_now), words[:5], 12, 4)
        assert output == text[5:]
        assert usage.accepted == usage.drafted > 0
    with objective.adapter.off():
        torch.testing.assert_close(states(of, words)[-1], old)


def test_the_target_is_not_read_beforehand() -> None:
    of = target()
    assert see(of, batch(), build(of).taps) == TargetFeatures({})


def test_bad_options() -> None:
    with pytest.raises(InputError, match="rank"):
        build(target(), rank=0)
    with pytest.raises(InputError, match="ramp must be at least 0"):
        build(target(), ramp=-1)
