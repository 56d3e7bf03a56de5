"""`write`: a drafter as a folder that others load, complete or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ..types import InputError
from . import medusa, native, safeailab, speculators
from .files import WEIGHTS, put, whole
from .parts import Found
from .target import Facts

FORMATS = ("safeailab", "medusa", "speculators", "vllm", "sglang")
Made = tuple[dict[str, Any], dict[str, Tensor], str]


def write(found: Found, to: str, facts: Facts, out: str | Path, after: Callable[[Path], None] | None = None) -> None:
    """Export to a new folder. `after` sees it before it gets its name, and may still refuse it."""
    config, tensors, file = made(found, to, facts)
    with whole(out) as folder:
        put(folder, config, tensors, file)
        if after is not None:
            after(folder)


def keep(found: Found, out: str | Path) -> None:
    """Write the native layout to a new folder."""
    native.check(found, out)
    with whole(out) as folder:
        native.write(found, folder)


def made(found: Found, to: str, facts: Facts) -> Made:
    """config.json, tensors and the name of their file."""
    if to not in FORMATS:
        raise InputError(f"there is no format {to!r}; choose one of {', '.join(FORMATS)}")
    native.check(found, "this drafter")
    method, config = found.method, found.config
    width = config["hidden"] if "hidden" in config else config["target_hidden"]
    safeailab.fits("this drafter", facts, config["vocab"], width)
    if (method, to) in (("eagle", "safeailab"), ("eagle", "vllm"), ("eagle", "sglang")):
        return *safeailab.eagle_folder(found, to, facts), WEIGHTS[0]
    if (method, to) in (("eagle3", "safeailab"), ("eagle3", "vllm"), ("eagle3", "sglang")):
        return *safeailab.eagle3_folder(found, to, facts), WEIGHTS[0]
    if (method, to) == ("eagle3", "speculators"):
        return *speculators.folder(found, facts), WEIGHTS[0]
    if (method, to) == ("medusa", "medusa"):
        return medusa.folder(found, facts)
    if (method, to) == ("medusa", "vllm"):
        return *medusa.vllm_folder(found, facts), WEIGHTS[0]
    raise InputError(_refusal(method, to))


def _refusal(method: str, to: str) -> str:
    if method == "hydra":
        return f"{to} has no format for Hydra, and no engine has; use it in Outrider"
    known = {"eagle": "safeailab, vllm or sglang", "eagle3": "safeailab, speculators, vllm or sglang"}
    return f"{to} has no format for {method}; export it to {known.get(method, 'medusa or vllm')}"
