"""Drafters: one file is one method, named as its file.

A SPEC is `name`, `name:path-or-hub-id`, or either with options: `lookup?ngram=3&tokens=10`,
`model:DIR?depth=6&width=4`. Several with ` + ` between them are a mix.

Each file has `load(target, tokenizer, path, **options) -> Drafter`, and `NETWORK` if what it loads was trained here.
Where `load` has a `scale`, it is fitted while the drafter is used (`_calibrated.py`), unless the SPEC gives a number.
Another package adds a drafter by an entry point of the group `outrider.drafters` that names such a module.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import plugins, shipped
from ..core.protocols import Drafter, Target
from ..params import InputError, missing
from ..plugins import MIX as MIX  # for those who may not import `plugins`
from ..plugins import parts as parts
from ._calibrated import calibrated


def names() -> list[str]:
    """The drafters of this package and of other packages (`plugins.py`)."""
    return plugins.names("drafters")


def load(
    specs: str | Sequence[str], target: Target | None = None, tokenizer: Any = None, choose: bool = False
) -> Drafter:
    """The drafter that a SPEC describes; several SPECs make a mix.

    Args:
        specs: one SPEC (`docs/formats.md` has the grammar), or several in order of trust, also as `SPEC + SPEC`.
        target: what it drafts for; drafters with weights must fit it.
        tokenizer: the target's, for drafters that read text.
        choose: no mix: the budget names one of several drafters each round.

    Raises:
        InputError: there is no such drafter or option, its files are missing, or it does not fit the target.
    """
    specs = [part for spec in ([specs] if isinstance(specs, str) else specs) for part in parts(spec)]
    from ._choice import ChoiceDrafter
    from ._mix import of

    if len(specs) > 1 and not choose:
        methods = [_named(spec)[0] for spec in specs]
        if "none" in methods:
            raise InputError("none cannot be mixed with another drafter; leave it out")
        if len(set(methods)) < len(methods):
            raise InputError("two drafters of the same method cannot be mixed; choose one")
    loaded = [load_one(spec, target, tokenizer) for spec in specs]
    if len(specs) == 1:
        return alone(loaded[0])
    return ChoiceDrafter(tuple(map(alone, loaded))) if choose else of(loaded)


def alone(drafter: Drafter) -> Drafter:
    """The drafter, or a mix of this one if its confidences are counts, so that their acceptance rates are learned."""
    from ._mix import of

    return of([drafter]) if drafter.counts else drafter


def load_one(spec: str, target: Target | None = None, tokenizer: Any = None) -> Drafter:
    """The drafter of a single SPEC; see `load`."""
    name, path, query = _named(spec)
    try:
        return _loaded(spec, name, path, query, target, tokenizer)
    except ImportError as error:
        raise (InputError(sentence) if (sentence := missing(error, f"the drafter {name} here")) else error) from None


def _named(spec: str) -> tuple[str, str, str]:
    """The method, path and options of a SPEC. Raises InputError where a folder does not say its method."""
    body, _, query = spec.partition("?")
    name, _, path = body.partition(":")
    return (name, path, query) if name in names() else (_method_of(body), body, query)


def _pairs(spec: str, query: str) -> list[tuple[str, str]]:
    """The options of a SPEC as they are written. Raises InputError for one that is given twice."""
    pairs = [(name, text) for name, _, text in (part.partition("=") for part in query.split("&") if part)]
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise InputError(f"{spec!r} gives {twice[0]} twice; leave one out")
    return pairs


def _loaded(spec: str, name: str, path: str, query: str, target: Target | None, tokenizer: Any) -> Drafter:
    module = plugins.module("drafters", name)
    given, known = dict(_pairs(spec, query)), inspect.signature(module.load).parameters
    auto = given.get("scale", "auto") == "auto" and "scale" in known
    if auto:
        query = "&".join(part for part in query.split("&") if part != "scale=auto")
    if "shape" in given and "tree" in known and "tree" not in given:
        query += "&tree=static"  # of this shape
    loaded = module.load(target, tokenizer, path or None, **options_of(spec, query, module.load))
    return calibrated(loaded) if auto else loaded


def _method_of(folder: str) -> str:
    """The method of a folder, by its config or weights, or of what ships with the package (`smollm2/eagle3`). Raises
    InputError where neither says."""
    if (config := shipped.folder_of(folder) / "config.json").is_file():
        method = _own_method(config)
        if method is None:  # not the native layout
            from ..checkpoints import method_of

            method = method_of(folder)
        if method in names():
            return str(method)
        raise InputError(f"{folder} does not say which drafter it is; name the method, as in model:{folder}")
    raise InputError(plugins.lacking(folder))


def _own_method(config: Path) -> str | None:
    """What a config of the native layout names; None for any other."""
    try:
        method = json.loads(config.read_text(encoding="utf-8"))["outrider_method"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return method if isinstance(method, str) else None


def options_of(spec: str, query: str, function: Any) -> dict[str, Any]:
    """The options of a SPEC's query, each of its default's type. Raises InputError for an unknown one."""
    known = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("target", "tokenizer", "path", "models") and parameter.kind is not parameter.VAR_KEYWORD
    }
    options: dict[str, Any] = {}
    for name, text in _pairs(spec, query):
        if name not in known:
            raise InputError(f"{spec!r} has no option {name!r}; it has {', '.join(known) or 'none'}")
        options[name] = value_of(spec, name, text, known[name])
    return options


def value_of(spec: str, name: str, text: str, default: Any) -> Any:
    """An option's text as the type of its default."""
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if isinstance(default, tuple):
            return tuple(int(x) for x in text.replace("x", ",").split(","))
        return type(default)(text) if default is not None else text
    except (KeyError, ValueError):
        kinds = {bool: "true or false", tuple: "whole numbers with commas", int: "a whole number", float: "a number"}
        raise InputError(f"{spec!r}: {name} must be {kinds[type(default)]}, not {text!r}") from None
