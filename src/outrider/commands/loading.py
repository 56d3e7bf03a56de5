"""What every command does before and while a model is loaded: checks that need no torch, then a spinner."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import hub, plugins, shipped
from ..params import InputError, check_exact, check_weights
from ..targets.names import DEMO, SMOLLM2, Place, find
from . import check_place

if TYPE_CHECKING:
    from ..llm import LLM


def load(
    model: str | Place | None,
    drafter: Sequence[str] | None = None,
    *,
    budget: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    exact: str = "auto",
    weights: str = "full",
    no_compile: bool = False,
    trust_remote_code: bool = False,
) -> LLM:
    """The model of a command line with its drafters and its budget."""
    check_budget(budget, sum(len(plugins.parts(spec)) for spec in drafter or ["none"]))
    check_exact(exact)
    check_weights(weights)
    for spec in drafter or ():
        check_drafter(spec)
    place = located(model)
    here = Path(place.where).exists()
    if here:  # the spinner says it; a download shows its own progress
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with spinner(f"loading {place}") if here else nullcontext():
        check_place(dtype, device)
        from .. import llm

        recorded: dict[str, Any] = {"compile": False} if no_compile else {}
        return llm.load(
            place, list(drafter) if drafter else None, dtype=dtype, device=device, budget=budget,
            exact=exact, weights=weights, trust_remote_code=trust_remote_code, **recorded,
        )  # fmt: skip


def located(model: str | Place | None) -> Place:
    """The model of a name, as `find` has it; a hub that cannot be reached is found out here, in seconds.

    What is in the hub's cache is then used as it is.
    """
    place = find(model)
    if not hub.ensure(place.where, place.hint):
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    return place


def check_drafter(spec: str) -> None:
    """Refuse the SPEC of a drafter that there is not, or that is on the hub (eagle:ORG/NAME) and out of reach."""
    for one in plugins.parts(spec):
        body = one.partition("?")[0]
        name, _, where = body.partition(":")
        if name not in plugins.names("drafters") and not (shipped.folder_of(body) / "config.json").is_file():
            raise InputError(plugins.lacking(body))
        if where.count("/") == 1 and hub.is_id(where) and where.split("/")[0] not in (DEMO, SMOLLM2):
            hub.ensure(where)


def check_budget(budget: str, drafters: int) -> None:
    """Refuse a budget that is none, or that chooses among other drafters than there are (`1:3,2,1 2:1,1`)."""
    from ..budgets.shapes import part_of, read, shape_of

    arms = read(budget).arms
    named = {part_of(arm) + 1 for arm in arms if shape_of(arm)}
    if ":" in budget and named != set(range(1, drafters + 1)):
        given = ", ".join(map(str, sorted(named)))
        raise InputError(f"--budget names the drafters {given}, and --drafter gives {drafters}; name each of them")


@contextmanager
def spinner(doing: str) -> Iterator[None]:
    """Say on a terminal what is being done, for as long as it takes."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(doing), spinner="dots"):
        yield
