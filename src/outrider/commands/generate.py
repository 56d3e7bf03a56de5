"""`outrider generate`: streams text, drafted tokens in another colour, and a line of usage at the end."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import check_names
from . import options as opt

if TYPE_CHECKING:
    from ..engine.request import Output
    from ..llm import LLM
    from ..prompts import Messages

DRAFTED = "cyan"
ASKED = (
    "What causes the seasons on Earth?",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "A shop sells 12 eggs for $3. How much do 30 eggs cost? Explain your steps.",
    "Give me five tips for a good night's sleep.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
)
QUESTIONS = tuple([{"role": "user", "content": question}] for question in ASKED)
FINISH = {
    "eos": "end of text", "length": "stopped at --max-new-tokens", "stop": "stopped at a --stop string",
}  # fmt: skip
EXACT = {"bits": "bit-exact", "rounding": "exact up to rounding", "distribution": "exact in distribution",
         "lossy": "lossy"}  # fmt: skip
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


def generate(
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] PROMPT...",
            help=f"{opt.NAMES}, then prompts. A single argument is the model if it is demo, smollm2, a path, a .gguf "
            "file or spelled like org/name, else a prompt. The prompt - is stdin, also the default where it is not a "
            "terminal.",
        ),
    ] = None,
    named: opt.NamedModel = None,
    prompt: Annotated[
        list[str] | None,
        opt.given("--prompt", "-p", metavar="TEXT", help="A prompt, even if it looks like a model (repeatable)."),
    ] = None,
    prompts_file: opt.Prompts = None,
    limit: opt.Limit = None,
    chat: Annotated[bool, opt.given("--chat", help="Wrap each prompt in the model's chat template.")] = False,
    drafter: opt.Drafter = None,
    rule: opt.Rule = "coupled",
    lossy: opt.Lossy = False,
    budget: opt.Budget = "auto",
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    stop: opt.Stop = None,
    n: Annotated[int, opt.sampling("-n", "--samples", help="Texts per prompt; sample j uses seed + j.")] = 1,
    seed: opt.Seed = None,
    batch_size: opt.BatchSize = 8,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    exact: opt.Exact = "auto",
    weights: opt.Weights = "auto",
    threads: opt.Threads = None,
    no_compile: opt.NoCompile = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    compare: Annotated[bool, opt.output("--compare", help="Compare text and speed with plain decoding.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Generate text by speculative decoding: the same text, faster.

    MODEL is demo (ships with the package), smollm2, a .gguf file, a folder or a hub id. Default: smollm2 where it is
    installed, else demo. --compare without a prompt uses five questions.
    """
    from ..params import InputError, Interrupted, Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty)
    check_rule(rule, lossy)
    check_names(dtype, device)
    counts = {"--max-new-tokens": max_new_tokens, "--samples": n, "--batch-size": batch_size, "--limit": limit}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, not {value}")
    if compare and n != 1:
        raise InputError("--compare decodes one text per prompt; leave out --samples")
    strings = [unescape(s) for s in stop or ()]
    model, texts = split(args or [], named, bool(prompt or prompts_file))
    prompts = gathered(model, texts, prompt or [], prompts_file, limit, compare)
    if chat:
        prompts = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
    from . import loading

    llm = loading.load(
        model, drafter, budget=budget, dtype=dtype, device=device, exact=exact, weights=weights, threads=threads,
        no_compile=no_compile, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": strings, "rule": rule, "sampling": sampling}
    outputs: list[Output] = []
    if compare:
        from .compare import compare as show

        outputs = show(llm, prompts, seed, how, as_json)
    elif len(prompts) == 1 and n == 1 and not as_json:
        echo(prompts[0])
        outputs = [stream(llm, prompts[0], seed, how)]
        typer.secho(usage_line(llm, outputs[0], how), fg="bright_black", err=True)
    else:
        complete = True
        try:
            for output in written(llm, prompts, n, seed, batch_size, how):
                outputs.append(output)
                if not as_json:
                    echo(prompts[output.prompt])
                    typer.echo(output.text)
                    typer.secho(usage_line(llm, output, how), fg="bright_black", err=True)
        except KeyboardInterrupt:
            complete = False
        if as_json:
            typer.echo(json.dumps(document(llm, outputs, rule, seed), ensure_ascii=False))
        if not complete:
            raise Interrupted(f"{len(outputs)} of {len(prompts) * n} texts were written")
    check_finite(outputs)


def check_finite(outputs: Sequence[Output]) -> None:
    """Raise InputError for texts that ended because of NaN or infinite logits."""
    from ..params import NOT_FINITE, InputError

    failed = sum(output.finish_reason == "error" for output in outputs)
    if failed:
        raise InputError(
            NOT_FINITE if len(outputs) == 1 else f"{failed} of {len(outputs)} texts have failed: {NOT_FINITE}"
        )


def check_rule(rule: str, lossy: bool) -> None:
    """Raise InputError for an unknown rule, and for a lossy one without --lossy."""
    from .. import params

    if params.check_rule(rule) in params.LOSSY and not lossy:
        raise params.InputError("typical acceptance changes the distribution of the text; add --lossy to allow that")


def unescape(text: str) -> str:
    r"""Replace `\n`, `\t`, `\r` and `\\` of a command line; other backslashes stay."""
    from ..params import InputError

    if not text:
        raise InputError("a stop string is empty; leave it out")
    return re.sub(r"\\([ntr\\])", lambda match: ESCAPES[match[1]], text)


def split(args: list[str], model: str | None, prompted: bool) -> tuple[str | None, list[str]]:
    """MODEL and the prompts among the arguments.

    Args:
        args: the arguments.
        model: the value of --model; then all arguments are prompts.
        prompted: whether an option gives prompts; then the arguments are a model at most.
    """
    from ..names import is_model
    from .loading import one_model

    if args and is_model(args[0]):
        return one_model(args[0], model), args[1:]
    if model is None and args and (prompted or len(args) > 1):
        return args[0], args[1:]
    return model, args


def gathered(
    model: str | None, texts: list[str], given: list[str], file: str | None, limit: int | None, compare: bool
) -> list[Any]:
    """The prompts of the arguments (`texts`), of --prompt (`given`) or of a file; else of stdin, or for --compare our
    own questions. Raises InputError if there is none, or an empty one."""
    from .. import InputError, prompts
    from ..names import installed

    if sum(map(bool, (texts, given, file))) > 1:
        raise InputError("give prompts as arguments, by --prompt or by --prompts; use one of these")
    if file is not None:
        return prompts.read(file, limit)
    if not texts and not given and compare:
        return (list(QUESTIONS) if installed() else held_out())[:limit]
    chosen = [_stdin() if p == "-" else p for p in texts or given]
    if not chosen and not (sys.stdin is None or sys.stdin.isatty()):
        chosen = list(filter(None, [_stdin()]))
    if not chosen:
        alone = f"{model} is taken for the model; give a prompt too" if model else "give a prompt"
        raise InputError(f'{alone}, as in: outrider generate {model or "demo"} "Once upon a time"')
    if "" in chosen:
        raise InputError("the prompt is empty; give some text")
    return chosen[:limit]


def _stdin() -> str:
    """The standard input as one prompt, without its last newline."""
    from .. import InputError

    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"the standard input is not UTF-8 text (byte {error.start}); convert it first") from None


