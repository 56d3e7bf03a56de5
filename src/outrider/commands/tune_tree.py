"""`outrider tune-tree`: the best static draft tree by a drafter's measured accuracies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from .. import files
from . import check_names
from . import options as opt

if TYPE_CHECKING:
    from ..training.tree_tuning import Measured, Tuned


def tune_tree(
    model: opt.Model = None,
    drafter: Annotated[
        str,
        opt.drafting("--drafter", metavar="SPEC", help="The drafter to tune, such as medusa:DIR."),
    ] = "",
    prompts_file: opt.Prompts = None,
    limit: opt.Limit = None,
    budget: Annotated[
        str,
        opt.drafting("--budget", metavar="NODESxDEPTH", help="Size of the tree (root included) and its depth."),
    ] = "64x8",
    out: Annotated[
        str | None, opt.output("--out", metavar="FILE", help="Write the tree here, for --drafter 'SPEC?tree=FILE'.")
    ] = None,
    store: Annotated[bool, opt.output("--store", help="Make it the default tree, in the drafter's folder.")] = False,
    temperature: opt.Temperature = 0.0,
    max_new_tokens: opt.MaxNewTokens = 64,
    ranks: Annotated[int, opt.drafting("--ranks", help="Candidates per position.")] = 10,
    batch_size: opt.BatchSize = 8,
    seed: Annotated[int, opt.sampling("--seed", help="Of the generated texts.")] = 0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    no_compile: opt.NoCompile = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
) -> None:
    """Grow the best static draft tree of a trained DRAFTER from the accuracies of its candidates.

    MODEL answers the prompts, and the drafter's candidates are compared with its tokens. Then nodes are added one by
    one, the most valuable first. A smaller budget uses the most valuable part of the tree.
    """
    from ..budgets import parse
    from ..budgets.budgeter import FixedBudget
    from ..params import InputError, Sampling
    from ..prompts import read
    from ..training import tree_tuning as tuning
    from .audit import bars
    from .loading import load

    if out is None and not store:
        raise InputError("give --out FILE for the tree, or --store for the drafter's own folder")
    if not drafter or prompts_file is None:
        raise InputError("give the drafter to tune and prompts to measure it on: --drafter SPEC --prompts FILE")
    size = parse(budget)
    if not isinstance(size, FixedBudget) or size.shape or size.nodes < 2:
        raise InputError(f"--budget must be NODESxDEPTH, as in 64x8, not {budget!r}")
    for name, value in (("--max-new-tokens", max_new_tokens), ("--ranks", ranks), ("--batch-size", batch_size)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, not {value}")
    if out is not None:
        files.regular(out)
    check_names(dtype, device)
    folder = folder_of(drafter)
    if store:
        tuning.storing(folder)
    prompts = read(prompts_file, limit)
    llm = load(model, [drafter], dtype=dtype, device=device, no_compile=no_compile, trust_remote_code=trust_remote_code)
    requests, _ = llm.requests(prompts, max_new_tokens=max_new_tokens, seed=seed, sampling=Sampling(temperature))
    with bars() as progress:
        measured = tuning.measure(llm.engine(), requests, ranks, size.depth, batch_size, progress)
    tuned = tuning.grow(measured, size.nodes)
    about = {"target": llm.name, "drafter": drafter, "temperature": temperature, "prompts": len(prompts), "seed": seed}
    document = tuning.document(tuned, measured, about)
    if out is not None:
        files.write(out, json.dumps(document, indent=1) + "\n")
    if store:
        tuning.store(folder, tuned)
    if as_json:
        typer.echo(json.dumps(document))
    else:
        show(tuned, measured, out, store)


def folder_of(spec: str) -> str:
    """The folder in a SPEC; what ships keeps its tree."""
    from .. import drafters

    body = spec.partition("?")[0]
    name, _, path = body.partition(":")
    return path if name in drafters.names() else body


def show(tuned: Tuned, measured: Measured, out: str | None, store: bool) -> None:
    """Print accuracies by depth and rank, and the tree."""
    from rich.console import Console
    from rich.table import Table

    shown = min(6, len(measured.accuracies[0]))
    table = Table(title="accuracy of candidates", title_justify="left", title_style="bold")
    for i, name in enumerate(["depth", "tested", *(f"rank {r + 1}" for r in range(shown)), "nodes"]):
        table.add_column(name, justify="left" if i == 0 else "right")
    for d, accuracies in enumerate(measured.accuracies, 1):
        wide = sum(len(p) == d for p in tuned.paths)
        table.add_row(str(d), str(measured.tested[d - 1]), *(f"{a:.3f}" for a in accuracies[:shown]), str(wide))
    console = Console()
    console.print(table)
    kept = [f"written to {out}: use it as --drafter 'SPEC?tree={out}'"] if out is not None else []
    kept += ["stored as the drafter's default"] if store else []
    console.print(
        f"{len(tuned.paths) + 1} nodes with the root, {tuned.tau:.2f} tokens per round expected if depths are "
        f"independent; {' and '.join(kept)}.",
        style="bold", highlight=False, markup=False,
    )  # fmt: skip
