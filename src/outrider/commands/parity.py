"""`outrider parity`: compares a drafter here with the same drafter in vLLM, greedily."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as opt

if TYPE_CHECKING:
    from ..proofs.parity import Certificate, Say


def parity(
    drafter: Annotated[
        list[str],
        opt.drafting(
            "--drafter",
            metavar="SPEC",
            help="Folder or SPEC; 'SPEC + SPEC' is a mix. EAGLE, EAGLE-3, Medusa and block drafters are exported; "
            "untrained ones run inside vLLM. Repeatable.",
        ),
    ],
    python: Annotated[
        str,
        opt.machine("--python", help="Python of an environment with vLLM; `make parity` creates one."),
    ],
    model: opt.Model = None,
    prompts_file: opt.Prompts = None,
    limit: opt.Limit = 40,
    tokens: Annotated[int, opt.drafting("--tokens", help="Length of the drafted chain.")] = 4,
    max_new_tokens: opt.MaxNewTokens = 64,
    to: Annotated[str, opt.drafting("--to", help="Format of the export: vllm or speculators.")] = "vllm",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
) -> None:
    """Compare a drafter with the same drafter in vLLM.

    Exports the drafter for vLLM's own code, or runs it inside vLLM, on the same prompts, greedily and in float32.
    Compares the texts, also with vLLM's without a drafter, and the acceptance per position: for exported drafters the
    counts must be equal where the texts are, for others the 95% intervals must overlap. Exits 1 without parity.
    """
    from ..params import InputError
    from ..prompts import read
    from .loading import check_drafter, located

    if to not in ("vllm", "speculators"):
        raise InputError(f"vLLM reads the formats vllm and speculators, not {to!r}")
    if min(1 if limit is None else limit, tokens, max_new_tokens) < 1:
        raise InputError("--limit, --tokens and --max-new-tokens must be at least 1")
    for spec in drafter:
        check_drafter(spec)
    place, given = located(model), read(prompts_file, limit) if prompts_file else held_out(limit)
    from ..proofs import vllm

    vllm.check(python)
    from ..backends.torch.gguf import as_folder
    from ..llm import load
    from ..proofs import parity as run

    def loaded(name: Any) -> Any:
        return load(where, name, dtype="float32", trust_remote_code=trust_remote_code)

    stack = ExitStack()
    where = stack.enter_context(as_folder(place))
    ids = loaded("none").prompts(list(given))
    certificates = []
    try:
        with progress(as_json, len(ids) * (1 + 2 * len(drafter))) as (say, above):
            for certificate in run.certify(
                loaded, drafter, where, ids, vllm.runner(python), tokens, max_new_tokens, to, say
            ):
                certificates.append(certificate)
                if not as_json:
                    with above():
                        show(certificate)
    finally:  # print finished certificates even if a later drafter fails
        stack.close()
        if as_json and certificates:
            import json

            typer.echo(json.dumps([document(c) for c in certificates]))
    if not all(c.passed for c in certificates):
        raise typer.Exit(1)


@contextmanager
def progress(quiet: bool, texts: int) -> Iterator[tuple[Say, Callable[[], AbstractContextManager[None]]]]:
    """Progress on stderr: a bar, or a line per step where stderr is not a terminal. Yields the function that advances
    it, and a context for printing above the bar."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console, last = Console(stderr=True), ""
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=texts)
    shown = console.is_terminal and not quiet

    def say(step: str, written: int) -> None:
        nonlocal last
        bar.update(task, description=escape(step), advance=written)
        if not (quiet or shown or step == last):
            typer.echo(f"outrider: {step}", err=True)
        last = step

    @contextmanager
    def above() -> Iterator[None]:
        bar.stop()
        yield
        bar.start()

    with bar if shown else nullcontext():
        yield say, above if shown else nullcontext


def held_out(count: int | None) -> list[Any]:
    """Held-out prompts of the demo, interleaved by domain."""
    import itertools
    import json
    from importlib.resources import files

    by: dict[str, list[Any]] = {}
    for line in (files("outrider") / "demo" / "heldout.jsonl").read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        by.setdefault(item["domain"], []).append(item.get("messages") or item["text"])
    turns = itertools.zip_longest(*by.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:count]


def document(c: Certificate) -> dict[str, Any]:
    """A certificate as JSON."""
    from dataclasses import asdict

    from .info import versions

    rates = [
        {
            side: {"hits": r.hits, "trials": r.trials, "rate": r.value, "interval": list(r.interval)}
            for side, r in (("outrider", place.ours), ("vllm", place.theirs))
        }
        | {"agrees": place.agrees}
        for place in c.places
    ]
    about = {k: v for k, v in asdict(c).items() if k != "places"}
    for name, splits in (("splits", c.splits), ("plain", c.plain)):
        about[name] = [{**asdict(s), "rounding": s.rounding} for s in splits]
    verdict = {"same_text": c.same_text, "same_acceptance": c.same_acceptance, "passed": c.passed}
    return {**about, "acceptance": rates, **verdict, "sentence": c.sentence, "versions": {**versions(), **c.versions}}


def show(c: Certificate) -> None:
    """The certificate."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{c.method} of {c.drafter}, chains of {c.tokens}", title_justify="left", title_style="bold")
    for i, name in enumerate(("position", "Outrider", "95 %", c.engine, "95 %", "")):
        table.add_column(name, justify="left" if i == 0 else "right")
    for d, place in enumerate(c.places, 1):
        row = [str(d)]
        for rate in (place.ours, place.theirs):
            low, high = rate.interval
            row += [f"{rate.hits}/{rate.trials} = {rate.value:.3f}", f"{low:.3f} to {high:.3f}"]
        table.add_row(*row, "" if place.agrees else "DIFFERS")
    console = Console()
    console.print(table)
    for where, splits in (("in Outrider and vLLM", c.splits), ("in vLLM with and without drafts", c.plain)):
        for s in splits:
            why = "rounding decides" if s.rounding else "NOT rounding"
            at = f"prompt {s.prompt + 1} differs from token {s.position + 1}"
            console.print(f"{at} {where}, margin {s.margin:.1e}: {why}")
    if c.uneven:
        console.print(f"different counts with the same text: prompts {', '.join(str(i + 1) for i in c.uneven)}")
    console.print(
        f"{c.prompts} prompts, {c.written} tokens each; tau {c.tau_ours:.3f} in Outrider, {c.tau_theirs:.3f} in vLLM"
    )
    console.print(c.sentence, style="bold green" if c.passed else "bold red", highlight=False, markup=False)
