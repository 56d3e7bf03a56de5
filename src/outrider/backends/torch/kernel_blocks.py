"""Weights in blocks of 32, as `c/formats/layout.h` describes them: a .gguf file's or any bfloat16 ones to the last bit,
or with eight bits each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from ...machine import threads
from ..native import abi
from ..native.abi import BF12, PLAIN, Q8, Library, Struct, address, ffi
from ..native.abi import BLOCK_WEIGHTS as BLOCK

OTHERS, OTHER = 4, 32  # at most one block of so many has upper bytes of its own, which take so many bytes


@dataclass
class Packed:
    """A matrix as a pass reads it."""

    kind: int
    rows: Tensor  # [o, bytes], of which four lie together; or the weights themselves
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


def _fours(rows: Tensor) -> Tensor:
    """Four rows side by side: [o, n] -> [o / 4, 4, n]."""
    return _side_by_side(rows, 4)


def _side_by_side(rows: Tensor, count: int) -> Tensor:
    """So many rows side by side, with rows of zeros at the end: [o, n] -> [o / count, count, n]."""
    lacking = -len(rows) % count
    return (nn.functional.pad(rows, (0, 0, 0, lacking)) if lacking else rows).unflatten(0, (-1, count))


def _bytes(numbers: Tensor) -> Integer[Tensor, "o bytes"]:
    return numbers.contiguous().view(torch.uint8).flatten(1)
