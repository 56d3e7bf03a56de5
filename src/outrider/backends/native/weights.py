"""A model's weights as passes read them, made of its files without a copy of the model in between, or of the memory
of a loaded module, whose matrices are read where they lie.

Matrices whose blocks this build reads keep their blocks, in the kernels' order; others become bfloat16 (in twelve bits
where the build has that) or float32. The weights are the numbers that the file's own reader makes, rounded to bfloat16
where the model computes in it. Of every matrix in blocks a sample of rows is compared with these at load, bit for bit.
A matrix that differs, or has a scale that its blocks cannot keep, is read as numbers.

With `weights` native or int8, matrices are multiplied as integers (`c/gemm/int8.h`) where they can be: by the quants of
their own blocks, or rounded to int8.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.types import Array
from ...machine import threads
from ...params import InputError
from .abi import BF12, BLOCK_WEIGHTS, INTEGER, PLAIN, Library, Struct, address, ffi, struct
from .checkpoint import Checkpoint
from .description import Description, LayerOptions
from .files import KINDS
from .model import Parameter
from .pages import aligned, stretch

SAMPLE = 4  # fours of rows of a matrix that are compared
PANEL = 16  # rows that lie together for integer products
Q8_0 = 8  # its number among GGUF's kinds
logger = logging.getLogger(__name__)
OTHERS, OTHER = 4, 32  # BF12: at most one block of so many has upper bytes of its own, which take so many bytes


@dataclass
class Matrix:
    """A matrix as a pass reads it, in memory of its own."""

    kind: int
    data: Array  # uint8
    others: Array | None = None  # BF12: upper bytes of single blocks, whose addresses stand in the data

    @property
    def struct(self) -> Struct:
        """`Matrix`; the data must live as long."""
        return struct("Matrix", data=address(self.data), kind=self.kind)[0]


@dataclass
class Weights:
    """A model's weights, and what their structures point to."""

    model: Struct  # `Model`
    head: Struct  # the same without layers and norm: the head alone
    table: Table
    kept: list[Any] = field(default_factory=list)
    copies: list[tuple[Array, Parameter]] = field(default_factory=list)  # of vectors that others may write to

    def refresh(self) -> None:
        """Copy the vectors of a loaded module again. (Its matrices are read where they lie.)"""
        for made, one in self.copies:
            made[:] = vector(self.table.code, one, self.table.halves)

    @property
    def bytes(self) -> int:
        """What a pass reads of weights."""
        return sum(one.data.nbytes for one in self.kept if isinstance(one, Matrix))

    @property
    def integers(self) -> tuple[str, ...]:
        """The kinds that are multiplied as integers."""
        numbers = {one.kind - INTEGER for one in self.kept if isinstance(one, Matrix) and one.kind >= INTEGER}
        return tuple(sorted(KINDS[number].name for number in numbers))


@dataclass(frozen=True)
class Table:
    """The table of embeddings, in memory or in the mapped file."""

    code: Library
    parameter: Parameter
    halves: bool  # are weights bfloat16?
    plain: Array | None = None  # uint8: its bytes, where they are as a pass reads them

    @property
    def address(self) -> Any:
        """Of the table as a pass reads it; NULL where rows are made one by one (`rows`)."""
        return address(self.plain)

    def rows(self, tokens: Array) -> Array:
        """Embeddings of tokens: float32 [n, h], of weights as the model has them."""
        made = numbers(self.code, self.parameter, self.halves, tokens)
        return widened(made) if self.halves else made


