"""The command line. Thin: a command is the function of its own name in `commands/`, imported when it is called.

Exit codes: 0 success, 2 bad input (one sentence on stderr), 1 failure (one sentence; `--debug` or
OUTRIDER_DEBUG=1 shows the traceback), 130 interrupted.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from keyword import iskeyword
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# Name and line of `outrider --help`; both stand here so that help imports no command (and hence no torch).
COMMANDS = {
    "generate": "Write text with a model: the text it writes alone, sooner.",
    "validate": "Prove on this machine that a model reads a tree of drafts exactly as it reads plain text.",
    "audit": "Prove on this machine that a drafter and a rule change nothing about a model's text.",
    "train": "Train a drafter for a target of your own, on text of your own.",
    "data": "Build training data, also by letting the target write the answers.",
    "tune-tree": "Grow the draft tree that a trained drafter's measured accuracies ask for.",
    "import": "Say what a trained drafter's folder holds, whatever its layout; write the native one.",
    "export": "Write a drafter as SafeAILab's code, speculators, vLLM or SGLang load it.",
    "parity": "Hold a drafter's text and acceptance in Outrider against the same drafter in vLLM.",
    "bench": "Measure methods side by side and beside stock transformers, with a report.",
    "theory": "What acceptance, draft length and cost promise (Leviathan).",
    "info": "Versions, threads, devices, demo models and drafters here.",
}

INTERRUPTED = 130
PLAIN: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}


class Lazy(TyperGroup):
    """A group whose commands are stubs until one is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, stub if stub is None else load(str(name)), rest


def file_of(name: str) -> str:
    return f"{name}_" if iskeyword(name) else name.replace("-", "_")


def load(name: str) -> Any:
    """The command `name`: `commands/name.py` has a typer app named `app`, or a function named like the file."""
    file = file_of(name)
    module = importlib.import_module(f".commands.{file}", __package__)
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(**PLAIN)
        app.command(name)(getattr(module, file))
    return typer.main.get_command(app)


app = typer.Typer(
    cls=Lazy,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='Start with: outrider generate "Once upon a time"',
    **PLAIN,
)
for _name, _line in COMMANDS.items():
    if find_spec(f".commands.{file_of(_name)}", __package__):
        app.command(_name, short_help=_line)(lambda: None)


@app.callback()
def outrider(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a failure's traceback (anywhere on the line).")] = False,
) -> None:
    """Lossless speculative decoding: the target's own text, several times sooner."""
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
    try:
        code = app(args, prog_name="outrider", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # typer has caught Ctrl-C
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("outrider: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        code, sentence = explain(error)
        typer.echo(f"outrider: {sentence}", err=True)
        return code


def quieten() -> None:
    """No chatter of transformers' unless the user's environment asks for it; downloads show progress on a terminal."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("torchao", "torch.utils._pytree"):  # one reports kernels for other machines, one warns of the first
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def explain(error: Exception) -> tuple[int, str]:
    """An error's exit code and sentence."""
    message = getattr(error, "format_message", None)
    if message is not None:  # typer's own: an unknown option, a missing value
        where = getattr(getattr(error, "ctx", None), "command_path", "outrider")
        return 2, f"{message().rstrip('.')} (see {where} --help)"
    types = sys.modules.get("outrider.types")
    if types is not None and isinstance(error, types.InputError):
        return 2, str(error)
    lines = str(error).strip().splitlines()
    return 1, f"{type(error).__name__}: {lines[0] if lines else 'no message'} (--debug shows the traceback)"


if __name__ == "__main__":
    sys.exit(main())
