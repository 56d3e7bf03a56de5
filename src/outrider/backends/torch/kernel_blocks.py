"""Weights in blocks of 32, as `c/formats/layout.h` describes them: a .gguf file's or any bfloat16 ones to the last bit,
or rounded to eight bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from ...machine import threads
from ..native import abi
from ..native.abi import BF12, PLAIN, Q8, W4A8, W8A8, Library, Struct, address, ffi
from ..native.abi import BLOCK_WEIGHTS as BLOCK

OTHERS, OTHER = 4, 32  # at most one block of so many has upper bytes of its own, which take so many bytes
HALVES = [0, 1, 4, 5], [2, 3, 6, 7]  # of eight rows, as integer products have them in a vector


@dataclass
class Packed:
    """A matrix as a pass reads it."""

    kind: int
    rows: Tensor  # [o, bytes], of which four or eight lie together; or the weights themselves
    others: Tensor | None = None  # BF12: what single blocks are read with, whose addresses stand in the rows

    @property
    def struct(self) -> Struct:
        """`Matrix`; `rows` must live as long."""
        return abi.struct("Matrix", data=address(self.rows), kind=self.kind)[0]


def plain(weight: Float[Tensor, "o i"]) -> Packed:
    """A matrix as it is."""
    return Packed(PLAIN, weight.detach().contiguous())


def eights(numbers: Integer[Tensor, "o i"], scales: Float[Tensor, "o g"]) -> Packed:
    """Rows of number * scale, with signed numbers of eight bits and a scale for each 32, which becomes float16. Rows of
    zeros make the last four rows whole."""
    fours = _fours(numbers.to(torch.int8)).unflatten(2, (-1, BLOCK))
    rows = torch.cat([_bytes(fours.transpose(1, 2)), _bytes(_fours(scales).transpose(1, 2).half())], 1)
    return Packed(Q8, rows.reshape(4 * len(rows), -1))


def arranged_bytes(code: Library, kind: int, width: int) -> int:
    """Bytes that a row of a file's matrix takes in the order in which passes read it; 0 where this code does not read
    its kind, GGUF's number `kind`."""
    return int(code.repacked_bytes(kind, width))


def arranged(
    code: Library,
    kind: int,
    rows: np.ndarray,
    width: int,
    order: np.ndarray | None,
    room: Integer[Tensor, " bytes"],
) -> Packed | None:
    """A file's matrix in the order in which passes read it.

    Args:
        code: the compiled pass, which must read blocks of this kind (`arranged_bytes`).
        kind: GGUF's number of the kind of its blocks.
        rows: uint8 [o, bytes of a row], as they lie in the file.
        width: weights in a row.
        order: int64 [o], the file's row that each row is; None: the same.
        room: where it is written; `arranged_bytes` for each row, and for rows of zeros that make the last four whole.

    Returns:
        The rows; None where a scale is NaN or infinite, or times 16 is more than float16 holds.
    """
    given = np.ascontiguousarray(rows)
    place = None if order is None else np.ascontiguousarray(order, np.int64)
    own = code.repack(kind, address(given), len(rows), width, address(place), address(room), threads())
    return Packed(own, room.view(len(rows) + -len(rows) % 4, -1)) if own else None


def whole(numbers: Integer[Tensor, "o i"], scales: Float[Tensor, "o g"], minima: Float[Tensor, "o g"] | None) -> Packed:
    """The same for integer products, which round activations to eight bits too (`gemm/int8.h`). Rows lie in
    eights, and rows of zeros make the last eight whole."""
    eights = _side_by_side(numbers.to(torch.uint8 if minima is not None else torch.int8), 8)
    parts = eights.unflatten(2, (-1, 4, 8)).permute(0, 2, 3, 1, 4)  # [o / 8, g, vector, row, 8]
    first, second = (parts[..., half, :].flatten(3) for half in HALVES)
    known = [_side_by_side(part.half(), 8).transpose(1, 2) for part in (scales, minima) if part is not None]
    own = torch.cat([first, second], 2) if minima is None else first | second << 4
    rows = torch.cat([_bytes(own), _bytes(torch.cat(known, 2))], 1)
    return Packed(W8A8 if minima is None else W4A8, rows.reshape(8 * len(rows), -1))


