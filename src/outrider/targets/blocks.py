"""What a compiled pass reads in place of a model's weights: a .gguf file's blocks, twelve bits, or whole numbers.

A weight is number * scale + minimum, rounded to bfloat16. Reading the numbers takes a third of the bytes, and nothing
changes: the compiled code's own weights are held to the model's, bit for bit, and where one differs it stays as it is.
(Products of whole numbers, which are asked for, are another target.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .. import kept
from ..native import blocks as native
from ..native.blocks import BLOCK, Packed, kind_of, numbers, packed, reads, twelve_bits, twelve_size
from ..native.weights import stretch, together
from . import gguf
from .gguf import Blocks

# Beside the converted model, by the lanes of the code that reads them: the file itself takes seconds to read.
KEPT = {16: "weights.fours", 8: "weights.words"}
KEPT_INTEGERS = "weights.integers"
GATED = "gate_proj", "up_proj"


def read(
    model: nn.Module, file: Path | None, folder: Path | None, code: ctypes.CDLL, integers: bool = False
) -> dict[int, Packed]:
    """By the id of a linear layer's weight, the blocks that are this weight.

    Args:
        model: a stock model in bfloat16.
        file: what it was made from; None: that is not there (any more).
        folder: of the model, where its blocks are kept for the next time; None: nowhere.
        code: the compiled pass, which must read blocks; or multiply whole numbers, for `integers`.
        integers: in the order in which products of whole numbers read them.
    """
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    lanes = reads(code)
    place = None if folder is None else folder / (KEPT_INTEGERS if integers else KEPT[lanes])
    rows = _kept(place)
    found = {} if rows is None else _right(rows, layers, code, integers)
    if file is not None and (rows is None or (rows and not found)):  # the second: kept by another version
        rows = _made(model, file, lanes, integers)
        _keep(place, rows)
        found = _right(rows, layers, code, integers)
    return _moved(found)


def _made(model: nn.Module, file: Path, lanes: int, integers: bool) -> dict[str, Tensor]:
    """By the name of a linear layer, the rows of its blocks."""
    names, made = {layer: name for name, layer in model.named_modules()}, {}
    for layer, b in blocks_of(model, file):
        given = b.numbers, b.scales, b.minima
        made[names[layer]] = (native.whole(*given) if integers else packed(*given, lanes)).rows
    return made


def _right(
    rows: dict[str, Tensor], layers: dict[str, nn.Linear], code: ctypes.CDLL, integers: bool
) -> dict[int, Packed]:
    """Those of the rows that are their layer's weight."""
    found, together_ = {}, 8 if integers else 4
    for name, own in rows.items():
        weight = layers[name].weight if name in layers else torch.empty(0, 1)
        outputs, width = weight.shape
        kind = kind_of(own, width, integers)
        if kind and len(own) == outputs + -outputs % together_:
            one = Packed(kind, own)
            read_ = native.opened(one, width).to(weight.dtype) if integers else numbers(code, one, width)
            if torch.equal(read_[:outputs], weight.detach()):
                found[id(weight)] = one
    return found


def integers(
    model: nn.Module, weights: str, file: Path | None, folder: Path | None, code: ctypes.CDLL
) -> dict[int, Packed]:
    """By the id of a linear layer's weight, its whole numbers for products of such: the nearest ones of eight bits
    ("int8"), or a .gguf file's own ("native"; the other layers stay full). None at all where that is less than half."""
    if weights == "native":
        found = read(model, file, folder, code, integers=True)
    else:
        layers = [m.weight for m in model.modules() if type(m) is nn.Linear and m.in_features % BLOCK == 0]
        found = _moved({id(weight): native.whole(*native.rounded(weight), None) for weight in layers})
    for module in model.modules():  # both halves of a gated layer round what they are given, or neither does
        pair = [id(part.weight) for part in (getattr(module, name, None) for name in GATED) if part is not None]
        if 0 < sum(key in found for key in pair) < len(pair):
            for key in pair:
                found.pop(key, None)
    sizes = {id(m.weight): m.weight.numel() for m in model.modules() if type(m) is nn.Linear}
    return found if sum(sizes[key] for key in found) >= sum(sizes.values()) / 2 else {}


def _moved(found: dict[int, Packed]) -> dict[int, Packed]:
    for one, moved in zip(found.values(), together([one.rows for one in found.values()]), strict=True):
        one.rows = moved
    return found


def twelve(model: nn.Module, packed: dict[int, Packed], code: ctypes.CDLL) -> dict[int, Packed]:
    """By the id of a linear layer's weight, its numbers in twelve bits: of those that are not `packed`, and can be."""
    layers = [m.weight for m in model.modules() if type(m) is nn.Linear and id(m.weight) not in packed]
    sizes = {id(weight): twelve_size(weight) if weight.dtype == torch.bfloat16 else 0 for weight in layers}
    weights = {id(weight): weight.detach() for weight in layers if sizes[id(weight)]}
    found = {}
    for (key, weight), room in zip(weights.items(), stretch([sizes[key] for key in weights]), strict=True):
        one = twelve_bits(weight, code, room)
        if one is not None:
            made = numbers(code, one, weight.shape[1])[: len(weight)]
            if torch.equal(made.view(torch.int16), weight.contiguous().view(torch.int16)):
                found[key] = one
    return found


def _kept(place: Path | None) -> dict[str, Tensor] | None:
    try:
        return None if place is None else load_file(place)
    except (OSError, SafetensorError):
        return None


def _keep(place: Path | None, rows: dict[str, Tensor]) -> None:
    if place is not None:
        with kept.keeping():
            kept.replace(place, partial(_save, rows))


def _save(rows: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(rows, file)
    except SafetensorError as error:  # a full disk is reported as this
        raise OSError(None, str(error)) from None


def blocks_of(model: nn.Module, file: Path) -> Iterator[tuple[nn.Linear, Blocks]]:
    """The linear layers whose weights a .gguf file keeps in blocks, with these.

    Layers are known by their numbers: transformers gives tensors other names, and their rows another order.
    """
    layers: dict[tuple[int, ...], list[tuple[nn.Linear, Tensor, Tensor]]] = {}
    for layer in model.modules():
        if type(layer) is nn.Linear:
            marks = _marks(layer.weight.detach())
            layers.setdefault(tuple(layer.weight.shape), []).append((layer, marks, marks.argsort()))
    for blocks in gguf.blocks(file):
        marks = _marks(blocks.full())
        order = marks.argsort()
        for layer, theirs, their_order in layers.get(tuple(blocks.numbers.shape), ()):
            if torch.equal(theirs[their_order], marks[order]):
                rows = torch.empty_like(order)
                rows[their_order] = order
                yield layer, blocks.rows(rows)


def _marks(weight: Float[Tensor, "o i"]) -> Int[Tensor, " o"]:
    """A number for each row that hardly any other row has."""
    factors = torch.randint(-(2**62), 2**62, (weight.shape[1],), generator=torch.Generator().manual_seed(0))
    positive = weight.to(torch.bfloat16) + 0.0  # zeros without a sign
    return (positive.contiguous().view(torch.int16) * factors).sum(1)
