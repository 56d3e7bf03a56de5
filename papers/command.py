"""How the programs beside this file are run: as commands of `outrider` are, with one sentence for bad input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from outrider.cli import explain, flowing
from outrider.commands import PLAIN


def main(function: Callable[..., Any], argv: list[str] | None = None) -> None:
    """Run a function with its arguments from the command line, and exit: 0, 1, or 2 for bad input."""
    app = typer.Typer(**PLAIN)
    app.command()(function)
    code = run(app, argv)
    sys.exit(code)


def run(app: typer.Typer, argv: list[str] | None = None) -> int:
    """The exit code of a command line (default: the process's own)."""
    try:
        code = flowing(typer.main.get_command(app))(argv, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort, Exception) as error:
        code, sentence = explain(error)
        typer.echo(sentence, err=True)
        return code
