"""The instrument: `run(config)` measures a grid and writes the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING

from ..machine import threads, use_threads
from ..params import Interrupted
from . import report
from .machine import here
from .models import Models
from .runner import Advance, Group, Runner, fitting
from .store import Store
from .tasks import expand, load

if TYPE_CHECKING:
    from .cells import Analysis
    from .config import Config
    from .document import Document
    from .types import Peer


@dataclass
class Grid:
    """A run that is ready to measure."""

    config: Config
    runner: Runner
    groups: list[Group]
    began: float
    complete: bool = False  # once measured: nothing is missing

    @classmethod
    def open(cls, config: Config, models: Models | None = None, peers: Mapping[str, Peer] | None = None) -> Grid:
        """Load models, drafters and tasks; see `run`."""
        config.check()
        began = monotonic()
        if config.threads:
            use_threads(config.threads)
        rows = config.named().rows()
        models = models or Models.of(config.named())
        models.llm()  # now: what it imports says how many threads and devices there are
        config = replace(config.named(), threads=threads())
        named = {m.name: [m.peer, m.spec, m.rule, m.budget, m.variant] for m in rows}
        header = {"target": models.target, "arguments": config.arguments(), "methods": named, **here()}
        store = Store.open(config.out, header)
        labelled = {m.name: peers[m.label] for m in rows if peers and m.label in peers}
        runner = Runner(models, store, config.tokens, config.seed, peers=labelled)
        if config.max_minutes:
            runner.deadline = began + 60 * config.max_minutes
        tasks = [fitting(load(name, config.data, config.limit), runner) for name in expand(config.tasks)]
        runner.open(rows)
        store.begin()
        groups = runner.groups(tasks, config.temperatures, config.batch_sizes, rows, config.repeats)
        return cls(config, runner, groups, began)

    def measure(self) -> None:
        """Measure what is missing, until the deadline."""
        with self.keeping(), progress(sum(map(self.runner.steps, self.groups))) as advance:
            self.complete = all(self.runner.run(group, advance) for group in self.groups)

    def document(self) -> tuple[Document, Analysis]:
        """The figures of all samples, and the analysis that they come from."""
        from .cells import Analysis, document

        analysis = Analysis(self.runner, self.config.keep_loops)
        with self.keeping(), progress(len(self.groups)) as advance:
            return document(analysis, self.groups, monotonic() - self.began, advance), analysis

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Ctrl-C says what is kept."""
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted(f"{self.runner.store.said()}; the same command resumes from there") from None


def run(config: Config, *, models: Models | None = None, peers: Mapping[str, Peer] | None = None) -> Document:
    """Measure what `config` names, and write samples and report into `config.out`.

    An interrupted run resumes where it stopped, and a run that adds methods, tasks, temperatures or batch sizes
    measures only those. The report covers what `config` names; `samples.jsonl` keeps all that was ever measured.

    models: targets that are already loaded; None: by `config.model`.
    peers: ways to decode that no SPEC can name, by the label of a method of `config.drafters`.

    Returns the document of results.json. Raises InputError for what cannot be measured, and Interrupted at Ctrl-C:
    every answer until then is kept.
    """
    grid = Grid.open(config, models, peers)
    grid.measure()
    document, _ = grid.document()
    report.write(document, config.out)
    if not grid.complete:
        print("The time was up before the end; the same command resumes from here.", file=sys.stderr)
    return document


@contextmanager
def progress(steps: int) -> Iterator[Advance]:
    """A progress bar with the time left on stderr; yields a function to call before each step, with its name."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=steps)
        yield lambda what: bar.update(task, advance=1, description=what)
