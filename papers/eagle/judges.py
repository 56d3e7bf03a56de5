"""Li et al. 2024a: EAGLE's speeds, its acceptance over depth, its inputs, its sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..document import Cell
from ..figures import CLOSE, FAILS, HOLDS, NOISE, Check, Figure, beside, close, computed, difference, higher, least
from ..medusa.judges import by_kind
from ..rows import Measured, Missing, Statement, judges, of_depth

SIZES = ((4096, 32, 32, 11008), (5120, 40, 40, 13824), (6656, 52, 52, 17920), (8192, 64, 8, 28672))  # 7B, 13B, 33B, 70B
MATHS = ("gsm8k", "demo/gsm8k")


@judges("E-F1, E-F2", studies={"demo": "drafters"}, SmolLM2="bw", demo="5")
def gains(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        yield lambda: least(f"speed-up of the tree at T = {t}, above 1", m("tree", t, "speedup"), 1.0)
    yield lambda: higher("speed-up of the tree, T = 0 over T = 1", m("tree", 0, "speedup"), m("tree", 1, "speedup"))


@judges("E-F8", SmolLM2="bw", demo="3")
def tasks(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        yield lambda: by_kind(m, "tree", t, "tau")
        yield lambda: by_kind(m, "tree", t, "speedup")


def gaps(m: Measured, table: str) -> float:
    """How wide 1- to 4-alpha lie in a published table, at most."""
    wide = []
    for row in m.evidence.published(f"{table}; alpha-1", "eagle"):
        same = f"{table}; {row['target']}; T={row['temperature']}"
        rates = [float(m.evidence.span(f"{same}; alpha-{n}", "eagle")) for n in range(1, 5)]
        wide.append(max(rates) - min(rates))
    return max(wide)


def flat(words: str, rates: list[Figure], wide: float) -> Check:
    """The statement that later steps are accepted alike: their rates spread no wider than published."""
    rest = rates[1:]
    spread = max(f.value for f in rest) - min(f.value for f in rest)
    sure = max(f.low for f in rest) - min(f.high for f in rest)  # of which the counts are certain
    most = max(f.high for f in rest) - min(f.low for f in rest)
    outcome = FAILS if sure > wide else HOLDS if most <= wide + CLOSE else NOISE
    figures = f"{spread:.2f} against {wide:.2f} ({', '.join(map(str, rest))})"
    return Check(f"{words}, 1- to 4-alpha spread as published", outcome, figures, f"{spread:.2f}/{wide:.2f}",
                 f"a spread of {wide + most - spread:.2f}")  # fmt: skip


@judges("E-T1", SmolLM2="bfw", demo="f3")
def by_depth(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        yield lambda: higher(f"chain at T = {t}, 0-alpha over 1-alpha", *m.rates("chain", t)[:2])
        yield lambda: flat(f"chain at T = {t}", m.rates("chain", t), gaps(m, "Table 1"))
    yield lambda: beside("0- and 1-alpha at T = 1", *m.rates("chain, coupled", 1)[:2])


@judges("E-T2", SmolLM2="bfw", demo="f3")
def maths(m: Measured) -> Iterator[Statement]:
    yield lambda: higher("tau of the chain on GSM8K, T = 0 over T = 1", *(tau_of(m, "chain", t) for t in (0, 1)))
    for t in (0, 1):
        yield lambda: higher(f"chain on GSM8K at T = {t}, 0-alpha over 1-alpha", *maths_rates(m, "chain", t)[:2])
        yield lambda: flat(f"chain on GSM8K at T = {t}", maths_rates(m, "chain", t), gaps(m, "Table 2"))


def on_maths(m: Measured, name: str, t: float) -> Cell:
    for cell in m.cells(name, t):
        if cell.task in MATHS:
            return cell
    raise Missing(f"the {name} on GSM8K at T = {t:g} was not run")


def tau_of(m: Measured, name: str, t: float) -> Figure:
    tau = on_maths(m, name, t).tau
    if tau is None or tau.low is None:
        raise Missing(f"the {name} on GSM8K was run on one batch of prompts, which gives no interval")
    return Figure.of(tau)


def maths_rates(m: Measured, name: str, t: float) -> list[Figure]:
    rates = [of_depth(depth) for depth in on_maths(m, name, t).depths[:5]]
    if len(rates) < 5:
        raise Missing(f"acceptance by depth on GSM8K at T = {t:g} is not stored")
    return rates


@judges("E-T3", studies={"demo": "ablations dense mixture"}, SmolLM2="7", demo="p3")
def mixture(m: Measured) -> Iterator[Statement]:
    if m.model != "demo":
        raise Missing("a mixture of experts of this target was not trained")
    for t in ("0", "1"):
        dense, moe = (Figure.of(m.training(name)["tau"][t], rough=0.1) for name in
                      ("eagle", "eagle on a mixture of experts"))  # fmt: skip
        state = higher if t == "0" else beside
        yield lambda: state(f"tau at T = {t}, dense target over mixture", dense, moe)
    dense, moe = (speed_of(m, file) for file in ("dense", "mixture"))
    yield higher("speed-up at T = 0, dense target over mixture", dense, moe)


def speed_of(m: Measured, file: str) -> Figure:
    """EAGLE's speed-up over plain decoding at T = 0, of all tasks."""
    for row in m.at(file).pooled:
        if (row.method, row.temperature) == ("EAGLE", 0) and row.speedup:
            return Figure.of(row.speedup)
    raise Missing(f"speeds of {file} were not run")


