"""`recommend`: the fastest drafter for a model on this machine, by measuring those that fit it.

First every candidate answers two prompts, the most promising first, in at most half of the time. Then the three fastest
take turns with plain decoding on the same prompts, then on twice as many, and so on; those whose interval lies below
the best one's drop out. It ends when one is clear of all others and of plain decoding, when there are no more prompts,
or when the time is up. Answers are shorter if the model is too slow for the time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from ..names import BEST, find
from ..params import InputError
from .cells import Analysis, document
from .config import Config
from .document import Cell, Estimate
from .machine import here
from .metrics import seconds
from .metrics import tokens as tokens_of
from .models import Models
from .runner import WARM, Group, Runner, fitting
from .store import Store
from .tasks import expand, load
from .types import PLAIN, Method, Prompt, Task

FIRST = 2  # prompts that every candidate answers
FAR = 0.6  # of the fastest one's speed: a slower candidate answers one prompt only
FINALISTS = 3  # that go on to more prompts
SURVEY = 0.5  # share of the time for the first prompts of all candidates
USED = 0.9  # share of the time in which answers may begin; the rest is for the last answer and the figures
UNTRAINED = ("lookup", "suffix", "lookahead", "suffix + lookup")
BUDGETS = ("8x3", "16x5")  # also tried for the fastest drafter, if it is a trained one
Say = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Candidate:
    """A way to decode, measured."""

    drafter: str  # its SPEC; a mix is joined by " + "
    budget: str
    prompts: int  # that it answered
    speedup: Estimate | None = None  # over plain decoding
    tokens_per_second: Estimate | None = None
    tau: Estimate | None = None
    note: str = ""  # why it has no figures


@dataclass(frozen=True)
class Recommendation:
    """The answer; `best` is None if plain decoding is the fastest."""

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
    model: str | None = None, prompts: Sequence[object] = (), minutes: float = 3.0, *, drafters: Sequence[str] = (),
    tokens: int = 64, dtype: str = "auto", device: str = "auto", compile: bool = True,
    trust_remote_code: bool = False, say: Say = lambda what, left: None,
) -> Recommendation:  # fmt: skip
    """Measure the drafters that fit a model against plain decoding, on this machine.

    model: a name, folder or hub id, as `outrider.load` takes it.
    prompts: texts, or lists of messages; none: held-out prompts for the demo, else a small set that ships.
    minutes: how long to measure at most, once the model is loaded.
    drafters: further SPECs to try, such as eagle:DIR.
    tokens: of each answer; fewer if the model is slow.
    say: called with what is done next and the seconds left at most (None while the model is loaded).

    Raises InputError for a model or a drafter that cannot be loaded, and if no prompt fits.
    """
    if not minutes > 0:
        raise InputError(f"--minutes must be above 0, not {minutes:g}")
    if tokens < 2:
        raise InputError(f"--max-new-tokens must be at least 2 to measure a speed, not {tokens}")
    config = Config(model, dtype=dtype, device=device, compile=compile, trust_remote_code=trust_remote_code).named()
    models, name = Models.of(config), str(config.model)
    say(f"loading {name}", None)
    models.llm()
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        store = Store.open(Path(folder), {"target": name, "arguments": {}, **here()})
        store.begin()
        runner = Runner(models, store, tokens)
        task = fitting(task_of(name, prompts), runner)
        say("loading the drafters that were named", None)
        runner.open([Method(spec) for spec in drafters])  # what the user names must load
        began = monotonic()
        cells, lost = measure(runner, task, [Method(PLAIN), *candidates(name, drafters)], minutes, say)
    return conclude(name, cells, lost, monotonic() - began)


def task_of(model: str, prompts: Sequence[object]) -> Task:
    """The prompts as a task."""
    if not prompts:
        names = ("demo/self-dialogue", "demo/gsm8k", "demo/stdlib") if model == "demo" else ("sample",)
        mixed = [p for row in zip(*(load(name).prompts for name in expand(names)), strict=False) for p in row]
        return Task("prompts", tuple(replace(p, id=str(i)) for i, p in enumerate(mixed)))
    turns = [
        (p,) if isinstance(p, str) else tuple(m["content"] for m in p if m["role"] == "user")  # type: ignore[attr-defined]
        for p in prompts
    ]
    raw = all(isinstance(p, str) for p in prompts)
    return Task("prompts", tuple(Prompt(str(i), t) for i, t in enumerate(turns)), raw=raw)


def candidates(model: str, named: Sequence[str]) -> list[Method]:
    """What to try, in order: named drafters, the model's best, lookup, others that ship, untrained ones."""
    shipped = [*BEST.get(model, ())]
    if model == "demo":
        shipped += ["eagle:demo/hass?tree=chain", "model:demo"]
    first, *untrained = UNTRAINED
    return [Method(spec) for spec in dict.fromkeys((*named, find(model).drafter, first, *shipped, *untrained))]


