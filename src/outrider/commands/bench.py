"""`outrider bench`: methods by tasks by temperatures by batch sizes, in turn, beside stock transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from . import PLAIN, check_names, check_place
from . import options as opt
from .loading import check_drafter, located, one_model


class Bench(TyperGroup):
    """`bench [MODEL] ...`, or `bench compare A B`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["compare"]:
            self.params, self.callback = [], None  # what measures does not run before what compares
            return list(super().parse_args(ctx, args))
        ctx.allow_interspersed_args = True
        TyperCommand.parse_args(self, ctx, args)
        if ctx.args:
            known = "repeat an option for each value, as in --task A --task B"
            ctx.fail(f"{ctx.args[0]!r} belongs to none of the options; {known}")
        return []


app = typer.Typer(cls=Bench, invoke_without_command=True, **PLAIN)
AGAIN = "Repeatable."


@app.callback()
def bench(
    model: opt.Model = None,
    named: opt.NamedModel = None,
    task: Annotated[
        list[str] | None, opt.given("--task", help=f"A name, a group or a JSONL file; NAME@N cuts prompts. {AGAIN}")
    ] = None,
    prompts: opt.Prompts = None,
    limit: Annotated[int | None, opt.given("--limit", metavar="N", help="Prompts of each task, at most.")] = None,
    data: Annotated[
        str | None, opt.given("--data", metavar="DIR", help="The tasks' files; else they come from the hub.")
    ] = None,
    replay: Annotated[
        str | None, opt.given("--replay", metavar="FILE", help="Recorded answers (JSONL) instead of a model.")
    ] = None,
    tokenizer: Annotated[str | None, opt.given("--tokenizer", help="Of the recorded answers.")] = None,
    list_: Annotated[bool, opt.given("--list", help="Say which tasks there are, and stop.")] = False,
    drafter: Annotated[
        list[str] | None,
        opt.drafting(
            "--drafter",
            metavar="SPEC",
            help="LABEL=SPEC@BUDGET@RULE, all but SPEC optional; SPEC + SPEC is a mix. Default: lookup, and the "
            f"model's own. {AGAIN}",
        ),
    ] = None,
    rule: Annotated[
        list[str] | None,
        opt.drafting("--rule", help=f"coupled (default), rejection, block, typical?epsilon=E&delta=D. {AGAIN}"),
    ] = None,
    budget: Annotated[
        list[str] | None, opt.drafting("--budget", help=f"auto (default), 16x6, 3,2,1, '3,2,1 2,1 none'. {AGAIN}")
    ] = None,
    peer: Annotated[
        list[str] | None,
        opt.drafting(
            "--peer",
            help=f"Beside ours: transformers (default), transformers:DRAFT, transformers?lookup=10, none. {AGAIN}",
        ),
    ] = None,
    lossy: opt.Lossy = False,
    temperature: Annotated[
        list[float] | None, opt.sampling("--temperature", "--temp", help=f"Default: 0. {AGAIN}")
    ] = None,
    max_new_tokens: Annotated[int, opt.sampling("--max-new-tokens", "--max-tokens", help="For every turn.")] = 128,
    seed: Annotated[int, opt.sampling("--seed", help="Of sampled texts; every prompt has its own from it.")] = 0,
    batch_size: Annotated[
        list[int] | None, opt.machine("--batch-size", help=f"Prompts side by side. Default: 1. {AGAIN}")
    ] = None,
    variant: Annotated[
        list[str] | None,
        opt.machine(
            "--variant",
            help="Of the target: plain (default), eager (no recorded passes), int8, native (a .gguf file's four bits), "
            f"eager+int8. {AGAIN}",
        ),
    ] = None,
    threads: opt.Threads = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    no_compile: opt.NoCompile = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    repeats: Annotated[int, opt.measuring("--repeats", help="How often every prompt is answered.")] = 1,
    max_minutes: Annotated[
        float | None, opt.measuring("--max-minutes", help="Stop then; the same command goes on later.")
    ] = None,
    keep_loops: Annotated[
        bool, opt.measuring("--keep-loops", help="Count prompts whose plain text repeats itself.")
    ] = False,
    observe: Annotated[bool, opt.measuring("--observe", help="Also measure how true the confidences are.")] = False,
    explain: Annotated[
        bool, opt.measuring("--explain/--no-explain", help="Say where the distance to the ideal speed goes.")
    ] = True,
    memory: Annotated[
        float | None,
        opt.measuring("--memory", metavar="GIB", help="Also say how many rows of each method fit."),
    ] = None,
    judge: Annotated[
        str | None, opt.measuring("--judge", help="The model that judges lossy texts. Default: the target.")
    ] = None,
    cost: Annotated[str, opt.measuring("--cost", help="What a replayed model's passes cost.")] = "7b@a100",
    out: Annotated[
        Path, opt.output("--out", metavar="DIR", help="Folder of the run; it is resumed if it holds one.")
    ] = Path("runs/bench"),
    as_json: opt.Json = False,
) -> None:
    """Measure: speed, acceptance, texts and their causes, with a report at the end.

    Every method answers the same prompts in turn. A run that is broken off goes on with the same command.
    """
    from ..bench.config import Config
    from ..bench.methods import labelled
    from ..params import InputError

    if list_:
        return show_tasks(as_json)
    model = one_model(model, named)
    if prompts is not None and task:
        raise InputError("give --prompts or --task, not both; a JSONL file is a task too")
    given = {
        "drafters": drafter, "tasks": [prompts] if prompts else task, "temperatures": temperature, "rules": rule,
        "batch_sizes": batch_size, "budgets": budget, "variants": variant, "peers": peer,
    }  # fmt: skip
    config = Config(
        model, tokens=max_new_tokens, limit=limit, repeats=repeats, seed=seed, threads=threads, dtype=dtype,
        device=device, compile=not no_compile, trust_remote_code=trust_remote_code, data=data, judge=judge,
        lossy=lossy, keep_loops=keep_loops, observe=observe, explain=explain, memory=memory, max_minutes=max_minutes,
        replay=replay, tokenizer=tokenizer, cost=cost, out=out,
        **{name: tuple(dict.fromkeys(values)) for name, values in given.items() if values},  # type: ignore[arg-type]
    )  # fmt: skip
    check_names(dtype, device)
    config.check()
    for spec in config.drafters:
        check_drafter(labelled(spec)[1])
    check_paths(data, replay, tokenizer, judge)
    if replay is None:
        located(model)
    check_place(dtype, device)
    from ..bench import report
    from ..bench.instrument import run
    from ..bench.results import to_json

    found = run(config)
    if as_json:
        typer.echo(json.dumps(to_json(found)))
        return
    report.show(found)
    typer.echo(f"The report: {out / 'report.html'}", err=True)


def check_paths(data: str | None, replay: str | None, *models: str | None) -> None:
    """Refuse folders, files and models that are not there."""
    from ..params import InputError

    if data is not None and not Path(data).is_dir():
        raise InputError(f"there is no folder {data}; give --data the one with the tasks' files")
    if replay is not None and not Path(replay).is_file():
        raise InputError(f"there is no recording {replay}")
    for model in models:
        if model is not None:
            located(model)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run's folder, or its results.json.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another run's.")],
    as_json: opt.Json = False,
) -> None:
    """Two runs side by side; changes beyond both intervals are marked."""
    from ..params import InputError

    for run in (a, b):
        if not run.exists():
            raise InputError(f"there is no run {run}; name the --out folder of an `outrider bench`")
    from ..bench import compare as sides
    from ..bench.results import read

    found = sides.compare(read(a), read(b))
    if as_json:
        typer.echo(json.dumps(sides.document(found)))
    else:
        sides.show(found)


def show_tasks(as_json: bool) -> None:
    """The names that --task knows."""
    from ..bench.tasks import names

    found = names()
    if as_json:
        typer.echo(json.dumps(found))
        return
    width = max(map(len, found))
    for name, about in found.items():
        typer.echo(f"{name:{width}}  {about}")
