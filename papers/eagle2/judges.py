"""Li et al. 2024b: dynamic trees: confidence, the order of methods, value and re-ranking."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from math import sqrt

from ..figures import POWER, Check, Figure, beside, dispersed, higher, least, mean, quotient, true
from ..reliability import ece
from ..rows import Measured, Missing, Statement, judges
from .runs import PARTS, SIZES, STUDIED

STRAIGHT = 0.05  # the calibration error up to which confidence is close to acceptance
NODES, PROMPTS = 6, 40  # P1 to P6, the tree (2, 2); prompts that the paper's figure asks for
NEWS = "cnn-dm@600"


@judges("E2-F5", studies=STUDIED, SmolLM2="bw", demo="3")
def positions(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        groups = [{p.position: p for p in c.positions} for c in m.cells("positions", t) if c.positions]
        if not groups or not all(g[1].counts for g in groups):
            raise Missing(f"acceptance by position at T = {t} was not run")
        prompts = sum(len(g[1].counts) for g in groups)
        few = f" ({prompts} prompts, fewer than {PROMPTS})" if prompts < PROMPTS else ""
        for node in (1, 2):
            words = f"T = {t}, acceptance at P{node} varies between a task's prompts beyond chance{few}"
            yield lambda: dispersed(words, [[(h, n) for h, n in g[node].counts] for g in groups if node in g])
        rates = [rate([g[node].counts for g in groups if node in g]) for node in range(1, NODES + 1)]
        for node in (1, NODES):
            yield lambda: extreme(t, node, rates)


def rate(counts: list[list[list[int]]]) -> Figure:
    """Acceptance at a position over all prompts."""
    hits, rounds = (sum(row[i] for task in counts for row in task) for i in (0, 1))
    return Figure.share(hits, rounds)


def extreme(t: float, node: int, rates: list[Figure]) -> Check:
    """The statement that P1 is accepted most often of all positions, or P6 least."""
    mine, rest = rates[node - 1], [f for i, f in enumerate(rates) if i != node - 1]
    if node == 1:
        return higher(f"T = {t:g}, P1 over the next", mine, max(rest, key=lambda f: f.value))
    return higher(f"T = {t:g}, the next over P{node}", min(rest, key=lambda f: f.value), mine)


@judges("E2-F6", studies=STUDIED, SmolLM2="bw")
def confidence(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        bins = m.bins("confident", t)
        n = sum(b.count for b in bins)
        pairs = [(a, b) for i, a in enumerate(bins) for b in bins[i + 1 :]]
        up = sum(a.acceptance < b.acceptance for a, b in pairs) / len(pairs)
        yield true(f"T = {t}, acceptance rises with confidence in 90 % of pairs of bins", up >= 0.9, f"{up:.0%}")
        error, half = ece(bins), 1.96 * sqrt(sum(b.count * b.acceptance * (1 - b.acceptance) for b in bins)) / n
        figure = Figure(error, max(0.0, error - half), error + half)
        check = least(
            f"T = {t}, the calibration error at most {STRAIGHT:g}", Figure(-error, -figure.high, -figure.low), -STRAIGHT
        )
        yield Check(
            check.words, check.outcome, f"{figure} of {n:,} nodes", f"error {figure.short}", f"{POWER * half:.3f}"
        )


def published_order(m: Measured) -> list[str]:
    """The methods, the paper's best first: T = 0, the two Vicunas, which all methods were run on."""
    names = ("EAGLE-2", "EAGLE", "Hydra", "Medusa", "SpS", "PLD", "Lookahead")
    where = "Table 1; Vicuna {}; mean; {}; tau; T=0"
    gains = {n: sum(float(m.evidence.span(where.format(s, n), "eagle2")) for s in ("7B", "13B")) for n in names}
    return sorted(names, key=lambda name: -gains[name])


@judges("E2-T1", SmolLM2="bcw", demo="o3")
def order(m: Measured) -> Iterator[Statement]:
    gain = 1 + int(re.findall(r"(\d+)-\d+ %", m.evidence.claims["E2-T1"]["finding"])[0]) / 100
    for a, b in pairwise(published_order(m)):
        yield lambda: higher(f"tau at T = 0, {a} over {b}", m(a, 0), m(b, 0))
    for t in (0, 1):
        over = f"tau of EAGLE-2 over EAGLE's at T = {t}"
        yield lambda: least(f"{over}, {gain:g} or more", quotient(m("EAGLE-2", t), m("EAGLE", t)), gain)
    yield lambda: beside("tau at T = 1, EAGLE-2 and EAGLE", m("EAGLE-2, coupled", 1), m("EAGLE, coupled", 1))
    yield lambda: least(f"speed-up of EAGLE-2 over EAGLE's at T = 0, {gain:g} or more",
                        quotient(m("EAGLE-2", 0, "speedup"), m("EAGLE", 0, "speedup")), gain)  # fmt: skip
    yield lambda: summaries(m)


def summaries(m: Measured) -> Check:
    """The statement that prompt lookup gains most on summaries."""
    news, rest = list[Figure](), list[Figure]()
    for cell in m.cells("PLD", 0):
        if cell.tau:
            (news if cell.task == NEWS else rest).append(Figure.of(cell.tau))
    if not news:
        raise Missing("lookup on summaries was not run")
    return higher("tau of PLD at T = 0, on summaries over its mean of the other tasks", mean(news), mean(rest))


@judges("E2-T2", SmolLM2="6", demo="6")
def larger(m: Measured) -> Iterator[Statement]:
    raise Missing("targets of 8B and 70B need GPUs")
    yield


@judges("E2-T3", studies=STUDIED, SmolLM2="bw", demo="3")
def ablations(m: Measured) -> Iterator[Statement]:
    for size in SIZES:
        for t in (0, 1):
            for part in list(PARTS)[1:]:
                yield lambda: higher(
                    f"tau at T = {t}, {size}, the whole over it{part}", m(size, t), m(f"{size}{part}", t)
                )
            ranking, value = (f"{size} without {part}" for part in ("re-ranking", "value"))
            yield lambda: higher(
                f"tau at T = {t}, {size}, without re-ranking over without value", m(ranking, t), m(value, t)
            )
