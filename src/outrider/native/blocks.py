"""Weights in blocks of 32, as `blocks.h` reads them: a .gguf file's or any bfloat16 ones to the last bit, or rounded to
eight bits."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from .parts import MatrixPart

BLOCK = 32  # weights that share a scale
OTHERS, OTHER = 4, 32  # at most one block of so many has upper bytes of its own, which take so many bytes
PLAIN, FOUR, EIGHT, TWELVE = range(4)  # kinds of rows, as in blocks.h


@dataclass
class Packed:
    """A matrix as a pass reads it."""

    kind: int
    rows: Tensor  # [o, bytes], of which four lie together; or the weights themselves
    others: Tensor | None = None  # TWELVE: what single blocks are read with, whose addresses stand in the rows

    @property
    def part(self) -> MatrixPart:
        """What pass.c is given; `rows` must live as long."""
        return MatrixPart(self.rows.data_ptr(), self.kind)


def plain(weight: Float[Tensor, "o i"]) -> Packed:
    """A matrix as it is."""
    return Packed(PLAIN, weight.detach().contiguous())


def packed(
    numbers: Integer[Tensor, "o i"], scales: Float[Tensor, "o g"], minima: Float[Tensor, "o g"] | None, lanes: int
) -> Packed:
    """Rows of number * scale + minimum: of four bits, or signed ones of eight without minima. Scales become float16.

    Rows lie in fours, and rows of zeros make the last four whole. `lanes`: of the code that reads them; eight bits lie
    alike for all.
    """
    if minima is None:
        return _eight(numbers, scales)
    fours = _fours(numbers.to(torch.int32)).unflatten(2, (-1, BLOCK))  # [o / 4, 4, g, 32]
    if lanes == 8:
        own = sum((fours[..., 8 * i : 8 * i + 8] << 4 * i for i in range(1, 4)), fours[..., :8])  # [o / 4, 4, g, 8]
        words = torch.stack([own[:, ::2], own[:, 1::2]], -1).to(torch.uint16).transpose(1, 2)
    else:
        words = sum((fours[:, r] << 4 * r for r in range(1, 4)), fours[:, 0]).to(torch.uint16)
    known = torch.stack([_fours(scales), _fours(minima)], -1).transpose(1, 2).half()
    rows = torch.cat([_bytes(words), _bytes(known)], 1)
    return Packed(FOUR, rows.reshape(4 * len(rows), -1))


def twelve_size(weight: Float[Tensor, "o i"]) -> int:
    """Bytes of a matrix in twelve bits a number; 0: its width does not allow it."""
    outputs, width = weight.shape
    return -(-outputs // 4) * 4 * (width // BLOCK * 48 + 16) if width % BLOCK == 0 else 0


def twelve_bits(weight: Float[Tensor, "o i"], code: ctypes.CDLL, room: Integer[Tensor, " bytes"]) -> Packed | None:
    """A bfloat16 matrix in twelve bits a number, to the last bit; None where it cannot be written so.

    Nearly all numbers of four rows share sixteen upper bytes, which are a sign and seven bits of the exponent. Blocks
    where one does not are read with sixteen of their own.

    Args:
        weight: the matrix.
        code: the compiled pass, of eight lanes.
        room: where it is written, of `twelve_size` bytes, which must stay there.
    """
    fours = _fours(weight.detach()).contiguous()  # [o / 4, 4, i]
    outputs, width = 4 * len(fours), weight.shape[1]
    blocks = len(fours) + len(fours) * (width // BLOCK) // OTHERS
    others = torch.empty(blocks * OTHER, dtype=torch.uint8)  # memory that is not written takes no place
    places = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (fours, room, others)]
    sizes = [ctypes.c_int64(size) for size in (outputs, width, blocks, torch.get_num_threads())]
    code.twelve_bits.restype = ctypes.c_int64
    done = code.twelve_bits(places[0], *sizes[:2], *places[1:], *sizes[2:])
    return Packed(TWELVE, room.view(outputs, -1), others) if done else None


def for_drafts(weight: Float[Tensor, "o i"], code: ctypes.CDLL) -> Packed:
    """A drafter's matrix: rounded to eight bits where this build reads such, else as it is."""
    return rounded(weight) if reads(code) else plain(weight)


def rounded(weight: Float[Tensor, "o i"]) -> Packed:
    """The nearest rows of eight bits, symmetric: for drafters, whose guesses need not be exact."""
    blocks = weight.detach().float().unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / 127).clamp(min=1e-7).half().float()
    numbers = (blocks / scales[..., None]).round().clamp(-127, 127)
    return _eight(numbers.flatten(1).to(torch.int8), scales)


def kind_of(rows: Tensor, width: int) -> int:
    """Which kind of rows these are, for matrices of this width; 0 where it is neither."""
    sizes = {width // BLOCK * 20: FOUR, width // BLOCK * 34: EIGHT}
    return sizes.get(rows.shape[1], PLAIN) if rows.dtype == torch.uint8 and rows.dim() == 2 else PLAIN


def numbers(code: ctypes.CDLL, matrix: Packed, width: int) -> Float[Tensor, "o i"]:
    """What a pass reads in these rows, those of zeros included, in bfloat16."""
    found = torch.empty(len(matrix.rows), width, dtype=torch.bfloat16)
    part = matrix.part
    code.numbers.restype = None
    sizes, threads = map(ctypes.c_int64, found.shape), ctypes.c_int64(torch.get_num_threads())
    code.numbers(ctypes.byref(part), *sizes, ctypes.c_void_p(found.data_ptr()), threads)
    return found


def reads(code: ctypes.CDLL) -> int:
    """For how many lanes this build of the pass reads blocks: sixteen where AVX-512 multiplies bfloat16,
    eight where it has no AVX-512. 0: it reads none."""
    return ctypes.c_int64.in_dll(code, "block_lanes").value if hasattr(code, "block_lanes") else 0


def _eight(numbers: Integer[Tensor, "o i"], scales: Float[Tensor, "o g"]) -> Packed:
    fours = _fours(numbers.to(torch.int8)).unflatten(2, (-1, BLOCK))
    rows = torch.cat([_bytes(fours.transpose(1, 2)), _bytes(_fours(scales).transpose(1, 2).half())], 1)
    return Packed(EIGHT, rows.reshape(4 * len(rows), -1))


def _fours(rows: Tensor) -> Tensor:
    """Four rows side by side: [o, n] -> [o / 4, 4, n]."""
    whole = nn.functional.pad(rows, (0, 0, 0, -len(rows) % 4)) if len(rows) % 4 else rows
    return whole.unflatten(0, (-1, 4))


def _bytes(numbers: Tensor) -> Integer[Tensor, "o bytes"]:
    return numbers.contiguous().view(torch.uint8).flatten(1)
