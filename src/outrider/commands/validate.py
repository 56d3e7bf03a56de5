"""`outrider validate`: proves on this machine that tree passes equal sequential decoding for a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer


def validate(
    model: Annotated[str, typer.Argument(help="A hub id or folder; demo: the model that ships with the package.")],
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Prove on this machine that MODEL reads a tree of drafts exactly as it reads plain text.

    A control with a wrong mask must be far off, or the proof proves nothing. Exits 1 if the model is not exact.
    """
    from ..targets import load_target
    from ..targets import validate as prove
    from ..types import InputError
    from . import check_place
    from .info import PACKAGE, models

    check_place(dtype, device)
    if model == "demo":
        if not models()["target"]:
            raise InputError("the demo target is not part of this installation; name a model")
        model = str(PACKAGE / "demo" / "target")
    target = load_target(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    report = prove(target, seed)
    if as_json:
        import json

        typer.echo(json.dumps({**asdict(report), "seed": seed}))
    else:
        typer.echo(report.sentence)
    if not report.exact:
        raise typer.Exit(1)