def first_prompts(task: Task, count: int, rows: Sequence[Method]) -> Group:
    """The group of these methods on the first prompts of a task, at temperature 0."""
    return Group(replace(task, prompts=task.prompts[:count]), 0.0, 1, tuple(rows), 1)


def figures(runner: Runner, group: Group) -> dict[str, Cell]:
    """The cells of a group by method, from the samples so far."""
    return {cell.method: cell for cell in document(Analysis(runner, keep_loops=True), [group], 0.0).cells}


def rate(runner: Runner, row: Method) -> float:
    """Decoded tokens per second on the first prompts; 0 without an answer."""
    mine = [s for s in runner.store.samples if s.method == row.name and s.chunk < FIRST]
    spent = sum(map(seconds, mine))
    return sum(map(tokens_of, mine)) / spent if spent else 0.0


def measure(
    runner: Runner, task: Task, rows: Sequence[Method], minutes: float, say: Say
) -> tuple[dict[str, Cell], list[Candidate]]:
    """Figures by method, and what could not be tried, within `minutes`; plain decoding is the first row."""
    began = monotonic()
    runner.deadline = began + USED * 60 * minutes
    plain, *others = rows
    runner.open([plain])
    say("plain decoding", runner.deadline - monotonic())
    shorten(runner, task, plain, len(others))
    tried, _ = survey(runner, task, [plain], runner.deadline, say)
    fit, lost = survey(runner, task, others, began + SURVEY * 60 * minutes, say)
    last = sorted(fit, key=lambda m: -rate(runner, m))[:FINALISTS]
    if last and last[0].spec not in UNTRAINED:  # a fixed budget may be better
        more, _ = survey(runner, task, [replace(last[0], budget=b) for b in BUDGETS], runner.deadline, say)
        fit += more
        last = sorted([*last, *more], key=lambda m: -rate(runner, m))[:FINALISTS]
    cells = figures(runner, first_prompts(task, FIRST, [plain, *fit]))
    if tried and last:
        cells |= narrow(runner, task, [plain, *last], say)
    return cells, lost


def shorten(runner: Runner, task: Task, plain: Method, rows: int) -> None:
    """Make the answers as short as the time requires, by the speed of plain decoding: at least 16 tokens."""
    group = first_prompts(task, 1, [plain])
    runner.warm(group, plain)
    began = monotonic()
    runner.warm(group, plain)
    speed = min(WARM, runner.tokens) / max(monotonic() - began, 1e-9)
    fitting = SURVEY * (runner.deadline - monotonic()) * speed / (FIRST * (rows + 2))
    runner.tokens = min(runner.tokens, max(WARM, int(fitting)))


def survey(
    runner: Runner, task: Task, rows: Sequence[Method], end: float, say: Say
) -> tuple[list[Method], list[Candidate]]:
    """Measure methods one by one on the first prompts, until `end` (of time.monotonic).

    Returns those that have figures, and the others with the reason. A method that is far behind the fastest after the
    first prompt gets no second one.
    """
    tried, lost = list[Method](), list[Candidate]()
    for number, row in enumerate(rows, 1):
        say(f"{row.name} ({number} of {len(rows)})", runner.deadline - monotonic())
        reason = "there was no time to try it; give more --minutes" if monotonic() > end else ""
        if not reason:
            try:
                runner.open([row])
            except InputError as error:
                reason = str(error)
        if not reason:
            runner.run(first_prompts(task, 1, [row]))
            fastest = max((rate(runner, m) for m in tried), default=0.0)
            if rate(runner, row) >= FAR * fastest:
                runner.run(first_prompts(task, FIRST, [row]))
            failed = [why for (*_, name), why in runner.failures.items() if name == row.name]
            reason = "" if rate(runner, row) else [*failed, "the time was up before its first answer"][0]
        if reason:
            lost.append(Candidate(row.spec, row.budget, 0, note=reason))
        else:
            tried.append(row)
    return tried, lost


