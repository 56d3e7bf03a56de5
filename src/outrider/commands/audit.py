"""`outrider audit`: tests that a model, a drafter and a rule are lossless, and reports the power of the tests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import check_names
from . import options as opt

if TYPE_CHECKING:
    from ..proofs.audit import Audit, Equality, Plan, Progress

PROMPTS = (
    "The old lighthouse keeper climbed the stairs and saw that the sea",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "One two three, one two three, one two",
    "Q: What do bees make?\nA:",
)


def audit(
    model: opt.Model = None,
    prompts_file: opt.Prompts = None,
    limit: opt.Limit = None,
    drafter: opt.Drafter = None,
    rule: opt.Rule = "coupled",
    samples: Annotated[
        int,
        opt.sampling("--samples", min=100, help="Samples per test; 4 times as many halve the detectable TV."),
    ] = 1000,
    minutes: Annotated[
        float | None,
        opt.sampling("--minutes", help="Time limit, which sets the number of samples."),
    ] = None,
    seed: Annotated[int, opt.sampling("--seed", help="Of texts and samples.")] = 0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    exact: opt.Exact = "auto",
    no_compile: opt.NoCompile = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
) -> None:
    """Test on this machine that a drafter and a rule do not change MODEL's text.

    Seed-for-seed equality with the stock model's plain decoding; the rules' exact distributions on tiny models; samples
    against the model's exact distribution, with the smallest detectable deviation. Exits 1 if not lossless. A .gguf
    file's weights are taken in full.
    """
    from ..names import DEMO, find
    from ..params import InputError
    from ..prompts import read
    from .generate import check_rule, held_out
    from .loading import load

    check_rule(rule, lossy=True)
    if limit is not None and limit < 1:
        raise InputError(f"--limit must be at least 1, not {limit}")
    if minutes is not None and not 0 < minutes < math.inf:
        raise InputError(f"--minutes must be above 0 and finite, not {minutes:g}")
    check_names(dtype, device)
    given = read(prompts_file, limit) if prompts_file else []
    place = find(model)
    prompts = given or (held_out() if place.name == DEMO else list(PROMPTS))[:limit]
    llm = load(
        place, drafter, dtype=dtype, device=device, exact=exact, weights="full", no_compile=no_compile,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    from ..proofs.audit import audit as run

    with bars() as progress:
        result = run(llm, rule, prompts[:8], samples, seed, progress=progress, minutes=minutes, say=announce)
    if as_json:
        import json

        typer.echo(json.dumps(document(result)))
    else:
        show(result)
    if not result.lossless:
        raise typer.Exit(1)


def announce(plan: Plan) -> None:
    """Print the expected time on stderr."""
    time = f"{plan.seconds:.0f} seconds" if plan.seconds < 90 else f"{plan.seconds / 60:.0f} minutes"
    typer.echo(f"this takes about {time}: {plan.samples} samples for each of {plan.tests} tests", err=True)


@contextmanager
def bars() -> Iterator[Progress]:
    """A progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    tasks: dict[str, Any] = {}
    columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:

        def progress(part: str, done: int, of: int) -> None:
            if part not in tasks:
                tasks[part] = shown.add_task(part, total=of)
            shown.update(tasks[part], completed=done)

        yield progress


def document(audit: Audit) -> dict[str, Any]:
    """The audit as JSON."""
    from dataclasses import asdict

    from ..proofs.samples import ALPHA, POWER
    from .info import versions

    return {**asdict(audit), "alpha": ALPHA, "power": POWER, "versions": versions()}


def show(audit: Audit) -> None:
    """Three tables and the verdict."""
    from rich.console import Console
    from rich.table import Table

    from ..proofs.audit import label

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left", title_style="bold")
        for i, name in enumerate(columns):
            made.add_column(name, justify="left" if i == 0 else "right")
        return made

    console = Console()
    heads = "sampling", "batch", "texts", "same without drafter", "tokens same as stock", "rounding", "divergences"
    equal = table("seed for seed, against the engine without a drafter and the stock model", *heads)
    for e in audit.equality:
        own = f"{e.own}/{e.texts}"
        equal.add_row(
            label(e.sampling), str(e.batch), str(e.texts), own, str(e.tokens), f"{e.noise:.1e}", divergences(e)
        )
    console.print(equal)
    rules = table("exact, every branch on tiny models (the audited rule is marked)", "rule", "draft", "TV", "")
    for x in audit.exact:
        rules.add_row(x.rule, x.draft, f"{x.tv:.1e}", "*" if x.counts(audit.rule) else "")
    console.print(rules)
    columns = "sampling", "prompt", "draft", "samples", "cells", "p", "TV", "detectable TV", "verdict"
    stats = table("pairs of tokens, against the model's distribution", *columns)
    for s in audit.statistics:
        verdict = "DEVIATES" if s.rejected else "no deviation" if s.cells > 1 else "nothing to test"
        stats.add_row(
            label(s.sampling), str(s.prompt + 1), s.draft, str(s.samples), str(s.cells), f"{s.p:.3g}", f"{s.tv:.3f}",
            f"{s.detectable:.3f}", verdict,
        )  # fmt: skip
    console.print(stats)
    console.print(audit.sentence, style="bold green" if audit.lossless else "bold red", highlight=False, markup=False)


def divergences(e: Equality) -> str:
    if not e.divergences:
        return "identical"
    d = max(e.divergences, key=lambda d: (not d.within, -d.position))
    what = "within rounding" if d.within else "NOT lossless"
    margin = "" if d.margin is None else f", margin {d.margin:.1e}"
    return f"{len(e.divergences)} differ: {what}, prompt {d.prompt} at {d.position}{margin}"
