"""Leviathan et al. 2023: the rule's distribution, the theorems, draft models and n-grams."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from scipy import stats

from .. import formulas as theory
from ..document import Cell, DistributionTest
from ..eagle2.runs import STUDIED
from ..figures import CLOSE, FAILS, HOLDS, NOISE, SIGNS, Check, Figure, beside, close, computed, higher, least
from ..rows import PAPERS, SPEEDS, Measured, Missing, Statement, judges
from .runs import GAMMAS

LEVELS = [i / 20 for i in range(1, 20)]  # of alpha, for the shapes of the figures
ENOUGH = 100_000  # sampled tokens of all tests


@judges("L-alg", studies={"demo": "demo_distributions"})
def rule(m: Measured) -> Iterator[Statement]:
    yield lambda: follows(m)
    for t in (0, 1):
        yield lambda: m.same_text(t, {"SmolLM2": "smollm2_taus", "demo": "drafters"}[m.model])


def follows(m: Measured) -> Check:
    """Tests of the sampled tokens of each method under `rejection`, of this paper's study and of the others'. What is
    refused, its share of the chance counted, is run again by another seed and with more tokens; that run decides."""
    first = []
    for study in (*(f"{paper}_{m.model.lower()}" for paper in PAPERS), STUDIED[m.model]):
        counted = tests(m, study)
        first += [*counted.items(), *((k, t) for k, t in tests(m, study + SPEEDS).items() if k not in counted)]
    again = tests(m, f"{m.model.lower()}_distributions")
    if not first and not again:
        raise Missing("no sampled tokens were tested")
    refused = [(name, test) for name, test in first if test.p * len(first) <= SIGNS]
    twice = [name for name, test in again.items() if test.p * len(again) <= SIGNS]
    fails = twice or any(name not in again or again[name].tokens <= test.tokens for name, test in refused)
    each = sorted(test.tokens for test in (*(test for _, test in first), *again.values()))
    tokens, middle = sum(each), each[len(each) // 2]
    seen = (stats.norm.isf(SIGNS / 2 / max(len(first), len(again))) + stats.norm.isf(0.2)) / (12 * middle) ** 0.5
    figures = f"{len(each)} tests, {tokens:,} tokens"
    for name, test in refused:
        more = f"again {again[name].p:.1g} of {again[name].tokens:,} tokens" if name in again else "not run again"
        figures += f"; {name}: p {test.p:.1g}, {more}"
    figures += "".join(f"; {name}, again: p {again[name].p:.1g}" for name in twice)
    outcome = FAILS if fails else HOLDS if tokens >= ENOUGH else NOISE
    words = "tokens sampled under `rejection` follow the target's distribution"
    power = f"a mean of u off by {seen:.3f} in a test of {middle:,} tokens"
    return Check(words, outcome, figures, f"{tokens:,} tokens", power)


def tests(m: Measured, file: str) -> dict[str, DistributionTest]:
    """Those of a file by method; none of a file that is not there."""
    return {
        r.method: r.distribution
        for r in (m.at(file).pooled if file in m.evidence.results else ())
        if r.temperature == 1 and r.distribution and not r.method.startswith("none") and "coupled" not in r.method
    }


@judges("L-tau", SmolLM2="w", demo="q")
def tokens(m: Measured) -> Iterator[Statement]:
    if m.model == "demo" and m.study not in m.evidence.results:
        yield from (of_t5(*row) for row in t5(m) if row[0].rule == "rejection")
        return
    for t in (0, 1):
        for gamma in GAMMAS:
            yield lambda: formula(m, f"chain of {gamma}", t, gamma)
    yield lambda: beside("tau of the chain of 5 at T = 1", m("chain of 5, coupled", 1))


def formula(m: Measured, name: str, t: float, gamma: int) -> Check:
    promised = theory.expected_tokens(m(name, t, "alpha").value, gamma)
    return close(f"tau of a {name} at T = {t:g} is the formula's but for {CLOSE:.0%}", m(name, t), promised)


def t5(m: Measured) -> list[tuple[Cell, theory.Comparison]]:
    """The T5 pair's cells, with what the theorems promised."""
    return [(c, c.theory) for c in m.at("t5").cells if c.theory]


def of_t5(cell: Cell, promised: theory.Comparison) -> Check:
    return close(
        f"tau of the T5 pair, gamma {promised.gamma}, T = {cell.temperature:g}", Figure.of(cell.tau), promised.tau
    )


