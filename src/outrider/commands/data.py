"""`outrider data`: builds training data."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import PLAIN, check_names
from . import options as opt

app = typer.Typer(**PLAIN, no_args_is_help=True)


@app.callback()
def data() -> None:
    """Build training data."""


@app.command()
def generate(
    data: Annotated[
        list[str],
        opt.given("--data", metavar="FILE", help="JSON lines of messages, prompts or texts (repeatable)."),
    ],
    out: Annotated[
        str,
        opt.output(
            "--out", metavar="FILE", help="JSON lines that the answers are appended to; what is there is skipped."
        ),
    ],
    model: opt.Model = None,
    limit: opt.Limit = None,
    opening: Annotated[int, opt.given("--opening", help="Tokens of a text that are given.")] = 64,
    drafter: opt.Drafter = None,
    max_new_tokens: opt.MaxNewTokens = 256,
    temperature: opt.Temperature = 1.0,
    seed: Annotated[int, opt.sampling("--seed", help="Of the answers; question i uses seed + i.")] = 0,
    batch_size: opt.BatchSize = 8,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    no_compile: opt.NoCompile = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
) -> None:
    """Let the target write the answers: what a drafter should learn is how its target writes. Resumes."""
    import json
    from pathlib import Path

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..params import InputError
    from .loading import load

    check_names(dtype, device)
    if max_new_tokens < 1 or opening < 1 or batch_size < 1 or temperature < 0:
        raise InputError("max-new-tokens, opening and batch-size must be at least 1, and the temperature not negative")
    if limit is not None and limit < 1:
        raise InputError(f"--limit must be at least 1, not {limit}")
    from ..training import generate as answers

    asked = list(answers.questions(data))[:limit]
    if asked and answers.finished(Path(out)) >= set(range(len(asked))):
        if as_json:
            typer.echo(json.dumps({"written": 0, "questions": len(asked), "out": out}))
        else:
            typer.echo(f"all {len(asked)} questions are answered in {out} already; nothing was written")
        return
    llm: Any = load(
        model, drafter, dtype=dtype, device=device, no_compile=no_compile, trust_remote_code=trust_remote_code
    )
    if llm.tokenizer is None:
        raise InputError(f"{llm.name} has no tokenizer; name a model that has one")
    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("", total=len(asked))
        written = answers.write(
            llm.target, llm.drafter, llm.tokenizer, asked, out, max_new_tokens, temperature, seed, batch_size, opening,
            llm.eos, lambda n: bar.advance(task, n),
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps({"written": written, "questions": len(asked), "out": out}))
    else:
        typer.echo(f"{written} answers written to {out}")
