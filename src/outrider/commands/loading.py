"""Loading a model for a command: checks that need no torch first, then a spinner."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from .. import hub, machine, plugins, shipped
from ..backends.native.files import open_gguf
from ..names import DEMO, GGUF, SMOLLM2, Place, check_folder, check_native, find
from ..params import InputError, check_exact, check_weights
from . import check_place

if TYPE_CHECKING:
    from ..llm import LLM

# What our drafters load from the part of a SPEC after the colon.
CORPUS, MODELS, NETWORKS = ("ngram", "suffix"), ("mamba", "model"), ("block", "eagle", "eagle3", "hydra", "medusa")


def load(
    model: str | Place | None,
    drafter: Sequence[str] | None = None,
    *,
    budget: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    exact: str = "auto",
    weights: str = "auto",
    threads: int | None = None,
    no_compile: bool = False,
    trust_remote_code: bool = False,
) -> LLM:
    """The model of a command line with its drafters and its budget."""
    check_budget(budget, sum(len(plugins.parts(spec)) for spec in drafter or ["none"]))
    check_exact(exact)
    check_threads(threads)
    for spec in drafter or ():
        check_drafter(spec)
    place = located(model, weights)
    here = Path(place.where).exists()
    if here:  # a download shows its own progress
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with spinner(f"loading {place}") if here else nullcontext():
        check_place(dtype, device)
        from .. import llm

        if threads is not None:
            machine.use_threads(threads)
        stock: dict[str, Any] = {"compile": False} if no_compile else {}
        return llm.load(
            place, list(drafter) if drafter else None, dtype=dtype, device=device, budget=budget,
            exact=exact, weights=weights, trust_remote_code=trust_remote_code, **stock,
        )  # fmt: skip


def check_threads(threads: int | None) -> None:
    """Raise InputError for a number of threads that this machine does not have."""
    if threads is not None and threads < 1:
        raise InputError(f"--threads must be at least 1, not {threads}")
    if threads is not None and threads > (cores := os.cpu_count() or threads):
        raise InputError(f"--threads must be at most {cores}, the number of processors of this machine, not {threads}")


def one_model(argument: str | None, option: str | None) -> str | None:
    """The model, given as an argument or by --model."""
    if argument is not None and option is not None:
        raise InputError(f"give one model: {argument}, or --model {option}")
    return argument if option is None else option


def located(model: str | Place | None, weights: str = "auto") -> Place:
    """Find a model by name. Raises InputError if there is no such folder, nor such an id on the hub or in its cache."""
    check_weights(weights)
    place = reached(find(model))
    if not place.gguf:
        check_folder(Path(place.where))
    if weights == "native":
        check_native(place)
    return place


def reached(place: Place) -> Place:
    """The same model, after a quick check whether the hub is reachable; if not, its cache is used."""
    if not hub.ensure(place.where, place.hint):
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    return place


def check_drafter(spec: str) -> None:
    """Raise InputError for a SPEC, or a mix, of an unknown drafter, or of a missing folder, file or hub id."""
    for one in (parts := plugins.parts(spec)):
        if one == "none" and len(parts) > 1:
            raise InputError("none cannot be mixed with another drafter; leave it out")
        body, _, query = one.partition("?")
        name, _, where = body.partition(":")
        if name in plugins.names("drafters"):
            plugins.check_options("drafters", name, (option for option, _ in parse_qsl(query, keep_blank_values=True)))
            if name in plugins.ours("drafters"):
                check_weights_of(name, where)
        elif not (shipped.folder_of(body) / "config.json").is_file():
            raise InputError(plugins.lacking(body))


def check_weights_of(drafter: str, where: str) -> None:
    """Raise InputError if a drafter's weights (a folder or hub id) or corpus (a file) do not exist."""
    if drafter in CORPUS:
        if where and not Path(where).is_file():
            raise InputError(f"there is no file {where}; give {drafter} a text file, or leave it out")
    elif drafter in NETWORKS and not where:
        raise InputError(plugins.unnamed(drafter))
    elif drafter in MODELS and where.lower().endswith(GGUF):
        open_gguf(Path(where).expanduser())
    elif where and not (drafter in MODELS and where in (DEMO, SMOLLM2)):
        reached(Place(where, shipped.place_of(shipped.placed(where, drafter))))


def check_budget(budget: str, drafters: int) -> None:
    """Raise InputError for a malformed budget, or one over other drafters than are given (`1:3,2,1 2:1,1`)."""
    from ..budgets import BanditBudget, parse

    parsed = parse(budget)
    arms = parsed.arms if isinstance(parsed, BanditBudget) else ()
    named = {part + 1 for part, shape in arms if shape}
    if ":" in budget and named != set(range(1, drafters + 1)):
        given = ", ".join(map(str, sorted(named)))
        raise InputError(f"--budget names the drafters {given}, and --drafter gives {drafters}; name each of them")


@contextmanager
def spinner(message: str) -> Iterator[None]:
    """Show a spinner with a message on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(message), spinner="dots"):
        yield
