"""EAGLE's, EAGLE-2's and HASS's findings on SmolLM2-135M-Instruct."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise

from .. import evidence
from ..evidence import SECOND, Evidence
from ..figures import FAILS, HOLDS, NOISE, Check, Figure, difference, higher, least, mean, open_, quotient
from . import eagle, eagle2, hass
from .smollm2 import COUNTED, FOUR, SIXTEEN, SPEEDS, by_kind, speed, tau

finding = partial(evidence.finding, of=SECOND)

CONFIDENT, BATCHES, VARIANTS = "smollm2_confidence", "smollm2_batches", "smollm2_variants"
MATHS, NEWS = "gsm8k", "cnn-dm@600"
CHAIN, TREE = "HASS chain, 6x5, coupled", "HASS, static"  # five drafted tokens in a row; EAGLE's tree of 26 nodes
WEIGHTS = "HASS's weights stand for EAGLE's."
SMALLER = "Speeds are those of the smaller trees that were measured on a quiet machine."


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


# ------------------------------------------------------------------------------------------------ EAGLE


@finding("E-F1, E-F2", SPEEDS, WEIGHTS)
def gains(e: Evidence) -> list[Check]:
    checks = []
    for name in (FOUR, SIXTEEN):
        cold, warm = (speed(e, t, name) for t in (0, 1))
        checks += [least(f"speed-up of {name} at T = {t}, above 1", f, 1.0) for t, f in ((0, cold), (1, warm))]
        checks.append(higher(f"speed-up of {name}, T = 0 over T = 1", cold, warm))
    return checks


@finding(
    "E-T4", VARIANTS, f"{WEIGHTS} Compiled passes stand for gpt-fast, and a .gguf file's four bits in these for int4."
)
def together(e: Evidence) -> list[Check]:
    return eagle.multiplied(e, VARIANTS, "HASS", {"compiled passes": "", "four bits, compiled": ", native"})


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


@finding("E-T5, E-F9", f"{COUNTED}, {SPEEDS}", f"{WEIGHTS} {SMALLER}")
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


@finding("E-T7", BATCHES, f"{WEIGHTS} Trees of 4 nodes and chains of 2; 8 rows are the most that were run.")
def batches(e: Evidence) -> list[Check]:
    return eagle.in_batches(e, BATCHES, tree=FOUR, chain="HASS chain of 2")


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
    ours = {"EAGLE-2": "HASS, dynamic", "EAGLE": TREE, "Hydra": "Hydra", "Medusa": "Medusa", "SpS": "draft model",
            "PLD": "lookup", "Lookahead": "lookahead"}  # fmt: skip
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
