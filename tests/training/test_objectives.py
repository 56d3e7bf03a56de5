"""What holds for the objective of every drafter: gradients, half precision, and overfitting one sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from objective_world import build, continued, decoded, overfit, packed, sharp, target, texts, value

from outrider import drafters
from outrider.training.features import see

PARALLEL = {"taps": (0, 2, 3), "parallel": True, "passes": 4, "layers": 2, "mask_token": 7}
EAGLE3 = {"taps": (0, 2, 3)}
BLOCK = {"taps": (1, 3), "block": 4, "layers": 2, "pair_rank": 5, "anchors": 99}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle", {"noise": 0.0}), ("hass", {"noise": 0.0}), ("eagle3", EAGLE3), ("eagle3", PARALLEL), ("block", BLOCK),
        ("medusa", {}), ("hydra", {"prefix": True}),
    ],
)  # fmt: skip
def test_half_precision_changes_a_loss_by_rounding_alone(name: str, options: dict[str, Any]) -> None:
    of, batch = target(torch.float32), packed([texts(2, [12, 9])])
    objective = build(name, of, **options)
    with torch.no_grad():
        for p in objective.parameters():  # away from a start where parts are zero
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    plain = value(objective, of, batch)[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, _ = objective(batch, see(of, batch, objective.taps))
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(plain), rel=0.03)
    gradients = [p.grad for p in objective.net.parameters() if p.requires_grad]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize(
    ("name", "options", "weight"),
    [("hass", {"noise": 0.0}, "fc.weight"), ("eagle3", EAGLE3, "midlayer.mlp.up_proj.weight")],
)
def test_gradients_flow_through_all_passes(name: str, options: dict[str, Any], weight: str) -> None:
    """A numerical derivative of the loss in a weight that every pass uses."""
    of, batch = target(), packed([texts(5, [10])])
    objective = build(name, of, **options)
    seen, w = see(of, batch, objective.taps), objective.net.get_parameter(weight)
    objective(batch, seen)[0].backward()
    direction, step = torch.randn_like(w), 1e-3
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            w.add_(sign * step * direction)
            ends.append(float(objective(batch, seen)[0]))
            w.sub_(sign * step * direction)
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float((w.grad * direction).sum()), rel=5e-3)


@pytest.mark.parametrize(
    ("method", "name", "options", "depth"),
    [
        ("eagle", "eagle", {"noise": 0.0}, 1),  # pairs are learned with true features: a draft of one reads only those
        ("eagle", "hass", {"noise": 0.0, "passes": 4}, 4),
        ("eagle3", "eagle3", {**EAGLE3, "draft_vocab": 30, "passes": 5}, 5),
        ("block", "block", {**BLOCK, "draft_vocab": 30}, 4),
        ("medusa", "medusa", {}, 4),
        ("medusa", "medusa", {"share_head": True, "layers": 2}, 4),
        ("hydra", "hydra", {}, 4),
        ("hydra", "hydra", {"prefix": True}, 4),
    ],
)
def test_a_drafter_overfitted_to_a_sample_drafts_it(
    method: str, name: str, options: dict[str, Any], depth: int, tmp_path: Path
) -> None:
    of = sharp()
    words = continued(of, [3, 1, 4, 1, 5], 14)
    objective = build(name, of, words, **options)
    hits = overfit(objective, of, packed([[(words, [False] * 5 + [True] * 14)]]))
    assert min(hits.values()) == 1.0, hits
    objective.save(tmp_path / "d")
    output, usage = decoded(of, drafters.load(f"{method}:{tmp_path / 'd'}", of), words[:5], 12, depth)
    assert output == words[5:17]
    assert usage.accepted == usage.drafted > 0
