"""Medusa-1 and Hydra against loops over heads and positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from objective_world import (
    VOCAB,
    SlowLayer,
    continued,
    cross_entropy,
    decoded,
    overfit,
    packed,
    sharp,
    states,
    target,
    texts,
    value,
)  # fmt: skip
from torch import Tensor

from outrider import drafters
from outrider.backends.torch import HFTarget
from outrider.training import objectives
from outrider.training.features import see


def build(of: HFTarget, name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    objective = objectives.build(name, of, [], options)
    with torch.no_grad():
        for p in objective.parameters():  # away from the start, where all heads are equal
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p))
    return objective.to(of.dtype)


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def medusa_head(objective: Any, k: int, feature: Tensor) -> Tensor:
    part = objective.net.heads[k - 1]
    for block in part.blocks:
        feature = feature + silu(block.linear.weight @ feature + block.linear.bias)
    return objective.target.head(feature) if part.lm_head is None else part.lm_head.weight @ feature


def hydra_head(objective: Any, k: int, feature: Tensor, spelled: list[int]) -> Tensor:
    part, embedding = objective.net.heads[k - 1], objective.target.model.get_input_embeddings().weight
    x = torch.cat([feature, *[embedding[token] for token in spelled]])
    for i, block in enumerate(part.blocks):
        kept = block.res_connection.weight @ x + block.res_connection.bias if i == 0 else x
        x = kept + silu(block.linear.weight @ x + block.linear.bias)
    return part.lm_head.weight @ x + part.lm_head.bias


def prefixed(objective: Any, features: Tensor) -> Tensor:
    """Hydra++'s layer, a position at a time."""
    prefix = objective.net.prefix
    slow = SlowLayer(prefix.layer)

    def norm(x: Tensor, by: Any) -> Tensor:
        return x / (x.pow(2).mean() + by.eps).sqrt() * by.weight

    keys, out = [], []
    for t, feature in enumerate(features):
        x = norm(feature, prefix.input_layernorm)
        keys.append(slow.key(x, t))
        out.append(norm(slow.out(x, feature, t, keys, []), prefix.norm))
    return torch.stack(out)


def slow(of: HFTarget, objective: Any, name: str, words: list[int], learn: list[bool]) -> tuple[float, int]:
    """The loss of one text, summed over heads and positions, and how many positions it has."""
    features = states(of, words)[-1]
    read = prefixed(objective, features) if name == "hydra" and objective.net.prefix is not None else features
    total, count = 0.0, 0
    for t in range(len(words) - 2):
        if not learn[t + 2]:
            continue
        count += 1
        for k in range(1, objective.net.config.heads + 1):
            place = t + 1 + k
            if place >= len(words) or not learn[place]:
                continue
            if name == "medusa":
                student = medusa_head(objective, k, read[t])
            else:
                student = hydra_head(objective, k, read[t], words[t + 1 : t + 1 + k])
            if objective.teacher:
                p = of.head(features[place - 1]).softmax(-1)
            else:
                p = torch.zeros(VOCAB).to(student)
                p[words[place]] = 1.0
            total += objective.decay**k * float(cross_entropy(student, p))
    return total, count


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("medusa", {}),
        ("medusa", {"heads": 3, "layers": 2, "decay": 0.5, "teacher": True}),
        ("medusa", {"share_head": True}),
        ("hydra", {}),
        ("hydra", {"heads": 3, "layers": 2, "teacher": False, "decay": 0.7}),
        ("hydra", {"prefix": True}),
    ],
)
def test_loss_equals_loops_over_heads_and_positions(name: str, options: dict[str, Any]) -> None:
    of = target()
    objective = build(of, name, **options)
    rows = [texts(i, sizes) for i, sizes in enumerate([[9, 5], [11], [3, 6, 2]])]
    with torch.no_grad():
        loss, weight, _ = value(objective, of, packed(rows, 16))
        found = [slow(of, objective, name, *text) for row in rows for text in row]
        alone = [value(objective, of, packed([[text]])) for row in rows for text in row if len(text[0]) > 2]
    assert float(weight) == sum(c for _, c in found)
    assert float(loss) == pytest.approx(sum(total for total, _ in found), rel=2e-5)
    assert float(loss) == pytest.approx(sum(float(a) for a, _, _ in alone), rel=1e-6)


def test_heads_begin_as_the_targets_own() -> None:
    """Untrained, every head foretells what the target's head does: the loss is that of the target's law of t + 1."""
    of, words = target(), texts(4, [9])[0][0]
    features = states(of, words)[-1]
    for name in ("medusa", "hydra"):
        objective = objectives.build(name, of, [], {"heads": 1, "decay": 1.0, "teacher": False})
        loss, _, _ = value(objective, of, packed([[(words, [True] * 9)]]))
        with torch.no_grad():
            expected = [-of.head(features[t]).log_softmax(-1)[words[t + 2]] for t in range(7)]
        assert float(loss) == pytest.approx(float(torch.stack(expected).sum()), rel=1e-5)


@pytest.mark.parametrize(("name", "options"), [("medusa", {}), ("hydra", {"prefix": True})])
def test_half_precision(name: str, options: dict[str, Any]) -> None:
    of, batch = target(torch.float32), packed([texts(2, [12, 9])])
    objective = build(of, name, **options)
    plain = value(objective, of, batch)[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, _ = objective(batch, see(of, batch, objective.taps))
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(plain), rel=0.03)
    assert all(bool(p.grad.isfinite().all()) for p in objective.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("name", "options"),
    [("medusa", {}), ("medusa", {"share_head": True, "layers": 2}), ("hydra", {}), ("hydra", {"prefix": True})],
)
def test_one_sample_is_learned_by_heart(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    of = sharp()
    words = continued(of, [3, 1, 4, 1, 5], 14)
    torch.manual_seed(1)
    objective: Any = objectives.build(name, of, [], options)
    hits = overfit(objective, of, packed([[(words, [False] * 5 + [True] * 14)]]))
    assert min(hits.values()) == 1.0, hits
    objective.save(tmp_path / "d")
    drafter = drafters.load(f"{name}:{tmp_path / 'd'}", of)
    output, usage = decoded(of, drafter, words[:5], 12, 4)
    assert output == words[5:17]
    assert usage.accepted == usage.drafted > 0
