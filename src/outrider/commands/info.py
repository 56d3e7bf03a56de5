"""`outrider info [MODEL]`: versions, threads, devices, models and drafters; or the location of a model."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import plugins
from ..machine import threads, versions

PACKAGE = Path(__file__).resolve().parents[1]
DEMO = ("target", "draft")


def info(
    model: Annotated[str | None, typer.Argument(help="smollm2, demo, a .gguf file, a folder or a hub id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Show versions, threads, devices, models and drafters; with MODEL, where its files are and its best drafter."""
    if model is not None:
        of = place(model)
        typer.echo(json.dumps(of) if as_json else "\n".join(f"{key:8}  {value}" for key, value in of.items() if value))
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


def place(model: str) -> dict[str, str]:
    """A model's file, folder or hub id, weights and drafter, as JSON."""
    from .loading import located

    model_place = located(model)
    where = str(Path(model_place.where) / model_place.gguf) if model_place.gguf else model_place.where
    return {"model": model_place.name, "where": where, "weights": model_place.about, "drafter": model_place.drafter}


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