@judges("L-38", studies={"demo": "t5"}, SmolLM2="w", demo="q")
def promised(m: Measured) -> Iterator[Statement]:
    words = "speed-up of a chain as promised, gamma {}, T = {:g}"
    if m.model == "demo":
        for c, p in t5(m):
            if c.rule == "rejection":
                yield close(words.format(p.gamma, c.temperature), Figure.of(c.speedup), p.promised)
        return
    for gamma in (1, 2, *GAMMAS):
        yield lambda: of_chain(m, gamma, words.format(gamma, 0))


def of_chain(m: Measured, gamma: int, words: str) -> Check:
    """A chain's speed-up beside what Theorem 3.8 promises of its acceptance and times."""
    (file, plain), (_, row) = (m.find(name, 0, "speedup") for name in ("none", f"chain of {gamma}"))
    if not (plain.round_ms and row.round_ms and row.alpha and row.speedup):
        raise Missing("the chains' times are not stored")
    m.at(file)
    c = row.round_ms.draft / gamma / plain.round_ms.verify
    return close(words, Figure.of(row.speedup), theory.speedup(row.alpha.value, gamma, c))


def printed(m: Measured, metric: str) -> Check:
    """The six rows of the table, computed, beside what was printed."""
    rows = m.evidence.published(f"numerical predictions (c = c_hat = 0); {metric}", m.paper)
    right = 0
    for row in rows:
        alpha, gamma = (word.split()[1] for word in row["target"].split(", "))
        of = theory.speedup if metric == "speedup" else theory.operations
        right += f"{of(float(alpha), int(gamma), 0.0):.2f}" == f"{float(row['value']):.2f}"
    return computed(f"{metric}, to two decimals as printed", right == len(rows), f"{right} of {len(rows)}")


@judges("L-311", ())
def operations(m: Measured) -> Iterator[Statement]:
    yield printed(m, "operations factor")


@judges("L-num", ())
def six_rows(m: Measured) -> Iterator[Statement]:
    yield printed(m, "speedup")
    yield printed(m, "operations factor")


@judges("L-F3", ())
def best_gamma(m: Measured) -> Iterator[Statement]:
    costs = (0.01, 0.02, 0.05, 0.1, 0.2)
    best = {(a, c): theory.optimal_gamma(a, c) for a in LEVELS for c in costs}
    grows = all(best[a, c] <= best[b, c] for a, b in pairwise(LEVELS) for c in costs)
    falls = all(best[a, c] >= best[a, d] for a in LEVELS for c, d in pairwise(costs))
    yield computed("the best gamma never falls with alpha", grows)
    yield computed("it never grows with c", falls)


@judges("L-F4", ())
def gains(m: Measured) -> Iterator[Statement]:
    gammas = (1, 2, 3, 5, 7, 10)
    up = all(theory.speedup(a, g, 0.0) < theory.speedup(b, g, 0.0) for a, b in pairwise(LEVELS) for g in gammas)
    down = all(theory.operations(a, g, 0.0) > theory.operations(b, g, 0.0) for a, b in pairwise(LEVELS) for g in gammas)
    yield computed("speed-up grows with alpha", up)
    yield computed("operations fall with alpha", down)


@judges("L-T2", SmolLM2="w", demo="3")
def temperatures(m: Measured) -> Iterator[Statement]:
    yield lambda: higher("alpha of the chain of 5, T = 0 over T = 1", *(m("chain of 5", t, "alpha") for t in (0, 1)))
    for t in (0, 1):
        yield lambda: higher(f"alpha at T = {t}, the larger draft model over the smaller", m("chain of 5", t, "alpha"),
                             m("smaller draft model", t, "alpha"))  # fmt: skip
    yield lambda: higher(
        "speed-up of the chain of 5, T = 0 over T = 1", *(m("chain of 5", t, "speedup") for t in (0, 1))
    )


@judges("L-T3", SmolLM2="w", demo="3")
def ngrams(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        yield lambda: least(f"alpha of unigrams at T = {t}, above 0", m("unigrams", t, "alpha"), 0.0)
        yield lambda: higher(
            f"alpha at T = {t}, bigrams over unigrams", m("bigrams", t, "alpha"), m("unigrams", t, "alpha")
        )
        yield lambda: higher(f"alpha at T = {t}, the network over bigrams", m("chain of 5", t, "alpha"),
                             m("bigrams", t, "alpha"))  # fmt: skip
