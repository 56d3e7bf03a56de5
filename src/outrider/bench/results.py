"""results.json: a run's document as JSON, written atomically and read strictly."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .. import files
from ..params import InputError
from .document import Document, Estimate
from .types import VERSION

D = TypeVar("D", bound=Document)


def to_json(value: Any) -> Any:
    """A dataclass as JSON; NaN and infinities as None."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def from_json(kind: Any, value: Any) -> Any:
    """JSON as what its type says: dataclasses, estimates, and lists, dicts and options of them.

    Raises TypeError or KeyError where a field is unknown or missing.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else from_json(next(t for t in inner if t is not type(None)), value)
    if kind is Estimate:
        figure, *ends = (None if x is None else float(x) for x in value)
        return None if figure is None else Estimate(figure, *ends)
    if kind is float:
        return None if value is None else float(value)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        return kind(**{k: from_json(hints[k], v) for k, v in value.items()})
    if origin in (list, Sequence):
        return [from_json(inner[0], v) for v in value]
    if origin is dict and inner[1] is not Any:
        return {k: from_json(inner[1], v) for k, v in value.items()}
    return value


def write(document: Document, path: Path) -> None:
    """Write results.json; it appears complete or not at all."""
    files.write(path, json.dumps(to_json(document), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read(path: str | Path, kind: type[D] = Document) -> D:  # type: ignore[assignment]
    """The results.json of a run, given by its own path or its folder's, as a document of this kind.

    Raises InputError, in one sentence, if there is none of this format.
    """
    file = Path(path) / "results.json" if Path(path).is_dir() else Path(path)
    again = "measure it again with `outrider bench --out DIR`"
    foreign = f"{file} does not hold the results of a benchmark: name what `outrider bench --out DIR` wrote"
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file} does not exist: name a folder that `outrider bench --out DIR` has finished") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise InputError(f"{file} is not complete JSON: run `outrider bench` with the same --out to write it") from None
    if not isinstance(loaded, dict) or not {"format", "run", "cells", "macro"} <= set(loaded):
        raise InputError(foreign)
    version = loaded["format"]
    if version != VERSION:
        writer = loaded["run"].get("versions", {}).get("outrider", "another version")
        newer = isinstance(version, int) and version > VERSION
        todo = f"update outrider, or {again}" if newer else f"{again} into another folder"
        raise InputError(f"{file} has format {version}, by outrider {writer}, and this one reads {VERSION}: {todo}")
    try:
        document: D = from_json(kind, loaded)
    except (TypeError, KeyError, AttributeError, IndexError):
        raise InputError(foreign) from None
    return document
