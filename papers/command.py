"""How the programs beside this file are run: as commands of `outrider` are, with one sentence for bad input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from outrider.cli import explain, flowing
from outrider.commands import PLAIN


def main(function: Callable[..., Any]) -> None:
    """Run a function with the arguments of the command line, and exit."""
    sys.exit(run(function))


def run(function: Callable[..., Any], argv: Sequence[str] | None = None) -> int:
    """The exit code of a command line (default: the process's own): 0, 1, 2 for bad input, 130 interrupted."""
    app = typer.Typer(**PLAIN)
    app.command()(function)
    try:
        code = flowing(typer.main.get_command(app))(argv if argv is None else list(argv), standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort, Exception) as error:
        code, sentence = explain(error)
        typer.echo(sentence, err=True)
        return code
