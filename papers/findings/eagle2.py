"""Li et al. 2024b: dynamic trees: confidence, the order of methods, value and re-ranking."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from ..evidence import Evidence, finding, unmeasured
from ..figures import Check, higher, least, open_, quotient, true
from ..reliability import ece

PAPER = "EAGLE-2"
OURS = {
    "PLD": "lookup", "SpS": "draft model", "Medusa": "Medusa", "Hydra": "Hydra", "EAGLE": "EAGLE tree",
    "EAGLE-2": "EAGLE-2",
}  # fmt: skip
STRAIGHT = 0.05  # the calibration error up to which confidence is close to acceptance


@finding("E2-F5", "sizes", "HASS's weights; few prompts a domain, so the spread is a rough one.")
def positions(e: Evidence) -> list[Check]:
    return spread(e, "sizes")


def spread(e: Evidence, file: str) -> list[Check]:
    """How far the acceptance of one node lies apart between prompts."""
    checks = []
    for t in (0.0, 1.0):
        firsts = [c.positions[0] for c in e.cells(file, "HASS, 16x6", t) if c.positions]
        if not firsts:
            return [open_(f"`papers/results/{file}.json` has no positions of HASS")]
        wide = sum(p.spread[-1] - p.spread[0] for p in firsts) / len(firsts)
        rate = sum(p.rate for p in firsts) / len(firsts)
        words = (
            f"T = {t:g}, the tree's first node, accepted in {rate:.2f} of the rounds, spreads over a domain's prompts"
        )
        checks.append(true(f"{words} by at least 0.1 (10 to 90 %): {wide:.2f}", wide >= 0.1))
    return checks


@finding(
    "E2-F6", "calibration",
    "The error is the mean distance of confidence and acceptance. Where the target's choice is no fresh draw the "
    "drafter is too modest; a fitted scale, the default since, mends it ([methods](methods.md)).",
)  # fmt: skip
def confidence(e: Evidence) -> list[Check]:
    return truth(e, "calibration", "eagle")


def truth(e: Evidence, file: str, name: str) -> list[Check]:
    """Whether a drafter's confidences are its rates of acceptance."""
    checks = []
    settings = {"T = 0": ("", 0.0), "T = 1, shared noise": ("", 1.0), "T = 1, rejection": (", rejection", 1.0)}
    for setting, (rule, t) in settings.items():
        bins = {s: e.bins(file, f"{name}{s}{rule}, 16x6", t) for s in ("", " fitted")}
        pairs = [(a, b) for i, a in enumerate(bins[""]) for b in bins[""][i + 1 :]]
        up = sum(a.acceptance < b.acceptance for a, b in pairs) / len(pairs)
        checks.append(
            true(f"{setting}, acceptance rises with confidence in 90 % of pairs of bins: {up:.0%}", up >= 0.9)
        )
        for scale, words in (("", "error"), (" fitted", "error with a fitted scale")):
            found = ece(bins[scale])
            checks.append(true(f"{setting}, {words} at most {STRAIGHT:g}: {found:.3f}", found <= STRAIGHT))
    return checks


def published_order(e: Evidence, names: Iterable[str] = OURS, of: str = "speedup") -> list[str]:
    """These methods, the paper's best first: T = 0, the two Vicunas, which all methods were run on."""
    gains = {
        name: sum(float(e.span(f"Table 1; Vicuna {size}; mean; {name}; {of}; T=0", PAPER)) for size in ("7B", "13B"))
        for name in names
    }
    return sorted(gains, key=lambda name: -gains[name])


@finding(
    "E2-T1", "drafters",
    "Neighbours in the paper's order of the Vicunas. EAGLE's static tree has more nodes here than EAGLE-2's.",
)  # fmt: skip
def order(e: Evidence) -> list[Check]:
    speeds = {t: {n: e.method("drafters", t, OURS[n], "speedup") for n in OURS} for t in (0, 1)}
    checks = [
        higher(f"speed-up at T = 0, {a} over {b}", speeds[0][a], speeds[0][b]) for a, b in pairwise(published_order(e))
    ]
    gain = 1 + int(re.findall(r"(\d+)-\d+ %", e.inventory["E2-T1"]["finding"])[0]) / 100
    for t, found in speeds.items():
        over = quotient(found["EAGLE-2"], found["EAGLE"])
        checks.append(least(f"speed of EAGLE-2 over EAGLE's at T = {t}, {gain:g} or more", over, gain))
    return [
        *checks,
        open_("lookahead in the same run"),
        open_("PLD beside the others on summarisation; `outrider bench --task cnn-dm` compares them"),
    ]


unmeasured(
    "E2-T2",
    "targets of 8B and 70B need GPUs",
    "outrider bench meta-llama/Meta-Llama-3-8B-Instruct --drafter eagle:yuhuili/EAGLE-LLaMA3-Instruct-8B "
    "--drafter 'eagle:yuhuili/EAGLE-LLaMA3-Instruct-8B?tree=static' --task mt-bench --temperature 0 --out runs/llama3",
)


@finding(
    "E2-T3", "drafters",
    "Sixteen nodes. The values of this drafter fall too fast with depth; with a fitted scale re-ranking helps "
    "([results](results.md)).",
)  # fmt: skip
def ablations(e: Evidence) -> list[Check]:
    checks = []
    for t in (0, 1):
        names = ("", " without value", " without re-ranking")
        full, value, ranking = (e.method("drafters", t, f"EAGLE-2{name}") for name in names)
        checks += [
            higher(f"tau at T = {t}, the whole over without value", full, value),
            higher(f"tau at T = {t}, the whole over without re-ranking", full, ranking),
            higher(f"tau at T = {t}, without re-ranking over without value", ranking, value),
        ]
    return [*checks, open_("without both")]
