"""Weights in blocks of 32, as `blocks.h` reads them: a .gguf file's to the last bit, or rounded to eight bits."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .parts import MatrixPart

BLOCK = 32  # weights that share a scale
PLAIN, FOUR, EIGHT = 0, 1, 2  # kinds of rows, as in blocks.h


@dataclass
class Packed:
    """A matrix as a pass reads it."""

    kind: int
    rows: Tensor  # [o, bytes], or the weights themselves

    @property
    def part(self) -> MatrixPart:
        """What pass.c is given; `rows` must live as long."""
        return MatrixPart(self.rows.data_ptr(), self.kind)


def plain(weight: Float[Tensor, "o i"]) -> Packed:
    """A matrix as it is."""
    return Packed(PLAIN, weight.detach().contiguous())


def packed(numbers: Int[Tensor, "o i"], scales: Float[Tensor, "o g"], minima: Float[Tensor, "o g"] | None) -> Packed:
    """Rows of number * scale + minimum: of four bits, or signed ones of eight without minima. Scales become float16."""
    if minima is None:
        return Packed(EIGHT, torch.cat([numbers.to(torch.int8).view(torch.uint8), _halves(scales)], 1))
    pairs = numbers.to(torch.uint8).unflatten(1, (-1, 2))
    return Packed(FOUR, torch.cat([pairs[..., 0] | pairs[..., 1] << 4, _halves(torch.stack([scales, minima], -1))], 1))


def rounded(weight: Float[Tensor, "o i"]) -> Packed:
    """The nearest rows of eight bits, symmetric: for drafters, whose guesses need not be exact."""
    blocks = weight.detach().float().unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / 127).clamp(min=1e-7).half().float()
    numbers = (blocks / scales[..., None]).round().clamp(-127, 127)
    return packed(numbers.flatten(1), scales, None)


def kind_of(rows: Tensor, width: int) -> int:
    """Which kind of rows these are, for matrices of this width; 0 where it is neither."""
    sizes = {width // BLOCK * 20: FOUR, width // BLOCK * 34: EIGHT}
    return sizes.get(rows.shape[1], PLAIN) if rows.dtype == torch.uint8 and rows.dim() == 2 else PLAIN


def numbers(code: ctypes.CDLL, matrix: Packed, width: int) -> Float[Tensor, "o i"]:
    """What a pass reads in these rows, in bfloat16."""
    found = torch.empty(len(matrix.rows), width, dtype=torch.bfloat16)
    part = matrix.part
    code.numbers.restype = None
    code.numbers(ctypes.byref(part), *map(ctypes.c_int64, found.shape), ctypes.c_void_p(found.data_ptr()))
    return found


def reads(code: ctypes.CDLL) -> bool:
    """Does this build of the pass read blocks? It does on processors with products of bfloat16 in AVX-512."""
    return hasattr(code, "numbers")


def _halves(numbers: Float[Tensor, "o ..."]) -> Int[Tensor, "o bytes"]:
    return numbers.to(torch.float16).contiguous().view(torch.uint8).flatten(1)
