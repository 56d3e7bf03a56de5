"""`outrider audit`: the losslessness audit of a model, a drafter and a rule, with the power it had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..audit import Audit, Equality, Progress

PROMPTS = (
    "The old lighthouse keeper climbed the stairs and saw that the sea",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "One two three, one two three, one two",
    "Q: What do bees make?\nA:",
)


def audit(
    model: Annotated[str | None, typer.Argument(help="A hub id or folder; omitted: the demo target.")] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="SPEC such as lookup, suffix, model:DIR; give several for a mix.")
    ] = None,
    rule: Annotated[str, typer.Option(help="coupled, rejection, block, or typical (lossy).")] = "coupled",
    prompts_file: Annotated[str | None, typer.Option(help="JSONL of prompts; default: a few of our own.")] = None,
    samples: Annotated[
        int, typer.Option(help="Samples per statistical test: four times as many, twice as fine.")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Of texts and samples.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="Audit recorded passes (generate --compile).")] = False,
) -> None:
    """Prove on this machine that a drafter and a rule change nothing about MODEL's text.

    Seed-for-seed equality with plain decoding by the stock model; the rules' exact laws on tiny models; samples
    against the model's exact law, with the smallest deviation they would have shown. Exits 1 if not lossless.
    """
    from ..audit import audit as run
    from ..llm import load
    from ..prompts import read
    from .generate import held_out

    given = read(prompts_file) if prompts_file else None
    model = None if model == "demo" else model
    llm = load(model, drafter or None, dtype=dtype, device=device, compile=compile)
    prompts = given or (held_out() if model is None else list(PROMPTS))
    with bars() as progress:
        found = run(llm, rule, prompts[:8], samples, seed, progress=progress)
    if as_json:
        import json

        typer.echo(json.dumps(document(found)))
    else:
        show(found)
    if not found.lossless:
        raise typer.Exit(1)


@contextmanager
def bars() -> Iterator[Progress]:
    """Progress with the time left, on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    tasks: dict[str, Any] = {}
    columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:

        def progress(part: str, done: int, of: int) -> None:
            if part not in tasks:
                tasks[part] = shown.add_task(part, total=of)
            shown.update(tasks[part], completed=done)

        yield progress


def document(found: Audit) -> dict[str, Any]:
    """The audit as JSON."""
    from dataclasses import asdict

    from ..audit import ALPHA, POWER
    from .info import versions

    return {**asdict(found), "alpha": ALPHA, "power": POWER, "versions": versions()}


def show(found: Audit) -> None:
    """Three tables and the verdict."""
    from rich.console import Console
    from rich.table import Table

    from ..audit import label

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left", title_style="bold")
        for i, name in enumerate(columns):
            made.add_column(name, justify="left" if i == 0 else "right")
        return made

    console = Console()
    equal = table("seed for seed, against plain decoding", "law", "batch", "texts", "tokens", "rounding", "found")
    for e in found.equality:
        equal.add_row(label(e.law), str(e.batch), str(e.texts), str(e.tokens), f"{e.noise:.1e}", _found(e))
    console.print(equal)
    laws = table("exact, every branch on tiny models (audited: marked)", "rule", "draft", "TV", "")
    for x in found.exact:
        laws.add_row(x.rule, x.draft, f"{x.tv:.1e}", "*" if x.counts(found.rule) else "")
    console.print(laws)
    columns = "law", "prompt", "draft", "samples", "cells", "p", "TV seen", "would find TV", "found"
    stats = table("pairs of tokens, against the model's law", *columns)
    for s in found.statistics:
        verdict = "DEVIATES" if s.rejected else "no deviation" if s.cells > 1 else "nothing to test"
        stats.add_row(
            label(s.law), str(s.prompt + 1), s.draft, str(s.samples), str(s.cells), f"{s.p:.3g}", f"{s.tv:.3f}",
            f"{s.detectable:.3f}", verdict,
        )  # fmt: skip
    console.print(stats)
    console.print(found.sentence, style="bold green" if found.lossless else "bold red", highlight=False, markup=False)


def _found(e: Equality) -> str:
    if not e.divergences:
        return "identical"
    d = max(e.divergences, key=lambda d: (not d.within, -d.position))
    what = "within rounding" if d.within else "NOT lossless"
    return f"{len(e.divergences)} differ: {what}, prompt {d.prompt + 1} at {d.position}, margin {d.margin:.1e}"
