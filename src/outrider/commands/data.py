"""`outrider data`: builds training data."""

from __future__ import annotations

from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def data() -> None:
    """Build training data."""


@app.command()
def generate(
    data: Annotated[list[str], typer.Option(help="JSONL of messages, prompts or texts (repeatable).")],
    out: Annotated[str, typer.Option(help="JSONL that the answers are appended to; what is there is skipped.")],
    target: Annotated[
        str, typer.Option(help="A hub id or folder; demo: the model that ships with the package.")
    ] = "demo",
    drafter: Annotated[list[str] | None, typer.Option(help="SPEC, as for generate.")] = None,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    opening: Annotated[int, typer.Option(help="Tokens of a text that are given.")] = 64,
    limit: Annotated[int, typer.Option(help="Questions, at most; 0: all.")] = 0,
    batch_size: int = 8,
    seed: int = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Let the target write the answers: what a drafter should learn is how its target writes. Resumes."""
    import json

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..llm import load
    from ..training import generate as answers
    from ..types import InputError
    from . import check_place

    check_place(dtype, device)
    if max_new_tokens < 1 or opening < 1 or batch_size < 1 or temperature < 0:
        raise InputError("max-new-tokens, opening and batch-size must be at least 1, and the temperature not negative")
    asked = list(answers.questions(data))
    asked = asked[:limit] if limit else asked
    llm: Any = load(None if target == "demo" else target, drafter or None, dtype=dtype, device=device)
    if llm.tokenizer is None:
        raise InputError(f"{target} has no tokenizer; name a model that has one")
    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=as_json) as bar:
        task = bar.add_task("", total=len(asked))
        written = answers.write(
            llm.target, llm.drafter, llm.tokenizer, asked, out, max_new_tokens, temperature, seed, batch_size, opening,
            llm.eos, lambda n: bar.advance(task, n),
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps({"written": written, "questions": len(asked), "out": out}))
    else:
        typer.echo(f"{written} answers written to {out}")
