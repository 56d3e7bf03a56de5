"""A run's files for readers, results.json and report.html: written atomically, and the first read strictly."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from .. import files
from ..params import InputError
from ..schema import from_dict
from . import page
from .document import Document
from .types import VERSION

D = TypeVar("D", bound=Document)
logger = logging.getLogger(__name__)


def to_json(value: Any) -> Any:
    """A dataclass as JSON; NaN and infinities as None."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(document: Document, folder: str | Path) -> list[Path]:
    """Write results.json and, if matplotlib is installed, report.html, atomically, into a folder that may be new."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_json(document), indent=1, ensure_ascii=False, allow_nan=False)
    files.write(folder / "results.json", text + "\n")
    if find_spec("matplotlib") is None:
        logger.warning("no report.html: its plots need matplotlib: pip install 'outrider[bench]'")
        return [folder / "results.json"]
    return [folder / "results.json", files.write(folder / "report.html", page.page(document))]


def read(path: str | Path, kind: type[D] = Document) -> D:  # type: ignore[assignment]
    """Load a run's results.json, given its path or its folder, as a document of this kind.

    Raises InputError if it does not exist or has another format.
    """
    file = Path(path) / "results.json" if Path(path).is_dir() else Path(path)
    foreign = f"{file} does not hold the results of a benchmark: name a finished folder of `outrider bench --out DIR`"
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{foreign} ({error.strerror})") from None
    except ValueError:
        raise InputError(f"{file} is not complete JSON: run `outrider bench` with the same --out to write it") from None
    if not isinstance(loaded, dict) or not {"format", "run", "cells", "macro"} <= set(loaded):
        raise InputError(foreign)
    if loaded["format"] != VERSION:
        raise InputError(
            f"{file} has format {loaded['format']} and this version reads {VERSION}: measure again with "
            "`outrider bench --out DIR` and another DIR, or use the version that wrote it"
        )
    try:
        return from_dict(kind, loaded)
    except (TypeError, InputError):
        raise InputError(foreign) from None
