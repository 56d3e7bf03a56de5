"""Goodness-of-fit tests of counts, correction for many tests, and detectable deviations."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from jaxtyping import Float64
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2
from torch import Tensor


def g_test(counts: Float64[Tensor, " k"], expected: Float64[Tensor, " k"]) -> tuple[float, float]:
    """G with Williams' correction, and its p-value."""
    n, k = float(counts.sum()), len(counts)
    if k < 2:
        return 0.0, 1.0
    g = 2 * float(torch.special.xlogy(counts, counts / (n * expected)).sum())
    g /= 1 + (float((1 / expected).sum()) - 1) / (6 * n * (k - 1))
    return g, float(chi2.sf(g, k - 1))


def holm(values: Sequence[float], alpha: float) -> list[bool]:
    """The hypotheses that Holm's procedure rejects."""
    rejected = [False] * len(values)
    for rank, i in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        if values[i] > alpha / (len(values) - rank):
            break
        rejected[i] = True
    return rejected


def detectable(samples: int, cells: int, alpha: float, power: float) -> float:
    """The smallest TV over the cells that is detected with this power: chi-square distance >= (2 TV)^2."""
    if cells < 2:
        return 1.0
    bar = chi2.isf(alpha, cells - 1)
    excess = brentq(lambda x: ncx2.sf(bar, cells - 1, x) - power, 1e-3, 1e4)
    return min(1.0, sqrt(excess / samples) / 2)
