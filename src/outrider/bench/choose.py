"""`recommend`: the fastest drafter for a model on this machine.

First every candidate answers two prompts, the most promising first, within half of the time. Then the three fastest
alternate with plain decoding on the same prompts, then on twice as many, and so on; those whose interval lies below
the best one's are dropped. It ends when one is clear of all others and of plain decoding, when there are no more
prompts, or when the time is over. Answers are shorter if the model is too slow for the time.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from time import monotonic

from ..machine import environment
from ..names import BEST, find
from ..params import InputError
from .cells import Analysis
from .config import Config
from .document import Cell, Estimate
from .metrics import speed
from .models import Models
from .runner import WARM, Group, Runner, fitting
from .sources import user_turns
from .store import Store
from .tasks import expand, load
from .types import PLAIN, Method, Prompt, Task

FIRST = 2  # prompts that every candidate answers
FAR = 0.6  # of the fastest one's speed: a slower candidate answers one prompt only
FINALISTS = 3  # candidates that go on to more prompts
SURVEY = 0.5  # share of the time for the first prompts of all candidates
USED = 0.9  # share of the time in which answers may begin; the rest is for the last answer and the figures
UNTRAINED = ("lookup", "suffix", "lookahead", "suffix + lookup")
BUDGETS = ("8x3", "16x5")  # also tried for the fastest drafter, if it is a trained one
Say = Callable[[str, float | None], None]
Asked = str | Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Candidate:
    """A way to decode, measured."""

    drafter: str  # its SPEC; a mix is joined by " + "
    budget: str
    prompts: int  # answered
    speedup: Estimate | None = None  # over plain decoding
    tokens_per_second: Estimate | None = None
    tau: Estimate | None = None
    note: str = ""  # why it has no figures

    @property
    def title(self) -> str:
        """The drafter with its budget."""
        return self.drafter if self.budget == "auto" else f"{self.drafter} with budget {self.budget}"


LOADING = {"dtype": "auto", "device": "auto", "compile": True, "trust_remote_code": False}  # options of both commands


@dataclass(frozen=True)
class Recommendation:
    """The result; `best` is None if plain decoding is the fastest."""

    model: str
    best: Candidate | None
    sure: bool  # the best one's interval lies above all others' and above plain decoding
    candidates: tuple[Candidate, ...]  # the fastest first
    plain: Candidate
    seconds: float
    command: str  # to decode so from the shell
    python: str  # and from Python
    sentence: str


def recommend(
    model: str | None = None, prompts: Sequence[Asked] = (), minutes: float = 3.0, *, drafters: Sequence[str] = (),
    tokens: int = 64, dtype: str = "auto", device: str = "auto", compile: bool = True,
    trust_remote_code: bool = False, say: Say = lambda what, left: None,
) -> Recommendation:  # fmt: skip
    """Measure the drafters that fit a model against plain decoding, on this machine.

    model: a name, folder or hub id, as `outrider.load` takes it.
    prompts: texts, or lists of messages; none: held-out prompts for the demo, else the package's sample.
    minutes: time limit, from when the model is loaded.
    drafters: further SPECs to try, such as eagle:DIR.
    tokens: of each answer; fewer if the model is slow.
    say: called before each step with its description and the seconds left (None while the model is loaded).

    Raises InputError for a model or a drafter that cannot be loaded, and if no prompt fits.
    """
    if not 0 < minutes < math.inf:
        raise InputError(f"--minutes must be a number above 0, not {minutes:g}")
    if tokens < 2:
        raise InputError(f"--max-new-tokens must be at least 2 to measure a speed, not {tokens}")
    config = Config(model, dtype=dtype, device=device, compile=compile, trust_remote_code=trust_remote_code).named()
    models, name = Models.of(config), str(config.model)
    say(f"loading {name}", None)
    models.llm()
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        store = Store.open(Path(folder), {"target": name, "arguments": {}, **environment()})
        store.begin()
        runner = Runner(models, store, tokens)
        task = fitting(task_of(name, prompts), runner)
        say("loading the drafters", None)
        runner.open([Method(spec) for spec in drafters])  # those of the user must load
        began = monotonic()
        cells, lost = measure(runner, task, [Method(PLAIN), *candidates(name, drafters)], minutes, say)
    return conclude(name, cells, lost, monotonic() - began, config)


def task_of(model: str, prompts: Sequence[Asked]) -> Task:
    """The prompts as a task."""
    if not prompts:
        names = ("demo/self-dialogue", "demo/gsm8k", "demo/stdlib") if model == "demo" else ("sample",)
        mixed = [p for row in zip(*(load(name).prompts for name in expand(names)), strict=False) for p in row]
        return Task("prompts", tuple(replace(p, id=str(i)) for i, p in enumerate(mixed)))
    turns = [(p,) if isinstance(p, str) else user_turns(f"prompt {i}", p) for i, p in enumerate(prompts, 1)]
    raw = all(isinstance(p, str) for p in prompts)
    return Task("prompts", tuple(Prompt(str(i), t) for i, t in enumerate(turns)), raw=raw)


def candidates(model: str, drafters: Sequence[str]) -> list[Method]:
    """What to try, in order: the user's drafters, the model's best, lookup, others that ship, untrained ones."""
    shipped = [*BEST.get(model, ())]
    if model == "demo":
        shipped += ["eagle:demo/hass?tree=chain", "model:demo"]
    first, *untrained = UNTRAINED
    return [Method(spec) for spec in dict.fromkeys((*drafters, find(model).drafter, first, *shipped, *untrained))]


def first_prompts(task: Task, count: int, rows: Sequence[Method]) -> Group:
    """The group of these methods on the first prompts of a task, at temperature 0."""
    return Group(replace(task, prompts=task.prompts[:count]), 0.0, 1, tuple(rows), 1)


def figures(runner: Runner, group: Group) -> dict[str, Cell]:
    """The cells of a group by method, from the samples so far."""
    return {cell.method: cell for cell in Analysis(runner, keep_loops=True).cells(group)}


def rate(runner: Runner, row: Method) -> float:
    """Decoded tokens per second on the first prompts; 0 without an answer."""
    samples = [s for s in runner.store.samples if s.method == row.name and s.chunk < FIRST]
    return speed(samples).value if samples else 0.0


def measure(
    runner: Runner, task: Task, rows: Sequence[Method], minutes: float, say: Say
) -> tuple[dict[str, Cell], list[Candidate]]:
    """Cells by method within `minutes`, and candidates that were not measured; the first row is plain decoding."""
    began = monotonic()
    runner.deadline = began + USED * 60 * minutes
    plain, *others = rows
    runner.open([plain])
    say("plain decoding", runner.deadline - monotonic())
    shorten(runner, task, plain, len(others))
    measured, _ = survey(runner, task, [plain], runner.deadline, say)
    fit, lost = survey(runner, task, others, began + SURVEY * 60 * minutes, say)
    fit.sort(key=lambda m: -rate(runner, m))
    if fit and fit[0].spec not in UNTRAINED:  # a fixed budget may be better
        fit += survey(runner, task, [replace(fit[0], budget=b) for b in BUDGETS], runner.deadline, say)[0]
        fit.sort(key=lambda m: -rate(runner, m))
    cells = figures(runner, first_prompts(task, FIRST, [plain, *fit]))
    if measured and fit:
        cells |= narrow(runner, task, [plain, *fit[:FINALISTS]], say)
    return cells, lost


def shorten(runner: Runner, task: Task, plain: Method, rows: int) -> None:
    """Limit the answers' tokens to what the time allows at the speed of plain decoding, but to no less than 16."""
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
    measured, lost = list[Method](), list[Candidate]()
    for number, row in enumerate(rows, 1):
        say(f"{row.name} ({number} of {len(rows)})", runner.deadline - monotonic())
        fastest = max((rate(runner, m) for m in measured), default=0.0)
        if reason := attempt(runner, task, row, end, fastest):
            lost.append(Candidate(row.spec, row.budget, 0, note=reason))
        else:
            measured.append(row)
    return measured, lost


