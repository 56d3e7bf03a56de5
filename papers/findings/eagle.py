"""Li et al. 2024a: EAGLE's speeds, its acceptance over depth, its inputs, its sizes."""

from __future__ import annotations

import re

import torch

from ..evidence import Evidence, finding, unmeasured
from ..figures import Check, Figure, close, difference, higher, least, open_, true
from .medusa import METRICS, by_kind

PAPER = "EAGLE"
SIZES = ((4096, 32, 32, 11008), (5120, 40, 40, 13824), (6656, 52, 52, 17920), (8192, 64, 8, 28672))  # 7B, 13B, 33B, 70B


@finding("E-F1, E-F2", "drafters")
def speed(e: Evidence) -> list[Check]:
    cold, warm = (e.method("drafters", t, "EAGLE tree", "speedup") for t in (0, 1))
    return [
        least("speed-up of EAGLE's tree at T = 0, above 1", cold, 1.0),
        least("speed-up of EAGLE's tree at T = 1, above 1", warm, 1.0),
        higher("speed-up of EAGLE's tree, T = 0 over T = 1", cold, warm),
    ]


@finding("E-F8", "drafters")
def tasks(e: Evidence) -> list[Check]:
    return [by_kind(e, name, t) for name in ("EAGLE tree", "EAGLE chain") for t in (0, 1)]


@finding(
    "E-T1", "drafters",
    "Acceptance at a depth is that of the rounds that came so far, on easier text than the first step's; here this "
    "outweighs what foretold features cost.",
)  # fmt: skip
def by_depth(e: Evidence) -> list[Check]:
    checks, spreads = [], []
    for row in e.published("Table 1; alpha-1", PAPER):
        same = f"Table 1; {row['target']}; T={row['temperature']}"
        rates = [float(e.span(f"{same}; alpha-{n}", PAPER)) for n in range(1, 5)]
        spreads.append(max(rates) - min(rates))
    for t in (0, 1):
        first, *rest = e.rates(t, "EAGLE chain")
        checks.append(higher(f"chain at T = {t}, 0-alpha over 1-alpha", first, rest[0]))
        low, high = min(f.value for f in rest), max(f.value for f in rest)
        words = f"chain at T = {t}, 1- to 4-alpha no wider than published ({max(spreads):.2f})"
        listed = ", ".join(f"{f.value:.2f}" for f in rest)
        checks.append(true(f"{words}: {high - low:.2f} ({listed})", round(high - low - max(spreads), 2) <= 0))
    return checks


@finding("E-T2", "drafters")
def maths(e: Evidence) -> list[Check]:
    cold, warm = (
        next(Figure.of(c.tau) for c in e.cells("drafters", "EAGLE chain", t) if c.task == "demo/gsm8k") for t in (0, 1)
    )
    return [
        higher("tau of the chain on gsm8k, T = 0 over T = 1", cold, warm),
        open_("n-alpha by domain; `outrider bench` reports depths by task"),
    ]


@finding("E-T3", "ablations", "Few prompts, others than the dense target's, and a mixture that hardly learnt.")
def mixture(e: Evidence) -> list[Check]:
    def tau(name: str, t: str) -> Figure:  # without intervals: other prompts differ by more than runs on the same ones
        return Figure.of(e.ablation(name)["tau"][t], rough=0.1)

    moe = "eagle on a mixture of experts"
    checks = [higher(f"tau at T = {t}, dense target over mixture", tau("eagle", t), tau(moe, t)) for t in ("0", "1")]
    return [*checks, open_("speed on the mixture")]


@finding("E-T4", "variants", "Recorded passes stand for gpt-fast, int8 for int4, HASS for EAGLE.")
def together(e: Evidence) -> list[Check]:
    return multiplied(e, "variants", "HASS, 16x6", {"recorded passes": "", "int8": ", eager+int8"})


def multiplied(e: Evidence, file: str, drafter: str, variants: dict[str, str]) -> list[Check]:
    """Do the gains of drafting and of each of these variants of the target multiply?"""

    def speed(method: str) -> Figure:
        return e.method(file, 0, method, "speedup")

    drafted, checks = speed(f"{drafter}, eager"), []
    for words, variant in variants.items():
        alone, both = speed(f"none{variant}"), speed(f"{drafter}{variant}")
        checks += [
            higher(f"over plain decoding, drafting and {words} over {words} alone", both, alone),
            higher(f"over plain decoding, drafting and {words} over drafting alone", both, drafted),
            close(f"gain of drafting and {words}, the product of the two", both, alone.value * drafted.value),
        ]
    return checks


