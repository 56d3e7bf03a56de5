"""Zhang et al. 2024: HASS beside EAGLE-2, its losses and its alignment steps."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..evidence import Evidence, finding
from ..figures import Check, difference, higher, least, open_, quotient
from .medusa import METRICS

BASE = "hass passes=3"  # K = 10, weight 1, beta 1
SMALL = "A small budget, at which the alignment steps do not pay yet ([results](results.md))."


@finding("H-res", "drafters", "The same network, text and number of steps for both.")
def results(e: Evidence) -> list[Check]:
    gain = 1 + int(re.findall(r"\+(\d+)-", e.inventory["H-res"]["finding"])[0]) / 100
    checks = []
    for t in (0, 1):
        for words, of in METRICS:
            hass, eagle = (e.method("drafters", t, name, of) for name in ("HASS", "EAGLE-2"))
            checks.append(higher(f"{words} at T = {t}, HASS over EAGLE-2", hass, eagle))
        checks.append(least(f"speed of HASS over EAGLE-2's at T = {t}, {gain:g} or more", quotient(hass, eagle), gain))
    return checks


@finding("H-topk", "ablations", SMALL)
def top_k(e: Evidence) -> list[Check]:
    pairs = {
        "K = 5 over K = 1": ("hass k=5", "hass k=1"),
        "K = 5 over K = 10": ("hass k=5", BASE),
        "K = 5 over K = 50": ("hass k=5", "hass k=50"),
        "weight 0.5 over 1": ("hass topk=0.5", BASE),
        "weight 0.5 over 0": ("hass topk=0.5", "hass topk=0"),
    }
    return [e.runs(f"tau at T = {t}, {words}", a, b, t) for t in ("0", "1") for words, (a, b) in pairs.items()]


@finding("H-loss", "ablations", SMALL)
def losses(e: Evidence) -> list[Check]:
    others = ("top-p", "normed-linear", "normed-softmax", "both-ways", "recall", "bild")
    return [e.runs(f"tau at T = {t}, top-K over {x}", BASE, f"hass loss={x}", t) for t in ("0", "1") for x in others]


@finding("H-steps", "ablations", SMALL)
def steps(e: Evidence) -> list[Check]:
    return number_of_steps(e, {n: f"hass passes={n}" for n in range(1, 6)})


def number_of_steps(e: Evidence, runs: Mapping[int, str], table: str = "ablations") -> list[Check]:
    """3 or 4 alignment steps over fewer and more, of those that were trained (`runs`: their names)."""
    checks = []
    for t in ("0", "1"):
        taus = {n: e.run(name, t, table) for n, name in runs.items()}
        best, rest = (max(taus.keys() & of, key=lambda n: taus[n].value) for of in ({3, 4}, {1, 2, 5}))
        few, more = (", ".join(map(str, sorted(taus.keys() & of))) for of in ({3, 4}, {1, 2, 5}))
        words = f"tau at T = {t}, the best of {few} steps ({best}) over the best of {more} ({rest})"
        checks.append(higher(words, taus[best], taus[rest]))
    return checks


@finding("H-beta", "ablations", SMALL + " tau stands for the first step's acceptance.")
def beta(e: Evidence) -> list[Check]:
    checks = [e.runs(f"tau at T = {t}, beta 0.5 over 1", "hass beta=0.5", BASE, t) for t in ("0", "1")]
    return [*checks, open_("acceptance at the first step")]


@finding("H-step-acc", "drafters", "Chains; acceptance at a depth is that of the rounds that came so far.")
def by_step(e: Evidence) -> list[Check]:
    checks = []
    for t in (0, 1):
        hass, eagle = e.rates(t, "HASS chain"), e.rates(t, "EAGLE chain")
        gains = [difference(a, b) for a, b in zip(hass, eagle, strict=True)]
        listed = ", ".join(f"{gain.value:+.3f}" for gain in gains)
        checks += [
            higher(f"acceptance at the first step, T = {t}, HASS over EAGLE", hass[0], eagle[0]),
            higher(f"gain at the last step over the first, T = {t} (by step {listed})", gains[-1], gains[0]),
        ]
    return checks