def opened(matrix: Packed, width: int) -> Float[Tensor, "o i"]:
    """The weights of `whole` rows, those of zeros included."""
    four, groups = matrix.kind == W4A8, width // BLOCK
    eights = matrix.rows.reshape(len(matrix.rows) // 8, -1)
    size = groups * BLOCK * 8 // (2 if four else 1)
    own = eights[:, :size].reshape(len(eights), groups, -1, 4, 8)
    parts = (own & 15, own >> 4) if four else own.view(torch.int8).chunk(2, 2)
    numbers = torch.empty(len(eights), groups, 4, 8, 8)
    for half, part in zip(HALVES, parts, strict=True):
        numbers[..., half, :] = part.float()
    known = eights[:, size:].contiguous().view(torch.half).float().view(len(eights), groups, -1, 1, 8, 1)
    wide = numbers * known[:, :, 0] + (known[:, :, 1] if four else 0)
    return wide.permute(0, 3, 1, 2, 4).reshape(-1, width)


def multiply(code: Library, matrix: Packed, outputs: int, x: Float[Tensor, "n i"]) -> Float[Tensor, "n o"]:
    """A pass's product of these rows, in float32; of code that `multiplies` whole numbers. Where it has inputs of
    bfloat16, x is rounded to it first."""
    given, found, own = x.float().contiguous(), torch.empty(len(x), outputs), matrix.struct
    room, count = torch.empty_like(given), threads()
    scratch = torch.empty(code.scratch_bytes(*x.shape) * count, dtype=torch.uint8)
    places = address(room), address(scratch)
    code.multiply(ffi.addressof(own), address(given), *x.shape, outputs, address(found), count, *places)
    return found


def nearest(x: Float[Tensor, "n i"]) -> Float[Tensor, "n i"]:
    """Activations as integer products round them: multiples of a 127th of the largest one among 32."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    factor = torch.full_like(largest, 127) / largest  # torch would compute 127 / largest as 127 * (1 / largest)
    return ((blocks * factor).round() * (largest / 127)).flatten(-2)


def twelve_size(weight: Float[Tensor, "o i"]) -> int:
    """Bytes of a matrix in twelve bits a number; 0: its width does not allow it."""
    outputs, width = weight.shape
    return -(-outputs // 4) * 4 * (width // BLOCK * 48 + 16) if width % BLOCK == 0 else 0


def twelve_bits(weight: Float[Tensor, "o i"], code: Library, room: Integer[Tensor, " bytes"]) -> Packed | None:
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
    done = code.pack_bf12(address(fours), outputs, width, address(room), address(others), blocks, threads())
    return Packed(BF12, room.view(outputs, -1), others) if done else None


def rounded(weight: Float[Tensor, "o i"]) -> tuple[Integer[Tensor, "o i"], Float[Tensor, "o g"]]:
    """The nearest numbers of eight bits, symmetric, and a scale for 32 each, which float16 holds."""
    blocks = weight.detach().float().unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / 127).clamp(min=1e-7).half().float()
    numbers = (blocks / scales[..., None]).round().clamp(-127, 127)
    return numbers.flatten(1).to(torch.int8), scales


def numbers(code: Library, matrix: Packed, width: int) -> Float[Tensor, "o i"]:
    """What a pass reads in these rows, those of zeros included, in bfloat16."""
    found = torch.empty(len(matrix.rows), width, dtype=torch.bfloat16)
    own = matrix.struct
    code.unpack_matrix(ffi.addressof(own), *found.shape, address(found), threads())
    return found


def reads(code: Library) -> int:
    """For how many lanes this build of the pass reads blocks: sixteen where AVX-512 multiplies bfloat16,
    eight where it has no AVX-512. 0: it reads none."""
    return int(code.block_lanes)


def multiplies(code: Library) -> bool:
    """Has this build integer products? Those for bfloat16 weights have them, but for that with tiles."""
    return bool(code.integer_products)


def _fours(rows: Tensor) -> Tensor:
    """Four rows side by side: [o, n] -> [o / 4, 4, n]."""
    return _side_by_side(rows, 4)


def _side_by_side(rows: Tensor, count: int) -> Tensor:
    """So many rows side by side, with rows of zeros at the end: [o, n] -> [o / count, count, n]."""
    lacking = -len(rows) % count
    return (nn.functional.pad(rows, (0, 0, 0, lacking)) if lacking else rows).unflatten(0, (-1, count))


def _bytes(numbers: Tensor) -> Integer[Tensor, "o bytes"]:
    return numbers.contiguous().view(torch.uint8).flatten(1)
