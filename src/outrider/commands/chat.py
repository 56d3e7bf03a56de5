"""`outrider chat`: a conversation in the terminal, with a line of usage after each answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import check_names
from . import options as opt

if TYPE_CHECKING:
    from ..engine.request import Output
    from ..llm import LLM
    from ..params import Sampling
    from ..prompts import Messages

GREY = "bright_black"
HELP = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/seed [N]": "sample every answer with this seed; without N: a fresh one each time",
    "/temperature [T]": "0 is greedy",
    "/drafter [SPEC ...]": "change the drafter, as in lookup, suffix or none",
    "/compare": "decode the last answer again without drafts, and compare text and speed",
    "/quit": "leave, like Ctrl-D; Ctrl-C stops an answer",
}


def chat(
    model: opt.Model = None,
    named: opt.NamedModel = None,
    system: Annotated[str | None, opt.given("--system", metavar="TEXT", help="The system message.")] = None,
    text: Annotated[bool, opt.given("--text", help="Continue your text, without the chat template.")] = False,
    drafter: opt.Drafter = None,
    rule: opt.Rule = "coupled",
    lossy: opt.Lossy = False,
    budget: opt.Budget = "auto",
    max_new_tokens: Annotated[
        int, opt.sampling("--max-new-tokens", "--max-tokens", help="Maximum tokens of an answer.")
    ] = 512,
    temperature: opt.Temperature = 0.7,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    stop: opt.Stop = None,
    seed: Annotated[int | None, opt.sampling("--seed", help="Of every answer; default: a fresh one each time.")] = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    exact: opt.Exact = "auto",
    weights: opt.Weights = "auto",
    threads: opt.Threads = None,
    no_compile: opt.NoCompile = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: Annotated[bool, opt.output("--json", help="One JSON object per answer on stdout, nothing else.")] = False,
) -> None:
    """Chat with a model by speculative decoding: the same answers, faster.

    Drafted tokens have another colour. /help lists commands. Without a terminal, each line of stdin is one turn.
    """
    from ..encoding import has_template
    from ..params import InputError, Sampling
    from .generate import check_rule, unescape
    from .loading import load, one_model

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    check_rule(rule, lossy)
    check_names(dtype, device)
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be at least 1, not {max_new_tokens}")
    if text and system is not None:
        raise InputError("--system needs the chat template, which --text leaves out; give one of them")
    how = {"max_new_tokens": max_new_tokens, "stop": [unescape(s) for s in stop or ()], "rule": rule}
    llm = load(
        one_model(model, named), drafter, budget=budget, dtype=dtype, device=device, exact=exact, weights=weights,
        threads=threads, no_compile=no_compile, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    if not has_template(llm.tokenizer):
        if system is not None:
            raise InputError(f"{llm.name} has no chat template, which --system needs; leave it out")
        if not text:
            note = f"{llm.name} has no chat template: text mode, the model continues what you type"
            typer.secho(note, fg=GREY, err=True)
        text = True
    talk = Talk(llm, sampling, how, seed, system, text, as_json)
    if sys.stdin.isatty() and not as_json:
        typer.secho(f"{llm.name} with {llm.drafter_name}; /help lists the commands, /quit leaves", fg=GREY, err=True)
        converse(talk, typed())
    elif converse(talk, (line.rstrip("\n") for line in sys.stdin)):
        raise typer.Exit(2)


@dataclass(frozen=True)
class Answered:
    """An answer with what it was made of."""

    prompt: list[int]
    output: Output
    llm: LLM
    sampling: Sampling


@dataclass
class Talk:
    """A conversation and its sampling."""

    llm: LLM
    sampling: Sampling
    how: dict[str, Any]
    seed: int | None = None
    system: str | None = None
    raw: bool = False  # plain text to continue, without the chat template
    as_json: bool = False
    messages: Messages = field(default_factory=list)
    text: str = ""
    last: Answered | None = None

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.text, self.last = "", None

    def ask(self, line: str) -> None:
        """One turn: stream the answer and print its usage. A turn that raises InputError leaves no trace."""
        from ..params import InputError
        from .generate import check_finite

        messages = [*self.messages, {"role": "user", "content": line}]
        text = f"{self.text}\n{line}" if self.text else line
        prompt = self.llm.encode(text if self.raw else messages)
        if len(prompt) >= self.llm.target.context:
            raise InputError(
                f"the conversation has {len(prompt)} tokens and the model's context {self.llm.target.context}; "
                "/reset starts a new one"
            )
        output = self.write(self.llm, prompt, self.seed, self.sampling)
        check_finite([output])
        self.messages = [*messages, {"role": "assistant", "content": output.text}]
        self.text, self.last = text + output.text, Answered(prompt, output, self.llm, self.sampling)
        full = len(prompt) + len(output.tokens) >= self.llm.target.context
        if full and not self.as_json:
            typer.secho("[the context is full; /reset starts a new conversation]", fg=GREY, err=True)

    def write(self, llm: LLM, prompt: list[int], seed: int | None, sampling: Sampling) -> Output:
        """Stream an answer. On a terminal, Ctrl-C stops it and keeps what there is of it."""
        from .generate import DRAFTED, entry, usage_line

        stream = llm.stream(prompt, seed=seed, sampling=sampling, **self.how)
        try:
            for chunk in stream.chunks():
                if not self.as_json:
                    if chunk.drafted:
                        typer.secho(chunk.drafted, fg=DRAFTED, nl=False)
                    typer.echo(chunk.own, nl=False)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        output = stream.output
        if self.as_json:
            typer.echo(json.dumps(entry(output), ensure_ascii=False))
        else:
            typer.echo()
            typer.secho(usage_line(llm, output, {**self.how, "sampling": sampling}), fg=GREY, err=True)
        return output

    def command(self, line: str) -> str:
        """Run a line that begins with a slash; returns the reply."""
        from ..params import InputError

        name, *words = line.split()
        if name == "/help":
            return "\n".join(f"{command:20} {about}" for command, about in HELP.items())
        if name == "/reset":
            self.reset()
            return "a new conversation"
        if name == "/seed":
            self.seed = number(name, words[0], int) if words else None
            return "a fresh seed for every answer" if self.seed is None else f"seed {self.seed}"
        if name == "/temperature":
            if words:
                self.sampling = replace(self.sampling, temperature=number(name, words[0], float))
            return f"temperature {self.sampling.temperature:g}"
        if name == "/drafter":
            self.draft_with(words)
            return f"drafting with {self.llm.drafter_name}"
        if name == "/compare":
            return self.compare()
        raise InputError(f"there is no command {name}; /help lists them")

    def draft_with(self, specs: list[str]) -> None:
        """Change the drafter and keep the target."""
        if specs:
            from .. import drafters, plugins

            name = " ".join(specs) if "+" in specs else plugins.MIX.join(specs)
            made = drafters.load(name, self.llm.target, self.llm.tokenizer)
            self.llm = replace(self.llm, drafter=made, drafter_name=name, budgets={})

    def compare(self) -> str:
        """Decode the last answer again without drafts, with its seed and sampling, whatever was changed since."""
        from ..params import InputError
        from .compare import difference, plain_of

        if self.last is None:
            raise InputError("there is no answer to compare yet; write a message first")
        made, drafted = self.last, self.last.output
        plain = self.write(plain_of(made.llm), made.prompt, drafted.seed, made.sampling)
        seconds = [o.usage.decode_seconds / max(1, len(o.tokens) - 1) for o in (plain, drafted)]
        shared = min(len(plain.tokens), len(drafted.tokens))
        why = difference(made.llm, {**self.how, "sampling": made.sampling})
        same = "the same text" if plain.tokens[:shared] == drafted.tokens[:shared] else f"a different text{why}"
        return f"{same}; {made.llm.drafter_name} was {seconds[0] / (seconds[1] or 1):.2f} times as fast"


def converse(talk: Talk, lines: Iterator[str]) -> int:
    """Turn by turn until the input ends. It goes on after InputErrors, which are printed; returns their number. A
    message of several lines is never a command."""
    from ..params import InputError, Interrupted

    answers = failed = 0
    try:
        for line in lines:
            try:
                words = line.strip()
                if words.split() == ["/quit"]:
                    break
                if line.startswith("/") and "\n" not in words:
                    typer.secho(talk.command(words), fg=GREY, err=True)
                elif words:
                    talk.ask(line)
                    answers += 1
            except InputError as error:
                failed += 1
                typer.secho(f"outrider: {error}", fg="red", err=True)
    except KeyboardInterrupt:
        raise Interrupted(f"{answers} answers were written") from None
    return failed


def number(name: str, word: str, kind: Callable[[str], Any]) -> Any:
    """The number after a /command. Raises InputError for anything else."""
    from ..params import InputError

    try:
        return kind(word)
    except ValueError:
        raise InputError(f"{name} takes {'an integer' if kind is int else 'a number'}, not {word!r}") from None


def typed() -> Iterator[str]:
    """Messages from the terminal, with a persistent history: pasted lines stay together, and a backslash at the end of
    a line continues it."""
    remember = history()
    while True:
        try:
            line = input("> ")
            while line.endswith("\\"):
                line = f"{line[:-1]}\n{input('. ')}"
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.secho("\n(/quit or Ctrl-D leaves)", fg=GREY, err=True)
            continue
        remember(line)
        yield line


def history() -> Callable[[str], None]:
    """Load the history of earlier conversations; returns a function that saves it with a message that was typed.
    Messages of several lines are left out: its file has an entry for each line."""
    try:
        import readline
    except ImportError:  # not available on every system
        return lambda line: None
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(state) / "outrider" / "chat_history"
    readline.set_history_length(1000)
    readline.set_completer_delims("")
    readline.set_completer(completions)
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted file is one message, not one for each line
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            readline.read_history_file(file)
    except OSError:
        return lambda line: None  # without a writable home there is no history

    def remember(line: str) -> None:
        if "\n" in line and (last := readline.get_current_history_length()):
            readline.remove_history_item(last - 1)
        with suppress(OSError):
            readline.write_history_file(file)

    return remember


def completions(text: str, state: int) -> str | None:
    """The commands that begin with the typed text, one per call."""
    matches = [name.split()[0] for name in HELP if text and name.startswith(text)]
    return matches[state] if state < len(matches) else None
