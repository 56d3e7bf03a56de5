"""The papers' findings on SmolLM2-135M-Instruct, with the drafters of this repository for it.

tau, acceptance, confidences and texts are those of `smollm2_findings` and `smollm2_confidence`, which ran beside other
work and hold no times. Speeds are those of `smollm2_ships`. `smollm2_open` says what was not measured; a row that is in
neither needs no model.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise

import evidence
from evidence import SECOND, Evidence
from figures import (
    CLOSE,
    FAILS,
    HOLDS,
    NOISE,
    ONE,
    Check,
    Figure,
    close,
    difference,
    higher,
    least,
    mean,
    open_,
    quotient,
    true,
)
from outrider.bench import theory

from . import eagle, eagle2, hass

finding = partial(evidence.finding, of=SECOND)

COUNTED, CONFIDENT, SPEEDS = "smollm2_findings", "smollm2_confidence", "smollm2_ships"
CODE, MATHS, NEWS = "humaneval", "gsm8k", "cnn-dm@600"
CHAIN, TREE = "HASS chain, 6x5, coupled", "HASS, static"  # five drafted tokens in a row; EAGLE's tree of 26 nodes
FOUR, SIXTEEN = "HASS, 4 nodes", "HASS, 16 nodes"  # dynamic trees whose speeds are known
WEIGHTS = "HASS's weights stand for EAGLE's."
OF_SHIPS = "Speeds are those of the smaller trees that were measured on a quiet machine."
ENOUGH = 0.01  # the chance of an honest method up to which its sampled tokens are taken to follow another law


def tau(e: Evidence, t: int, name: str) -> Figure:
    """With that of each prompt: all methods decode the same ones, so they can be compared in pairs."""
    each = e.at(COUNTED).run.methods.get(name, {}).get(f"{t}", [])
    return replace(e.method(COUNTED, t, name), parts={str(i): x for i, x in enumerate(each)}, kind="prompts")


def speed(e: Evidence, t: float, name: str) -> Figure:
    return e.method(SPEEDS, t, name, "speedup")


def gaps(e: Evidence, table: str) -> float:
    """How wide 1- to 4-alpha lie in a published table, at most."""
    wide = []
    for row in e.published(f"{table}; alpha-1", eagle.PAPER):
        same = f"{table}; {row['target']}; T={row['temperature']}"
        rates = [float(e.span(f"{same}; alpha-{n}", eagle.PAPER)) for n in range(1, 5)]
        wide.append(max(rates) - min(rates))
    return max(wide)


def flat(e: Evidence, words: str, rates: list[Figure], table: str) -> list[Check]:
    """The statements that the first step is accepted most often, and that later ones are alike."""
    first, *rest = rates
    wide, low, high = gaps(e, table), min(f.value for f in rest), max(f.value for f in rest)
    told = (
        f"{words}, 1- to 4-alpha no wider than published ({wide:.2f}): {high - low:.2f} ({', '.join(map(str, rest))})"
    )
    apart = max(f.low for f in rest) - min(f.high for f in rest)  # where the counts are sure of more
    outcome = HOLDS if round(high - low - wide, 2) <= 0 else FAILS if apart > wide else NOISE
    return [higher(f"{words}, 0-alpha over 1-alpha", first, rest[0]), Check(told, outcome)]


# ------------------------------------------------------------------------------------------------ Leviathan et al.


@finding("L-alg", COUNTED)
def rule(e: Evidence) -> list[Check]:
    laws = [m.law for m in e.at(COUNTED).pooled if m.temperature == 1 and m.law and "rejection" in m.method]
    if not laws:
        return [open_(f"`benchmarks/results/{COUNTED}.json` has no tested laws")]
    least_, tokens = min(law.p for law in laws), sum(law.tokens for law in laws)
    words = f"sampled tokens under `rejection` against the target's law, {len(laws)} methods and {tokens} tokens, the "
    words += f"least chance of an honest method above {ENOUGH}: {least_:.2f}"
    return [true(words, least_ > ENOUGH), *(e.same_text(COUNTED, t, " under `coupled`") for t in (0, 1))]


@finding("L-tau", COUNTED, "HASS's chains of three and five tokens stand for a draft model's.")
def tokens(e: Evidence) -> list[Check]:
    checks = []
    settings = {  # at T = 0 all rules are one
        "coupled": [(t, size, "coupled") for t in (0, 1) for size in ((3, "4x3"), (5, "6x5"))],
        "rejection": [(1, size, "rejection") for size in ((3, "4x3"), (5, "6x5"))],
    }
    for judge, rows in settings.items():
        found = []
        for t, (gamma, size), name in rows:
            row = e.mean(COUNTED, f"HASS chain, {size}, {name}", t)
            assert row.alpha is not None
            found.append((t, gamma, Figure.of(row.tau), theory.expected_tokens(row.alpha.value, gamma)))
        t, gamma, mine, told = max(found, key=lambda row: abs(row[2].value / row[3] - 1))
        words = f"tau within {CLOSE:.0%} of the formula under `{judge}`, the worst of {len(found)} settings, "
        checks.append(close(f"{words}T = {t} and gamma {gamma}", mine, told))
    return checks


@finding("L-38", SPEEDS, "HASS's chains of one and two tokens, three temperatures.")
def promised(e: Evidence) -> list[Check]:
    rows = []
    for t in (0.0, 0.6, 1.0):
        plain = e.mean(SPEEDS, "none", t).round_ms
        for gamma in (1, 2):
            row = e.mean(SPEEDS, f"HASS chain of {gamma}", t)
            assert plain is not None
            assert row.alpha is not None
            assert row.round_ms is not None
            c = row.round_ms.draft / gamma / plain.verify
            rows.append((Figure.of(row.speedup), theory.speedup(row.alpha.value, gamma, c)))
    side = sum((found.value > 1) == (promise > 1) for found, promise in rows)
    reached = sum(found.high >= promise for found, promise in rows)
    shares = sorted(found.value / promise for found, promise in rows)
    n, span = len(rows), f"{shares[0]:.0%} to {shares[-1]:.0%} of it"
    return [
        true(f"on the promised side of plain decoding: {side} of {n} settings", side == n),
        true(f"as fast as promised: {reached} of {n} settings ({span})", reached == n),
    ]


@finding("L-T2", f"{COUNTED}, {SPEEDS}", "HASS's chains stand for a draft model's.")
def temperatures(e: Evidence) -> list[Check]:
    cold, warm = (
        e.method(COUNTED, t, f"HASS chain, 6x5, {rule}", "alpha") for t, rule in ((0, "coupled"), (1, "rejection"))
    )
    return [
        higher("alpha, gamma 5, T = 0 over T = 1 under `rejection`", cold, warm),
        higher("speed-up, gamma 2, T = 0 over T = 1", *(speed(e, t, "HASS chain of 2") for t in (0, 1))),
        open_("the order of drafter sizes: it takes trainings of draft models"),
    ]


@finding("L-T3", COUNTED, "N-grams of each row's own text, chains of five. HASS stands for the draft model of 6M.")
def ngrams(e: Evidence) -> list[Check]:
    checks = []
    for t, rule in ((0, "coupled"), (1, "rejection")):
        one, two, net = (
            e.method(COUNTED, t, name, "alpha") for name in ("unigrams", "bigrams", f"HASS chain, 6x5, {rule}")
        )
        checks += [
            least(f"alpha of unigrams at T = {t}, above 0", one, 0.0),
            higher(f"alpha at T = {t}, bigrams over unigrams", two, one),
            higher(f"alpha at T = {t}, the network over bigrams", net, two),
        ]
    return checks


# ------------------------------------------------------------------------------------------------ Medusa


def by_kind(e: Evidence, name: str, t: int) -> Check:
    """The statement that code gains more than the other tasks."""
    kinds: dict[bool, list[Figure]] = {True: [], False: []}
    for cell in e.cells(SPEEDS, name, t):
        kinds[cell.task == CODE].append(Figure.of(cell.speedup))
    words = f"speed-up of {name} at T = {t}, HumanEval over the mean of the other five tasks"
    return higher(words, mean(kinds[True]), mean(kinds[False]))


@finding("M-ladder", COUNTED, "16 nodes where there is a tree; tuned on questions that are in no evaluation.")
def ladder(e: Evidence) -> list[Check]:
    rungs = [("Medusa, chain", "heads as a chain"), ("Medusa, 3 x 2 x 1", "Cartesian tree 3 x 2 x 1"),
             ("Medusa, tuned", "optimised sparse tree")]  # fmt: skip
    steps = [
        higher(f"tau at T = 0, {told} over {before}", tau(e, 0, name), tau(e, 0, below))
        for (below, before), (name, told) in pairwise(rungs)
    ]
    return [*steps, open_("speed-ups of the rungs, on a quiet machine"), open_("Medusa-2: it takes a training of both")]


@finding("M-sizes", SPEEDS, "The larger of two sizes.")
def second_size(e: Evidence) -> list[Check]:
    names = ("Medusa, adaptive", "Medusa, 16 nodes")
    return [least(f"speed-up at T = {t} of {name}, above 1", speed(e, t, name), 1.0) for t in (0, 1) for name in names]


@finding("M-cat", SPEEDS)
def categories(e: Evidence) -> list[Check]:
    return [by_kind(e, "Medusa, 16 nodes", t) for t in (0, 1)]


@finding("M-sparse", COUNTED, "One dense tree, the product of its widths, stands for the random ones.")
def sparse(e: Evidence) -> list[Check]:
    return [
        higher(f"tau at T = {t}, sparse over dense, 16 nodes each", tau(e, t, "Medusa, tuned"),
               tau(e, t, "Medusa, 3 x 2 x 1")) for t in (0, 1)
    ]  # fmt: skip


@finding("M-treesize", f"{COUNTED}, {SPEEDS}", "HASS's trees; one node is plain decoding, two are a chain of one.")
def tree_size(e: Evidence) -> list[Check]:
    checks, sizes = [], {1: "none", 2: "HASS chain of 1", 4: FOUR, 16: SIXTEEN}
    for t in (0, 1):
        speeds = {n: ONE if n == 1 else speed(e, t, name) for n, name in sizes.items()}
        peak = max(speeds, key=lambda n: speeds[n].value)
        taus = {n: tau(e, t, f"HASS, {n}") for n in ("4x3", "8x4", "16x6", "32x6")}
        grown = ", ".join(f"{f.value:.2f}" for f in taus.values())
        checks += [
            higher(f"tokens a round at T = {t} ({grown} of 4, 8, 16, 32 nodes), 32 over 4", taus["32x6"], taus["4x3"]),
            higher(f"speed-up at T = {t}, the rise: {peak} nodes over one", speeds[peak], speeds[1]),
            higher(f"speed-up at T = {t}, the fall: {peak} nodes over 16", speeds[peak], speeds[16]),
        ]
    return checks


@finding("M-typical", COUNTED, "T = 1; tau stands for speed. Likelier text is no sample of the target any more.")
def typical(e: Evidence) -> list[Check]:
    kinds = ("low", "high")
    likely, plain = {}, {}
    for kind in kinds:
        each = [c.quality for c in e.cells(COUNTED, f"Medusa, {kind} typical", 1) if c.quality]
        if not each:
            return [open_(f"`benchmarks/results/{COUNTED}.json` judges no text of typical acceptance")]
        likely[kind] = Figure.of(sum(q.log_likelihood or 0.0 for q in each) / len(each))
        plain[kind] = Figure.of(sum(q.plain or 0.0 for q in each) / len(each))
    low, high = (tau(e, 1, f"Medusa, {kind} typical") for kind in kinds)
    return [
        higher("tau, the lowest threshold over the highest", low, high),
        higher("tau, the lowest threshold over the lossless rule", low, tau(e, 1, "Medusa")),
        higher("log-likelihood a token, the highest threshold over the lowest", likely["high"], likely["low"]),
        higher("log-likelihood a token, the lowest threshold over plain decoding's", likely["low"], plain["low"]),
    ]


# ------------------------------------------------------------------------------------------------ EAGLE


@finding("E-F1, E-F2", SPEEDS, WEIGHTS)
def gains(e: Evidence) -> list[Check]:
    checks = []
    for name in (FOUR, SIXTEEN):
        cold, warm = (speed(e, t, name) for t in (0, 1))
        checks += [least(f"speed-up of {name} at T = {t}, above 1", f, 1.0) for t, f in ((0, cold), (1, warm))]
        checks.append(higher(f"speed-up of {name}, T = 0 over T = 1", cold, warm))
    return checks


@finding("E-F8", SPEEDS, WEIGHTS)
def tasks(e: Evidence) -> list[Check]:
    return [by_kind(e, name, t) for name in (FOUR, "HASS chain of 1") for t in (0, 1)]


@finding("E-T1", COUNTED, f"{WEIGHTS} Five tasks; acceptance at a depth is that of the rounds that came so far.")
def by_depth(e: Evidence) -> list[Check]:
    return [c for t in (0, 1) for c in flat(e, f"chain at T = {t}", e.rates(t, CHAIN, COUNTED), "Table 1")]


@finding("E-T2", COUNTED, f"{WEIGHTS} Three prompts.")
def maths(e: Evidence) -> list[Check]:
    cells = {t: e.at_task(COUNTED, CHAIN, t, MATHS) for t in (0, 1)}
    taus = (Figure.of(cell.tau) for cell in cells.values())
    rates = {t: [Figure.of(depth.rate) for depth in cell.depths[:5]] for t, cell in cells.items()}
    return [
        higher("tau of the chain on GSM8K, T = 0 over T = 1", *taus),
        *(c for t, mine in rates.items() for c in flat(e, f"chain on GSM8K at T = {t}", mine, "Table 2")),
    ]


@finding("E-T5, E-F9", f"{COUNTED}, {SPEEDS}", f"{WEIGHTS} {OF_SHIPS}")
def tree(e: Evidence) -> list[Check]:
    more, faster = map(float, re.findall(r"\+(\d\.\d)", e.inventory["E-T5, E-F9"]["finding"]))
    checks = []
    for t in (0, 1):
        tree, chain = (tau(e, t, name) for name in (TREE, CHAIN))
        fast, line = (speed(e, t, name) for name in (FOUR, "HASS chain of 2"))
        checks += [
            higher(f"tau at T = {t}, tree of 26 nodes over chain of 5", tree, chain),
            least(f"gain in tau at T = {t}, {more} or more", difference(tree, chain), more),
            higher(f"speed-up at T = {t}, tree of 4 nodes over chain of 2", fast, line),
            least(f"gain in speed-up at T = {t}, {faster} or more", difference(fast, line), faster),
        ]
    return checks


# ------------------------------------------------------------------------------------------------ EAGLE-2


@finding("E2-F5", CONFIDENT, "HASS's weights; three prompts a task, so the spread is a rough one.")
def positions(e: Evidence) -> list[Check]:
    return eagle2.spread(e, CONFIDENT)


@finding(
    "E2-F6", CONFIDENT, "HASS's weights, twelve prompts. The error is the mean distance of confidence and acceptance."
)
def confidence(e: Evidence) -> list[Check]:
    return eagle2.truth(e, CONFIDENT, "HASS")


@finding(
    "E2-T1", f"{COUNTED}, {SPEEDS}",
    f"{WEIGHTS} Neighbours in the paper's order of tau on the Vicunas; at equal nodes tau stands for speed.",
)  # fmt: skip
def order(e: Evidence) -> list[Check]:
    ours = {"EAGLE-2": "HASS, dynamic", "EAGLE": TREE, "Medusa": "Medusa", "PLD": "lookup", "Lookahead": "lookahead"}
    gain = 1 + int(re.findall(r"(\d+)-\d+ %", e.inventory["E2-T1"]["finding"])[0]) / 100
    checks = [
        higher(f"tau at T = 0, {a} over {b}", tau(e, 0, ours[a]), tau(e, 0, ours[b]))
        for a, b in pairwise(eagle2.published_order(e, ours, "tau"))
    ]
    first, second = ({t: tau(e, t, ours[x]) for t in (0, 1)} for x in ("EAGLE-2", "EAGLE"))
    checks.append(higher("tau at T = 1, EAGLE-2 over EAGLE", first[1], second[1]))
    for t in (0, 1):
        over = quotient(first[t], second[t])
        checks.append(least(f"tau of EAGLE-2 over EAGLE's at T = {t}, 26 nodes each, {gain:g} or more", over, gain))
    news, rest = list[Figure](), list[Figure]()
    for cell in e.cells(SPEEDS, "lookup", 0):
        (news if cell.task == NEWS else rest).append(Figure.of(cell.speedup))
    return [
        *checks,
        higher("speed-up at T = 0, EAGLE-2 over Medusa, 16 nodes each", speed(e, 0, SIXTEEN),
               speed(e, 0, "Medusa, 16 nodes")),
        higher("speed-up of PLD at T = 0, on summarisation over its mean of the other tasks", mean(news), mean(rest)),
        open_("Hydra and a draft model: neither ships; a draft model's figures stand in docs/results.md"),
    ]  # fmt: skip


@finding(
    "E-F3, E-F5, E-F10", "smollm2_ablations",
    "A small budget for every run; all begin as linear maps, which is the default.",
)  # fmt: skip
def inputs(e: Evidence) -> list[Check]:
    return eagle.inputs(e, "smollm2_ablations")


@finding("H-res", "smollm2_ablations", "Equal budgets of half a million tokens; the ones in the package had more.")
def equal_budgets(e: Evidence) -> list[Check]:
    taus = [e.runs(f"tau at T = {t}, HASS over EAGLE", "hass", "eagle", t, "smollm2_ablations") for t in ("0", "1")]
    return [*taus, open_("speed: a matter of tau here, both being the same network")]


@finding(
    "H-steps", "smollm2_ablations",
    "Half a million tokens for each number of steps; the loss is that of `smollm2/hass`, without the top-K term. Five "
    "steps were not trained.",
)  # fmt: skip
def steps(e: Evidence) -> list[Check]:
    return hass.number_of_steps(e, {2: "hass", **{n: f"hass passes={n}" for n in (1, 3, 4)}}, "smollm2_ablations")


@finding("E2-T3", COUNTED, "HASS's weights, sixteen nodes.")
def ablations(e: Evidence) -> list[Check]:
    checks = []
    for t in (0, 1):
        full = tau(e, t, "HASS, 16x6")
        value, ranking, both = (tau(e, t, f"HASS without {x}") for x in ("value", "re-ranking", "both"))
        checks += [
            higher(f"tau at T = {t}, the whole over without value", full, value),
            higher(f"tau at T = {t}, the whole over without re-ranking", full, ranking),
            higher(f"tau at T = {t}, the whole over without both", full, both),
            higher(f"tau at T = {t}, without re-ranking over without value", ranking, value),
        ]
    return checks


@finding("Ma-alg1", COUNTED, "HASS's and Medusa's trees.")
def verification(e: Evidence) -> list[Check]:
    return [e.same_text(COUNTED, t, "") for t in (0, 1)]
