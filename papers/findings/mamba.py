"""Choi et al. 2025: Mamba drafters beside Transformers, over contexts, tokenizers and tree shapes."""

from __future__ import annotations

from collections.abc import Callable

from .. import contexts
from ..document import Cell
from ..evidence import Evidence, finding
from ..figures import CLOSE, Check, Figure, close, higher, least, open_, quotient, true
from ..reliability import ece
from ..studies import PAPER

SMALL, LARGE = "Mamba 0.5M, chain", "Mamba 1.5M"
MAMBA, LLAMA, EAGLE = "Mamba 1.5M", "Transformer 1.5M", "EAGLE"  # of the studies of contexts
CONTEXTS = "context_1024"  # the first of them


def speed(e: Evidence, t: int, name: str, file: str = "mamba") -> Figure:
    return e.method(file, t, name, "tokens_per_second")


def over_contexts(e: Evidence, name: str, of: Callable[[Cell], float]) -> dict[int, float]:
    """A number of a drafter by the context's length."""
    return {n: of(e.cells(f"context_{n}", name, 0)[0]) for n in contexts.LENGTHS}


def state(cell: Cell) -> float:
    """Bytes that the drafter's side holds."""
    assert cell.memory is not None
    return cell.memory.drafter


def step(cell: Cell) -> float:
    """Milliseconds of drafting for each drafted token."""
    assert cell.round_ms is not None
    assert cell.nodes is not None
    return cell.round_ms.draft / (cell.nodes - 1)


@finding("Ma-F1", CONTEXTS, "Times of one repetition, neither passes nor steps recorded.")
def memory_and_time(e: Evidence) -> list[Check]:
    states = {name: list(over_contexts(e, name, state).values()) for name in (MAMBA, LLAMA, EAGLE)}
    time = {name: list(over_contexts(e, name, step).values()) for name in (MAMBA, LLAMA)}
    kib = {name: ", ".join(f"{n / 1024:,.0f}" for n in sizes) for name, sizes in states.items()}
    ms = {name: ", ".join(f"{x:.2f}" for x in times) for name, times in time.items()}
    growth = {name: times[-1] / times[0] for name, times in time.items()}
    lengths = ", ".join(map(str, contexts.LENGTHS))
    return [
        true(
            f"the Mamba's state is as large at all of {lengths} tokens, KiB: {kib[MAMBA]}", len(set(states[MAMBA])) == 1
        ),
        *(
            true(f"{name}'s grows, KiB: {kib[name]}", states[name] == sorted(set(states[name])))
            for name in (LLAMA, EAGLE)
        ),
        true(f"a drafted token's time grows most with the Transformer, ms: {ms[LLAMA]}", growth[LLAMA] > growth[MAMBA]),
        true(f"and stays within {CLOSE:.0%} with the Mamba, ms: {ms[MAMBA]}", growth[MAMBA] <= 1 + CLOSE),
    ]


@finding("Ma-F2", "mamba")
def sizes(e: Evidence) -> list[Check]:
    others = ("Llama 0.5M, chain", "Mamba 1.5M, chain", "Llama 1.5M, chain")
    return [higher(f"tokens/s at T = 1, {SMALL} over {x}", speed(e, 1, SMALL), speed(e, 1, x)) for x in others]


@finding("Ma-F3", "mamba_calibration")
def reliability(e: Evidence) -> list[Check]:
    checks = []
    for t in (0.0, 1.0):
        theirs, mine = (ece(e.bins("mamba_calibration", name, t)) for name in ("transformer", "mamba"))
        words = f"calibration error at T = {t:g}, Transformer over Mamba"
        checks.append(higher(words, Figure.of(theirs), Figure.of(mine)))
    return checks


@finding("Ma-T1a", "mamba", "Chains; beside a target this small no external drafter can gain much.")
def against_transformers(e: Evidence) -> list[Check]:
    checks = []
    for t in (0, 1):
        for size in ("0.5M", "1.5M"):
            mamba, llama = (speed(e, t, f"{kind} {size}, chain") for kind in ("Mamba", "Llama"))
            checks.append(higher(f"tokens/s at T = {t}, Mamba {size} over Llama {size}", mamba, llama))
            checks.append(
                close(f"Mamba {size} over Llama {size} at T = {t}, twice as fast", quotient(mamba, llama), 2.0)
            )
    return checks


