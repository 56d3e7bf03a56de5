"""Choi et al. 2025: Mamba drafters beside Transformers, over contexts, tokenizers and tree shapes; the bandit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import sqrt
from typing import TypeVar

from outrider.bench.document import Estimate

from .. import contexts
from ..document import Cell
from ..figures import CLOSE, Check, Figure, close, higher, least, quotient, true
from ..reliability import ece
from ..rows import Measured, Missing, Statement, computed_by, judges
from .runs import SHAPES

T = TypeVar("T")
CONTEXTS = {
    model: " ".join(f"{prefix}context_{n}" for n in contexts.LENGTHS)
    for model, prefix in (("SmolLM2", "smollm2_"), ("demo", ""))
}
NAMES = {"Mamba": "Mamba 1.5M", "Llama": "Transformer 1.5M", "EAGLE": "EAGLE"}  # of the demo's studies of contexts


def over_contexts(m: Measured, name: str, of: Callable[[Cell], T | None]) -> list[T]:
    """A number of a drafter by the context's length."""
    figures, method = [], NAMES[name] if m.model == "demo" else name
    for n, file in zip(contexts.LENGTHS, CONTEXTS[m.model].split(), strict=True):
        cells = [c for c in m.at(file).cells if c.method == method and c.temperature == 0]
        value = of(cells[0]) if cells else None
        if value is None:
            raise Missing(f"{name} at {n} tokens was not run")
        figures.append(value)
    return figures


def state(cell: Cell) -> float | None:
    return cell.memory.drafter / 1024 if cell.memory else None


def peak(cell: Cell) -> float | None:
    return cell.memory.peak / 2**20 if cell.memory and cell.memory.peak else None


def step(cell: Cell) -> float | None:
    """Milliseconds of drafting for each drafted token."""
    return cell.round_ms.draft / (cell.nodes - 1) if cell.round_ms and cell.nodes else None


@judges("Ma-F1", studies=CONTEXTS, SmolLM2="gw", demo="n3")
def memory_and_time(m: Measured) -> Iterator[Statement]:
    for name in NAMES:
        sizes = over_contexts(m, name, state)
        grows = sizes == sorted(set(sizes))
        words, right = ("is constant", len(set(sizes)) == 1) if name == "Mamba" else ("grows", grows)
        yield true(f"the {name}'s state {words} over contexts, KiB", right, ", ".join(f"{n:,.0f}" for n in sizes))
    growth = {name: (times := over_contexts(m, name, step))[-1] / times[0] for name in ("Mamba", "Llama")}
    words = "a drafted token's time grows more with the Transformer than with the Mamba"
    yield true(words, growth["Llama"] > growth["Mamba"], f"{growth['Llama']:.2f}x against {growth['Mamba']:.2f}x")
    yield lambda: least("growth of the process's peak, the Transformer's over the Mamba's, above 1", peaks(m), 1.0)


def peaks(m: Measured) -> Figure:
    """How much more the process's peak grows over contexts with the Transformer."""
    mamba, llama = (over_contexts(m, name, peak) for name in ("Mamba", "Llama"))
    return Figure.of((llama[-1] - llama[0]) / (mamba[-1] - mamba[0]), rough=0.1)


@judges("Ma-F2", studies={"demo": "mamba"}, SmolLM2="gw", demo="a5")
def sizes(m: Measured) -> Iterator[Statement]:
    for name in ("small Llama, chain", "Mamba, chain", "Llama, chain"):
        for t in (0, 1):
            yield lambda: higher(
                f"tokens/s at T = {t}, the small Mamba over the {name}",
                m("small Mamba, chain", t, "tokens_per_second"),
                m(name, t, "tokens_per_second"),
            )