@finding("E-T5, E-F9", "drafters", "A pass over a tree costs much more than one over a chain on two cores.")
def tree(e: Evidence) -> list[Check]:
    stated = re.findall(r"\+(\d\.\d)", e.inventory["E-T5, E-F9"]["finding"])
    checks = []
    for t in (0, 1):
        for (words, of), gain in zip(METRICS, map(float, stated), strict=True):
            tree, chain = (e.method("drafters", t, f"EAGLE {kind}", of) for kind in ("tree", "chain"))
            checks += [
                higher(f"{words} at T = {t}, tree over chain", tree, chain),
                least(f"gain in {words} at T = {t}, {gain} or more", difference(tree, chain), gain),
            ]
    return checks


@finding("E-F3, E-F5, E-F10", "ablations", "A small budget for every run.")
def inputs_of_the_demo(e: Evidence) -> list[Check]:
    return inputs(e, "ablations")


def inputs(e: Evidence, file: str) -> list[Check]:
    runs = {"shifted token": "eagle", "unshifted": "eagle inputs=feature+unshifted",
            "feature only": "eagle inputs=feature", "token only": "eagle inputs=token"}  # fmt: skip
    pairs = [("shifted token", x) for x in list(runs)[1:]] + [("unshifted", x) for x in list(runs)[2:]]
    return [e.runs(f"tau at T = {t}, {a} over {b}", runs[a], runs[b], t, file) for t in ("0", "1") for a, b in pairs]


@finding("E-T6", "ablations", "The same questions in both, a small budget.")
def own_data(e: Evidence) -> list[Check]:
    few, words = "eagle of few texts", "the target's own answers over the documents'"
    return [e.runs(f"tau at T = {t}, {words}", f"{few} by the target", few, t) for t in ("0", "1")]


@finding(
    "E-T7",
    "batches",
    "HASS's weights; 8 rows are the most that were run, not the most that fit.",
)
def batches(e: Evidence) -> list[Check]:
    return in_batches(e, "batches", tree="HASS", chain="HASS chain")


def in_batches(e: Evidence, file: str, tree: str, chain: str, most: int = 8) -> list[Check]:
    """What a batch does to a tree and to a chain."""
    published = e.published("Table 7; speedup, throughput at the largest batch", PAPER)
    twice = sum(float(row["value"]) for row in published) / len(published)

    def at(batch: int, method: str, of: str = "speedup") -> Figure:
        return e.method(file, 0, method, of, batch)

    speed = "tokens_per_second"
    return [
        higher(f"speed-up, batch 1 over {most}, tree", at(1, tree), at(most, tree)),
        higher(f"speed-up, batch 1 over {most}, chain", at(1, chain), at(most, chain)),
        higher(f"tokens/s at batch {most}, chain over tree", at(most, chain, speed), at(most, tree, speed)),
        close(f"throughput over plain decoding at batch {most}, chain, as published", at(most, chain), twice),
    ]


@finding(
    "E-par", "pytest tests/training/test_objective_eagle.py", "Counted for the shapes of Vicuna and LLaMA2-Chat 70B."
)
def parameters(e: Evidence) -> list[Check]:
    from outrider.drafters._eagle import EagleNet
    from outrider.nets.configs import EagleConfig
    from outrider.nets.layer import LayerShape

    checks, stated = [], re.findall(r"0\.\d\d", e.inventory["E-par"]["shows"])
    for (hidden, heads, groups, inner), billions in zip(SIZES, stated, strict=True):
        with torch.device("meta"):
            net = EagleNet(EagleConfig(LayerShape(hidden, heads, groups, 128, inner, hidden), 32000, hidden))
        size = f"{sum(p.numel() for p in net.parameters()) / 1e9:.2f}"
        checks.append(true(f"hidden size {hidden:,}, counted now: {size}B against {billions}B", size == billions))
    return checks


unmeasured(
    "E-cost",
    "a drafter of this size needs GPUs",
    "outrider train eagle lmsys/vicuna-7b-v1.3 --data dialogues.jsonl --out runs/eagle-7b",
)
