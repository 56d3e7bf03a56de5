"""Reliability diagrams: are drafted nodes accepted as often as their confidences say?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bin:
    """The pairs whose confidence lies in [low, high), in the last bin up to 1: how many, and the means."""

    low: float
    high: float
    count: int
    confidence: float
    acceptance: float


def reliability(pairs: Iterable[tuple[float, bool]], width: float = 0.05) -> list[Bin]:
    """The reliability diagram of (confidence, accepted?) pairs: its bins that are not empty."""
    last = max(1, round(1 / width)) - 1
    groups: dict[int, list[tuple[float, bool]]] = {}
    for confidence, hit in pairs:
        groups.setdefault(min(last, math.floor(confidence / width + 1e-9)), []).append((confidence, hit))
    return [
        Bin(
            round(k * width, 9), round((k + 1) * width, 9), len(groups[k]),
            math.fsum(c for c, _ in groups[k]) / len(groups[k]), sum(h for _, h in groups[k]) / len(groups[k]),
        )
        for k in sorted(groups)
    ]  # fmt: skip


def ece(bins: Sequence[Bin]) -> float:
    """The expected calibration error: the mean distance of acceptance from confidence, bins weighed by their counts."""
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.acceptance - b.confidence) for b in bins) / total if total else 0.0
