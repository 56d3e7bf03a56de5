"""`outrider bench`: methods by tasks by temperatures by batch sizes, interleaved, beside stock transformers."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from . import PLAIN, check_names, check_place
from . import options as opt


class Bench(TyperGroup):
    """`bench [MODEL] ...`, `bench compare A B`, or `bench tasks`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] and args[0] in self.commands:
            self.params, self.callback = [], None  # only the subcommand runs
            return list(super().parse_args(ctx, args))
        ctx.allow_interspersed_args = True
        TyperCommand.parse_args(self, ctx, args)
        if ctx.args:
            repeat = "repeat an option for each value, as in --task A --task B"
            ctx.fail(f"unexpected argument {ctx.args[0]!r}; {repeat}")
        return []


app = typer.Typer(cls=Bench, invoke_without_command=True, **PLAIN)
AGAIN = "Repeatable."


@app.callback()
def bench(
    model: opt.Model = None,
    task: Annotated[
        list[str] | None,
        opt.given("--task", help=f"A task, a group of tasks or a JSONL file; NAME@N cuts prompts to N tokens. {AGAIN}"),
    ] = None,
    limit: Annotated[int | None, opt.given("--limit", metavar="N", help="Use at most N prompts of each task.")] = None,
    data: Annotated[
        str | None, opt.given("--data", metavar="DIR", help="Folder of the published tasks' files. Default: the hub.")
    ] = None,
    drafter: Annotated[
        list[str] | None,
        opt.drafting(
            "--drafter",
            metavar="SPEC",
            help="A method, [LABEL=]SPEC[@BUDGET][@RULE][@WEIGHTS], as in eagle:DIR@16x6@rejection or lookup@int8; "
            f"SPEC + SPEC is a mix. Default: lookup, and the model's default. {AGAIN}",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        opt.drafting(
            "--peer",
            help=f"Another engine: transformers (default), transformers:DRAFT, transformers?lookup=10, none. {AGAIN}",
        ),
    ] = None,
    temperature: Annotated[
        list[float] | None, opt.sampling("--temperature", "--temp", help=f"Default: 0. {AGAIN}")
    ] = None,
    max_new_tokens: Annotated[int, opt.sampling("--max-new-tokens", "--max-tokens", help="For every turn.")] = 128,
    batch_size: Annotated[
        list[int] | None, opt.machine("--batch-size", help=f"Prompts decoded together. Default: 1. {AGAIN}")
    ] = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    repeats: Annotated[int, opt.measuring("--repeats", help="Times that each prompt is answered.")] = 1,
    max_minutes: Annotated[
        float | None, opt.measuring("--max-minutes", metavar="M", help="Time limit; the same command resumes.")
    ] = None,
    out: Annotated[Path, opt.output("--out", metavar="DIR", help="The run's folder.")] = Path("runs/bench"),
    as_json: opt.Json = False,
) -> None:
    """Compare methods, and write results.json and report.html.

    The same command resumes an interrupted run. `outrider bench tasks` lists the tasks, `outrider bench compare A B`
    compares two runs. For example: outrider bench MODEL --drafter lookup --task prompts.jsonl
    """
    from ..bench.config import Config

    if not peer and find_spec("torch") is None:
        typer.echo("transformers' own generate is left out: it needs torch (pip install 'outrider[torch]')", err=True)
        peer = ["none"]
    lists = {
        "drafters": drafter, "tasks": task, "temperatures": temperature, "batch_sizes": batch_size, "peers": peer,
    }  # fmt: skip
    config = Config(
        model, tokens=max_new_tokens, limit=limit, repeats=repeats, dtype=dtype, device=device,
        trust_remote_code=trust_remote_code, data=data, max_minutes=max_minutes, out=out,
        **{name: tuple(dict.fromkeys(values)) for name, values in lists.items() if values},  # type: ignore[arg-type]
    )  # fmt: skip
    check(config)
    from ..bench.instrument import run
    from ..bench.results import to_json
    from ..bench.summary import show

    document = run(config)
    if as_json:
        typer.echo(json.dumps(to_json(document)))
        return
    show(document)
    page = out / "report.html"
    typer.echo(f"Report: {page if page.is_file() else out / 'results.json'}", err=True)


def check(config: Any) -> None:
    """Raise InputError for unknown names, before anything is loaded."""
    from ..bench.types import OURS, weights_of
    from ..params import InputError
    from .loading import check_drafter, located

    check_names(config.dtype, config.device)
    config.check()
    for method in config.rows():
        if method.peer == OURS:
            check_drafter(method.spec)
        located(config.model, weights_of(method.variant, config.weights))
    if config.data is not None and not Path(config.data).is_dir():
        raise InputError(f"there is no folder {config.data}; --data names the folder of the tasks' files")
    check_place(config.dtype, config.device)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run's folder, or its results.json.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another run's.")],
    as_json: opt.Json = False,
) -> None:
    """Compare two runs; significant changes are marked."""
    from ..bench import compare as sides
    from ..bench.results import read, to_json
    from ..params import InputError

    for run in (a, b):
        if not run.exists():
            raise InputError(f"there is no run {run}; give the --out folder of an `outrider bench`")
    comparison = sides.compare(read(a), read(b))
    if as_json:
        typer.echo(json.dumps(to_json(comparison)))
    else:
        sides.show(comparison)


@app.command()
def tasks(as_json: opt.Json = False) -> None:
    """List the available tasks."""
    from ..bench.tasks import names

    known = names()
    if as_json:
        typer.echo(json.dumps(known))
        return
    width = max(map(len, known))
    for name, about in known.items():
        typer.echo(f"{name:{width}}  {about}")
