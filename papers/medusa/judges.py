"""Cai et al. 2024: heads, trees of ranks, the ladder, typical acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ..figures import ONE, Check, Figure, higher, least, mean
from ..rows import Measured, Missing, Statement, computed_by, judges
from .runs import DENSE, RUNGS

CODE = ("humaneval", "stdlib", "algorithms", "tldr")  # Python, its library, algorithms, shell commands


def by_kind(m: Measured, name: str, t: float, of: str) -> Check:
    """The statement that code gains more than the other tasks."""
    kinds: dict[bool, list[Figure]] = {True: [], False: []}
    for cell in m.cells(name, t, of):
        if (estimate := getattr(cell, of)) is not None:
            kinds[cell.task.removeprefix("demo/") in CODE].append(Figure.of(estimate))
    if any(not f.measured for figures in kinds.values() for f in figures):
        raise Missing(f"{of} of {name} by task at T = {t:g} has no intervals: one batch of prompts each")
    if not all(kinds.values()):
        raise Missing(f"{of} of {name} by task at T = {t:g} is not stored")
    words = f"{of} of {name} at T = {t:g}, mean of code over that of the other tasks"
    return higher(words, mean(kinds[True]), mean(kinds[False]))


computed_by("M-arch", "tests/models/test_medusa.py::test_network")
computed_by("M-tree", "tests/unit/test_tree.py::test_templates")


@judges("M-ladder", studies={"demo": "ladder medusa2 medusa2_distilled"}, SmolLM2="c8", demo="3")
def ladder(m: Measured) -> Iterator[Statement]:
    for of in ("tau", "speedup"):
        for a, b in pairwise(RUNGS):
            yield lambda: higher(f"{of} at T = 0, {b} over {a}", m(b, 0, of), m(a, 0, of))
    yield lambda: higher(f"tau at T = 0, Medusa-2 by self-distillation over {RUNGS[-2]}",
                         m("self-distilled", 0), m(RUNGS[-2], 0))  # fmt: skip


@judges("M-sizes", studies={"demo": "drafters"}, SmolLM2="c", demo="5")
def sizes(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        yield lambda: least(f"speed-up of Medusa at T = {t}, above 1", m("Medusa", t, "speedup"), 1.0)


@judges("M-cat", SmolLM2="c", demo="3")
def categories(m: Measured) -> Iterator[Statement]:
    for of in ("tau", "speedup"):
        for t in (0, 1):
            yield lambda: by_kind(m, "Medusa", t, of)


@judges("M-sparse", SmolLM2="c", demo="3")
def sparse(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        for shape, n in DENSE.items():
            yield lambda: higher(f"tau at T = {t}, {n} nodes each, sparse over dense tree {shape}",
                                 m(f"sparse tree of {n}", t), m(f"dense tree {shape}", t))  # fmt: skip


@judges("M-treesize", SmolLM2="c", demo="e3")
def tree_size(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        yield lambda: higher(f"tau at T = {t}, 60 nodes over 4", m("60 nodes", t), m("4 nodes", t))
    own = m.model == "SmolLM2" or m.study in m.evidence.results  # elsewhere they are HASS's trees
    speeds: dict[int, Figure] = {}
    for n in (1, 2, 4, 8, 16, 32, 60):
        try:
            speeds[n] = ONE if n == 1 else m("Medusa" if n == 16 and own else f"{n} nodes", 0, "speedup")
        except Missing:
            continue
    if len(speeds) < 4:
        raise Missing("speed over tree size was not run")
    peak, last = max(list(speeds)[1:], key=lambda n: speeds[n].value), max(speeds)
    yield lambda: higher(f"speed-up at T = 0 rises: {peak} nodes over 1", speeds[peak], speeds[1])
    yield lambda: higher(f"and falls: {peak} nodes over {last}", speeds[peak], speeds[last])


@judges("M-typical", SmolLM2="cmx", demo="mx")
def typical(m: Measured) -> Iterator[Statement]:
    t = 1.0 if m.model == "SmolLM2" or m.study in m.evidence.results else 0.7
    low, high = "typical, low", "typical, high"
    yield lambda: higher("tau, the lowest threshold over the highest", m(low, t), m(high, t))
    likely = {name: likelihood(m, name, t) for name in (low, high)}
    words = "log-likelihood a token, the highest threshold over the lowest"
    yield lambda: higher(words, likely[high], likely[low])


def likelihood(m: Measured, name: str, t: float) -> Figure:
    """Mean log-likelihood of a method's texts, its interval from the tasks."""
    each = [c.quality.log_likelihood for c in m.cells(name, t) if c.quality and c.quality.log_likelihood is not None]
    if len(each) < 2:
        raise Missing(f"texts of {name} were not judged")
    middle = sum(each) / len(each)
    half = 1.96 * (sum((x - middle) ** 2 for x in each) / (len(each) - 1) / len(each)) ** 0.5
    return Figure(middle, middle - half, middle + half, dict(enumerate(each)))  # type: ignore[arg-type]
