"""`outrider bench`: methods by tasks by temperatures by batch sizes, in turn, beside stock transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from ..bench.runner import Group, Runner

MANY = ("--drafter", "--tasks", "--temperature", "--rules", "--batch-size", "--budget", "--variant", "--peer")


class Plural(TyperGroup):
    """Options that take several values: `--temperature 0 1` means `--temperature 0 --temperature 1`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["compare"]:
            self.callback = None  # what measures does not run before what compares
        return list(super().parse_args(ctx, spread(args)))


def spread(args: list[str]) -> list[str]:
    found: list[str] = []
    option, values = "", 0
    for arg in args:
        if arg.startswith("--"):
            option, values = arg if arg in MANY else "", 0
        elif option:
            found += [option] * (values > 0)
            values += 1
        found.append(arg)
    return found


app = typer.Typer(
    cls=Plural, invoke_without_command=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False,
)  # fmt: skip


@app.callback()
def bench(
    target: Annotated[str | None, typer.Option(help="A hub id or folder; default: the demo target.")] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="[LABEL=]SPEC[@BUDGET][@RULE]; default: lookup, for the demo its own too.")
    ] = None,
    tasks: Annotated[
        list[str] | None, typer.Option(help="Names, groups or JSONL files, NAME@N cuts prompts; see --list.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the tasks' files; else they come from the hub.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Default: 0.")] = None,
    rules: Annotated[
        list[str] | None, typer.Option(help="coupled (default), rejection, block, typical?epsilon=E&delta=D.")
    ] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Prompts side by side; default: 1.")] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="adaptive (default), NODESxDEPTH, a shape 3,2,1, or '3,2,1 2,1 none' for a bandit."),
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Of the target: plain (default), compile, int8, compile+int8.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Beside ours: transformers (default), transformers:DRAFT, transformers?lookup=10; none: none."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="For every turn.")] = 128,
    limit: Annotated[int | None, typer.Option(help="Prompts of each task, at most.")] = None,
    repeats: Annotated[int, typer.Option(help="How often every prompt is answered.")] = 1,
    max_minutes: Annotated[float | None, typer.Option(help="Stop then; the same command goes on later.")] = None,
    seed: Annotated[int, typer.Option(help="Of sampled texts; every prompt has its own from it.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Default: torch's own.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    lossy: Annotated[bool, typer.Option("--lossy", help="Allow rules that change the text's law.")] = False,
    judge: Annotated[
        str | None, typer.Option(help="The model that lossy texts are judged by; default: the target.")
    ] = None,
    keep_loops: Annotated[
        bool, typer.Option("--keep-loops", help="Count prompts whose plain text repeats itself.")
    ] = False,
    observe: Annotated[bool, typer.Option("--observe", help="Also measure how true the confidences are.")] = False,
    explain: Annotated[bool, typer.Option(help="Say where the distance to the ideal speed goes.")] = True,
    replay: Annotated[Path | None, typer.Option(help="Recorded answers (JSONL) instead of a target.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Of the recorded answers.")] = None,
    cost: Annotated[str, typer.Option(help="What a replayed model's passes cost, as 7b@a100.")] = "7b@a100",
    memory: Annotated[
        float | None, typer.Option(help="GiB: also say how many rows of each method fit into it.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run; it is resumed if it holds one.")] = Path("runs/bench"),
    list_: Annotated[bool, typer.Option("--list", help="The tasks there are, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="results.json on stdout, nothing else there.")] = False,
) -> None:
    """Measure: speed, acceptance, texts and their causes, with a report at the end.

    Every method answers the same prompts in turn. A run that is broken off goes on with the same command.
    """
    from ..bench import report
    from ..types import InputError
    from . import check_place

    if list_:
        return show_tasks(as_json)
    if min(max_new_tokens, repeats, *(batch_size or [1])) < 1 or min(temperature or [0]) < 0:
        raise InputError("--max-new-tokens, --repeats and --batch-size are at least 1, and --temperature at least 0")
    if min(limit or 1, threads or 1) < 1 or (max_minutes is not None and max_minutes <= 0):
        raise InputError("--limit and --threads are at least 1, and --max-minutes is above 0")
    check_place(dtype, device)
    if replay is not None:
        if any((target, tasks, temperature, rules, batch_size, variant, peer)):
            raise InputError("a replay takes --drafter, --budget, --tokenizer, --cost and --limit; leave the rest out")
        document = replayed(replay, tokenizer, drafter or ["lookup", "suffix"], budget or ["16x6"], cost, limit)
    else:
        asked: dict[str, Any] = {
            "target": target or "demo", "drafter": drafter or ["lookup", *([] if target else [default_drafter()])],
            "tasks": tasks or ["sample" if target else "demo"], "temperature": unique(temperature or [0.0]),
            "rules": unique(rules or ["coupled"]), "batch_size": unique(batch_size or [1]),
            "budget": unique(budget or ["adaptive"]), "variant": unique(variant or ["plain"]),
            "peer": ["transformers"] if peer is None else peer, "tokens": max_new_tokens, "limit": limit,
            "repeats": repeats, "seed": seed, "threads": threads, "dtype": dtype, "device": device,
            "keep_loops": keep_loops, "data": str(data) if data else None, "judge": judge,
        }  # fmt: skip
        document = measured(asked, out, max_minutes, observe, explain, memory, lossy)
    files = report.write(document, out)
    if as_json:
        import json

        typer.echo(json.dumps(report.finite(document)))
        return
    report.show(document)
    typer.echo(f"The report: {files[-1]}", err=True)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A run's folder, or its results.json.")],
    b: Annotated[Path, typer.Argument(help="Another run's.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Two runs side by side; changes beyond both intervals are marked."""
    import json

    from ..bench import compare as sides
    from ..bench import report

    found = sides.compare(report.read(a), report.read(b))
    if as_json:
        typer.echo(json.dumps(found))
    else:
        sides.show(found)


def unique(values: list[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def default_drafter() -> str:
    from ..llm import DEMO_DRAFTER

    return DEMO_DRAFTER


def show_tasks(as_json: bool) -> None:
    from ..bench.tasks import names

    found = names()
    if as_json:
        import json

        typer.echo(json.dumps(found))
        return
    width = max(map(len, found))
    for name, about in found.items():
        typer.echo(f"{name:{width}}  {about}")


def measured(
    asked: dict[str, Any], out: Path, minutes: float | None, observe: bool, explain: bool, memory: float | None = None,
    lossy: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The grid, measured and judged; also when it is broken off, with what there is."""
    from time import monotonic

    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from .. import llm as models_of
    from ..bench import cells, methods, report, studies
    from ..bench.models import Models
    from ..bench.runner import Runner, fitting
    from ..bench.store import Store
    from ..bench.tasks import expand, load
    from ..types import InputError

    if asked["threads"]:
        torch.set_num_threads(asked["threads"])
    asked = {**asked, "threads": torch.get_num_threads()}
    rows = methods.rows(asked["drafter"], asked["rules"], asked["budget"], asked["variant"], asked["peer"])
    changing = [m for m in rows if not methods.lossless(m)]
    if changing and not lossy:
        raise InputError("typical acceptance changes the text's law; say --lossy if that is what you want")
    if changing and max(asked["temperature"]) == 0:
        raise InputError("typical acceptance at temperature 0 is greedy decoding; give a --temperature above 0")
    names = expand(asked["tasks"])
    if not names:
        raise InputError("no task was named; see outrider bench --list")
    models = Models(None if asked["target"] == "demo" else asked["target"], asked["dtype"], asked["device"])
    llm, began = models.llm(), monotonic()
    place = {"dtype": asked["dtype"], "device": asked["device"]}
    referee = models_of.load(asked["judge"], "none", **place) if asked["judge"] else None
    named = {m.name: [m.peer, m.spec, m.rule, m.budget, m.variant] for m in rows}
    header = {"target": models.name, "arguments": asked, "methods": named, **here()}
    runner = Runner(models, Store.open(out, header), asked["tokens"], asked["seed"])
    runner.deadline = began + 60 * minutes if minutes else runner.deadline

    def count(text: str) -> int:
        return len(llm.encode(text))

    folder = Path(asked["data"]) if asked["data"] else None
    chosen = [fitting(load(name, folder, asked["limit"], count), runner) for name in names]
    runner.open(rows)
    groups = runner.groups(chosen, asked["temperature"], asked["batch_size"], rows, asked["repeats"])
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    whole = True
    with Progress(*columns, console=console, transient=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=sum(steps(runner, group) for group in groups))
        try:
            for group in groups:
                whole = whole and runner.run(group, lambda what: bar.update(task, advance=1, description=what))
        except KeyboardInterrupt:
            whole = False
    judge = cells.Judge(runner, asked["keep_loops"])
    document = cells.document(judge, groups, monotonic() - began)
    report.write(document, out)  # before anything else can go wrong
    room = memory * 2**30 if memory else None
    studies.add(document, judge, groups, models, referee, observe and whole, explain and whole, room)
    if not whole:
        console.print("Broken off before the end; the same command goes on from here.")
    return document


def steps(runner: Runner, group: Group) -> int:
    left = runner.missing(group)
    return sum(len(ms) for _, _, ms in left) + len({m.name for _, _, ms in left for m in ms})


def here() -> dict[str, Any]:
    """When and where."""
    import os
    import platform
    from datetime import datetime, timezone

    import torch

    from .info import versions

    gpu = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "processor": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpus": gpu,
        },
        "versions": versions(),
    }  # fmt: skip


def replayed(
    file: Path, tokenizer: str | None, specs: list[str], budgets: list[str], cost: str, limit: int | None
) -> dict[str, Any]:
    """Recorded answers, replayed for drafters that need no model."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from ..bench import recording, replay
    from ..bench.cost import parse
    from ..bench.types import VERSION
    from ..targets.load import load_tokenizer

    price, words = parse(cost), load_tokenizer(tokenizer)
    records = recording.read(file, words)[:limit]
    documents = []
    with Progress(console=Console(stderr=True)) as bar:
        for budget in budgets:
            task = bar.add_task(f"replay, {budget}", total=len(records))

            def progress(done: int, of: int, task: TaskID = task) -> None:
                bar.update(task, completed=done, total=of)

            documents.append(replay.document(replay.replay(records, specs, budget, words, progress=progress), price))
    run = {"target": str(file), "arguments": {"replay": str(file), "cost": cost, "budget": budgets}, **here()}
    return {
        "format": VERSION, "run": {**run, "seconds": 0.0}, "tasks": documents[0]["tasks"],
        "cells": [cell for d in documents for cell in d["cells"]], "macro": [], "explain": [],
    }  # fmt: skip
