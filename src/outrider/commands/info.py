"""`outrider info [MODEL]`: versions, threads, devices, models and drafters; or what a model is and where it lies."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import plugins
from ..machine import threads, versions

if TYPE_CHECKING:
    from ..names import Place

PACKAGE = Path(__file__).resolve().parents[1]
DEMO = ("target", "draft")


def info(
    model: Annotated[str | None, typer.Argument(help="smollm2, demo, a .gguf file, a folder or a hub id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Show versions, threads, devices, models and drafters; with MODEL, what it is, what runs it and what drafts."""
    if model is not None:
        of = about_model(model)
        typer.echo(json.dumps(of) if as_json else "\n".join(f"{key:8}  {value}" for key, value in lines(of)))
        return
    about = collect()
    if as_json:
        typer.echo(json.dumps(about))
        return
    typer.echo("versions  " + ", ".join(f"{name} {v}" for name, v in about["versions"].items()))
    typer.echo(f"threads   {about['threads']} of {about['cores']} cores")
    typer.echo("devices   " + ", ".join(about["devices"]))
    here = {True: "here", False: "absent"}
    typer.echo("models    " + ", ".join(f"{name} {here[there]}" for name, there in about["models"].items()))
    width = max(map(len, about["drafters"]))
    for i, (name, line) in enumerate(about["drafters"].items()):
        typer.echo(f"{'drafters' if i == 0 else '':8}  {name:{width}}  {line}")


def about_model(model: str) -> dict[str, Any]:
    """A model's location, architecture, weights, passes and drafter, as JSON."""
    from .loading import located

    place = located(model)
    where = str(Path(place.where) / place.gguf) if place.gguf else place.where
    return {"model": place.name, "where": where, "weights": place.about, "drafter": place.drafter, **about_files(place)}


def about_files(place: Place) -> dict[str, Any]:
    """What the files of a model say of it, and whose passes run it; nothing where they are on the hub."""
    from ..backends.choose import readable
    from ..params import InputError

    if not Path(place.where).exists():
        return {}
    try:
        files = readable(place, dtype=place.dtype)
    except InputError as error:
        return {"passes": f"none here: {error}"}
    if files is None:
        return {"passes": "torch" if find_spec("torch") else "none here: it needs torch"}
    made, numbers, sizes = files.description, 0, Counter[str]()
    for one in files.parameters.values():
        numbers += prod(one.shape)
        sizes[one.tensor.kind.name] += one.tensor.data.size
    return {
        "passes": "native",
        "family": made.family,
        "layers": len(made.layers),
        "width": made.hidden,
        "vocabulary": made.vocab,
        "context": made.context,
        "parameters": numbers,
        "bytes": dict(sizes.most_common()),
    }


def lines(of: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The result of `about_model` as labelled lines."""
    yield from ((key, of[key]) for key in ("model", "where", "weights") if of[key])
    if "family" in of:
        yield "family", f"{of['family']}, {of['layers']} layers of width {of['width']}"
        yield "context", f"{of['context']:,} tokens, of a vocabulary of {of['vocabulary']:,}"
        whole = sum(of["bytes"].values())
        kinds = ", ".join(f"{n / whole:.0%} {kind}" for kind, n in of["bytes"].items() if n > whole / 200)
        size = f"{amount(of['parameters'], 'million', 'billion')} parameters, {amount(whole, 'MB', 'GB')} ({kinds})"
        yield "size", size
    if "passes" in of:
        yield "passes", "native, bit-exact" if of["passes"] == "native" else of["passes"]
    yield "drafter", of["drafter"]


def amount(number: int, millions: str, billions: str) -> str:
    """Three digits of a number, in millions or billions."""
    return f"{number / 1e9:.3g} {billions}" if number >= 1e9 else f"{number / 1e6:.3g} {millions}"


def collect() -> dict[str, Any]:
    """Versions, threads, devices, models and drafters, as JSON."""
    devices = ["cpu"]
    if find_spec("torch") is not None:
        import torch

        devices += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return {
        "versions": versions(),
        "threads": threads(),
        "cores": os.cpu_count(),
        "devices": devices,
        "models": models(),
        "drafters": drafters(),
    }


def models() -> dict[str, bool]:
    """The models that ship with the package, and whether each is complete."""
    demo = PACKAGE / "demo"
    there = {f.parent.name for f in demo.glob("*/config.json")} if demo.is_dir() else set()
    return {name: name in there and any((demo / name).glob("*.safetensors")) for name in sorted({*DEMO, *there})}


def drafters() -> dict[str, str]:
    """The drafters, with the first line of their files."""
    return {name: plugins.summary("drafters", name) for name in plugins.names("drafters")}
