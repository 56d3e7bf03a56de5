"""A trained drafter's network as its folder describes it: a module that is built from a dataclass of sizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import nn

from ..params import InputError

Config = TypeVar("Config")


@dataclass(frozen=True)
class Network:
    """What a drafter's file exports as `NETWORK`. Folders are read, checked and written by it.

    Args:
        module: the class of the network. It takes the config alone and keeps it as `.config`; its state dict is the
            list of tensors that a folder must hold.
        config: a frozen dataclass of whatever JSON can hold, and of dataclasses of that. It has `vocab`, and checks
            itself in `__post_init__` by raising `InputError`.
    """

    module: Callable[[Any], nn.Module]
    config: type

    def read(self, given: Mapping[str, Any], where: object) -> Any:
        """The config in a dictionary from JSON.

        Raises:
            InputError: fields are missing, unknown or wrong; the sentence names `where`.
        """
        try:
            return from_dict(self.config, given)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"the config of {where} is not this drafter's ({error}); train or import it again"
            ) from None

    def empty(self, config: Any) -> nn.Module:
        """The network of a config without numbers in it, on the device `meta`."""
        with torch.device("meta"):
            return self.module(config)


def to_dict(config: Any) -> dict[str, Any]:
    """A config as JSON has it: dataclasses as objects, tuples as lists."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return found


def from_dict(kind: type[Config], given: Mapping[str, Any]) -> Config:
    """The config that `to_dict` wrote.

    Raises:
        TypeError: a field is missing or unknown.
    """
    hints = get_type_hints(kind)
    return kind(**{name: _typed(hints.get(name), value) for name, value in given.items()})


def _typed(hint: Any, value: Any) -> Any:
    for part in (hint, *get_args(hint)):
        if isinstance(part, type) and is_dataclass(part) and isinstance(value, Mapping):
            return from_dict(part, value)
    return _tuples(value)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(x) for x in value) if isinstance(value, list) else value
