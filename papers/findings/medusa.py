"""Cai et al. 2024: heads, trees of ranks, the ladder, typical acceptance."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch

from outrider.core.tree import template

from ..evidence import Evidence, Missing, finding
from ..figures import Check, Figure, higher, least, mean, true

CODE = ("stdlib", "algorithms", "tldr")  # Python's library, algorithms, shell commands
LADDER = ("heads as a chain", "Cartesian tree 3 x 2 x 1", "optimised sparse tree", "Medusa-2")
SIZES = ("4x3", "8x4", "16x6", "32x6", "60x6")
METRICS = (("tau", "tau"), ("speed-up", "speedup"))


def by_kind(e: Evidence, name: str, t: int) -> Check:
    """The statement that code-like domains gain more than the others."""
    kinds: dict[bool, list[Figure]] = {True: [], False: []}
    for cell in e.cells("drafters", name, t):
        kinds[cell.task.removeprefix("demo/") in CODE].append(Figure.of(cell.speedup))
    if not kinds[True]:
        raise Missing(f"`papers/results/drafters.json` has no {name!r} at T = {t}")
    words = f"speed-up of {name} at T = {t}, mean of {', '.join(CODE)} over the other domains'"
    return higher(words, mean(kinds[True]), mean(kinds[False]))


@finding("M-arch", "pytest tests/checkpoints")
def heads(e: Evidence) -> list[Check]:
    from outrider.drafters.medusa import MedusaConfig, MedusaNet

    with torch.device("meta"):
        net = MedusaNet(MedusaConfig(vocab=32000, hidden=4096, heads=5))
    shapes = sorted(tuple(p.shape) for p in net.parameters())
    size = sum(prod(shape) for shape in shapes) / 1e9
    words = f"five heads for a 7B target, each h x h, a bias and V x h, counted now: {size:.2f}B parameters"
    return [true(words, shapes == sorted([(4096, 4096), (4096,), (32000, 4096)] * 5))]


@finding("M-tree", "pytest tests/unit/test_tree.py")
def product_tree(e: Evidence) -> list[Check]:
    shapes = ((2, 3), (4, 3, 2, 1), (3, 3, 2, 1), (3, 2, 2, 1, 1), (2, 2, 2, 1, 1, 1))
    made = [template(shape) for shape in shapes]
    nodes = [len(parents) - 1 for parents in made]  # beside the root
    leaves = [len(set(range(len(parents))) - set(parents)) for parents in made]
    sums = [sum(prod(shape[: d + 1]) for d in range(len(shape))) for shape in shapes]
    named = " ".join("x".join(map(str, shape)) for shape in shapes)
    return [
        true(f"nodes of the trees {named}, counted now: {', '.join(map(str, nodes))}", nodes == sums),
        true(f"leaves of the same: {', '.join(map(str, leaves))}", leaves == [prod(shape) for shape in shapes]),
    ]


def rung(e: Evidence, t: int, name: str, of: str) -> Figure:
    return e.method("medusa2" if name == "Medusa-2" else "ladder", t, name, of)


@finding("M-ladder", "ladder", "Rungs were decoded one after the other, so speeds are rough. Heads of a small budget.")
def ladder(e: Evidence) -> list[Check]:
    return [
        higher(f"{words} at T = 0, {b} over {a}", rung(e, 0, b, of), rung(e, 0, a, of))
        for words, of in METRICS
        for a, b in pairwise(LADDER)
    ]


@finding("M-sizes", "drafters", "The smallest of two sizes; SmolLM2 is the other.")
def sizes(e: Evidence) -> list[Check]:
    return [
        least(f"speed-up at T = {t} of Medusa, above 1", e.method("drafters", t, "Medusa", "speedup"), 1.0)
        for t in (0, 1)
    ]


@finding("M-cat", "drafters", "Our code-like domains stand for the paper's categories.")
def categories(e: Evidence) -> list[Check]:
    return [by_kind(e, "Medusa", t) for t in (0, 1)]


@finding("M-sparse", "ladder", "One dense tree, the product of its widths, stands for the random ones.")
def sparse(e: Evidence) -> list[Check]:
    dense, tuned = LADDER[1:3]
    return [
        higher(f"{words} at T = {t}, sparse over dense", rung(e, t, tuned, of), rung(e, t, dense, of))
        for t in (0, 1)
        for words, of in METRICS
    ]


@finding("M-treesize", "sizes", "Measured with HASS's trees of 4 to 60 nodes.")
def tree_size(e: Evidence) -> list[Check]:
    checks = []
    for t in (0.0, 1.0):
        of = {n: {m: e.method("sizes", t, f"HASS, {n}", m) for m in ("tau", "speedup")} for n in SIZES}
        peak = max(SIZES, key=lambda n: of[n]["speedup"].value)
        checks += [
            higher(f"tokens a round at T = {t:g}, 60 nodes over 4", of["60x6"]["tau"], of["4x3"]["tau"]),
            higher(f"speed-up at T = {t:g}, the rise: {peak} over 4x3", of[peak]["speedup"], of["4x3"]["speedup"]),
            higher(f"speed-up at T = {t:g}, the fall: {peak} over 60x6", of[peak]["speedup"], of["60x6"]["speedup"]),
        ]
    return checks


@finding(
    "M-typical", "typical",
    "Quality means likelier text under the target, which is no sample any more.",
)  # fmt: skip
def typical(e: Evidence) -> list[Check]:
    low, high = (f"Medusa, typical?epsilon={eps:g}&delta={delta:g}, 16x4" for eps, delta in ((0.03, 0.1), (0.3, 0.3)))
    likely = {}
    for name in (low, high):
        each = [c.quality.log_likelihood or 0.0 for c in e.cells("typical", name, 0.7) if c.quality]
        likely[name] = Figure.of(sum(each) / len(each))
    tau, speed = ([e.method("typical", 0.7, name, of) for name in (low, high)] for of in ("tau", "speedup"))
    return [
        higher("tau, the lowest threshold over the highest", *tau),
        higher("speed-up, the lowest threshold over the highest", *speed),
        higher("log-likelihood a token, the highest threshold over the lowest", likely[high], likely[low]),
    ]
