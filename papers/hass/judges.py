"""Zhang et al. 2024: HASS beside EAGLE-2, its losses and its alignment steps."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..figures import difference, higher, least, quotient
from ..rows import Measured, Missing, Statement, judges

BASE = {"demo": "hass passes=3", "SmolLM2": "hass as published"}  # three passes, K = 10, weight 1, beta 1
TABLES = {"SmolLM2": "smollm2_ablations", "demo": "ablations"}


@judges("H-res", SmolLM2="bj", demo="5")
def results(m: Measured) -> Iterator[Statement]:
    gain = 1 + int(re.findall(r"\+(\d+)-", m.evidence.claims["H-res"]["finding"])[0]) / 100
    for t in (0, 1):
        yield lambda: higher(f"tau at T = {t}, HASS over EAGLE-2", m("HASS", t), m("EAGLE-2", t))
    for t in (0, 1):
        yield lambda: least(f"speed of HASS over EAGLE-2's at T = {t}, {gain:g} or more",
                            quotient(m("HASS", t, "speedup"), m("EAGLE-2", t, "speedup")), gain)  # fmt: skip


@judges("H-topk", studies=TABLES, SmolLM2="bj", demo="j")
def top_k(m: Measured) -> Iterator[Statement]:
    base, best = BASE[m.model], "hass k=5"
    half = "hass topk=0.5" if m.model == "demo" else "hass k=5 topk=0.5"
    pairs = {"K = 5 over K = 1": (best, "hass k=1"), "K = 5 over K = 10": (best, base),
             "K = 5 over K = 50": (best, "hass k=50"), "weight 0.5 over 1": (half, base),
             "weight 0.5 over 0": (half, "hass topk=0")}  # fmt: skip
    for t in ("0", "1"):
        for words, (a, b) in pairs.items():
            yield lambda: m.versus(f"tau at T = {t}, {words}", a, b, t)


@judges("H-loss", studies=TABLES, SmolLM2="bj", demo="j")
def losses(m: Measured) -> Iterator[Statement]:
    for t in ("0", "1"):
        for x in ("top-p", "normed-linear", "normed-softmax", "both-ways", "recall", "bild"):
            yield lambda: m.versus(f"tau at T = {t}, top-K over {x}", BASE[m.model], f"hass loss={x}", t)


@judges("H-steps", studies=TABLES, SmolLM2="bjkl", demo="j")
def steps(m: Measured) -> Iterator[Statement]:
    """3 or 4 alignment steps over fewer and more, of those that were trained."""
    names = {n: f"hass passes={n}" for n in range(1, 6)} | ({2: "hass"} if m.model == "SmolLM2" else {})
    for t in ("0", "1"):
        taus = {}
        for n, name in names.items():
            try:
                taus[n] = m.trained(name, t)
            except Missing:
                continue
        if not taus.keys() & {3, 4} or not taus.keys() & {1, 2, 5}:
            raise Missing("the alignment steps were not trained")
        best, rest = (max(taus.keys() & of, key=lambda n: taus[n].value) for of in ({3, 4}, {1, 2, 5}))
        few, more = (", ".join(map(str, sorted(taus.keys() & of))) for of in ({3, 4}, {1, 2, 5}))
        words = f"tau at T = {t}, the best of {few} steps ({best}) over the best of {more} ({rest})"
        yield lambda: m.versus(words, names[best], names[rest], t)


@judges("H-beta", studies=TABLES, SmolLM2="bj3", demo="j3")
def beta(m: Measured) -> Iterator[Statement]:
    for t in ("0", "1"):
        yield lambda: m.versus(f"tau at T = {t}, beta 0.5 over 1", "hass beta=0.5", BASE[m.model], t)
    for at in (0, 1):
        yield lambda: higher(f"acceptance at the first step, T = {at}, beta 0.5 over 1",
                             *(m.rates(name, at)[0] for name in ("beta 0.5 chain", "HASS chain")))  # fmt: skip


@judges("H-step-acc", SmolLM2="bfj", demo="f")
def by_step(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        gains = [difference(a, b) for a, b in zip(m.rates("HASS chain", t), m.rates("EAGLE chain", t), strict=True)]
        listed = ", ".join(f"{gain.value:+.3f}" for gain in gains)
        yield lambda: higher(f"acceptance at the first step, T = {t}, HASS over EAGLE",
                             *(m.rates(name, t)[0] for name in ("HASS chain", "EAGLE chain")))  # fmt: skip
        yield lambda: higher(f"gain at the last step over the first, T = {t} (by step {listed})", gains[-1], gains[0])
