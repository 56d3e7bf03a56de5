"""The command line. Thin: a command is the function of its own name in `commands/`, imported when it is called.

Exit codes: 0 success, 2 bad input (one sentence on stderr), 1 failure (one sentence; `--debug` or
OUTRIDER_DEBUG=1 shows the traceback), 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from threading import current_thread, main_thread
from time import monotonic
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .commands import PLAIN
from .params import InputError, Interrupted, missing, out_of_memory

# Group, name and line of `outrider --help`; all stand here so that help imports no command (and hence no torch).
GROUPS = {
    "Write text": {
        "generate": "Generate text: the same text as without drafts, faster.",
        "chat": "Chat with a model: the same answers as without drafts, faster.",
        "serve": "Serve a model with OpenAI's API and a chat page.",
    },
    "Prove": {
        "validate": "Prove on this machine that passes over draft trees equal passes over plain text.",
        "audit": "Test on this machine that a drafter and a rule do not change a model's text.",
        "parity": "Compare a drafter with the same drafter in vLLM.",
    },
    "Measure": {
        "recommend": "Find the fastest drafter for a model on this machine.",
        "bench": "Compare methods with each other and with stock transformers, with a report.",
        "info": "Show versions, threads, devices, models and drafters; with MODEL, what it is and what runs it.",
    },
    "Make drafters": {
        "train": "Train a drafter for your target on your text.",
        "data": "Generate training data with the target.",
        "tune-tree": "Grow the best static draft tree of a trained drafter.",
        "import": "Show a trained drafter's checkpoint, and convert it to the native layout.",
        "export": "Export a drafter for SafeAILab's code, speculators, vLLM or SGLang.",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}

INTERRUPTED = 130

# What a folder or a disk may refuse: bad input, not a failure of ours.
UNUSABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR, errno.EISDIR,
    errno.ENAMETOOLONG,
)  # fmt: skip


class Lazy(TyperGroup):
    """A group whose commands are stubs until one is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, stub if stub is None else load(str(name)), rest


def file_of(name: str) -> str:
    """The name of a command's file."""
    return f"{name}_" if iskeyword(name) else name.replace("-", "_")


def load(name: str) -> Any:
    """The command `name`: `commands/name.py` has a typer app named `app`, or a function named like the file."""
    file = file_of(name)
    module = importlib.import_module(f".commands.{file}", __package__)
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(**PLAIN)
        app.command(name)(getattr(module, file))
    return flowing(typer.main.get_command(app))


def flowing(command: Any) -> Any:
    """The command with its help in paragraphs: the ends of the docstring's lines are none of the terminal's."""
    command.help = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    for below in getattr(command, "commands", {}).values():
        flowing(below)
    return command


app = typer.Typer(
    cls=Lazy,
    invoke_without_command=True,
    epilog='Start with: outrider generate "Once upon a time"',
    **{**PLAIN, "add_completion": True},
)
for _panel, _lines in GROUPS.items():
    for _name, _line in _lines.items():
        if find_spec(f".commands.{file_of(_name)}", __package__):
            app.command(_name, short_help=_line, rich_help_panel=_panel)(lambda: None)


@app.callback()
def outrider(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a failure's traceback (anywhere on the line).")] = False,
) -> None:
    """Lossless speculative decoding: the target's own text, faster."""
    if version:
        from importlib.metadata import version as of

        typer.echo(of("outrider"))
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    end = args.index("--") if "--" in args else len(args)
    debug = "--debug" in args[:end] or os.environ.get("OUTRIDER_DEBUG", "0") not in ("", "0")
    args = [a for a in args[:end] if a != "--debug"] + args[end:] or ["--help"]
    quieten()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 (until the process ends)
    with listening() as heard:
        try:
            code = app(args, prog_name="outrider", standalone_mode=False)
            sys.stdout.flush()
            if code == INTERRUPTED:  # typer has caught Ctrl-C
                raise KeyboardInterrupt
            return code if isinstance(code, int) else 0
        except BrokenPipeError:  # the reader, such as `head`, has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (KeyboardInterrupt, typer.Abort, Exception) as error:
            if debug:
                traceback.print_exc()
            code, sentence = explain(error)
            if code == 1 and heard and monotonic() - heard[-1] < 2:  # a library has made an error of its own of Ctrl-C
                code, sentence = explain(KeyboardInterrupt())
            typer.echo(f"outrider: {sentence}", err=True)
            return code


@contextmanager
def listening() -> Iterator[list[float]]:
    """Ctrl-C interrupts as ever, and its times (of `time.monotonic`) are noted in the list."""
    heard: list[float] = []

    def interrupt(number: int, frame: Any) -> None:
        heard.append(monotonic())
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    own = before is signal.default_int_handler and current_thread() is main_thread()
    if own:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield heard
    finally:
        if own:
            signal.signal(signal.SIGINT, before)


def quieten() -> None:
    """No log messages of transformers unless the environment enables them; downloads show progress on a terminal."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")  # the reading of .gguf files


def explain(error: BaseException) -> tuple[int, str]:
    """An error's exit code and sentence."""
    if isinstance(error, Interrupted):  # the command says what it kept
        return INTERRUPTED, f"interrupted; {error}"
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED, "interrupted"
    message = getattr(error, "format_message", None)
    if message is not None:  # typer's own: an unknown option, a missing value
        where = getattr(getattr(error, "ctx", None), "command_path", "outrider")
        return 2, f"{message().rstrip('.') or 'name a command'} (see {where} --help)"
    if isinstance(error, InputError):
        return 2, str(error)
    if isinstance(error, OSError) and error.errno in UNUSABLE and error.strerror:
        return 2, f"{error.filename or 'a file'} cannot be used: {error.strerror.lower()}"
    if os.strerror(errno.ENOSPC) in str(error):  # as torch and safetensors say it
        return 2, "the disk is full; free space, and run the same command again"
    if isinstance(error, ImportError) and (sentence := missing(error)):
        return 2, sentence
    if out_of_memory(error):
        return 2, "memory ran out; free some or raise its limit (ulimit -v), or use a smaller model or batch"
    lines = str(error).strip().splitlines()
    return 1, f"{type(error).__name__}: {lines[0] if lines else 'no message'} (--debug shows the traceback)"


if __name__ == "__main__":
    sys.exit(main())
