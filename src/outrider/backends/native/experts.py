"""The matrices of experts, which model files hold alone or stacked, and transformers' modules hold stacked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from .description import Description
from .files import Tensor
from .model import Parameter

MOST = 4096  # experts of a layer
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
ALONE = re.compile(r"(.*\.)block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")  # transformers 4 and the hub
ROUTER = ".block_sparse_moe.gate."
STACKED = re.compile(r"(.*\.mlp\.experts\.)(gate|up|down)_proj(\.weight)?")  # [experts, outputs, inputs]
BOTH = re.compile(r"(.*\.mlp\.experts\.)gate_up_proj")  # [experts, 2 * outputs, inputs]: gates first
FIRST = re.compile(r"(.*\.mlp\.)experts\.0\.(gate|down)_proj\.weight")


def apart(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Parameters under the names of `Description.shapes`, each expert's its own: views of what the file stacks."""
    return {one.name: one for parameter in parameters.values() for one in _apart(parameter)}


def _apart(one: Parameter) -> Iterator[Parameter]:
    name, shape = one.name, one.tensor.shape
    stacked = len(shape) == 3 and shape[0] <= MOST
    if match := ALONE.fullmatch(name):
        yield _named(one, f"{match[1]}mlp.experts.{match[2]}.{MIXTRAL[match[3]]}.weight")
    elif ROUTER in name:
        yield _named(one, name.replace(ROUTER, ".mlp.gate."))
    elif stacked and (match := STACKED.fullmatch(name)):
        yield from _sliced(one, match[1], (match[2],))
    elif stacked and shape[1] % 2 == 0 and (match := BOTH.fullmatch(name)):
        yield from _sliced(one, match[1], ("gate", "up"))
    else:
        yield one


def _named(one: Parameter, name: str) -> Parameter:
    return replace(one, name=name)


def _sliced(one: Parameter, at: str, parts: tuple[str, ...]) -> Iterator[Parameter]:
    """The matrices of a stack, in which each expert has these parts, one behind the other."""
    count, rows, width = one.tensor.shape
    each = one.tensor.data.reshape(count, len(parts), -1)
    for e in range(count):
        for i, part in enumerate(parts):
            name = f"{at}{e}.{part}_proj.weight"
            tensor = Tensor(name, one.tensor.kind, (rows // len(parts), width), each[e, i])
            yield Parameter(name, tensor)


@dataclass(frozen=True)
class Stack:
    """A parameter of transformers' modules: one of ours, or of all experts together.

    Attributes:
        name: in the modules.
        shape: [..., outputs, inputs].
        names: ours, one behind the other.
    """

    name: str
    shape: tuple[int, ...]
    names: tuple[str, ...]

    def locate(self, places: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Where numbers of the flattened parameter lie: by each of our parameters, their rows and columns."""
        width = self.shape[-1] if len(self.shape) > 1 else 1
        size = int(np.prod(self.shape)) // len(self.names)
        for i, name in enumerate(self.names):
            own = places[places // size == i] - i * size
            yield name, own // width, own % width


def stacks(made: Description) -> Iterator[Stack]:
    """All parameters, as transformers' modules have them and in their order."""
    for name, shape in made.shapes():
        if not (match := FIRST.fullmatch(name)):
            if ".experts." not in name:
                yield Stack(name, shape, (name,))
            continue
        assert (experts := made.experts) is not None
        parts = ("gate", "up") if match[2] == "gate" else ("down",)
        names = tuple(f"{match[1]}experts.{e}.{part}_proj.weight" for e in range(experts.count) for part in parts)
        stem = f"{match[1]}experts.{'gate_up' if match[2] == 'gate' else 'down'}_proj"
        yield Stack(stem, (experts.count, len(parts) * shape[0], shape[1]), names)
