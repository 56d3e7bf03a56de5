"""`outrider tune-tree`: the sparse draft tree that a drafter's measured accuracies ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..tuning import Measured, Tuned


def tune_tree(
    model: Annotated[str, typer.Argument(help="A hub id or folder; demo: the model that ships with the package.")],
    drafter: Annotated[str, typer.Option(help="SPEC of the drafter to tune, such as medusa:DIR.")],
    prompts_file: Annotated[str, typer.Option("--prompts", help="JSONL of prompts to measure on.")],
    nodes: Annotated[int, typer.Option(help="Nodes of the tree, root included.")] = 64,
    out: Annotated[str | None, typer.Option(help="Write the tree here, for drafters' option tree=FILE.")] = None,
    store: Annotated[bool, typer.Option("--store", help="Make it the default tree, in the drafter's folder.")] = False,
    temperature: Annotated[float, typer.Option(help="Of the texts that are written; 0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write to each prompt.")] = 64,
    ranks: Annotated[int, typer.Option(help="Candidates to look at in each place.")] = 10,
    depth: Annotated[int, typer.Option(help="Depths to look at, as far as the drafter goes.")] = 8,
    batch_size: int = 8,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Grow the draft tree that serves a trained DRAFTER best, from how often its candidates are right.

    MODEL writes texts to the prompts; the drafter's candidates are held against them. Nodes are then added one by one,
    the most valuable first. A budget smaller than the tree takes its most valuable part.
    """
    from .. import InputError, Sampling, tuning
    from ..llm import load
    from ..prompts import read
    from . import check_place
    from .audit import bars

    if out is None and not store:
        raise InputError("say where the tree goes: --out FILE, or --store for the drafter's own folder")
    if nodes < 2:
        raise InputError(f"a tree has a root and at least one node more: --nodes must be at least 2, not {nodes}")
    law = Sampling(temperature)
    check_place(dtype, device)
    prompts = read(prompts_file)
    llm = load(None if model == "demo" else model, drafter, dtype=dtype, device=device)
    asked = [llm.request(p, max_new_tokens=max_new_tokens, seed=seed, temperature=law.temperature)[0] for p in prompts]
    with bars() as progress:
        measured = tuning.measure(llm.engine(), asked, ranks, depth, batch_size, progress)
    tuned = tuning.grow(measured, nodes)
    if store:
        tuning.store(folder_of(drafter), tuned)
    about = {"target": llm.name, "drafter": drafter, "temperature": temperature, "prompts": len(prompts), "seed": seed}
    found = tuning.document(tuned, measured, about)
    if out is not None:
        write(out, found)
    if as_json:
        import json

        typer.echo(json.dumps(found))
    else:
        show(tuned, measured, out, store)


def folder_of(spec: str) -> str:
    """The folder in a SPEC."""
    from .. import drafters

    body = spec.partition("?")[0]
    name, _, path = body.partition(":")
    return path if name in drafters.names() else body


def write(file: str, found: dict[str, Any]) -> None:
    import json
    from pathlib import Path

    from ..types import InputError

    try:
        Path(file).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"the tree cannot be written to {file}: {error.strerror or error}") from None


def show(tuned: Tuned, measured: Measured, out: str | None, store: bool) -> None:
    """Accuracies by depth and rank, and the tree they made."""
    from rich.console import Console
    from rich.table import Table

    shown = min(6, len(measured.accuracies[0]))
    table = Table(title="how often candidates are right", title_justify="left", title_style="bold")
    for i, name in enumerate(["depth", "tested", *(f"rank {r + 1}" for r in range(shown)), "nodes"]):
        table.add_column(name, justify="left" if i == 0 else "right")
    for d, accuracies in enumerate(measured.accuracies, 1):
        wide = sum(len(p) == d for p in tuned.paths)
        table.add_row(str(d), str(measured.tested[d - 1]), *(f"{a:.3f}" for a in accuracies[:shown]), str(wide))
    console = Console()
    console.print(table)
    kept = [f"written to {out}: use it as tree={out}"] if out is not None else []
    kept += ["stored as the drafter's default"] if store else []
    console.print(
        f"{len(tuned.paths) + 1} nodes with the root, {tuned.tau:.2f} tokens a round expected if depths are "
        f"independent; {' and '.join(kept)}.",
        style="bold", highlight=False, markup=False,
    )  # fmt: skip
