"""`write`: a drafter as a folder that others load, complete or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import files
from ..params import InputError, check_format
from ..schema import to_dict
from . import dflash, medusa, native, safeailab, speculators
from .files import WEIGHTS, put
from .parts import Found
from .target import Facts

FORMATS_OF = {
    "block": ("vllm", "sglang"),
    "eagle": ("safeailab", "vllm", "sglang"),
    "eagle3": ("safeailab", "speculators", "vllm", "sglang"),
    "medusa": ("medusa", "vllm"),
}
Made = tuple[dict[str, Any], dict[str, Tensor], str]


def trimmed(found: Found) -> bool:
    """Has it a draft vocabulary that names rows of the target's own head? Engines have no list of them, and draft with
    all rows."""
    shares = found.method == "eagle" or (found.method == "medusa" and found.config["share_head"])
    return shares and bool(found.config.get("draft_vocab"))


def write(found: Found, to: str, facts: Facts, out: str | Path, after: Callable[[Path], None] | None = None) -> None:
    """Export to a new folder. `after` sees it before it gets its name, and may still refuse it."""
    config, tensors, file = made(found, to, facts)
    with files.folder(out) as folder:
        put(folder, config, tensors, file)
        if after is not None:
            after(folder)


def keep(found: Found, out: str | Path, in_int8: bool = False) -> None:
    """Write the native layout to a new folder, its matrices in eight bits if asked."""
    native.check(found, out)
    with files.folder(out) as folder:
        native.write(found, folder, in_int8)


def made(found: Found, to: str, facts: Facts) -> Made:
    """config.json, tensors and the name of their file."""
    check_format(to)
    native.check(found, "this drafter")
    method = found.method
    whole = native.network(method).read(found.config, "this drafter")  # a folder may be older than some of its fields
    found = replace(found, config=(config := to_dict(whole)))
    if to not in FORMATS_OF.get(method, ()):
        others = " or ".join(FORMATS_OF.get(method, ()))
        say = f"export it to {others}" if others else "no engine has one, so use it in Outrider"
        raise InputError(f"{to} has no format for {method}; {say}")
    if trimmed(found):
        tensors = {name: t for name, t in found.tensors.items() if name != "d2t"}
        found = replace(found, config=(config := {**config, "draft_vocab": 0}), tensors=tensors)
    if method not in ("eagle3", "block") and config.get("draft_vocab"):
        raise InputError(f"{to} has no draft vocabulary for {method}; train it without, or use it in Outrider")
    width = config["hidden"] if "hidden" in config else config["target_hidden"]
    safeailab.fits("this drafter", facts, config["vocab"], width)
    if (method, to) == ("medusa", "medusa"):
        return medusa.folder(found, facts)
    if method == "medusa":
        return *medusa.vllm_folder(found, facts), WEIGHTS[0]
    if method == "block":
        return *dflash.folder(found, facts), WEIGHTS[0]
    if to == "speculators":
        return *speculators.folder(found, facts), WEIGHTS[0]
    folder = safeailab.eagle_folder if method == "eagle" else safeailab.eagle3_folder
    return *folder(found, to, facts), WEIGHTS[0]
