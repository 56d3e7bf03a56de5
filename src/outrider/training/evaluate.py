"""Evaluation of a drafter in training: held-out loss, and acceptance in decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..budgets.budgeter import FixedBudget
from ..core.protocols import Drafter, Target
from ..core.types import Usage
from ..engine import Engine, Request, generate
from .data import Batch, Document
from .features import TargetFeatures


@dataclass(frozen=True)
class Acceptance:
    """Of texts decoded past end of text: tokens per round (the target's own included), and alpha per position."""

    tau: float
    alpha: list[float]  # [d]: share of rounds accepting depth d + 1, of those that tested it
    rounds: int


def held_out_loss(
    objective: Any, batch: Batch, features_of: Callable[[Batch], TargetFeatures], rows: int
) -> tuple[float, dict[str, float]]:
    """The mean loss per position, and its parts."""
    was = objective.training
    objective.eval()
    total, weight = 0.0, 0.0
    parts: dict[str, list[tuple[float, float]]] = {}
    with torch.no_grad():
        for first in range(0, len(batch.keys), rows):
            part = batch.rows(range(first, min(first + rows, len(batch.keys))))
            loss, count, hits = objective(part, features_of(part))
            total, weight = total + float(loss), weight + float(count)
            for name, value in hits.items():
                if value == value:  # NaN for a batch without tests
                    parts.setdefault(name, []).append((float(value), float(count)))
    objective.train(was)
    return total / max(weight, 1.0), {name: mean(v) for name, v in parts.items()}


def mean(weighted: Sequence[tuple[float, float]]) -> float:
    """The mean of values by their weights."""
    return sum(value * weight for value, weight in weighted) / max(sum(weight for _, weight in weighted), 1e-9)


def prompts_of(documents: Sequence[Document], count: int, longest: int) -> list[list[int]]:
    """Prompts from held-out documents: up to the first token with loss, or a third of a plain text; their last
    `longest` tokens."""
    prompts: list[list[int]] = []
    for document in documents:
        first = document.learn.index(True) if True in document.learn else len(document.tokens)
        size = first if first > 4 else len(document.tokens) // 3
        prompt = list(document.tokens[max(0, size - longest) : size])
        if len(prompt) >= 4:
            prompts.append(prompt)
        if len(prompts) == count:
            break
    return prompts


def acceptance(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], tokens: int) -> Acceptance:
    """Decode the prompts at temperature 0, one by one, and count."""
    engine = Engine.of(target, drafter, FixedBudget(16, 5))
    usages: list[Usage] = []
    for i, prompt in enumerate(prompts):
        request = Request(prompt, i, tokens)
        row = None
        for piece in generate(engine, [request]):
            row = piece.row
        if row is not None:
            usages.append(row.usage)
    rounds, new = sum(u.rounds for u in usages), sum(u.new_tokens - 1 for u in usages)
    depth = max((len(u.tested_at) for u in usages), default=0)

    def at(counts: list[int], d: int) -> int:
        return counts[d] if d < len(counts) else 0

    tested = [sum(at(u.tested_at, d) for u in usages) for d in range(depth)]
    accepted = [sum(at(u.accepted_at, d) for u in usages) for d in range(depth)]
    alpha = [a / t for a, t in zip(accepted, tested, strict=True) if t]
    return Acceptance(new / rounds if rounds else 0.0, alpha, rounds)
