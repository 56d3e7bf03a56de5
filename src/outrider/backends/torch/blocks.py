"""What a compiled pass reads in place of a model's weights: a .gguf file's blocks, or twelve bits.

A weight is number * scale + minimum, rounded to bfloat16. Reading the numbers takes a third of the bytes and changes no
result: of a file's blocks a sample of rows is compared with the model's weights at load, bit for bit, and twelve bits
are compared as a whole; a matrix that differs stays in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..native.abi import Library
from ..native.files import open_gguf
from ..native.model import Parameter, parameters, supports
from .kernel_blocks import Packed, arranged, arranged_bytes, numbers, twelve_bits, twelve_size
from .module_weights import stretch

SAMPLE = 16  # fours of rows of a matrix that are compared with the model's weights


def read(model: nn.Module, file: Path | None, code: Library) -> dict[int, Packed]:
    """By the id of a linear layer's weight, the file's blocks that are this weight.

    Args:
        model: a stock model in bfloat16.
        file: what it was made from; None: that is not there (any more), and there are no blocks.
        code: the compiled pass, which must read blocks.
    """
    parts, found = [], {}
    for weight, one in _parts(model, file):
        size = arranged_bytes(code, one.tensor.kind.number, weight.shape[1])
        if size:
            parts.append((weight, one, size * (len(weight) + -len(weight) % 4)))
    for (weight, one, _), room in zip(parts, stretch([size for *_, size in parts]), strict=True):
        made = arranged(code, one.tensor.kind.number, one.tensor.rows, weight.shape[1], one.order, room)
        if made is not None and _agrees(code, made, weight.detach()):
            found[id(weight)] = made
    return found


def _agrees(code: Library, made: Packed, weight: Float[Tensor, "o i"]) -> bool:
    """Are the weights that a pass reads the model's, in a sample of rows?"""
    fours = max(1, len(weight) // 4)
    starts = [4 * int(four) for four in torch.linspace(0, fours - 1, min(fours, SAMPLE)).long()]
    return all(
        torch.equal(
            numbers(code, Packed(made.kind, made.rows[i : i + 4]), weight.shape[1])[: len(weight) - i],
            weight[i : i + 4],
        )
        for i in starts
    )


def _parts(model: nn.Module, file: Path | None) -> Iterator[tuple[Tensor, Parameter]]:
    """The weights of linear layers, and where their numbers lie in a file that is read as it lies."""
    if file is None or not supports(open_gguf(file)):
        return
    layers = {id(layer.weight) for layer in model.modules() if type(layer) is nn.Linear}
    weights = {name: p for name, p in model.named_parameters(remove_duplicate=False) if id(p) in layers}
    for one in parameters(open_gguf(file)):
        weight = weights.get(one.name)
        if weight is not None and one.tensor.shape == tuple(weight.shape):
            yield weight, one


def twelve(model: nn.Module, packed: dict[int, Packed], code: Library) -> dict[int, Packed]:
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