@judges("E-T4", studies={"SmolLM2": "smollm2_variants", "demo": "variants"}, SmolLM2="u", demo="u")
def together(m: Measured) -> Iterator[Statement]:
    file, drafter = {"SmolLM2": ("smollm2_variants", "HASS"), "demo": ("variants", "HASS, 16x6")}[m.model]
    kinds = {"SmolLM2": {"compilation": "", "four bits": ", native"}, "demo": {"recording": "", "int8": ", eager+int8"}}
    speeds = {r.method: Figure.of(r.speedup) for r in m.at(file).macro if r.temperature == 0 and r.speedup}
    drafted = speeds[f"{drafter}, eager"]
    for words, variant in kinds[m.model].items():
        alone, both = speeds[f"none{variant}"], speeds[f"{drafter}{variant}"]
        yield lambda: higher(f"drafting and {words} over {words}", both, alone)
        yield lambda: higher(f"drafting and {words} over drafting", both, drafted)
        yield lambda: close(f"gain of drafting and {words}, the product of the two", both, alone.value * drafted.value)


@judges("E-T5, E-F9", SmolLM2="bw", demo="35")
def tree(m: Measured) -> Iterator[Statement]:
    more, faster = map(float, re.findall(r"\+(\d\.\d)", m.evidence.claims["E-T5, E-F9"]["finding"]))
    for t in (0, 1):
        yield lambda: higher(f"tau at T = {t}, tree over chain", m("tree", t), m("chain", t))
        yield lambda: least(f"gain in tau at T = {t}, {more} or more", difference(m("tree", t), m("chain", t)), more)
    yield lambda: beside("tau at T = 1, tree and chain", m("tree, coupled", 1), m("chain, coupled", 1))
    for t in (0, 1):
        yield lambda: least(f"gain in speed-up at T = {t}, {faster} or more",
                            difference(m("tree", t, "speedup"), m("chain", t, "speedup")), faster)  # fmt: skip


@judges("E-F3, E-F5, E-F10", studies={"SmolLM2": "smollm2_ablations", "demo": "ablations"}, SmolLM2="bjkm", demo="jm")
def inputs(m: Measured) -> Iterator[Statement]:
    runs = {"shifted token": "eagle", "unshifted": "eagle inputs=feature+unshifted",
            "feature only": "eagle inputs=feature", "token only": "eagle inputs=token"}  # fmt: skip
    pairs = [("shifted token", x) for x in list(runs)[1:]] + [("unshifted", x) for x in list(runs)[2:]]
    for t in ("0", "1"):
        for a, b in pairs:
            yield lambda: m.versus(f"tau at T = {t}, {a} over {b}", runs[a], runs[b], t)


@judges("E-T6", studies={"SmolLM2": "smollm2_ablations", "demo": "ablations"}, SmolLM2="bj", demo="j")
def own_data(m: Measured) -> Iterator[Statement]:
    few, words = "eagle of few texts", "the target's own answers over the documents'"
    for t in ("0", "1"):
        yield lambda: m.versus(f"tau at T = {t}, {words}", f"{few} by the target", few, t)


@judges("E-T7", studies={"SmolLM2": "eagle_batches", "demo": "batches"}, SmolLM2="bw", demo="u")
def batches(m: Measured) -> Iterator[Statement]:
    published = m.evidence.published("Table 7; speedup, throughput at the largest batch", m.paper)
    twice = sum(float(row["value"]) for row in published) / len(published)
    file, tree, chain = {"SmolLM2": ("eagle_batches", "tree", "chain"),
                         "demo": ("batches", "HASS", "HASS chain")}[m.model]  # fmt: skip
    rows = {(r.method, r.batch): r for r in (*m.at(file).pooled, *m.at(file).macro) if r.temperature == 0 and r.speedup}
    most = max(batch for _, batch in rows)
    speed = {key: Figure.of(row.speedup) for key, row in rows.items()}
    rate = {key: Figure.of(row.tokens_per_second) for key, row in rows.items()}
    for words, name in (("tree", tree), ("chain", chain)):
        yield lambda: higher(f"speed-up of the {words}, batch 1 over {most}", speed[name, 1], speed[name, most])
    yield lambda: higher(f"tokens/s at batch {most}, chain over tree", rate[chain, most], rate[tree, most])
    yield lambda: close(f"throughput over plain decoding at batch {most}, chain", speed[chain, most], twice)


@judges("E-par", ())
def parameters(m: Measured) -> Iterator[Statement]:
    import torch

    from outrider.drafters._eagle import EagleNet
    from outrider.nets.configs import EagleConfig
    from outrider.nets.layer import LayerShape

    stated = re.findall(r"0\.\d\d", m.evidence.claims["E-par"]["published"])
    for (hidden, heads, groups, inner), billions in zip(SIZES, stated, strict=True):
        with torch.device("meta"):
            net = EagleNet(EagleConfig(LayerShape(hidden, heads, groups, 128, inner, hidden), 32000, hidden))
        size = f"{sum(p.numel() for p in net.parameters()) / 1e9:.2f}"
        yield computed(f"hidden size {hidden:,}", size == billions, f"{size}B against {billions}B")


@judges("E-cost", SmolLM2="6", demo="6")
def cost(m: Measured) -> Iterator[Statement]:
    raise Missing("a drafter of this size needs GPUs")
    yield
