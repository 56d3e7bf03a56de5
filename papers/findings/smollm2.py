"""The papers' findings on SmolLM2-135M-Instruct, with the drafters of this repository for it.

tau, acceptance, confidences and texts are those of `smollm2_findings` and `smollm2_confidence`, which ran beside other
work and hold no times. Speeds are those of `smollm2` and `smollm2_batches`. `smollm2_open` says what was not measured;
a row that is in neither needs no model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

from .. import evidence
from .. import formulas as theory
from ..evidence import SECOND, Evidence
from ..figures import (
    CLOSE,
    ONE,
    Check,
    Figure,
    close,
    higher,
    least,
    mean,
    open_,
    true,
)

finding = partial(evidence.finding, of=SECOND)

COUNTED, SPEEDS = "smollm2_findings", "smollm2"
CODE = "humaneval"
FOUR, SIXTEEN = "HASS, 4 nodes", "HASS, 16 nodes"  # dynamic trees whose speeds are known
ENOUGH = 0.01  # the chance of an honest method up to which its sampled tokens are taken to follow another law


def tau(e: Evidence, t: int, name: str) -> Figure:
    """With that of each prompt: all methods decode the same ones, so they can be compared in pairs."""
    each = e.at(COUNTED).run.methods.get(name, {}).get(f"{t}", [])
    return replace(e.method(COUNTED, t, name), parts={str(i): x for i, x in enumerate(each)}, kind="prompts")


def speed(e: Evidence, t: float, name: str) -> Figure:
    return e.method(SPEEDS, t, name, "speedup")


# ------------------------------------------------------------------------------------------------ Leviathan et al.


@finding("L-alg", COUNTED)
def rule(e: Evidence) -> list[Check]:
    laws = [m.law for m in e.at(COUNTED).pooled if m.temperature == 1 and m.law and "rejection" in m.method]
    if not laws:
        return [open_(f"`papers/results/{COUNTED}.json` has no tested laws")]
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
            return [open_(f"`papers/results/{COUNTED}.json` judges no text of typical acceptance")]
        likely[kind] = Figure.of(sum(q.log_likelihood or 0.0 for q in each) / len(each))
        plain[kind] = Figure.of(sum(q.plain or 0.0 for q in each) / len(each))
    low, high = (tau(e, 1, f"Medusa, {kind} typical") for kind in kinds)
    return [
        higher("tau, the lowest threshold over the highest", low, high),
        higher("tau, the lowest threshold over the lossless rule", low, tau(e, 1, "Medusa")),
        higher("log-likelihood a token, the highest threshold over the lowest", likely["high"], likely["low"]),
        higher("log-likelihood a token, the lowest threshold over plain decoding's", likely["low"], plain["low"]),
    ]
