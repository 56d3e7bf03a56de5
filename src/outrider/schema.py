"""Dataclasses from JSON and to it: every value of its field's type, every number finite and within a sane range."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .params import InputError, shown

Config = TypeVar("Config")
ANY = (-(2**63), 2**63)  # what a number may be that has no range of its own; NaN and infinities never are
LARGEST = 2**24  # tokens, widths
RANGES = {  # of those that mean the same in every config: modules are built by the first two
    "layers": (1, 256),
    "heads": (1, 1024),
    "rope_theta": (1, 1e12),
    "eps": (0, 1),
    "scale": (1e-3, 1e3),
    "block": (1, 4096),
    "mask_token": (-1, LARGEST),
    **dict.fromkeys(
        ("vocab", "hidden", "target_hidden", "kv_heads", "head_dim", "intermediate", "inputs"), (1, LARGEST)
    ),
    **dict.fromkeys(("draft_vocab", "pair_rank", "pair_top", "conv", "conv_group", "parallel", "factor"), (0, LARGEST)),
}


def to_dict(config: Any) -> dict[str, Any]:
    """A config as JSON has it: dataclasses as objects, tuples as lists."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return plain


def from_dict(kind: type[Config], given: Mapping[str, Any]) -> Config:
    """The config that `to_dict` wrote, every value of its field's type and every number within `RANGES`.

    Raises:
        TypeError: a field is missing or unknown.
        InputError: a value is of another type or out of its range.
    """
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{name: typed(name, hints.get(name, Any), value) for name, value in given.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def typed(name: str, hint: Any, value: Any) -> Any:
    """A value from JSON in its field's type. Where that is open, lists become tuples and numbers are only bounded."""
    if get_origin(hint) in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not NoneType]
        if value is None and len(options) < len(get_args(hint)):
            return None
        hint = options[0] if len(options) == 1 else Any
    if isinstance(hint, type) and is_dataclass(hint):
        return from_dict(hint, _is(name, value, Mapping, "an object"))
    if isinstance(hint, type) and hasattr(hint, "_fields"):  # a NamedTuple
        values = _is(name, value, list | tuple, "a list")
        return hint(*(typed(name, of, x) for of, x in zip(_hints(hint).values(), values, strict=False)))
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (list, Sequence) or (origin is tuple and inner[1:] == (Ellipsis,)):
        items = (typed(name, inner[0] if inner else Any, x) for x in _is(name, value, list | tuple, "a list"))
        return tuple(items) if origin is tuple else list(items)
    if origin in (dict, Mapping):
        key, of = inner or (str, Any)
        pairs = _is(name, value, Mapping, "an object").items()
        return {(int(x) if key is int else str(x)): typed(str(x), of, y) for x, y in pairs}
    if hint in (bool, str):
        return _is(name, value, hint, "true or false" if hint is bool else "a string")
    if hint in (int, float):
        return bounded(name, value, hint)
    return _bounded_all(name, value)


def bounded(name: str, value: Any, kind: type = float) -> Any:
    """A number of a config, if it is of this type, finite and within its range.

    Raises:
        InputError: it is not.
    """
    what = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise InputError(f"{name} in the config must be {what}, not {shown(value)}; correct it")
    least, most = RANGES.get(name, ANY)
    if not least <= value <= most:  # false for NaN
        raise InputError(
            f"{name} in the config must be {what} from {least:g} to {most:g}, not {shown(value)}; correct it"
        )
    return value


def _bounded_all(name: str, value: Any) -> Any:
    """A value of no known type, its lists as tuples."""
    if isinstance(value, Mapping):
        return {key: _bounded_all(str(key), x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_bounded_all(name, x) for x in value)
    return bounded(name, value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _is(name: str, value: Any, kind: Any, what: str) -> Any:
    if not isinstance(value, kind):
        raise InputError(f"{name} in the config must be {what}, not {shown(value)}; correct it")
    return value
