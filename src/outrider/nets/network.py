"""A trained drafter's network as its folder describes it: a module that is built from a dataclass of sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..params import InputError
from ..schema import from_dict


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