def attempt(runner: Runner, task: Task, row: Method, end: float, fastest: float) -> str:
    """Measure a method on the first prompts; returns why it has no figures, or ""."""
    if monotonic() > end:
        return "there was no time to try it; give more --minutes"
    try:
        runner.open([row])
    except InputError as error:
        return str(error)
    runner.run(first_prompts(task, 1, [row]))
    if rate(runner, row) >= FAR * fastest:
        runner.run(first_prompts(task, FIRST, [row]))
    failures = [why for (*_, name), why in runner.failures.items() if name == row.name]
    return "" if rate(runner, row) else [*failures, "the time was over before its first answer"][0]


def narrow(runner: Runner, task: Task, rows: Sequence[Method], say: Say) -> dict[str, Cell]:
    """Measure methods, interleaved, on more and more prompts, until one is clear of the others or the time is over.

    Returns the last cell of every method.
    """
    cells, count, alive = dict[str, Cell](), min(FIRST, len(task.prompts)), list(rows)
    while True:
        group = first_prompts(task, count, alive)

        def advance(what: str, prompts: int = count) -> None:
            say(f"{what.partition(', ')[2]} ({prompts} prompts)", runner.deadline - monotonic())

        complete = runner.run(group, advance)
        cells |= figures(runner, group)
        alive = [m for m in alive if m.plain or not behind(cells[m.name], cells.values())]
        if not complete or count >= len(task.prompts) or decided([cells[m.name] for m in alive]):
            return cells
        count = min(2 * count, len(task.prompts))


