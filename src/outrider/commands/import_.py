"""`outrider import`: shows a drafter's checkpoint and converts it to the native layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as opt

if TYPE_CHECKING:
    from ..checkpoints import Checkpoint, Facts
    from ..names import Place


def import_(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="A folder or hub id with a trained drafter, or one that ships: smollm2/eagle3.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="The drafter's target, which some layouts need: a folder, a hub id, smollm2 or demo."
        ),
    ] = None,
    out: Annotated[
        str | None,
        opt.output("--out", metavar="DIR", help="Write the native layout to this new folder."),
    ] = None,
    in_int8: Annotated[
        bool,
        opt.output("--int8", help="With --out: keep matrices in eight bits, half the size of bfloat16."),
    ] = False,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--no-causal",
            help="For block drafters whose config does not say: whether a slot attends to earlier slots only.",
            show_default=False,
        ),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Show the drafter in FOLDER; --out converts it to the native layout.

    Reads EAGLE, EAGLE-2, HASS and EAGLE-3 of SafeAILab, P-EAGLE, Medusa (three layouts, and vLLM's), Hydra, block
    drafters (DFlash, DFlash 2, JetSpec, DSpark) and speculators' folders. Missing and unknown tensors, wrong shapes and
    NaN are refused by name.
    """
    from .. import hub, shipped
    from ..params import InputError

    if in_int8 and out is None:
        raise InputError("--int8 says how the new folder is written; name that folder with --out DIR")
    hub.ensure(shipped.drafter_at(folder))
    facts = facts_of(model) if model else None
    from ..checkpoints import read
    from ..checkpoints.native import check
    from ..checkpoints.write import keep

    checkpoint = read(folder, facts)
    if causal is not None:
        if checkpoint.method != "block":
            raise InputError(f"--causal is for block drafters, and {folder} holds {checkpoint.method}; leave it out")
        checkpoint.config["causal"] = causal
    check(checkpoint, folder)
    if out is not None:
        keep(checkpoint, out, in_int8)
    if as_json:
        import json

        typer.echo(json.dumps({**summary(checkpoint), "folder": folder, "out": out}))
    else:
        show(checkpoint, folder, out)


def facts_of(model: str | Place | None) -> Facts:
    """A target's facts by its name."""
    from .loading import located

    place = located(model)  # before torch is imported
    from ..backends.choose import load
    from ..checkpoints import Facts

    return replace(Facts.of(load(place).target), name=str(place)) if place.gguf else Facts.at(place.where)


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as JSON."""
    return {
        "layout": checkpoint.layout,
        "method": checkpoint.method,
        "config": checkpoint.config,
        "tensors": {name: list(t.shape) for name, t in checkpoint.tensors.items()},
        "parameters": sum(t.numel() for t in checkpoint.tensors.values() if t.is_floating_point()),
        "dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in checkpoint.tensors.values()}),
        "notes": checkpoint.notes,
    }


def show(checkpoint: Checkpoint, folder: str, out: str | None) -> None:
    """Print a checkpoint."""
    about = summary(checkpoint)
    config = {k: v for k, v in checkpoint.config.items() if k != "layer" and v is not None}
    typer.echo(f"layout      {checkpoint.layout}")
    typer.echo(f"drafter     {checkpoint.method}, {about['parameters']:,} parameters in {', '.join(about['dtypes'])}")
    typer.echo("config      " + ", ".join(f"{name} {value}" for name, value in config.items()))
    if layer := checkpoint.config.get("layer"):
        typer.echo("layer       " + ", ".join(f"{name} {value}" for name, value in layer.items()))
    for i, note in enumerate(checkpoint.notes):
        typer.echo(f"{'notes' if i == 0 else '':12}{note}")
    use = f"{checkpoint.method}:{out or folder}"
    typer.echo(f"{'written to  ' + out + '; ' if out else ''}use it as --drafter {use}")
