"""`outrider train`: a drafter for a target of your own, on text of your own."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def train(
    method: Annotated[str, typer.Argument(help="medusa, medusa2, hydra, eagle, hass, eagle3, mamba or draft-lm.")],
    data: Annotated[list[str], typer.Option(help="JSONL of messages, prompt and completion, or text; or plain text.")],
    out: Annotated[str, typer.Option(help="Folder of the run; OUT/best is the drafter.")],
    target: Annotated[
        str, typer.Option(help="A hub id or folder; demo: the model that ships with the package.")
    ] = "demo",
    steps: int = 1000,
    rows: Annotated[int, typer.Option(help="Rows of a batch.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a row; short documents share one.")] = 512,
    accumulate: Annotated[int, typer.Option(help="Batches of a step.")] = 1,
    lr: Annotated[float, typer.Option(help="Default: the method's paper's.")] = 0.0,
    warmup: Annotated[int, typer.Option(help="Steps; default: the paper's, at most a tenth.")] = -1,
    clip: Annotated[float, typer.Option(help="Gradient norm; default: the paper's.")] = 0.0,
    decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0,
    seed: int = 0,
    bf16: Annotated[bool, typer.Option("--bf16", help="Train in bfloat16 autocast.")] = False,
    half_features: Annotated[bool, typer.Option("--half-features", help="Run the target in bfloat16.")] = False,
    cache: Annotated[str, typer.Option(help="Folder that keeps features for repeated epochs.")] = "",
    cache_dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    evaluate: Annotated[int, typer.Option(help="Steps between evaluations; 0: ten in all.")] = 0,
    prompts: Annotated[int, typer.Option(help="Held-out prompts decoded at each evaluation.")] = 16,
    save: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 200,
    shard: Annotated[bool, typer.Option("--shard", help="FSDP2 over the processes there are.")] = False,
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of the method, as in passes=3.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the target: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Train a drafter. The same command goes on after an interruption. Only medusa2 changes the target: a copy, in
    OUT/best/target.

    Several processes: start it with `accelerate launch`, as any script.
    """
    import json

    from ..targets import load_target, load_tokenizer
    from ..training import data as text
    from ..training import loop
    from ..training.objectives import options_of
    from ..training.recipe import Recipe
    from ..types import InputError
    from . import check_place
    from .info import PACKAGE

    check_place(dtype, device)
    options = read_options(method, option or [], options_of(method))
    recipe = Recipe(
        method, steps, rows, length, accumulate, lr, warmup=warmup, clip=clip, decay=decay, seed=seed, bf16=bf16,
        half_features=half_features, cache=cache, cache_dtype=cache_dtype, evaluate=evaluate, prompts=prompts,
        save=save, options=options,
    ).complete()  # fmt: skip
    demo = target == "demo"
    where = str(PACKAGE / "demo" / "target") if demo else target
    tokenizer = load_tokenizer(where)
    if tokenizer is None:
        raise InputError(f"{target} has no tokenizer, and training reads text; name a model that has one")
    documents = list(text.read(data, tokenizer))
    model: Any = load_target(where, dtype="float32" if demo and dtype == "auto" else dtype, device=device)
    found = loop.train(model, documents, out, recipe, shard=shard, quiet=as_json)
    if as_json:
        typer.echo(json.dumps({**found.__dict__, "folder": str(found.folder), "method": method}))
    else:
        typer.echo(f"{found.folder}: held-out loss {found.best:.4f}, tau {found.tau:.2f} (16 nodes, T = 0)")
        changed = f"{found.folder}/target" if method == "medusa2" else target
        typer.echo(f'try it: outrider generate {changed} "..." --drafter {found.folder}', err=True)


def read_options(method: str, given: list[str], known: dict[str, Any]) -> dict[str, Any]:
    """NAME=VALUE, each of the type of its default."""
    from ..drafters import value_of
    from ..types import InputError

    found: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or name not in known:
            raise InputError(f"{method} has no option {item!r}; give NAME=VALUE with one of {', '.join(known)}")
        found[name] = value_of(f"--option {item}", name, value, known[name])
    return found
