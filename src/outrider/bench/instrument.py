"""The instrument: `run(config)` measures a grid or replays recorded answers, and writes the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .. import llm as models_of
from ..backends.torch.load import load_tokenizer
from ..params import InputError, Interrupted
from . import recording, report, studies
from . import replay as replays
from .cells import Analysis, document
from .config import Config
from .cost import parse
from .document import Cell, Document, RunInfo, TaskInfo, unique
from .machine import here
from .models import Models
from .results import read
from .runner import Advance, Group, Runner, fitting
from .store import Store
from .tasks import expand, load
from .types import Peer


def run(config: Config, *, models: Models | None = None, peers: Mapping[str, Peer] | None = None) -> Document:
    """Measure what `config` asks for, and write samples and report into `config.out`.

    A run that was broken off goes on where it stopped, and a wider one measures what it lacks.

    models: targets that are loaded already; None: by `config.model`.
    peers: ways to decode that no SPEC can name, by the label of a row of `config.drafters`.

    Returns the document of results.json. Raises InputError for what cannot be measured so, and Interrupted at Ctrl-C:
    every answer until then is kept.
    """
    config.check()
    found = replayed(config) if config.replay else measured(config, models, peers or {})
    report.write(found, config.out)
    return found


def measured(config: Config, models: Models | None, peers: Mapping[str, Peer]) -> Document:
    """The grid, measured and analysed; what is missing where the time was up."""
    began = monotonic()
    if config.threads:
        torch.set_num_threads(config.threads)
    config = replace(config.named(), threads=torch.get_num_threads())
    rows = config.rows()
    models = models or Models.of(config)
    named = {m.name: [m.peer, m.spec, m.rule, m.budget, m.variant] for m in rows}
    header = {"target": models.target, "arguments": config.arguments(), "methods": named, **here()}
    store = Store.open(config.out, header)
    runner = Runner(
        models, store, config.tokens, config.seed, peers={m.name: peers[m.label] for m in rows if m.label in peers}
    )
    if config.max_minutes:
        runner.deadline = began + 60 * config.max_minutes
    llm = models.llm()
    chosen = [
        fitting(load(name, config.data, config.limit, lambda text: len(llm.encode(text))), runner)
        for name in expand(config.tasks)
    ]
    groups = runner.groups(chosen, config.temperatures, config.batch_sizes, rows, config.repeats)
    refuse_narrower(config, groups)
    place: dict[str, Any] = {
        "dtype": config.dtype,
        "device": config.device,
        "trust_remote_code": config.trust_remote_code,
    }
    referee = models_of.load(config.judge, "none", **place) if config.judge else None
    runner.open(rows)
    store.begin()
    try:
        with progress(sum(runner.steps(group) for group in groups)) as advance:
            whole = all(runner.run(group, advance) for group in groups)
        analysis = Analysis(runner, config.keep_loops)
        seconds = monotonic() - began
        with progress(len(groups)) as advance:
            found = document(analysis, groups, seconds, advance)
        report.write(found, config.out)  # before anything else can go wrong
        if whole:
            studies.add(found, analysis, groups, config, referee)
    except KeyboardInterrupt:
        raise Interrupted(f"{store.said()}; the same command goes on from there") from None
    if not whole:
        Console(stderr=True).print("The time was up before the end; the same command goes on from here.")
    return found


def refuse_narrower(config: Config, groups: list[Group]) -> None:
    """Raise InputError where the report in the folder holds what the new one would not: it would be lost."""
    if not (config.out / "results.json").exists():
        return
    old, lost = read(config.out), list[str]()
    asked = [(g.task.name, g.temperature, g.batch, m.name) for g in groups for m in g.methods]
    for i, name in enumerate(("task", "temperature", "batch size", "method")):
        gone = unique(str(c.key[i]) for c in old.cells if c.key[i] not in {key[i] for key in asked})
        lost += [f"{name} {', '.join(gone[:3])}{' and more' * (len(gone) > 3)}"] if gone else []
    cells = len({c.key for c in old.cells} - set(asked))
    lost += [f"{cells} cells"] if cells and not lost else []
    for task in {g.task.name: g.task for g in groups}.values():
        was = old.tasks[task.name].prompts if task.name in old.tasks else 0
        lost += [f"{was} prompts of {task.name}"] if was > len(task.prompts) else []
    before = old.run.arguments
    lost += [f"--{name}" for name in ("observe", "memory", "judge") if before.get(name) and not getattr(config, name)]
    lost += [f"--repeats {before['repeats']}"] if before.get("repeats", 1) > config.repeats else []
    if before.get("keep_loops", False) != config.keep_loops:
        lost.append("--keep-loops" if config.keep_loops is False else "leaving loops out")
    if lost:
        raise InputError(
            f"the report in {config.out} also has {'; '.join(lost)}, and this run would replace it: ask for that too "
            "(nothing is measured twice), or give another --out"
        )


def replayed(config: Config) -> Document:
    """Recorded answers, replayed for drafters that need no model."""
    price, words = parse(config.cost), load_tokenizer(config.tokenizer)
    records = recording.read(str(config.replay), words)[: config.limit]
    budgets = [b for b in config.budgets if b != "auto"] or ["16x6"]
    tasks: dict[str, TaskInfo] = {}
    cells: list[Cell] = []
    began = monotonic()
    with progress(len(budgets) * len(records)) as advance:
        for budget in budgets:
            done = replays.replay(
                records, config.drafters or replays.DEFAULT, budget, words,
                progress=lambda done, of, b=budget: advance(f"replay, {b}"),  # type: ignore[misc]
            )  # fmt: skip
            about, more = replays.cells(done, price)
            tasks |= about
            cells += more
    where = {**here(), "target": str(config.replay), "arguments": config.arguments()}
    return Document(RunInfo(**where, seconds=round(monotonic() - began, 1)), tasks, cells)


@contextmanager
def progress(steps: int) -> Iterator[Advance]:
    """A bar with the time left on stderr; what it yields is told what comes next, once for each step."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=steps)
        yield lambda what: bar.update(task, advance=1, description=what)
