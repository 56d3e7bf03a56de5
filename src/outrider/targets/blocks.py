"""What a compiled pass reads in place of a model's weights: the blocks of the .gguf file that they were made from, or
the same numbers in twelve bits.

A weight is number * scale + minimum, rounded to bfloat16. Reading the numbers takes a third of the bytes, and nothing
changes: the compiled code's own weights are held to the model's, bit for bit, and where one differs it stays as it is.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .. import kept
from ..native.blocks import Packed, kind_of, numbers, packed, reads, twelve_bits, twelve_size
from ..native.weights import stretch, together
from . import gguf
from .gguf import Blocks

logger = logging.getLogger(__name__)
# Beside the converted model, by the lanes of the code that reads them: the file itself takes seconds to read.
KEPT = {16: "weights.fours", 8: "weights.words"}


def read(model: nn.Module, file: Path | None, folder: Path | None, code: ctypes.CDLL) -> dict[int, Packed]:
    """By the id of a linear layer's weight, the blocks that are this weight.

    Args:
        model: a stock model in bfloat16.
        file: what it was made from; None: that is not there (any more).
        folder: of the model, where its blocks are kept for the next time; None: nowhere.
        code: the compiled pass, which must read blocks.
    """
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    lanes = reads(code)
    rows = _kept(folder, lanes)
    if rows is None:
        if file is None:
            return {}
        names = {layer: name for name, layer in layers.items()}
        made = {names[layer]: packed(b.numbers, b.scales, b.minima, lanes) for layer, b in blocks_of(model, file)}
        rows = {name: one.rows for name, one in made.items()}
        _keep(folder, lanes, rows)
    found = {}
    for name, own in rows.items():
        weight = layers[name].weight if name in layers else torch.empty(0, 1)
        kind = kind_of(own, weight.shape[1])
        if kind and 0 <= len(own) - len(weight) < 4:
            one = Packed(kind, own)
            if torch.equal(numbers(code, one, weight.shape[1])[: len(weight)], weight.detach()):
                found[id(weight)] = one
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


def _kept(folder: Path | None, lanes: int) -> dict[str, Tensor] | None:
    try:
        return None if folder is None else load_file(folder / KEPT[lanes])
    except (OSError, SafetensorError):
        return None


def _keep(folder: Path | None, lanes: int, rows: dict[str, Tensor]) -> None:
    if folder is not None:
        try:
            kept.replace(folder / KEPT[lanes], lambda place: save_file(rows, place))
        except (OSError, SafetensorError) as error:  # a full disk comes as the second
            logger.info("%s cannot be kept, so the blocks are read anew at each start: %s", folder / KEPT[lanes], error)


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
