"""Leviathan et al. 2023: the rule, the theorems (computed here), T5 pairs and n-grams."""

from __future__ import annotations

from itertools import pairwise

from .. import formulas as theory
from ..document import Cell
from ..evidence import Evidence, finding
from ..figures import CLOSE, ONE, Check, Figure, close, higher, open_, true

PAPER = "Leviathan"
NGRAMS = "outrider bench --drafter 'ngram?n=1' --drafter 'ngram?n=2' --drafter model --budget 6x5 --out runs/ngrams"
LEVELS = [i / 20 for i in range(1, 20)]  # of alpha, for the shapes of the figures


@finding("L-alg", "outrider audit --rule rejection")
def rule(e: Evidence) -> list[Check]:
    from outrider.proofs.enumeration import exact

    found = [x.tv for x in exact() if x.rule == "rejection"]
    small = max(found) <= 1e-12
    words = f"total variation between text and law over {len(found)} kinds of drafts, all branches enumerated now"
    checks = [true(f"{words}: {'at most 1e-12' if small else f'{max(found):.1e}'}", small)]
    return [*checks, *(e.same_text("drafters", t, " under `coupled`") for t in (0, 1))]


@finding("L-tau", "t5", "Acceptances are neither independent nor of one rate, so the formula is a little high.")
def tokens(e: Evidence) -> list[Check]:
    checks = []
    for judge in ("rejection", "coupled"):
        rows = [(c.temperature, c.tau, promised) for c, promised in chains(e) if c.rule == judge and c.tau]
        t, tau, told = max(rows, key=lambda row: abs(row[1].value / row[2].tau - 1))
        words = f"tau within {CLOSE:.0%} of the formula under `{judge}`, the worst of {len(rows)} settings, "
        checks.append(close(f"{words}T = {t:g} and gamma {told.gamma}", Figure.of(tau), told.tau))
    return checks


def chains(e: Evidence) -> list[tuple[Cell, theory.Comparison]]:
    """The T5 pair's cells, with what the theorems promised."""
    return [(c, c.theory) for c in e.at("t5").cells if c.theory]


def computed(e: Evidence, metric: str) -> Check:
    """The six rows of the table, computed, beside what was printed."""
    rows = e.published(f"numerical predictions (c = c_hat = 0); {metric}", PAPER)
    right = 0
    for row in rows:
        alpha, gamma = (word.split()[1] for word in row["target"].split(", "))
        of = theory.speedup if metric == "speedup" else theory.operations
        right += f"{of(float(alpha), int(gamma), 0.0):.2f}" == f"{float(row['value']):.2f}"
    return true(f"{metric}, computed now to two decimals: {right} of {len(rows)} as published", right == len(rows))


@finding(
    "L-38",
    "t5",
    "The theorem takes a pass over the whole draft to cost what one over one token costs; here it costs more.",
)
def speed(e: Evidence) -> list[Check]:
    rows = [(Figure.of(c.speedup), promised.promised) for c, promised in chains(e)]
    side = sum((found.value > 1) == (promise > 1) for found, promise in rows)
    reached = sum(found.high >= promise for found, promise in rows)
    shares = sorted(found.value / promise for found, promise in rows)
    n, span = len(rows), f"{shares[0]:.0%} to {shares[-1]:.0%} of it"
    return [
        computed(e, "speedup"),
        true(f"T5 pair, on the promised side of plain decoding: {side} of {n} settings", side == n),
        true(f"T5 pair, as fast as promised: {reached} of {n} settings ({span})", reached == n),
    ]


@finding("L-311", "python -m papers.theory --table")
def operations(e: Evidence) -> list[Check]:
    return [computed(e, "operations factor")]


@finding("L-num", "python -m papers.theory --table")
def six_rows(e: Evidence) -> list[Check]:
    return [computed(e, metric) for metric in ("speedup", "operations factor")]


@finding("L-F3", "python -m papers.theory --plot theory.svg")
def best_gamma(e: Evidence) -> list[Check]:
    costs = (0.01, 0.02, 0.05, 0.1, 0.2)
    best = {(a, c): theory.optimal_gamma(a, c) for a in LEVELS for c in costs}
    grows = all(best[a, c] <= best[b, c] for a, b in pairwise(LEVELS) for c in costs)
    falls = all(best[a, c] >= best[a, d] for a in LEVELS for c, d in pairwise(costs))
    size = f"{len(LEVELS)} values of alpha and {len(costs)} of c, computed now"
    return [
        true(f"the best gamma never falls with alpha: {size}", grows),
        true(f"it never grows with c: {size}", falls),
    ]


@finding("L-F4", "python -m papers.theory --plot theory.svg")
def gains(e: Evidence) -> list[Check]:
    gammas = (1, 2, 3, 5, 7, 10)
    up = all(theory.speedup(a, g, 0.0) < theory.speedup(b, g, 0.0) for a, b in pairwise(LEVELS) for g in gammas)
    down = all(theory.operations(a, g, 0.0) > theory.operations(b, g, 0.0) for a, b in pairwise(LEVELS) for g in gammas)
    size = f"{len(LEVELS)} values of alpha and {len(gammas)} of gamma, c = 0, computed now"
    return [true(f"speed-up grows with alpha: {size}", up), true(f"operations fall with alpha: {size}", down)]


@finding("L-T2", "t5", "Both T5s learnt little; why their order of temperatures is the reverse was not looked into.")
def t5(e: Evidence) -> list[Check]:
    gamma = max(promised.gamma for _, promised in chains(e))
    mine = [c for c, promised in chains(e) if promised.gamma == gamma]
    cold = next(c for c in mine if c.temperature == 0)  # where all rules are one
    warm = next(c for c in mine if c.temperature == 1 and c.rule == "rejection")
    return [
        higher(f"alpha, gamma {gamma}, T = 0 over T = 1", Figure.of(cold.alpha), Figure.of(warm.alpha)),
        higher(f"speed-up, gamma {gamma}, T = 0 over T = 1", Figure.of(cold.speedup), Figure.of(warm.speedup)),
        open_("the order of drafter sizes in alpha and in time: one pair was trained"),
    ]


@finding(
    "L-T3", "untrained",
    "Our n-grams are bigrams of each row's own text, drafted as trees of two. tau stands for alpha, which this file "
    "does not hold. Few prompts.",
)  # fmt: skip
def ngrams(e: Evidence) -> list[Check]:
    def tau(name: str) -> Figure:
        return e.method("untrained", 0, name)

    return [
        higher("tau at T = 0, n-grams over plain decoding", tau("ngram"), ONE),
        higher("tau at T = 0, the draft model over n-grams", tau("model"), tau("ngram")),
        open_(f"alpha of unigrams and of bigrams; `{NGRAMS}` reports it"),
    ]
