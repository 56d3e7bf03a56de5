"""Do sampled tokens of a lossless method follow the target's distribution? One test over all tokens.

For a token x drawn from a distribution p, with the vocabulary in falling order of p, u = P(tokens before x) + V p(x)
with V uniform is itself uniform on (0, 1) exactly if x follows p (a randomised probability integral transform). A
sampler that is too greedy gives small u too often, one that is too flat large ones. Each token is judged given its own
text, so the u of a run are independent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats

from outrider.bench import methods
from outrider.bench.cells import newest
from outrider.bench.runner import Group, Runner
from outrider.bench.types import Method, weights_of
from outrider.llm import LLM
from outrider.proofs.logits import logits

from .document import DistributionTest

BINS = 20  # of the histogram of u
LEAST = 200  # tokens: fewer do not tell distributions apart
REFUSED = 1e-6  # the probability that an honest method is refused


def softmax(scores: np.ndarray) -> np.ndarray:
    """Of each row."""
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def uniforms(llm: LLM, ids: Sequence[int], new: Sequence[int], temperature: float, dice: random.Random) -> list[float]:
    """u of every new token; see above."""
    p = softmax(logits(llm, ids, new) / temperature)
    at = np.array(new)[:, None]
    mine = np.take_along_axis(p, at, 1)
    before = (p > mine) | ((p == mine) & (np.arange(p.shape[1]) < at))
    below = (p * before).sum(1)
    return [a + dice.random() * q for a, q in zip(below.tolist(), mine[:, 0].tolist(), strict=True)]


def law_test(us: Sequence[float]) -> float | None:
    """The p-value of a test that these numbers are uniform on (0, 1); None of fewer than LEAST.

    Twice the smaller p of a chi-square test over BINS and of a test of the mean.
    """
    if len(us) < LEAST:
        return None
    counts = np.histogram(us, BINS, (0, 1))[0]
    shape = float(stats.chisquare(counts).pvalue)
    mean = (sum(us) / len(us) - 0.5) * math.sqrt(12 * len(us))
    return min(1.0, 2 * min(shape, float(2 * stats.norm.sf(abs(mean)))))


@dataclass
class Tests:
    """The u of a run, by cell; texts that several methods wrote are read once."""

    runner: Runner
    texts: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)
    cells: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)

    def add(self, group: Group, method: Method) -> DistributionTest | None:
        """Read a cell's texts; the test of the cell alone."""
        if group.temperature == 0 or not methods.lossless(method):
            return None
        llm, us = self.runner.models.llm(method.variant), list[float]()
        samples = [s for s in group.own(self.runner.store.samples) if s.method == method.name and not s.faults]
        for text in self.runner.texts(group, newest(samples)):
            key = (weights_of(method.variant), group.temperature, tuple(text.ids), tuple(text.new))
            if text.new and key not in self.texts:
                self.texts[key] = uniforms(llm, text.ids, text.new, group.temperature, random.Random(repr(key)))
            us += self.texts.get(key, [])
        self.cells[group.task.name, group.temperature, group.batch, method.name] = us
        return tested(us)

    def pooled(self) -> dict[tuple[float, int, str], DistributionTest]:
        """The tests over all tasks together, which are stronger, by (temperature, batch size, method)."""
        us: dict[tuple[float, int, str], list[float]] = {}
        for (_, *key), mine in self.cells.items():
            us.setdefault(tuple(key), []).extend(mine)
        return {key: test for key, mine in us.items() if (test := tested(mine))}


def tested(us: Sequence[float]) -> DistributionTest | None:
    """The test of these u; None of too few."""
    p = law_test(us)
    return None if p is None else DistributionTest(len(us), p)
