"""`run(config)` measures a grid and writes the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from time import monotonic

from .. import files
from ..machine import environment, threads, use_threads
from ..params import Interrupted
from . import methods, results
from .cells import Analysis, document
from .config import Config
from .document import Document
from .models import Models
from .runner import Advance, Group, Runner, fitting
from .stamps import stamps
from .store import Store
from .tasks import expand, load
from .types import Peer


@dataclass
class Grid:
    """A run that is ready to measure."""

    config: Config
    runner: Runner
    groups: list[Group]
    complete: bool = False  # set by `measure`

    @classmethod
    def open(cls, config: Config, models: Models | None = None, peers: Mapping[str, Peer] | None = None) -> Grid:
        """Load models, drafters and tasks; see `run`."""
        config.check()
        began = monotonic()
        if config.threads:
            use_threads(config.threads)
        config = config.named()
        rows = config.rows()
        models = models or Models.of(config)
        models.llm()  # imports what determines the number of threads and the devices
        config = replace(config, threads=threads())
        meanings = {m.name: [m.peer, m.spec, m.rule, m.budget, m.variant] for m in rows}
        header = {
            "target": models.target, "mark": models.llm().target.mark, "arguments": config.arguments(),
            "methods": meanings, "files": stamps({m.spec for m in rows}), **environment(),
        }  # fmt: skip
        store = Store.open(config.out, header)
        given = {m.name: peers[m.label] for m in rows if peers and m.label in peers}
        runner = Runner(models, store, config.tokens, config.seed, peers=given)
        if config.max_minutes:
            runner.deadline = began + 60 * config.max_minutes
        tasks = [fitting(load(name, config.data, config.limit), runner) for name in expand(config.tasks)]
        runner.open(rows)
        store.begin()
        groups = [
            Group(task, temperature, batch, methods.at(temperature, rows), config.repeats)
            for task, temperature, batch in product(tasks, config.temperatures, config.batch_sizes)
        ]
        return cls(config, runner, groups)

    def measure(self) -> None:
        """Measure what is missing, until the deadline."""
        with self.resumable(), progress(sum(map(self.runner.steps, self.groups))) as advance:
            self.complete = all(self.runner.run(group, advance) for group in self.groups)

    def document(self) -> tuple[Document, Analysis]:
        """The figures of all samples, and the analysis behind them."""
        analysis = Analysis(self.runner, self.config.keep_loops)
        with self.resumable(), progress(len(self.groups)) as advance:
            return document(analysis, self.groups, advance), analysis

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Turns Ctrl-C into a message about the answers that are kept."""
        try:
            yield
        except KeyboardInterrupt:
            kept = f"{len(self.runner.store.samples)} answers are kept in {self.runner.store.folder}"
            raise Interrupted(f"{kept}; the same command resumes from there") from None


def run(config: Config, *, models: Models | None = None, peers: Mapping[str, Peer] | None = None) -> Document:
    """Measure what `config` names, and write samples and report into `config.out`.

    A run resumes where it stopped; further methods, tasks, temperatures or batch sizes may be added. The report covers
    `config` alone; `samples.jsonl` keeps everything measured in this folder.

    models: loaded targets; None: by `config.model`.
    peers: ways to decode that have no SPEC, by the label of a method of `config.drafters`.

    Returns the document of results.json. Raises InputError for a wrong configuration, and Interrupted at Ctrl-C; the
    answers so far are kept.
    """
    files.fillable(config.out)
    with files.alone_in(config.out):
        grid = Grid.open(config, models, peers)
        grid.measure()
        measured, _ = grid.document()
        results.write(measured, config.out)
    if not grid.complete:
        print("--max-minutes is over; the same command resumes from here.", file=sys.stderr)
    return measured


@contextmanager
def progress(steps: int) -> Iterator[Advance]:
    """A progress bar on stderr; yields the function to call before each step, with a description."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=steps)
        yield lambda what: bar.update(task, advance=1, description=what)
