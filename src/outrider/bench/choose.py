"""`recommend`: which drafter serves a model best on this machine, by measuring those that fit it.

The candidates take turns with plain decoding on a few prompts, then on twice as many, and so on. After each step
those go whose interval lies below the best one's. It ends when the best has parted from all others and from plain
decoding, when there are no more prompts, or when the time is up.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from ..llm import LLM
from ..params import InputError
from ..targets import find
from ..targets.names import BEST
from .cells import Analysis, document
from .config import Config
from .document import Cell, Estimate
from .machine import here
from .models import Models
from .runner import Group, Runner, fitting
from .store import Store
from .tasks import load
from .types import PLAIN, Method, Prompt, Task

FIRST = 2  # prompts of the first step
TASK = "prompts"
UNTRAINED = ("lookup", "suffix", "lookahead", "suffix + lookup")
BUDGETS = ("auto", "8x3", "16x5")  # of trained drafters; the others have `auto`, which finds its own depth
Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """What one way to decode would give."""

    drafter: str  # its SPEC; several joined by " + " are a mix
    budget: str
    prompts: int  # that it answered
    speedup: Estimate | None = None  # over plain decoding
    tokens_per_second: Estimate | None = None
    tau: Estimate | None = None
    note: str = ""  # why it has no figures, or was left behind


@dataclass(frozen=True)
class Recommendation:
    """The answer: `best` is None where plain decoding is the fastest."""

    model: str
    best: Candidate | None
    sure: bool  # the best one's interval lies above all others' and above plain decoding
    candidates: tuple[Candidate, ...]  # the fastest first
    plain: Candidate
    seconds: float
    command: str  # how to decode so from the shell
    python: str  # and from Python
    sentence: str


def recommend(
    model: str | None = None,
    prompts: Sequence[object] = (),
    minutes: float = 3.0,
    *,
    drafters: Sequence[str] = (),
    tokens: int = 64,
    dtype: str = "auto",
    device: str = "auto",
    compile: bool = True,
    trust_remote_code: bool = False,
    say: Say = lambda what: None,
) -> Recommendation:
    """Measure the drafters that fit a model against plain decoding, on this machine.

    model: a name, folder or hub id, as `outrider.load` takes it.
    prompts: texts, or lists of messages; none: the demo's held-out prompts for the demo, else a small set of our own.
    minutes: how long to measure at most, loading left out.
    drafters: further SPECs to try, such as eagle:DIR.
    tokens: new ones for each answer.
    say: told what is done next.

    Raises InputError for a model or a drafter that cannot be loaded, and where no prompt fits.
    """
    if not minutes > 0:
        raise InputError(f"--minutes is above 0, not {minutes:g}")
    if tokens < 2:
        raise InputError(f"a speed takes at least 2 new tokens, not {tokens}")
    config = Config(model, dtype=dtype, device=device, compile=compile, trust_remote_code=trust_remote_code).named()
    models = Models.of(config)
    say(f"loading {config.model}")
    llm = models.llm()
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        store = Store.open(Path(folder), {"target": str(config.model), "arguments": {}, **here()})
        store.begin()
        runner = Runner(models, store, tokens)
        task = fitting(_task(llm, config, prompts), runner)
        rows, lost = opened(runner, candidates(llm, config, drafters), set(drafters), say)
        found = race(runner, task, rows, minutes, say)
    return conclude(str(config.model), found, lost)


def _task(llm: LLM, config: Config, prompts: Sequence[object]) -> Task:
    """The prompts as a task."""
    if not prompts:
        known = load(config.tasks[0] if config.tasks[0] != "demo" else "demo/self-dialogue", None)
        others = [load(name, None) for name in ("demo/gsm8k", "demo/stdlib")] if config.model == "demo" else []
        mixed = [p for row in zip(*(t.prompts for t in (known, *others)), strict=False) for p in row]
        return Task(TASK, tuple(replace(p, id=str(i)) for i, p in enumerate(mixed)))
    made = [
        Prompt(str(i), (p,) if isinstance(p, str) else tuple(m["content"] for m in p if m["role"] == "user"))  # type: ignore[attr-defined]
        for i, p in enumerate(prompts)
    ]
    return Task(TASK, tuple(made), raw=all(isinstance(p, str) for p in prompts))


def candidates(llm: LLM, config: Config, more: Sequence[str]) -> list[Method]:
    """The rows to try: untrained drafters, those that ship for this model, and what the user names."""
    trained = [*BEST.get(str(config.model), ()), *more]
    best = find(config.model).drafter
    trained = list(dict.fromkeys([best, *trained])) if best != "lookup" else list(dict.fromkeys(trained))
    if config.model == "demo":
        trained += ["eagle:demo/hass?tree=chain", "model:demo"]
    rows = [Method(spec) for spec in UNTRAINED]
    return rows + [Method(spec, budget=budget) for spec in dict.fromkeys(trained) for budget in BUDGETS]


def opened(runner: Runner, rows: Sequence[Method], asked: set[str], say: Say) -> tuple[list[Method], list[Candidate]]:
    """Rows that could be loaded, plain decoding first, and the others with the reason; what was asked for must load."""
    kept, lost = [Method(PLAIN)], list[Candidate]()
    runner.open(kept)
    for row in rows:
        say(f"loading {row.spec}")
        try:
            runner.open([row])
            kept.append(row)
        except InputError as error:
            if row.spec in asked:
                raise
            lost.append(Candidate(row.spec, row.budget, 0, note=str(error)))
    return kept, lost


def race(runner: Runner, task: Task, rows: list[Method], minutes: float, say: Say) -> tuple[dict[str, Cell], float]:
    """The last figures of every row, by its name, and the seconds it took."""
    began, found, count, alive = monotonic(), dict[str, Cell](), FIRST, list(rows)
    runner.deadline = began + 60 * minutes
    while True:
        group = Group(replace(task, prompts=task.prompts[:count]), 0.0, 1, tuple(alive), 1)
        whole = runner.run(group, lambda what, n=count: say(f"{what.partition(', ')[2]} ({n} prompts)"))  # type: ignore[misc]
        for cell in document(Analysis(runner, keep_loops=True), [group], 0.0).cells:
            if cell.speedup or cell.method not in found:
                found[cell.method] = cell
        alive = [m for m in alive if m.plain or not behind(found[m.name], found.values())]
        last = count >= len(task.prompts)
        if not whole or last or monotonic() > runner.deadline or parted([found[m.name] for m in alive]):
            return found, monotonic() - began
        count = min(2 * count, len(task.prompts))


def behind(cell: Cell, others: object) -> bool:
    """Has it no figures, or does its whole interval lie below another's?"""
    if cell.speedup is None or not cell.result:
        return True
    best = max(c.speedup.ends[0] for c in others if c.speedup and c.result)  # type: ignore[attr-defined]
    return cell.speedup.ends[1] < best and cell.speedup.low is not None


