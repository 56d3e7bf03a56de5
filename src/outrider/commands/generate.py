"""`outrider generate`: writes text as it comes, drafted tokens in another colour, a line of usage at the end."""

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
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


def generate(
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] PROMPT...",
            help=f"{opt.NAMES}, then prompts. One argument alone is the model if it is demo, smollm2, a path, a .gguf "
            "file or spelled like org/name, else a prompt. A prompt - is read from stdin, and so is a missing one "
            "where stdin is no terminal.",
        ),
    ] = None,
    named: opt.NamedModel = None,
    prompt: Annotated[
        list[str] | None,
        opt.given("--prompt", "-p", metavar="TEXT", help="A prompt, whatever it looks like (repeatable)."),
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
    weights: opt.Weights = "full",
    threads: opt.Threads = None,
    no_compile: opt.NoCompile = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    compare: Annotated[bool, opt.output("--compare", help="Also decode plainly; show equality and speed.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Write text with a model, speculating: the same text as without, faster.

    MODEL is demo (it ships with the package), smollm2, a .gguf file, a folder or a hub id; without it, smollm2 where
    that is installed, else demo. With --compare and no prompt, a handful of questions.
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
        typer.secho(usage_line(llm, outputs[0], temperature), fg="bright_black", err=True)
    else:
        whole = True
        try:
            for output in written(llm, prompts, n, seed, batch_size, how):
                outputs.append(output)
                if not as_json:
                    echo(prompts[output.prompt])
                    typer.echo(output.text)
                    typer.secho(usage_line(llm, output, temperature), fg="bright_black", err=True)
        except KeyboardInterrupt:
            whole = False
        if as_json:
            typer.echo(json.dumps(document(llm, outputs, rule, seed), ensure_ascii=False))
        if not whole:
            raise Interrupted(f"{len(outputs)} of {len(prompts) * n} texts were written")
    check_finite(outputs)


def check_finite(outputs: Sequence[Output]) -> None:
    """Refuse texts that ended since the model's logits were NaN or infinite."""
    from ..params import NOT_FINITE, InputError

    failed = sum(output.finish_reason == "error" for output in outputs)
    if failed:
        raise InputError(
            NOT_FINITE if len(outputs) == 1 else f"{failed} of {len(outputs)} texts have failed: {NOT_FINITE}"
        )


def check_rule(rule: str, lossy: bool) -> None:
    """Refuse a rule that is none, and a lossy one that was not asked for as such."""
    from .. import params

    if params.check_rule(rule) in params.LOSSY and not lossy:
        raise params.InputError("typical acceptance changes the text's law; say --lossy if that is what you want")


def unescape(text: str) -> str:
    r"""`\n`, `\t`, `\r` and `\\` as they are written on a command line; other backslashes stay."""
    from ..params import InputError

    if not text:
        raise InputError("a stop string is empty; leave it out")
    return re.sub(r"\\([ntr\\])", lambda found: ESCAPES[found[1]], text)


def split(args: list[str], model: str | None, prompted: bool) -> tuple[str | None, list[str]]:
    """MODEL and the prompts among the arguments.

    Args:
        args: the arguments.
        model: what --model gives; all arguments are prompts then.
        prompted: are there prompts beside the arguments, which then hold a model at most?
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
    """The prompts: `texts` of the arguments, those `given` by --prompt, or a file's; else those of stdin, or for
    --compare a few of our own. Raises InputError where there are none, or an empty one."""
    from .. import InputError, prompts
    from ..names import installed

    if sum(map(bool, (texts, given, file))) > 1:
        raise InputError("give prompts as arguments, by --prompt or by --prompts, not by several of these")
    if file is not None:
        return prompts.read(file, limit)
    if not texts and not given and compare:
        return (list(QUESTIONS) if installed() else held_out())[:limit]
    found = [_stdin() if p == "-" else p for p in texts or given]
    if not found and not (sys.stdin is None or sys.stdin.isatty()):
        found = list(filter(None, [_stdin()]))
    if not found:
        alone = f"{model} is taken for the model; give a prompt too" if model else "give a prompt"
        raise InputError(f'{alone}, as in: outrider generate {model or "demo"} "Once upon a time"')
    if "" in found:
        raise InputError("the prompt is empty; give some text")
    return found[:limit]


def _stdin() -> str:
    """The whole standard input as one prompt, without the newline that ends it."""
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
    """Text as it comes, drafted tokens in colour where the terminal has colours; what was written in the end."""
    from ..params import Interrupted

    text = llm.stream(prompt, seed=seed, **options)
    try:
        for chunk in text.chunks():
            typer.secho(chunk.drafted, fg=DRAFTED, nl=False)
            typer.echo(chunk.own, nl=False)
    except KeyboardInterrupt:
        again = f" with --seed {text.output.seed}" if options["sampling"].temperature > 0 else ""
        count = len(text.output.tokens)
        raise Interrupted(f"{count} tokens were written, and the same command{again} writes them again") from None
    finally:
        typer.echo()
    return text.output


def written(
    llm: LLM, prompts: list[str | Messages], n: int, seed: int | None, batch_size: int, options: dict[str, Any]
) -> Iterator[Output]:
    """The texts in the order of the prompts, each as soon as it and those before it are finished."""
    from ..engine import generate

    how = {name: value for name, value in options.items() if name != "rule"}
    requests, stops = llm.requests(prompts, n=n, seed=seed, **how)
    rows, done = {}, 0
    for piece in generate(llm.engine(options["rule"]), requests, batch_size):
        if piece.row.finish is not None:
            rows[piece.row.index] = piece.row
        while done in rows:
            yield llm.output(rows.pop(done), done // n, stops)
            done += 1


def usage_line(llm: LLM, output: Output, temperature: float) -> str:
    """What the text cost. A greedy text depends on no seed, so none is shown."""
    u = output.usage
    rate = (u.new_tokens - 1) / u.decode_seconds if u.decode_seconds else 0.0
    seed = f", seed {output.seed}" if temperature > 0 else ""
    return (
        f"[{u.new_tokens} tokens, {u.rounds} rounds of {llm.drafter_name}, tau {u.tau:.2f}, exact: {output.exact}, "
        f"{rate:.0f} tokens/s after "
        f"{u.prefill_seconds * 1000:.0f} ms of prompt; {output.finish_reason}{seed}]"
    )


def document(llm: LLM, outputs: list[Output], rule: str, seed: int | None) -> dict[str, Any]:
    """The JSON of `generate` (docs/formats.md)."""
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