def behind(cell: Cell, others: Iterable[Cell]) -> bool:
    """Whether it has no figures, or its interval lies below another's."""
    if cell.speedup is None or not cell.result:
        return True
    best = max(c.speedup.ends[0] for c in others if c.speedup and c.result)
    return cell.speedup.ends[1] < best and cell.speedup.low is not None


def decided(alive: Sequence[Cell]) -> bool:
    """Whether plain decoding alone is left, or one more that is clear of it."""
    others = [c for c in alive if not c.plain]
    return not others or (len(others) == 1 and bool(others[0].speedup and others[0].speedup.clear_of(1.0)))


def conclude(
    model: str, cells: dict[str, Cell], lost: Sequence[Candidate], spent: float, config: Config | None = None
) -> Recommendation:
    """The recommendation: plain decoding, unless a drafter's interval lies above it. spent: seconds of measuring;
    config: how the model was loaded."""
    plain = next(candidate(c) for c in cells.values() if c.plain)
    ranked = [candidate(c) for c in cells.values() if not c.plain]
    ranked.sort(key=lambda c: -(c.speedup.value if c.speedup else 0.0))
    first = next((c for c in ranked if c.speedup and c.speedup.value > 1), None)
    best = first if first and first.speedup and first.speedup.clear_of(1.0) else None
    rest = [c.speedup.ends[1] for c in ranked if c is not best and c.speedup]
    sure = bool(best and best.speedup and all(best.speedup.ends[0] > end for end in rest))
    specs = best.drafter.split(" + ") if best else ["none"]
    budget = best.budget if best and best.budget != "auto" else ""
    flags = " ".join(f"--drafter {quote(s)}" for s in specs)
    flags += f" --budget {budget}" * bool(budget)
    python = f"{model!r}, {specs if len(specs) > 1 else specs[0]!r}" + f", budget={budget!r}" * bool(budget)
    for name, usual in LOADING.items() if config else ():
        if (value := getattr(config, name)) != usual:
            option = name.replace("_", "-") if value is not False else f"no-{name}"
            flags += f" --{option}" + f" {value}" * (not isinstance(value, bool))
            python += f", {name}={value!r}"
    return Recommendation(
        model, best, sure, (*ranked, *lost), plain, round(spent, 1),
        f'outrider generate {quote(model)} "..." {flags}', f"outrider.load({python})",
        sentence(model, first, best, sure, plain),
    )  # fmt: skip


def sentence(model: str, first: Candidate | None, best: Candidate | None, sure: bool, plain: Candidate) -> str:
    """The recommendation in words."""
    rate = f"{plain.tokens_per_second.value:.0f} tokens/s" if plain.tokens_per_second else ""
    if not rate or (first is None and not plain.speedup):
        return f"The time was too short to measure {model}; give more --minutes."
    if best is None or best.speedup is None:
        near = f"; the best of them, {first.title}, is at {first.speedup.text()}" if first and first.speedup else ""
        why = f"no drafter is faster beyond chance{near}"
        if first and first.speedup and first.speedup.low is None:
            why += "; a single prompt gives no interval, so give more"
        return f"Plain decoding ({rate}) is the fastest for {model} on this machine: {why}."
    fast = f"{best.speedup.text()} times as fast as plain decoding ({rate})"
    close = "" if sure else "; others are as good within the intervals"
    return f"{best.title} is the fastest for {model} on this machine: {fast}{close}."


def candidate(cell: Cell) -> Candidate:
    """A cell as a candidate."""
    speedup = cell.speedup if cell.result else None
    note = "" if cell.state == "done" else cell.reason
    if speedup is None and not cell.plain:
        note = note or "the time was over before it could be compared with plain decoding"
    return Candidate(cell.spec, cell.budget, cell.prompts, speedup, cell.tokens_per_second, cell.tau, note)