def parted(alive: Sequence[Cell]) -> bool:
    """Is only one left beside plain decoding, with an interval clear of it, or plain decoding alone?"""
    others = [c for c in alive if not c.plain]
    return not others or (len(others) == 1 and bool(others[0].speedup and others[0].speedup.clear_of(1.0)))


def conclude(model: str, raced: tuple[dict[str, Cell], float], lost: Sequence[Candidate]) -> Recommendation:
    """What is said of the figures: plain decoding wins unless a drafter's whole interval lies above it."""
    cells, seconds = raced
    every = [_candidate(c) for c in cells.values() if not c.plain]
    plain = next(_candidate(c) for c in cells.values() if c.plain)
    ranked = sorted(every, key=lambda c: -(c.speedup.value if c.speedup else 0.0))
    first = next((c for c in ranked if c.speedup and c.speedup.value > 1), None)
    best = first if first and first.speedup and first.speedup.clear_of(1.0) else None
    rest = [c.speedup.ends[1] for c in ranked if c is not best and c.speedup]
    sure = bool(best and best.speedup and all(best.speedup.ends[0] > end for end in rest))
    spec = best.drafter.split(" + ") if best else ["none"]
    flags = " ".join(f"--drafter '{s}'" if "?" in s else f"--drafter {s}" for s in spec)
    budget = f" --budget {best.budget}" if best and best.budget != "auto" else ""
    python = f'outrider.load("{model}", {spec[0]!r}' if len(spec) == 1 else f'outrider.load("{model}", {spec!r}'
    python += f", budget={best.budget!r})" if best and best.budget != "auto" else ")"
    return Recommendation(
        model, best, sure, (*ranked, *lost), plain, round(seconds, 1),
        f'outrider generate {model} "..." {flags}{budget}', python, sentence(model, best, first, sure, plain),
    )  # fmt: skip


def sentence(model: str, best: Candidate | None, first: Candidate | None, sure: bool, plain: Candidate) -> str:
    """The answer in words."""
    rate = f"{plain.tokens_per_second.value:.0f} tokens/s" if plain.tokens_per_second else "no figures"
    if plain.tokens_per_second is None or (first is None and best is None and not plain.speedup):
        return f"The time was too short to measure {model}; give more --minutes."
    if best is None or best.speedup is None:
        near = f"; the best of them, {_named(first)}, is at {first.speedup.text()}" if first and first.speedup else ""
        return f"Plain decoding ({rate}) serves {model} best on this machine: no drafter is faster beyond chance{near}."
    close = "" if sure else "; others are as good within the intervals"
    return f"{_named(best)} serves {model} best on this machine: {best.speedup.text()} times plain ({rate}){close}."


def _named(c: Candidate) -> str:
    return c.drafter if c.budget == "auto" else f"{c.drafter} with budget {c.budget}"


def _candidate(cell: Cell) -> Candidate:
    note = "" if cell.state == "done" else cell.reason
    return Candidate(
        cell.spec, cell.budget, cell.prompts, cell.speedup if cell.result else None, cell.tokens_per_second, cell.tau,
        note,
    )  # fmt: skip