def narrow(runner: Runner, task: Task, rows: Sequence[Method], say: Say) -> dict[str, Cell]:
    """Measure methods in turn on more and more prompts, until one is clear of the others or the time is up.

    Returns the last figures of every method.
    """
    cells, count, alive = dict[str, Cell](), min(FIRST, len(task.prompts)), list(rows)
    while True:
        group = first_prompts(task, count, alive)

        def advance(what: str, prompts: int = count) -> None:
            say(f"{what.partition(', ')[2]} ({prompts} prompts)", runner.deadline - monotonic())

        complete = runner.run(group, advance)
        cells |= figures(runner, group)
        alive = [m for m in alive if m.plain or not behind(cells[m.name], cells.values())]
        if not complete or count >= len(task.prompts) or parted([cells[m.name] for m in alive]):
            return cells
        count = min(2 * count, len(task.prompts))


def behind(cell: Cell, others: Iterable[Cell]) -> bool:
    """Whether it has no figures, or its interval lies below another's."""
    if cell.speedup is None or not cell.result:
        return True
    best = max(c.speedup.ends[0] for c in others if c.speedup and c.result)
    return cell.speedup.ends[1] < best and cell.speedup.low is not None


def parted(alive: Sequence[Cell]) -> bool:
    """Whether plain decoding alone is left, or one more that is clear of it."""
    others = [c for c in alive if not c.plain]
    return not others or (len(others) == 1 and bool(others[0].speedup and others[0].speedup.clear_of(1.0)))


def conclude(model: str, cells: dict[str, Cell], lost: Sequence[Candidate], spent: float) -> Recommendation:
    """The answer: plain decoding, unless a drafter's interval lies above it. spent: seconds of measuring."""
    ranked = sorted(
        (candidate(c) for c in cells.values() if not c.plain), key=lambda c: -(c.speedup.value if c.speedup else 0.0)
    )
    plain = next(candidate(c) for c in cells.values() if c.plain)
    first = next((c for c in ranked if c.speedup and c.speedup.value > 1), None)
    best = first if first and first.speedup and first.speedup.clear_of(1.0) else None
    rest = [c.speedup.ends[1] for c in ranked if c is not best and c.speedup]
    sure = bool(best and best.speedup and all(best.speedup.ends[0] > end for end in rest))
    spec = best.drafter.split(" + ") if best else ["none"]
    budget = best.budget if best and best.budget != "auto" else ""
    flags = " ".join(f"--drafter '{s}'" if "?" in s else f"--drafter {s}" for s in spec)
    flags += f" --budget {budget}" * bool(budget)
    python = f'"{model}", {spec if len(spec) > 1 else spec[0]!r}' + f", budget={budget!r}" * bool(budget)
    return Recommendation(
        model, best, sure, (*ranked, *lost), plain, round(spent, 1),
        f'outrider generate {model} "..." {flags}', f"outrider.load({python})",
        sentence(model, first, best, sure, plain),
    )  # fmt: skip


def sentence(model: str, first: Candidate | None, best: Candidate | None, sure: bool, plain: Candidate) -> str:
    """The answer in words."""
    rate = f"{plain.tokens_per_second.value:.0f} tokens/s" if plain.tokens_per_second else ""
    if not rate or (first is None and not plain.speedup):
        return f"The time was too short to measure {model}; give more --minutes."
    if best is None or best.speedup is None:
        near = f"; the best of them, {titled(first)}, is at {first.speedup.text()}" if first and first.speedup else ""
        why = f"no drafter is faster beyond chance{near}"
        return f"Plain decoding ({rate}) is the fastest for {model} on this machine: {why}."
    close = "" if sure else "; others are as good within the intervals"
    fast = f"{best.speedup.text()} times as fast as plain decoding ({rate})"
    return f"{titled(best)} is the fastest for {model} on this machine: {fast}{close}."


def titled(c: Candidate) -> str:
    """The drafter with its budget."""
    return c.drafter if c.budget == "auto" else f"{c.drafter} with budget {c.budget}"


def candidate(cell: Cell) -> Candidate:
    """A cell as a candidate."""
    speedup = cell.speedup if cell.result else None
    note = "" if cell.state == "done" else cell.reason
    if speedup is None and not cell.plain:
        note = note or "the time was up before it could be compared with plain decoding"
    return Candidate(cell.spec, cell.budget, cell.prompts, speedup, cell.tokens_per_second, cell.tau, note)