@finding("Ma-T1b", "mamba", "EAGLE's chain was decoded in another run, each beside its own plain decoding.")
def against_eagle(e: Evidence) -> list[Check]:
    checks = []
    for t in (0, 1):
        mamba, llama = (e.method("mamba", t, name, "speedup") for name in (SMALL, "Llama 0.5M, chain"))
        eagle = e.method("drafters", t, "EAGLE chain", "speedup")
        checks += [
            higher(f"speed-up at T = {t}, Mamba 0.5M over Llama 0.5M", mamba, llama),
            close(f"speed-up at T = {t}, Mamba 0.5M like EAGLE's chain", mamba, eagle.value),
        ]
    return checks


@finding(
    "Ma-T2", CONTEXTS,
    "Texts and code, not LongBench. The target was trained on shorter rows than most of these contexts, where time and "
    "memory alone are claimed.",
)  # fmt: skip
def long_contexts(e: Evidence) -> list[Check]:
    mamba, eagle = (over_contexts(e, name, state) for name in (MAMBA, EAGLE))
    longest = max(mamba)
    share = mamba[longest] / eagle[longest]
    words = f"the Mamba's state at {longest} tokens is half of EAGLE's or less: {share:.0%}"
    return [true(words, share <= 0.5), open_("tau beyond the length that the target was trained on")]


def kept(other: Figure, own: Figure) -> Figure:
    """The share that is kept of the tokens beyond the target's own, as if both were measured independently."""
    return quotient(*(Figure(f.value - 1, f.low - 1, f.high - 1) for f in (other, own)))


@finding("Ma-T3", "mamba", "Beside the Mamba of the same stage with the target's tokenizer; the other one is smaller.")
def tokenizer(e: Evidence) -> list[Check]:
    checks = []
    for t in (0, 1):
        names = ("Mamba of another tokenizer, text", "Mamba 0.5M, pretrained, chain")
        other, own = (e.method("mamba", t, name) for name in names)
        words = f"gain in tau at T = {t}, half or more is kept ({other} and {own} tokens a round)"
        checks.append(least(words, kept(other, own), 0.5))
    return checks


@finding("Ma-T4", "mamba", "A pass over the whole tree costs several plain passes on two cores.")
def tree(e: Evidence) -> list[Check]:
    return over_chain(e, "mamba", LARGE)


def over_chain(e: Evidence, file: str, name: str) -> list[Check]:
    checks = []
    for t in (0, 1):
        for words, of in (("tau", "tau"), ("tokens/s", "tokens_per_second")):
            tree, chain = (e.method(file, t, f"{name}, {kind}", of) for kind in ("3,2,2,1,1", "chain"))
            checks.append(higher(f"{words} at T = {t}, tree over chain", tree, chain))
    return checks


@finding("Ma-T5", "mamba")
def shapes(e: Evidence) -> list[Check]:
    return of_shapes(e, "mamba", LARGE)


def of_shapes(e: Evidence, file: str, name: str) -> list[Check]:
    checks = []
    for t in (0, 1):
        found = {shape: speed(e, t, f"{name}, {shape}", file) for shape in PAPER}
        slow, fast = (pick(found, key=lambda shape: found[shape].value) for pick in (min, max))
        words = f"tokens/s at T = {t}, the slowest of three shapes ({slow}) within {CLOSE:.0%} of the fastest ({fast})"
        checks.append(close(words, found[slow], found[fast].value))
    return checks


@finding(
    "Ma-T6", "mamba",
    "The paper's three shapes. Over arms that differ more it loses to the best of them ([results](results.md)).",
)  # fmt: skip
def bandit(e: Evidence) -> list[Check]:
    return over_shapes(e, "mamba", LARGE)


def over_shapes(e: Evidence, file: str, name: str) -> list[Check]:
    """A bandit over the paper's three shapes beside the best of them."""
    checks, mine = [], f"{name}, bandit of the paper's"
    for t in (0, 1):
        best = max((f"{name}, {shape}" for shape in PAPER), key=lambda arm: speed(e, t, arm, file).value)
        words = f"tokens/s at T = {t}, the bandit over the best shape ({best.removeprefix(f'{name}, ')})"
        checks.append(higher(words, speed(e, t, mine, file), speed(e, t, best, file)))
    return checks


@finding("Ma-alg1", "mamba")
def verification(e: Evidence) -> list[Check]:
    return [e.same_text("mamba", t, "") for t in (0, 1)]
