"""The matrices of experts, which model files hold alone or stacked, and transformers' modules hold stacked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from .description import Description
from .files import KINDS, Tensor
from .model import Parameter
from .pages import forget

MOST = 4096  # experts of a layer
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
ALONE = re.compile(r"(.*\.)block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")  # transformers 4 and the hub
ROUTER = ".block_sparse_moe.gate."
# `gate_proj` of all experts; `gate_up_proj`: gates and ups, one after the other, or (GPT-OSS) in turn.
STACKED = re.compile(r"(.*\.mlp\.experts\.)(gate|up|down|gate_up)_proj(?:[._](weight|bias|blocks))?")
FIRST = re.compile(r"(.*\.mlp\.)experts\.0\.(gate|down)_proj\.(weight|bias)")
IN_TURN = "gpt_oss"  # the family whose gates and ups lie in turn, and whose matrices are [experts, inputs, outputs]
(MXFP4,) = (kind for kind in KINDS.values() if kind.name == "MXFP4")


def apart(parameters: Mapping[str, Parameter], in_turn: bool = False) -> dict[str, Parameter]:
    """Parameters under the names of `Description.shapes`, each expert's its own: views of what the file stacks.

    Args:
        parameters: as they lie in the file.
        in_turn: are they laid out as GPT-OSS's of the hub?
    """
    made: dict[str, Parameter] = {}
    for one in parameters.values():
        scales = parameters.get(one.name.removesuffix("_blocks") + "_scales")
        parts = _in_turn(one, scales) if in_turn else _apart(one)
        made |= {part.name: part for part in parts}
    return made


def _apart(one: Parameter) -> Iterator[Parameter]:
    """Each expert's part, which lies in one piece."""
    name, shape = one.name, one.tensor.shape
    if match := ALONE.fullmatch(name):
        yield replace(one, name=f"{match[1]}mlp.experts.{match[2]}.{MIXTRAL[match[3]]}.weight")
    elif ROUTER in name:
        yield replace(one, name=name.replace(ROUTER, ".mlp.gate."))
    elif (match := STACKED.fullmatch(name)) and len(shape) > 1 and 0 < shape[0] <= MOST:
        parts, kind = match[2].split("_"), match[3] or "weight"
        if shape[1] % len(parts):
            return
        each = one.tensor.data.reshape(shape[0] * len(parts), -1)
        for i, data in enumerate(each):
            own = f"{match[1]}{i // len(parts)}.{parts[i % len(parts)]}_proj.{kind}"
            yield Parameter(own, replace(one.tensor, shape=(shape[1] // len(parts), *shape[2:]), data=data))
    else:
        yield one


def _in_turn(one: Parameter, scales: Parameter | None) -> Iterator[Parameter]:
    """Each expert's part: rows (columns, where it is transposed) of a matrix, or of a bias."""
    shape, match = one.tensor.shape, STACKED.fullmatch(one.name)
    if match is None:
        yield one
    elif match[3] == "blocks":
        yield from _of_blocks(one, scales, match)
    elif len(shape) > 1 and 0 < shape[0] <= MOST:
        parts, kind = match[2].split("_"), match[3] or "weight"
        for e, data in enumerate(one.tensor.data.reshape(shape[0], -1)):
            tensor = replace(one.tensor, shape=shape[1:], data=data)
            for i, part in enumerate(parts):
                order = np.arange(i, shape[-1], len(parts)) if len(parts) > 1 else None
                yield Parameter(f"{match[1]}{e}.{part}_proj.{kind}", tensor, order, len(shape) == 3)


def _of_blocks(one: Parameter, scales: Parameter | None, match: re.Match[str]) -> Iterator[Parameter]:
    """Parts in MXFP4, from blocks [experts, outputs, groups, 16] and scales [experts, outputs, groups]."""
    shape = one.tensor.shape
    fits = scales is not None and len(shape) == 4 and shape[3] == 16 and scales.tensor.shape == shape[:3]
    if scales is None or not fits or shape[0] > MOST or {one.tensor.kind.name, scales.tensor.kind.name} != {"U8"}:
        return
    parts = match[2].split("_")
    each = zip(one.tensor.data.reshape(shape), scales.tensor.data.reshape(shape[:3]), strict=True)
    for e, (quants, exponents) in enumerate(each):
        for i, part in enumerate(parts):
            name = f"{match[1]}{e}.{part}_proj.weight"
            yield Parameter(name, Blocks(name, quants, exponents, slice(i, None, len(parts))))


class Blocks(Tensor):
    """Rows of a matrix in MXFP4, whose exponents lie apart from its quants in the file. Bytes as a .gguf file has them
    are made when they are read.

    Args:
        name: of the tensor.
        quants: uint8 [rows, groups, 16]: byte i has the quants 2 i and 2 i + 1 of a group.
        exponents: uint8 [rows, groups].
        rows: which ones.
    """

    quants: np.ndarray
    exponents: np.ndarray
    own: slice

    def __init__(self, name: str, quants: np.ndarray, exponents: np.ndarray, rows: slice) -> None:
        shape = len(exponents[rows]), 32 * exponents.shape[1]
        values = {"name": name, "kind": MXFP4, "shape": shape, "mapped": True}
        for key, value in (values | {"quants": quants, "exponents": exponents, "own": rows}).items():
            object.__setattr__(self, key, value)

    __hash__ = object.__hash__

    @property
    def data(self) -> np.ndarray:
        """uint8 [bytes]: of each group its exponent, and quants i and 16 + i in byte i."""
        return _as_in_gguf(self)

    def forget(self) -> None:
        """See `Tensor.forget`."""
        forget(self.quants)
        forget(self.exponents)
        _as_in_gguf.cache_clear()


@lru_cache(maxsize=8)  # asked for again at once
def _as_in_gguf(one: Blocks) -> np.ndarray:
    quants, exponents = one.quants[one.own], one.exponents[one.own]
    made = np.empty((*exponents.shape, 17), np.uint8)
    made[..., 0] = exponents
    first, second = quants[..., :8], quants[..., 8:]
    made[..., 1::2] = (first & 15) | second << 4
    made[..., 2::2] = first >> 4 | (second & 240)
    return made.reshape(-1)


@dataclass(frozen=True)
class Stack:
    """A parameter of transformers' modules: one of ours, or of all experts together.

    Attributes:
        name: in the modules.
        shape: [..., outputs, inputs]; with `in_turn`, [..., inputs, outputs].
        names: ours, one after the other.
        in_turn: do the outputs of an expert's parts lie in turn?
    """

    name: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    in_turn: bool = False

    def locate(self, places: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Where numbers of the flattened parameter lie: their places in ours, flattened too."""
        if len(self.names) == 1 and not self.in_turn:
            yield self.names[0], places
            return
        parts, outputs = len(self.names) // self.shape[0], self.shape[-1] if self.in_turn else self.shape[1]
        rows, width = outputs // parts, math.prod(self.shape) // (self.shape[0] * outputs)
        for place in places:
            expert, rest = divmod(int(place), outputs * width)
            column, row = divmod(rest, outputs) if self.in_turn else divmod(rest, width)[::-1]
            own, row = (row % parts, row // parts) if self.in_turn else divmod(row, rows)
            yield self.names[expert * parts + own], np.array([row * width + column])


def stacks(made: Description) -> Iterator[Stack]:
    """All parameters, as transformers' modules have them and in their order."""
    for name, shape in made.shapes():
        if not (match := FIRST.fullmatch(name)):
            if ".experts." not in name:
                yield Stack(name, shape, (name,))
            continue
        experts = made.experts
        assert experts is not None
        parts, in_turn = ("gate", "up") if match[2] == "gate" else ("down",), made.family == IN_TURN
        names = tuple(f"{match[1]}experts.{e}.{part}_proj.{match[3]}" for e in range(experts.count) for part in parts)
        stem = f"{match[1]}experts.{'_'.join(parts)}_proj{'_bias' if match[3] == 'bias' else ''}"
        stacked = (len(parts) * shape[0], *shape[1:])
        yield Stack(stem, (experts.count, *(stacked[::-1] if in_turn else stacked)), names, in_turn)
