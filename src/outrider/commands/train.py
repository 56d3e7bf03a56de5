"""`outrider train`: trains a drafter for a target on text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import files, plugins
from . import options as opt

FAST = "Default: where the machine supports it (AVX512_BF16, AMX, a GPU), unless --dtype is wider."


def known(method: str) -> str:
    """Check the method before missing options are reported."""
    plugins.check("objectives", method)
    return method


def train(
    method: Annotated[
        str,
        typer.Argument(metavar="METHOD", callback=known, help=f"One of {', '.join(plugins.names('objectives'))}."),
    ],
    data: Annotated[
        list[str],
        opt.given(
            "--data",
            metavar="FILE",
            help="JSON lines of messages, prompt and completion, text or token ids; plain text (repeatable).",
        ),
    ],
    out: Annotated[str, opt.output("--out", metavar="DIR", help="Folder of the run; DIR/best is the drafter.")],
    model: opt.Model = None,
    length: Annotated[int, opt.given("--length", help="Tokens per row; short documents are packed.")] = 1024,
    limit: Annotated[
        int,
        opt.given("--limit", metavar="N", help="Decode at most N held-out prompts at each evaluation."),
    ] = 16,
    steps: Annotated[int, opt.training("--steps", help="Optimiser steps; 0: three epochs.")] = 0,
    rows: Annotated[int, opt.training("--rows", help="Rows per batch.")] = 2,
    accumulate: Annotated[int, opt.training("--accumulate", help="Batches per step.")] = 1,
    lr: Annotated[float, opt.training("--lr", help="Default: the method's.")] = 0.0,
    warmup: Annotated[int, opt.training("--warmup", help="Steps; default: the method's, at most a tenth.")] = -1,
    clip: Annotated[float, opt.training("--clip", help="Gradient norm; default: the method's.")] = 0.0,
    decay: Annotated[float, opt.training("--decay", help="Weight decay.")] = 0.0,
    choice: Annotated[
        list[str] | None, opt.training("--option", help="NAME=VALUE of the method, as in passes=3.")
    ] = None,
    seed: Annotated[int, opt.training("--seed", help="Of initial weights and data order.")] = 0,
    evaluate: Annotated[int, opt.training("--evaluate", help="Steps between evaluations; 0: ten in all.")] = 0,
    save: Annotated[int, opt.training("--save", help="Steps between checkpoints; 0: every five minutes.")] = 0,
    bf16: Annotated[
        bool | None,
        opt.machine("--bf16/--no-bf16", show_default=False, help=f"Multiply in bfloat16. {FAST}"),
    ] = None,
    cache: Annotated[
        str,
        opt.machine("--cache", metavar="DIR", help="Folder for cached features. Default: in DIR, until the run ends."),
    ] = "",
    features: Annotated[
        str,
        opt.machine("--features", metavar="DIR", help="Folder of hidden states from vLLM, speculators or SpecForge."),
    ] = "",
    init: Annotated[
        str,
        opt.training("--init", metavar="DIR", help="Start from this drafter's weights, as in smollm2/eagle3."),
    ] = "",
    shard: Annotated[bool, opt.machine("--shard", help="FSDP2 over all processes.")] = False,
    target_parallel: Annotated[
        int,
        opt.machine("--target-parallel", metavar="N", help="Tensor parallelism of MODEL over N processes."),
    ] = 1,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
) -> None:
    """Train a drafter for MODEL. The same command resumes after an interruption. Only medusa2 changes MODEL: a copy in
    DIR/best/target.

    Several processes: `torchrun --nproc-per-node 8 -m outrider train ...`.
    """
    import json

    from . import check_names, check_place
    from .loading import located

    check_names(dtype, device)
    check_given(method, data, choice or [], init, features)
    files.fillable(out)
    place = located(model)  # before torch is imported
    from ..training import loop
    from ..training.objectives import native, options_of
    from ..training.recipe import Recipe

    check_place(dtype, device)
    if dtype in ("float32", "float64"):
        bf16 = bool(bf16)
    options = read_options(method, choice or [], options_of(method))
    recipe = Recipe(
        method, steps, rows, length, accumulate, lr, warmup=warmup, clip=clip, decay=decay, seed=seed, bf16=bf16,
        cache=cache, features=features, evaluate=evaluate,
        prompts=limit, save=save, init=init, options=options, target=str(place), data=tuple(data),
    )  # fmt: skip
    recipe.complete()  # raises InputError before a model is loaded
    stock = not native(method) or target_parallel > 1 or bool(features)
    target, documents = load(place, data, stock, dtype, device, trust_remote_code, target_parallel)
    result = loop.train(target, documents, out, recipe, shard=shard, quiet=as_json)
    if int(os.environ.get("RANK", 0)):  # only the first of several processes prints
        return
    if as_json:
        typer.echo(json.dumps({**result.__dict__, "folder": str(result.folder), "method": method}))
    else:
        typer.echo(f"{result.folder}: held-out loss {result.best:.4f}, tau {result.tau:.2f} (16 nodes, T = 0)")
        changed = f"{result.folder}/target" if method == "medusa2" else place.name
        typer.echo(f'try it: outrider generate {changed} "..." --drafter {result.folder}', err=True)


def load(
    place: Any, data: list[str], stock: bool, dtype: str, device: str, trust_remote_code: bool, processes: int
) -> tuple[Any, list[Any]]:
    """The target and the tokenised documents. stock: whether the method needs the model's own modules."""
    from ..backends import choose, torch
    from ..params import InputError
    from ..training import data as text

    native = not stock and dtype in choose.PRECISIONS
    if native and choose.readable(place, device, dtype, trust_remote_code) is not None:
        loaded = choose.load(place, dtype=dtype, device=device)
        return loaded.target, list(text.read(data, loaded.tokenizer))
    tokenizer = torch.load_tokenizer(place, trust_remote_code)
    if tokenizer is None:
        raise InputError(f"{place} has no tokenizer; name a model that has one")
    documents = list(text.read(data, tokenizer))  # raises InputError before a model is loaded
    target = torch.load_target(
        place,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        processes=processes,
    )
    return target, documents


def check_given(method: str, data: list[str], choice: list[str], init: str, features: str) -> None:
    """Raise InputError for missing files and folders, and unknown options of the method."""
    from .. import hub, shipped
    from ..params import InputError

    plugins.check_options("objectives", method, (item.partition("=")[0] for item in choice))
    for file in data:
        if not Path(file).exists():
            raise InputError(f"there is no file {file}; give --data a text, or JSON lines")
    if init:
        hub.ensure(shipped.place_of(shipped.placed(init, method)))
    if features and not Path(features).is_dir():
        raise InputError(f"there is no folder {features}; give --features a folder that another engine has written")


def read_options(method: str, given: list[str], known: dict[str, Any]) -> dict[str, Any]:
    """NAME=VALUE options, with the types of their defaults."""
    from ..drafters import value_of
    from ..params import InputError

    options: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or name not in known:
            raise InputError(f"{method} has no option {item!r}; give NAME=VALUE with one of {', '.join(known)}")
        options[name] = value_of(f"--option {item}", name, value, known[name])
    return options