def held_out() -> list[Any]:
    """One held-out prompt per domain of the demo target's text."""
    from .. import prompts

    first: dict[str, Any] = {}
    with (files("outrider") / "demo" / "heldout.jsonl").open("rb") as lines:
        for where, line in prompts.parse("heldout.jsonl", lines):
            first.setdefault(line["domain"], prompts.prompt(where, line))
    return list(first.values())


def echo(prompt: str | Messages) -> None:
    """Show the prompt on a terminal, in grey, before its text."""
    if sys.stdout.isatty():
        text = prompt if isinstance(prompt, str) else "".join(f"{m['role']}: {m['content']}\n" for m in prompt)
        typer.secho(text, fg="bright_black", nl=False)


def stream(llm: LLM, prompt: str | Messages, seed: int | None, options: dict[str, Any]) -> Output:
    """Print text as it is generated, drafted tokens in colour where the terminal has colours; returns the output."""
    from ..params import Interrupted

    text = llm.stream(prompt, seed=seed, **options)
    try:
        for chunk in text.chunks():
            if chunk.drafted:
                typer.secho(chunk.drafted, fg=DRAFTED, nl=False)
            typer.echo(chunk.own, nl=False)
    except KeyboardInterrupt:
        again = f" with --seed {text.output.seed}" if options["sampling"].temperature > 0 else ""
        count = len(text.output.tokens)
        raise Interrupted(f"{count} tokens were written; run it again{again} for the same text") from None
    finally:
        typer.echo()
    return text.output


def written(
    llm: LLM, prompts: list[str | Messages], n: int, seed: int | None, batch_size: int, options: dict[str, Any]
) -> Iterator[Output]:
    """The texts in the order of the prompts, each as soon as it and all before it are finished."""
    from ..engine import generate

    how = {name: value for name, value in options.items() if name != "rule"}
    requests, stops = llm.requests(prompts, n=n, seed=seed, **how)
    rows, done = {}, 0
    try:
        for piece in generate(llm.engine(options["rule"]), requests, batch_size):
            if piece.row.finish is not None:
                rows[piece.row.index] = piece.row
            while done in rows:
                yield llm.output(rows.pop(done), done // n, stops, options["rule"])
                done += 1
    finally:
        llm.remember()


def usage_line(llm: LLM, output: Output, options: dict[str, Any]) -> str:
    """Tokens, speed, exactness and finish of a text. A greedy text does not depend on its seed, so none is shown."""
    u, sampled = output.usage, options["sampling"].temperature > 0
    rate = (u.new_tokens - 1) / u.decode_seconds if u.decode_seconds else 0.0
    drafts = "without drafts" if llm.drafter_name == "none" else f"{u.tau:.1f} per pass ({llm.drafter_name})"
    finish = FINISH.get(output.finish_reason, output.finish_reason)
    if output.finish_reason == "length" and u.new_tokens < options["max_new_tokens"]:
        finish = "stopped at the end of the context"
    seed = f"; seed {output.seed}" if sampled else ""
    return f"{u.new_tokens} tokens, {rate:.0f} tokens/s, {drafts}, {EXACT[output.exact]}; {finish}{seed}"


def document(llm: LLM, outputs: list[Output], rule: str, seed: int | None) -> dict[str, Any]:
    """The document of --json (docs/formats.md)."""
    from ..params import LOSSY
    from .info import versions

    return {
        "outputs": [{"prompt": o.prompt, **entry(o)} for o in outputs],
        "target": llm.name,
        "drafter": llm.drafter_name,
        "rule": rule,
        "lossless": rule not in LOSSY,
        "exact": llm.target.exact,
        "seed": seed,
        "versions": versions(),
    }


def entry(output: Output) -> dict[str, Any]:
    """One text of that document."""
    u = output.usage
    usage = {**asdict(u), "tau": u.tau, "alpha": u.alpha, "overhead_seconds": u.overhead_seconds}
    return {
        "text": output.text, "tokens": output.tokens, "finish_reason": output.finish_reason, "seed": output.seed,
        "usage": usage,
    }  # fmt: skip
