"""`outrider plan`: what a drafter for a target takes, before anything is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..names import find
from .loading import located


def plan(
    target: Annotated[
        str,
        typer.Option(metavar="CONFIG", help="A folder or config.json, a hub id, smollm2, demo; needs no weights."),
    ],
    tokens: Annotated[str, typer.Option(metavar="N", help="Tokens to train on, prompts and answers: 100M, 1.2G.")],
    gpus: Annotated[str, typer.Option(metavar="COUNTxGPU", help="As in 8xh100.")],
    drafter: Annotated[str, typer.Option(help="eagle, eagle3 or dflash.")] = "eagle3",
    epochs: Annotated[int, typer.Option(help="Times that the drafter sees each token.", min=1)] = 5,
    length: Annotated[int, typer.Option(help="Tokens of a text, prompt and answer.", min=1)] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Work out what a drafter for a target takes: GPU hours, disk and network.

    For example: outrider plan --target config.json --tokens 100M --gpus 8xh100
    """
    from ..bench import plan as planning

    number, gpu = planning.gpus_of(gpus)
    amount, kind = planning.tokens_of(tokens), planning.chosen(drafter)
    place = find(target) if Path(target).is_file() else located(target)
    made = planning.plan(planning.read(place), kind, amount, number, gpu, epochs, length)
    typer.echo(json.dumps(made) if as_json else "\n".join(planning.lines(made)))