def widened(values: Array) -> Array:
    """The float32 of bfloat16 numbers, given as the uint16 of their bits."""
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def rounded(values: Array) -> Array:
    """float32 numbers rounded to bfloat16, to nearest even, as the uint16 of their bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def numbers(
    code: Library, one: Parameter, halves: bool, rows: Array | None = None, to: Array | None = None, workers: int = 0
) -> Array:
    """Rows of a parameter as numbers.

    Args:
        code: the compiled pass, of any precision.
        one: a matrix, or a vector, which is a matrix of one column.
        halves: round to bfloat16 (the uint16 of its bits)? Else float32.
        rows: int64, which ones, in the model's order; None: all.
        to: uint8, where they are written; None: memory of its own.
        workers: threads that write; 0: `threads()` for large matrices, else 1.
    """
    tensor = one.tensor
    width = tensor.shape[1] if len(tensor.shape) > 1 else 1
    if width == 1 and tensor.kind.elements > 1:
        raise InputError(f"the vector {one.name} is stored in blocks ({tensor.kind.name}); fetch the model again")
    order = one.order if rows is None else rows if one.order is None else one.order[rows]
    place = None if order is None else np.ascontiguousarray(order, np.int64)
    count, kind = tensor.shape[0] if place is None else len(place), np.uint16 if halves else np.float32
    made = aligned((count, width), kind) if to is None else to.view(kind).reshape(count, width)
    workers = workers or (1 if count * width < 1 << 16 else threads())
    arguments = address(place), address(made), int(halves), workers
    done = code.dequantise(tensor.kind.number, address(tensor.data), count, width, *arguments)
    assert done == count, "the checkpoint has been asked whether its kinds are supported"
    return made


def single(code: Library, one: Parameter, places: Array) -> Array:
    """Single weights of a parameter, rounded to bfloat16: float32 [n]. Only the blocks that hold them are opened.

    Args:
        code: the compiled pass, of any precision.
        one: the parameter.
        places: int64 [n], where they lie in it as the model has it, row by row.
    """
    tensor, width = one.tensor, one.tensor.shape[1] if len(one.tensor.shape) > 1 else 1
    if one.order is not None:
        places = one.order[places // width] * width + places % width
    size = tensor.kind.elements
    blocks = np.ascontiguousarray(places // size)
    made = np.empty((len(blocks), size), np.uint16)
    code.dequantise(tensor.kind.number, address(tensor.data), len(blocks), size, address(blocks), address(made), 1, 1)
    return widened(made[np.arange(len(blocks)), places % size])


def vector(code: Library, one: Parameter, halves: bool) -> Array:
    """A norm's weights or a bias: float32 [n], rounded to bfloat16 where the model is."""
    made = numbers(code, one, halves)
    return (widened(made) if halves else made).reshape(-1)


def load(checkpoint: Checkpoint, code: Library, halves: bool, way: str = "full") -> Weights:
    """The weights of a model.

    Args:
        checkpoint: its files.
        code: the compiled pass.
        halves: does the model compute with bfloat16 weights? Else float32.
        way: "full"; "native" or "int8": products of integers, with the quants of the file's own blocks, or with weights
            rounded to int8. Matrices that have no such form stay full, which is logged.

    Raises:
        InputError: no matrix has such a form.
    """
    made = checkpoint.description
    loader = _Loader(code, halves, {name: checkpoint.parameters[name] for name, _ in made.shapes()}, way)
    table = checkpoint.parameters["model.embed_tokens.weight"]
    head = table if made.tied else checkpoint.parameters["lm_head.weight"]
    matrices = loader.matrices([*loader.layer_matrices(made), head])
    if way != "full":
        loader.report([*loader.layer_matrices(made), head], matrices, checkpoint)
    kept: list[Any] = list(matrices)
    layers = ffi.new("Layer[]", len(made.layers))
    for i, (layer, options) in enumerate(zip(layers, made.layers, strict=True)):
        loader.fill(layer, f"model.layers.{i}.", options, matrices[7 * i : 7 * i + 7], kept)
    norm = loader.vector(checkpoint.parameters["model.norm.weight"])
    sizes = {
        "hidden": made.hidden, "intermediate": made.intermediate, "heads": made.heads, "kv_heads": made.kv_heads,
        "head_dim": made.head_dim, "vocab": made.vocab, "eps": made.eps, "attention_scale": made.head_dim**-0.5,
        "head": matrices[-1].struct,
    }  # fmt: skip
    model = struct("Model", layers=len(made.layers), layer=layers, norm=address(norm), **sizes)
    kept += [layers, norm]
    plain = matrices[-1].data if made.tied and matrices[-1].kind == PLAIN else None
    if plain is None and table.tensor.kind.name == ("BF16" if halves else "F32"):
        plain = table.tensor.data
    return Weights(model, struct("Model", **sizes), Table(code, table, halves, plain), kept, loader.copies)


PROJECTIONS = (
    ("q", "self_attn.q_proj"), ("k", "self_attn.k_proj"), ("v", "self_attn.v_proj"), ("o", "self_attn.o_proj"),
    ("gate", "mlp.gate_proj"), ("up", "mlp.up_proj"), ("down", "mlp.down_proj"),
)  # fmt: skip
GATE = 4  # its place among these; behind it stands `up`
NORMS = (
    ("attention_norm", "input_layernorm.weight"), ("mlp_norm", "post_attention_layernorm.weight"),
    ("q_norm", "self_attn.q_norm.weight"), ("k_norm", "self_attn.k_norm.weight"),
)  # fmt: skip


