"""Kept between runs: a folder in the user's cache directory, and small files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any


def folder(name: str) -> Path:
    """`$OUTRIDER_CACHE/NAME`, else `$XDG_CACHE_HOME/outrider/NAME`, else `~/.cache/outrider/NAME`."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own) / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / name


def write(file: Path, value: Any) -> None:
    """A value as JSON. OSError where the folder cannot be written."""
    replace(file, lambda place: place.write_text(json.dumps(value), encoding="utf-8"))


def replace(file: Path, content: Callable[[Path], object]) -> None:
    """What a function writes to the file that it is given. OSError as above."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        content(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def device(of: Any) -> str:
    """A torch device, with the name of its GPU."""
    import torch

    return f"{of} {torch.cuda.get_device_name(of)}" if of.type == "cuda" else str(of)


def processor() -> str:
    """The processor's name and abilities, which tell apart what was measured or proved on it."""
    import torch

    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.is_file() else []
    facts = {
        line.split(":")[0].strip(): line
        for line in lines
        if line.startswith(("model", "flags", "Features", "CPU part", "cpu family"))
    }
    return "\n".join(
        [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability(), *facts.values()]
    )
