"""`outrider recommend`: the fastest drafter for a model on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import check_names
from . import options as opt

if TYPE_CHECKING:
    from ..bench.choose import Candidate, Recommendation, Say


def recommend(
    model: opt.Model = None,
    prompts: opt.Prompts = None,
    limit: opt.Limit = None,
    drafter: Annotated[
        list[str] | None,
        opt.drafting("--drafter", metavar="SPEC", help="A further drafter to try, such as eagle:DIR. Repeatable."),
    ] = None,
    max_new_tokens: Annotated[int, opt.sampling("--max-new-tokens", help="Maximum tokens of each answer.")] = 64,
    minutes: Annotated[float, opt.measuring("--minutes", help="Time limit, from when MODEL is loaded.")] = 3.0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    no_compile: opt.NoCompile = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
) -> None:
    """Measure the drafters that fit MODEL against plain decoding, and recommend one.

    All answer two prompts at temperature 0, the most promising first; then the fastest three alternate on more prompts
    until one is clear of the others. Give prompts like yours: the best drafter depends on the text.
    """
    from ..params import InputError
    from ..prompts import read
    from .loading import check_drafter, located

    check_names(dtype, device)
    given = read(prompts, limit) if prompts else []
    if limit is not None and not given:
        raise InputError("--limit is for --prompts FILE; give one")
    for spec in drafter or ():
        check_drafter(spec)
    place = located(model)
    from ..bench.choose import recommend as measure

    with saying() as say:
        result = measure(
            place.name, given, minutes, drafters=drafter or (), tokens=max_new_tokens, dtype=dtype, device=device,
            compile=not no_compile, trust_remote_code=trust_remote_code, say=say,
        )  # fmt: skip
    if as_json:
        import json

        from ..bench.results import to_json

        typer.echo(json.dumps(to_json(result)))
    else:
        show(result)


@contextmanager
def saying() -> Iterator[Say]:
    """The current step on one line of stderr, with the time left."""
    from time import monotonic

    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.text import Text

    end: list[float] = []

    class Left(ProgressColumn):
        def render(self, task: Task) -> Text:
            left = max(0, round(end[-1] - monotonic())) if end else None
            return Text("" if left is None else f"at most {left // 60}:{left % 60:02} left", "cyan")

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), Left())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def say(what: str, left: float | None) -> None:
            end[:] = [] if left is None else [monotonic() + left]
            bar.update(task, description=what)

        yield say


def show(result: Recommendation) -> None:
    """Print a table, the recommendation, and how to use it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(result.model), title_justify="left")
    for name in ("drafter", "budget", "speed-up", "tokens/s", "tau", "prompts"):
        left = name in ("drafter", "budget")
        table.add_column(name, justify="left" if left else "right", overflow="fold" if left else "ellipsis")
    for c in (result.plain, *(c for c in result.candidates if c.speedup)):
        table.add_row(*map(Text, _row(c)), style="bold green" if c is result.best else "")
    console = Console()
    console.print(table)
    notes = dict.fromkeys(c.note for c in result.candidates if c.note and not c.speedup)
    for note in notes:
        names = ", ".join(c.drafter for c in result.candidates if c.note == note and not c.speedup)
        console.print(Text(f"left out: {names} ({note})", "bright_black"))
    console.print(Text(result.sentence, "bold"), soft_wrap=True)
    if result.plain.tokens_per_second:
        console.print(Text(f"\n  {result.command}\n  {result.python}"), soft_wrap=True)  # to be copied


def _row(c: Candidate) -> tuple[Any, ...]:
    def text(figure: Any, digits: int) -> str:
        return figure.text(digits) if figure else ""

    rate = f"{c.tokens_per_second.value:.0f}" if c.tokens_per_second else ""
    tau = f"{c.tau.value:.2f}" if c.tau else ""
    name = "plain decoding" if c.drafter == "none" else c.drafter
    return name, "" if c.drafter == "none" else c.budget, text(c.speedup, 2), rate, tau, str(c.prompts or "")
