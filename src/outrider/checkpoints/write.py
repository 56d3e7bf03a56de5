"""`write`: exports a drafter to a folder, atomically."""

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
from .parts import Checkpoint
from .target import Facts

FORMATS_OF = {
    "block": ("vllm", "sglang"),
    "eagle": ("safeailab", "vllm", "sglang"),
    "eagle3": ("safeailab", "speculators", "vllm", "sglang"),
    "medusa": ("medusa", "vllm"),
}
Made = tuple[dict[str, Any], dict[str, Tensor], str]


def trimmed(checkpoint: Checkpoint) -> bool:
    """Whether its draft vocabulary selects rows of the target's head. Engines do not support that and use all rows."""
    shares = checkpoint.method == "eagle" or (checkpoint.method == "medusa" and checkpoint.config["share_head"])
    return shares and bool(checkpoint.config.get("draft_vocab"))


def write(
    checkpoint: Checkpoint, to: str, facts: Facts, out: str | Path, after: Callable[[Path], None] | None = None
) -> None:
    """Export to a new folder. `after` sees it before it gets its name, and may still refuse it."""
    config, tensors, file = made(checkpoint, to, facts)
    with files.folder(out) as folder:
        put(folder, config, tensors, file)
        if after is not None:
            after(folder)


def keep(checkpoint: Checkpoint, out: str | Path, in_int8: bool = False) -> None:
    """Write the native layout to a new folder. in_int8: quantise matrices to int8."""
    native.check(checkpoint, out)
    with files.folder(out) as folder:
        native.write(checkpoint, folder, in_int8)


def made(checkpoint: Checkpoint, to: str, facts: Facts) -> Made:
    """config.json, tensors and the name of their file."""
    check_format(to)
    native.check(checkpoint, "this drafter")
    method = checkpoint.method
    complete = native.network(method).read(checkpoint.config, "this drafter")  # fills in fields newer than the folder
    checkpoint = replace(checkpoint, config=(config := to_dict(complete)))
    if to not in FORMATS_OF.get(method, ()):
        others = " or ".join(FORMATS_OF.get(method, ()))
        say = f"export it to {others}" if others else "no engine has one, so use it in Outrider"
        raise InputError(f"{to} has no format for {method}; {say}")
    if trimmed(checkpoint):
        tensors = {name: t for name, t in checkpoint.tensors.items() if name != "d2t"}
        checkpoint = replace(checkpoint, config=(config := {**config, "draft_vocab": 0}), tensors=tensors)
    if method not in ("eagle3", "block") and config.get("draft_vocab"):
        raise InputError(f"{to} has no draft vocabulary for {method}; train it without, or use it in Outrider")
    width = config["hidden"] if "hidden" in config else config["target_hidden"]
    safeailab.fits("this drafter", facts, config["vocab"], width)
    if (method, to) == ("medusa", "medusa"):
        return medusa.folder(checkpoint, facts)
    if method == "medusa":
        return *medusa.vllm_folder(checkpoint, facts), WEIGHTS[0]
    if method == "block":
        return *dflash.folder(checkpoint, facts), WEIGHTS[0]
    if to == "speculators":
        return *speculators.folder(checkpoint, facts), WEIGHTS[0]
    folder = safeailab.eagle_folder if method == "eagle" else safeailab.eagle3_folder
    return *folder(checkpoint, to, facts), WEIGHTS[0]
