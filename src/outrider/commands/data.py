"""`outrider data`: training data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
            "--out", metavar="FILE", help="JSON lines to append answers to; questions answered there are skipped."
        ),
    ],
    model: opt.Model = None,
    limit: opt.Limit = None,
    opening: Annotated[int, opt.given("--opening", help="Tokens of a text used as prompt (--endpoint: words).")] = 64,
    endpoint: Annotated[
        list[str] | None,
        opt.machine("--endpoint", metavar="URL", help="An OpenAI-compatible server that serves MODEL (repeatable)."),
    ] = None,
    concurrency: Annotated[int, opt.machine("--concurrency", help="Concurrent requests per server.")] = 32,
    drafter: opt.Drafter = None,
    max_new_tokens: opt.MaxNewTokens = 256,
    temperature: opt.Temperature = 1.0,
    seed: Annotated[int, opt.sampling("--seed", help="Question i uses seed + i.")] = 0,
    batch_size: opt.BatchSize = 8,
    dtype: opt.Dtype = "auto",
    weights: opt.Weights = "auto",
    device: opt.Device = "auto",
    no_compile: opt.NoCompile = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
) -> None:
    """Generate answers with the target, whose own texts are what a drafter should learn. Resumes.

    The target runs here, or on the servers of --endpoint (vLLM, SGLang, llama.cpp's, outrider serve).
    """
    from pathlib import Path

    from .. import files
    from ..names import find, weights_of
    from ..params import InputError
    from .loading import check_drafter, load, located

    check_names(dtype, device)
    for spec in drafter or ():
        check_drafter(spec)
    from ..training import questions

    if min(max_new_tokens, opening, batch_size, concurrency) < 1 or temperature < 0:
        raise InputError(
            "--max-new-tokens, --opening, --batch-size and --concurrency must be at least 1, and --temperature at "
            "least 0"
        )
    if limit is not None and limit < 1:
        raise InputError(f"--limit must be at least 1, not {limit}")
    items = list(questions.questions(data))[:limit]
    names: list[Any] = questions.keys([what for _, what in items]) if endpoint else list(range(len(items)))
    with files.alone(out):
        answers_there = questions.finished(Path(out), str if endpoint else int)
    if endpoint:
        author = questions.by(str(model), temperature)
    else:
        place = find(model)
        kept = "native" if place.gguf and weights == "auto" else weights_of(weights, place)
        author = questions.by(place.name, temperature, kept)
    if not endpoint:
        questions.same_questions(Path(out), answers_there, [what for _, what in items])
    if model or not endpoint:
        questions.same_author(Path(out), answers_there, author)
    have = set(answers_there)
    if items and have >= set(names):
        there = f"all {len(items)} questions already have answers in {out}"
        report(as_json, out, len(items), 0, there)
        return
    if endpoint:
        local = (dtype, device, weights, batch_size) != ("auto", "auto", "auto", 8)
        if drafter or no_compile or trust_remote_code or local:
            raise InputError(
                "--endpoint leaves these to the servers: remove --drafter, --dtype, --device, --weights, "
                "--batch-size, --no-compile and --trust-remote-code"
            )
        from ..training import answering, endpoints

        urls, served = endpoints.connect(endpoint, model)
        questions.same_author(Path(out), answers_there, questions.by(served, temperature))
        wish = endpoints.Wish(served, max_new_tokens, temperature, seed, opening)
        with progress(as_json, len(items), len(have & set(names))) as (done, say):
            result = answering.write(urls, items, out, wish, concurrency, done, say)
        report(
            as_json, out, len(items), result.answers, sentence(out, result),
            without_token_ids=result.texts, refused=result.refused,
        )  # fmt: skip
        return
    place = located(model, weights)  # before torch is imported
    from ..training import generate as answers

    llm: Any = load(  # exactness does not matter for training data
        place, drafter, dtype=dtype, device=device, exact="rounding", weights=weights,
        no_compile=no_compile, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    if llm.tokenizer is None:
        raise InputError(f"{llm.name} has no tokenizer; name a model that has one")
    with progress(as_json, len(items), len(have & set(names))) as (done, say):
        written = answers.write(
            llm.target, llm.drafter, llm.tokenizer, items, out, max_new_tokens, temperature, seed, batch_size, opening,
            llm.eos, done, say, author,
        )  # fmt: skip
    report(as_json, out, len(items), written, f"{written} answer{'s' * (written != 1)} written to {out}")


@contextmanager
def progress(quiet: bool, total: int, there: int) -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """A progress bar on a terminal; yields the functions that advance it and that print a line above it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=there)
        yield lambda n: bar.advance(task, n), lambda words: console.print(f"outrider: {words}", highlight=False)


def sentence(out: str, result: Any) -> str:
    """The sentence at the end of a run with servers."""
    words = f"{result.answers} answer{'s' * (result.answers != 1)} written to {out}"
    if result.texts:
        words += f"; {result.texts} of them as text, to be tokenised, since a server gave no token ids"
    elif result.answers:
        words += ", with the servers' token ids"
    if result.refused:
        words += f"; {len(result.refused)} questions were not answered, the first: {result.refused[0]}"
    return words


def report(as_json: bool, out: str, questions: int, written: int, words: str, **more: Any) -> None:
    """Print the result: one line, or JSON."""
    summary = {"written": written, "questions": questions, "out": out, **more}
    typer.echo(json.dumps(summary) if as_json else words)
