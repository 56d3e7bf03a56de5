"""Kept between runs: a folder in the user's cache directory, and small files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def folder(name: str) -> Path:
    """`$OUTRIDER_CACHE/NAME`, else `$XDG_CACHE_HOME/outrider/NAME`, else `~/.cache/outrider/NAME`."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own) / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / name


def write(file: Path, value: Any) -> None:
    """A value as JSON. OSError where the folder cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.replace(file)