@judges("Ma-F3", SmolLM2="ghw", demo="3")
def reliability(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        bins = {name: m.bins(f"{name}, tree", t) for name in ("Llama", "Mamba")}
        errors = {}
        for name, mine in bins.items():
            n = sum(b.count for b in mine)
            half = 1.96 * sqrt(sum(b.count * b.acceptance * (1 - b.acceptance) for b in mine)) / n
            errors[name] = Figure(ece(mine), ece(mine) - half, ece(mine) + half)
        yield lambda: higher(f"calibration error at T = {t}, Transformer over Mamba", errors["Llama"], errors["Mamba"])


@judges("Ma-T1a", SmolLM2="gw", demo="3")
def against_transformers(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        yield lambda: higher(f"tau at T = {t}, Mamba over Llama", *(m(f"{x}, chain", t) for x in ("Mamba", "Llama")))
    for t in (0, 1):
        yield lambda: higher(f"tokens/s at T = {t}, Mamba over Llama", *speeds(m, t))
        yield lambda: close(f"Mamba over Llama at T = {t}, twice as fast", quotient(*speeds(m, t)), 2.0)


def speeds(m: Measured, t: float) -> tuple[Figure, Figure]:
    """Tokens a second with the Mamba and with the Llama."""
    mamba, llama = (m(f"{name}, chain", t, "tokens_per_second") for name in ("Mamba", "Llama"))
    return mamba, llama


@judges("Ma-T1b", SmolLM2="gw", demo="3")
def against_eagle(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        yield lambda: quotient_like(m, t, "tau")
    for t in (0, 1):
        yield lambda: quotient_like(m, t, "speedup")


def quotient_like(m: Measured, t: float, of: str) -> Check:
    mamba, eagle = (m(f"{name}, chain", t, of) for name in ("Mamba", "EAGLE"))
    return close(f"{of} at T = {t:g}, Mamba's like EAGLE's", quotient(mamba, eagle), 1.0)


@judges("Ma-T2", studies=CONTEXTS, SmolLM2="gsw", demo="ns3")
def long_contexts(m: Measured) -> Iterator[Statement]:
    mamba, eagle = (over_contexts(m, name, state)[-1] for name in ("Mamba", "EAGLE"))
    yield true(
        "at 8,192 tokens the Mamba's state is half of EAGLE's or less", mamba <= eagle / 2, f"{mamba / eagle:.0%}"
    )
    if m.model == "demo":
        raise Missing("peak memory, and tau beyond the target's own length, were not run")
    words = "tau of the Mamba at 8,192 tokens, that at 1,024"
    yield lambda: close(words, quotient(*(Figure.of(x) for x in taus(m)[::-1])), 1.0)
    mamba, eagle = (over_contexts(m, name, peak)[-1] for name in ("Mamba", "EAGLE"))
    words = "the process's peak at 8,192 tokens, MiB, with EAGLE over that with the Mamba"
    yield higher(words, Figure.of(eagle), Figure.of(mamba))


def taus(m: Measured) -> tuple[Estimate, Estimate]:
    """Of the Mamba in the shortest and in the longest context."""
    short, *_, long = over_contexts(m, "Mamba", lambda cell: cell.tau)
    return short, long


@judges("Ma-T3", SmolLM2="gw", demo="3")
def tokenizer(m: Measured) -> Iterator[Statement]:
    own = "its own" if m.model == "demo" else "Mamba, chain"
    for t in (0, 1):
        yield lambda: least(
            f"gain in tau at T = {t}, half or more is kept", kept(m("another tokenizer", t), m(own, t)), 0.5
        )


def kept(other: Figure, own: Figure) -> Figure:
    """The share that is kept of the tokens beyond the target's own, as if both were measured independently."""
    return quotient(*(Figure(f.value - 1, f.low - 1, f.high - 1) for f in (other, own)))


@judges("Ma-T4", SmolLM2="gw", demo="3")
def tree(m: Measured) -> Iterator[Statement]:
    shape = "Mamba, 3,2,2,1,1"
    for of in ("tau", "tokens_per_second"):
        for t in (0, 1):
            yield lambda: higher(f"{of} at T = {t}, tree over chain", m(shape, t, of), m("Mamba, chain", t, of))


@judges("Ma-T5", SmolLM2="gw", demo="a3")
def shapes(m: Measured) -> Iterator[Statement]:
    for of in ("tau", "tokens_per_second"):
        for t in (0, 1):
            yield lambda: spread(m, "Mamba", t, of)
    first, last = (f"Llama, {shape}" for shape in (SHAPES[0], SHAPES[-1]))
    for of in ("tau", "tokens_per_second"):
        for t in (0, 1):
            words = f"{of} of the Transformer at T = {t}, its first shape over its last"
            yield lambda: higher(words, m(first, t, of), m(last, t, of))


def spread(m: Measured, name: str, t: float, of: str) -> Check:
    by_shape = {shape: m(f"{name}, {shape}", t, of) for shape in SHAPES}
    slow, fast = (pick(by_shape, key=lambda s: by_shape[s].value) for pick in (min, max))
    words = f"{of} of the {name} at T = {t:g}, the least of the shapes within {CLOSE:.0%} of the most"
    return close(words, quotient(by_shape[slow], by_shape[fast]), 1.0)


@judges("Ma-T6", SmolLM2="gw", demo="5")
def bandit(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        of = "tokens_per_second"
        yield lambda: higher(f"tokens/s at T = {t}, the paper's bandit over the shape (3,3,2,1)",
                             m("Mamba, bandit", t, of), m(f"Mamba, {SHAPES[0]}", t, of))  # fmt: skip


@judges("Ma-alg1")
def verification(m: Measured) -> Iterator[Statement]:
    for t in (0, 1):
        yield lambda: m.same_text(t, {"SmolLM2": "smollm2_taus", "demo": "mamba"}[m.model])


computed_by("Ma-eq1", "tests/budgets/test_bandit.py::test_ucb_by_hand")
computed_by("Ma-eq2", "tests/budgets/test_bandit.py::test_rewards")
computed_by(
    "Ma-eq5", "tests/budgets/test_bandit.py::test_exact_rewards_find_the_faster_arm_where_the_mean_of_shares_does_not"
)