@dataclass
class _Loader:
    code: Library
    halves: bool
    parameters: dict[str, Parameter]
    way: str = "full"
    copies: list[tuple[Array, Parameter]] = field(default_factory=list)

    def layer_matrices(self, made: Description) -> Iterator[Parameter]:
        for i in range(len(made.layers)):
            for _, name in PROJECTIONS:
                yield self.parameters[f"model.layers.{i}.{name}.weight"]

    def fill(self, layer: Struct, at: str, options: LayerOptions, matrices: Sequence[Matrix], kept: list[Any]) -> None:
        """Write a layer's structure; what it points to is added to `kept`."""
        for (field_, _), matrix in zip(PROJECTIONS, matrices, strict=True):
            setattr(layer, field_, matrix.struct)
        biases = [(f"{field_}_bias", f"{name}.bias") for field_, name in PROJECTIONS[:4]]
        for field_, name in (*NORMS, *biases):
            if (one := self.parameters.get(at + name)) is not None:
                kept.append(self.vector(one))
                setattr(layer, field_, address(kept[-1]))
        layer.window, layer.rope = options.window, int(options.rope)

    def matrices(self, parameters: Sequence[Parameter]) -> list[Matrix]:
        """Matrices in one stretch of memory. A thread reads a matrix alone, the largest first: most are small, and
        threads that share one mostly wait for each other."""
        rooms = stretch([self.size(one) for one in parameters])
        order = sorted(range(len(rooms)), key=lambda i: -len(rooms[i]))
        with ThreadPoolExecutor(threads()) as pool:
            made = dict(zip(order, pool.map(lambda i: self.matrix(parameters[i], rooms[i]), order), strict=True))
        for gate in range(GATE, len(rooms) - 1, len(PROJECTIONS)):  # both halves of a gated layer read the same rows
            if (made[gate].kind >= INTEGER) != (made[gate + 1].kind >= INTEGER):
                made |= {i: self.full(parameters[i]) for i in (gate, gate + 1)}
        return [made[i] for i in range(len(rooms))]

    def matrix(self, one: Parameter, room: Array) -> Matrix:
        """A matrix, written into `room`. The file's own pages are given back as soon as they were read."""
        if not self.int8_size(one):
            return self.full(one, room)
        made = self.integers(one, room)
        one.tensor.forget()
        return self.full(one) if made is None else made

    def full(self, one: Parameter, room: Array | None = None) -> Matrix:
        """The same of all its bits, in `room` or in memory of its own."""
        if self.in_place(one):
            return Matrix(PLAIN, one.tensor.data)
        if room is None:
            (room,) = stretch([self.full_size(one)])
        made = self.blocks(one, room) or self.plain(one, room)
        one.tensor.forget()
        return made

    def in_place(self, one: Parameter) -> bool:
        """Is it read where it lies, in memory of a loaded module?"""
        kind = "BF16" if self.halves else "F32"
        return not one.tensor.mapped and one.order is None and one.tensor.kind.name == kind

    def vector(self, one: Parameter) -> Array:
        """A norm's weights or a bias, float32 [n]."""
        made = vector(self.code, one, self.halves)
        if not one.tensor.mapped:
            self.copies.append((made, one))
        return made

    def size(self, one: Parameter) -> int:
        """Bytes that a matrix takes in the stretch."""
        return self.int8_size(one) or self.full_size(one)

    def int8_size(self, one: Parameter) -> int:
        """Bytes of a matrix for integer products; 0: it has no such form."""
        if self.way == "full":
            return 0
        kind = Q8_0 if self.way == "int8" else one.tensor.kind.number
        return int(self.code.int8_bytes(kind, *one.tensor.shape))

    def integers(self, one: Parameter, room: Array) -> Matrix | None:
        """A matrix for integer products; None where it has no such form."""
        if not self.int8_size(one):
            return None
        rows, width = one.tensor.shape
        place = None if one.order is None else np.ascontiguousarray(one.order, np.int64)
        own = one.tensor.kind.number, address(one.tensor.data), rows, width, address(place)
        made = Matrix(int(self.code.pack_int8(*own, int(self.way == "int8"), address(room), 1)), room)
        return None if made.kind == PLAIN or (self.way == "native" and not self.integers_agree(made, one)) else made

    def integers_agree(self, made: Matrix, one: Parameter) -> bool:
        """Are the weights of the first and the last panel those of the file?"""
        rows, width = one.tensor.shape
        panels = made.data.reshape(-(-rows // PANEL), -1)
        for panel in {0, len(panels) - 1}:
            index = np.arange(PANEL * panel, min(rows, PANEL * (panel + 1)))
            own, read = panels[panel], aligned((len(index), width))
            sample = Matrix(made.kind, own).struct
            self.code.unpack_int8(ffi.addressof(sample), *read.shape, address(read))
            if not np.array_equal(read, numbers(self.code, one, False, index, workers=1)):
                return False
        return True

    def report(self, parameters: Sequence[Parameter], matrices: Sequence[Matrix], checkpoint: Checkpoint) -> None:
        """Say which matrices have no integer form; refuse a model that has none."""
        full = [one for one, made in zip(parameters, matrices, strict=True) if made.kind < INTEGER]
        kinds = " and ".join(sorted({one.tensor.kind.name for one in full}))
        if len(full) == len(matrices):
            raise InputError(
                f"{checkpoint.place} keeps its weights as {kinds}, which have no form for {self.way} weights; choose "
                + ("full" if self.way == "int8" else "int8 or full")
            )
        if full:
            logger.warning(
                "%d of the %d matrices of %s (%s) have no form for %s weights and stay full",
                len(full), len(matrices), checkpoint.place.name, kinds, self.way,
            )  # fmt: skip

    def full_size(self, one: Parameter) -> int:
        """The same where it is not multiplied as integers."""
        if self.in_place(one):
            return 0
        rows, width = one.tensor.shape
        if each := self.each(one):
            return each * (rows + -rows % 4)
        return self.twelve(rows, width) or rows * width * (2 if self.halves else 4)

    def each(self, one: Parameter) -> int:
        """Bytes of a row in blocks; 0: they are not read so."""
        if not self.code.block_lanes or not self.halves:
            return 0
        return int(self.code.repacked_bytes(one.tensor.kind.number, one.tensor.shape[1]))

    def twelve(self, rows: int, width: int) -> int:
        """Bytes of a matrix in twelve bits a number; 0: this build does not read that, or not at this width."""
        fits = self.halves and self.code.block_lanes == 8 and width % BLOCK_WEIGHTS == 0
        return -(-rows // 4) * 4 * (width // BLOCK_WEIGHTS * 48 + 16) if fits else 0

    def blocks(self, one: Parameter, room: Array) -> Matrix | None:
        """The file's blocks; None where they are not read so."""
        if not self.each(one):
            return None
        rows, width = one.tensor.shape
        place = None if one.order is None else np.ascontiguousarray(one.order, np.int64)
        kind = self.code.repack(
            one.tensor.kind.number, address(one.tensor.data), rows, width, address(place), address(room), 1
        )
        made = Matrix(int(kind), room)
        return made if kind != PLAIN and self.agrees(made, one) else None

    def agrees(self, made: Matrix, one: Parameter) -> bool:
        """Are the weights that a pass reads those of the file, in a sample of rows?"""
        rows, width = one.tensor.shape
        fours = made.data.reshape(-(-rows // 4), -1)
        last = max(0, rows // 4 - 1)
        some = np.array(sorted({last * i // (SAMPLE - 1) for i in range(SAMPLE)}))
        own = np.ascontiguousarray(fours[some])
        read = aligned((4 * len(some), width), np.uint16)
        sample = Matrix(made.kind, own).struct
        self.code.unpack_matrix(ffi.addressof(sample), len(read), width, address(read), 1)
        index = (4 * some[:, None] + np.arange(4)).reshape(-1)
        there = index < rows
        theirs = numbers(self.code, one, True, index[there], workers=1)
        return np.array_equal(widened(read[there]), widened(theirs))  # zeros may differ in their signs

    def plain(self, one: Parameter, room: Array) -> Matrix:
        """Numbers, in twelve bits where the build reads that and they are the same."""
        rows, width = one.tensor.shape
        size = rows * width * (2 if self.halves else 4)
        if len(room) == size and not self.twelve(rows, width):
            numbers(self.code, one, self.halves, to=room, workers=1)
            return Matrix(PLAIN, room)
        own = aligned(((rows + -rows % 4) * width * size // (rows * width),), np.uint8)
        own[size:] = 0
        numbers(self.code, one, self.halves, to=own[:size], workers=1)
        if not self.each(one) and (made := self.packed(own, rows, width, room)) is not None:
            return made
        return Matrix(PLAIN, own)

    def packed(self, own: Array, rows: int, width: int, room: Array) -> Matrix | None:
        """bfloat16 numbers in twelve bits; None where they cannot be written so."""
        outputs = rows + -rows % 4
        capacity = outputs // 4 + outputs // 4 * (width // BLOCK_WEIGHTS) // OTHERS
        others = aligned((capacity * OTHER,), np.uint8)  # memory that is not written takes no place
        numbers_ = address(own), outputs, width
        if not self.code.pack_bf12(*numbers_, address(room), address(others), capacity, 1):
            return None
        made, read = Matrix(BF12, room, others), aligned((outputs, width), np.uint16)
        own_ = made.struct
        self.code.unpack_matrix(ffi.addressof(own_), outputs, width, address(read), 1)
        return made if np.array_equal(read, own.view(np.uint16).reshape(read.shape)) else None
