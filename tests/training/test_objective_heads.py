"""Medusa-1 and Hydra against loops over heads and positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from objective_world import (
    ROWS,
    VOCAB,
    SlowLayer,
    cross_entropy,
    equals_loops,
    normed,
    packed,
    states,
    target,
    texts,
    value,
)  # fmt: skip
from objective_world import build as fresh
from torch import Tensor
from torch.nn.functional import silu

from outrider.backends.torch import HFTarget


def build(of: HFTarget, name: str, **options: Any) -> Any:
    objective = fresh(name, of, **options)
    with torch.no_grad():
        for p in objective.parameters():  # away from the start, where all heads are equal
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p))
    return objective


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

    keys, out = [], []
    for t, feature in enumerate(features):
        x = normed(feature, prefix.input_layernorm)
        keys.append(slow.key(x, t))
        out.append(normed(slow.out(x, feature, t, keys, []), prefix.norm))
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
    rows = [texts(i, sizes) for i, sizes in enumerate(ROWS)]
    equals_loops(of, build(of, name, **options), rows, lambda *given: slow(*given[:2], name, *given[2:]))


def test_heads_begin_as_the_targets_own() -> None:
    """Untrained, every head predicts what the target's head does: the loss is that of its distribution of t + 1."""
    of, words = target(), texts(4, [9])[0][0]
    features = states(of, words)[-1]
    for name in ("medusa", "hydra"):
        objective = fresh(name, of, heads=1, decay=1.0, teacher=False)
        loss, _, _ = value(objective, of, packed([[(words, [True] * 9)]]))
        with torch.no_grad():
            expected = [-of.head(features[t]).log_softmax(-1)[words[t + 2]] for t in range(7)]
        assert float(loss) == pytest.approx(float(torch.stack(expected).sum()), rel=1e-5)
