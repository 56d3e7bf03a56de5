"""`outrider import`: what a drafter's folder holds, and its native layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as opt

if TYPE_CHECKING:
    from ..backends.torch import Place
    from ..checkpoints import Facts, Found


def import_(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="A folder or hub id with a trained drafter, of whatever layout, or one that ships: smollm2/eagle3.",
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
            help="Of a block drafter whose config leaves it open: does a slot see only the slots before it?",
            show_default=False,
        ),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Say what FOLDER holds, and write it in the native layout if asked.

    Reads EAGLE, EAGLE-2, HASS and EAGLE-3 of SafeAILab, P-EAGLE, Medusa (three layouts, and vLLM's), Hydra, block
    drafters (DFlash, DFlash 2, JetSpec, DSpark) and what speculators writes. What is missing, unknown, of another shape
    or not a number is refused by name.
    """
    from .. import hub, shipped
    from ..params import InputError

    if in_int8 and out is None:
        raise InputError("--int8 says how the new folder is written; name that folder with --out DIR")
    hub.ensure(shipped.place_of(folder))
    facts = facts_of(model) if model else None
    from ..checkpoints import read
    from ..checkpoints.native import check
    from ..checkpoints.write import keep

    found = read(folder, facts)
    if causal is not None:
        if found.method != "block":
            raise InputError(f"--causal is for block drafters, and {folder} holds {found.method}; leave it out")
        found.config["causal"] = causal
    check(found, folder)
    if out is not None:
        keep(found, out, in_int8)
    if as_json:
        import json

        typer.echo(json.dumps({**summary(found), "folder": folder, "out": out}))
    else:
        show(found, folder, out)


def facts_of(model: str | Place | None) -> Facts:
    """A target's facts by its name."""
    from .loading import located

    place = located(model)  # before torch is imported
    from ..backends.choose import load
    from ..checkpoints import Facts

    return Facts.of(load(place).target) if place.gguf else Facts.at(place.where)


def summary(found: Found) -> dict[str, Any]:
    """What a folder holds, as JSON."""
    return {
        "layout": found.layout,
        "method": found.method,
        "config": found.config,
        "tensors": {name: list(t.shape) for name, t in found.tensors.items()},
        "parameters": sum(t.numel() for t in found.tensors.values() if t.is_floating_point()),
        "dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in found.tensors.values()}),
        "notes": found.notes,
    }


def show(found: Found, folder: str, out: str | None) -> None:
    """What a folder holds, for a reader."""
    about = summary(found)
    config = {k: v for k, v in found.config.items() if k != "layer" and v is not None}
    typer.echo(f"layout      {found.layout}")
    typer.echo(f"drafter     {found.method}, {about['parameters']:,} parameters in {', '.join(about['dtypes'])}")
    typer.echo("config      " + ", ".join(f"{name} {value}" for name, value in config.items()))
    if layer := found.config.get("layer"):
        typer.echo("layer       " + ", ".join(f"{name} {value}" for name, value in layer.items()))
    for i, note in enumerate(found.notes):
        typer.echo(f"{'notes' if i == 0 else '':12}{note}")
    use = f"{found.method}:{out or folder}"
    typer.echo(f"{'written to  ' + out + '; ' if out else ''}use it as --drafter {use}")
