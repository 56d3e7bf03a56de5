"""A model's weights as passes read them, made of its files without a copy of the model in between.

Matrices whose blocks this build reads keep their blocks, in the kernels' order; others become bfloat16 (in twelve bits
where the build has that) or float32. The weights are the numbers that the file's own reader makes, rounded to bfloat16
where the model computes in it. Of every matrix in blocks a sample of rows is compared with these at load, bit for bit.
A matrix that differs, or has a scale that its blocks cannot keep, is read as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.types import Array
from ...machine import threads
from ...params import InputError
from .abi import BF12, BLOCK_WEIGHTS, PLAIN, Library, Struct, address, ffi, struct
from .checkpoint import Checkpoint
from .description import Experts, LayerOptions
from .model import Parameter
from .pages import aligned, forget, stretch

SAMPLE = 16  # fours of rows of a matrix that are compared
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

    @property
    def bytes(self) -> int:
        """What a pass reads of weights."""
        return sum(one.data.nbytes for one in self.kept if isinstance(one, Matrix))


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


def numbers(code: Library, one: Parameter, halves: bool, rows: Array | None = None, to: Array | None = None) -> Array:
    """Rows of a parameter as numbers.

    Args:
        code: the compiled pass, of any precision.
        one: a matrix, or a vector, which is a matrix of one column.
        halves: round to bfloat16 (the uint16 of its bits)? Else float32.
        rows: int64, which ones, in the model's order; None: all.
        to: uint8, where they are written; None: memory of its own.
    """
    tensor = one.tensor
    width = tensor.shape[1] if len(tensor.shape) > 1 else 1
    if width == 1 and tensor.kind.elements > 1:
        raise InputError(f"the vector {one.name} is stored in blocks ({tensor.kind.name}); fetch the model again")
    order = one.order if rows is None else rows if one.order is None else one.order[rows]
    place = None if order is None else np.ascontiguousarray(order, np.int64)
    count, kind = tensor.shape[0] if place is None else len(place), np.uint16 if halves else np.float32
    made = aligned((count, width), kind) if to is None else to.view(kind).reshape(count, width)
    few = 1 if count * width < 1 << 16 else threads()
    arguments = address(place), address(made), int(halves), few
    done = code.dequantise(tensor.kind.number, address(tensor.data), count, width, *arguments)
    assert done == count, "the checkpoint has been asked whether its kinds are supported"
    return made


def vector(code: Library, one: Parameter, halves: bool) -> Array:
    """A norm's weights or a bias: float32 [n], rounded to bfloat16 where the model is."""
    made = numbers(code, one, halves)
    return (widened(made) if halves else made).reshape(-1)


def load(checkpoint: Checkpoint, code: Library, halves: bool) -> Weights:
    """The weights of a model.

    Args:
        checkpoint: its files.
        code: the compiled pass.
        halves: does the model compute with bfloat16 weights? Else float32.
    """
    made = checkpoint.description
    loader = _Loader(code, halves, {name: checkpoint.parameters[name] for name, _ in made.shapes()})
    table = checkpoint.parameters["model.embed_tokens.weight"]
    head = table if made.tied else checkpoint.parameters["lm_head.weight"]
    order = [name for name, shape in made.shapes() if len(shape) > 1 and name.startswith("model.layers.")]
    parts = [*(loader.parameters[name] for name in order), head]
    matrices = loader.matrices(parts)
    kept: list[Any] = list(matrices)
    named = {one.name: matrix.struct for one, matrix in zip(parts, matrices, strict=True)}
    layers = ffi.new("Layer[]", len(made.layers))
    for i, (layer, options) in enumerate(zip(layers, made.layers, strict=True)):
        loader.fill(layer, f"model.layers.{i}.", options, named, kept)
    norm = vector(code, checkpoint.parameters["model.norm.weight"], halves)
    sizes = {
        "hidden": made.hidden, "intermediate": made.intermediate, "heads": made.heads, "kv_heads": made.kv_heads,
        "head_dim": made.head_dim, "vocab": made.vocab, "eps": made.eps, "attention_scale": made.head_dim**-0.5,
        "head": matrices[-1].struct,
    }  # fmt: skip
    mixture = next((options.experts for options in made.layers if options.experts is not None), None)
    if mixture is not None:
        sizes |= {
            "experts": mixture.count, "top_k": mixture.top_k, "expert_intermediate": mixture.intermediate,
            "shared_intermediate": mixture.shared,
        }  # fmt: skip
    model = struct("Model", layers=len(made.layers), layer=layers, norm=address(norm), **sizes)
    kept += [layers, norm]
    plain = matrices[-1].data if made.tied and matrices[-1].kind == PLAIN else None
    if plain is None and table.tensor.kind.name == ("BF16" if halves else "F32"):
        plain = table.tensor.data
    return Weights(model, struct("Model", **sizes), Table(code, table, halves, plain), kept)


PROJECTIONS = (
    ("q", "self_attn.q_proj"), ("k", "self_attn.k_proj"), ("v", "self_attn.v_proj"), ("o", "self_attn.o_proj"),
    ("gate", "mlp.gate_proj"), ("up", "mlp.up_proj"), ("down", "mlp.down_proj"),
)  # fmt: skip
NORMS = (
    ("attention_norm", "input_layernorm.weight"), ("mlp_norm", "post_attention_layernorm.weight"),
    ("q_norm", "self_attn.q_norm.weight"), ("k_norm", "self_attn.k_norm.weight"),
)  # fmt: skip


@dataclass
class _Loader:
    code: Library
    halves: bool
    parameters: dict[str, Parameter]

    def fill(
        self, layer: Struct, at: str, options: LayerOptions, matrices: Mapping[str, Struct], kept: list[Any]
    ) -> None:
        """Write a layer's structure; what it points to is added to `kept`."""
        for field_, name in PROJECTIONS:
            if (matrix := matrices.get(f"{at}{name}.weight")) is not None:
                setattr(layer, field_, matrix)
        biases = [(f"{field_}_bias", f"{name}.bias") for field_, name in PROJECTIONS[:4]]
        for field_, name in (*NORMS, *biases):
            if (one := self.parameters.get(at + name)) is not None:
                kept.append(vector(self.code, one, self.halves))
                setattr(layer, field_, address(kept[-1]))
        layer.window, layer.rope = options.window, int(options.rope)
        if options.experts is not None:
            kept.append(self.mixture(f"{at}mlp.", options.experts, matrices, kept))
            layer.experts = kept[-1]

    def mixture(self, at: str, own: Experts, matrices: Mapping[str, Struct], kept: list[Any]) -> Struct:
        """`Experts`; what it points to is added to `kept`."""
        made = struct("Experts", router=matrices[f"{at}gate.weight"], normalised=int(own.normalised))
        for field_ in ("gate", "up", "down"):
            each = [matrices[f"{at}experts.{e}.{field_}_proj.weight"] for e in range(own.count)]
            kept.append(ffi.new("Matrix[]", each))
            setattr(made, field_, kept[-1])
            if own.shared:
                setattr(made, f"shared_{field_}", matrices[f"{at}shared_expert.{field_}_proj.weight"])
        if own.shared:
            made.shared_router = matrices[f"{at}shared_expert_gate.weight"]
        return made

    def matrices(self, parameters: Sequence[Parameter]) -> list[Matrix]:
        """Matrices in one stretch of memory. The file's own pages are given back as soon as they were read."""
        made = []
        for one, room in zip(parameters, stretch([self.size(one) for one in parameters]), strict=True):
            made.append(self.blocks(one, room) or self.plain(one, room))
            forget(one.tensor.data)
        return made

    def size(self, one: Parameter) -> int:
        """Bytes that a matrix takes."""
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
            one.tensor.kind.number, address(one.tensor.data), rows, width, address(place), address(room), threads()
        )
        made = Matrix(int(kind), room)
        return made if kind != PLAIN and self.agrees(made, one) else None

    def agrees(self, made: Matrix, one: Parameter) -> bool:
        """Are the weights that a pass reads those of the file, in a sample of rows?"""
        rows, width = one.tensor.shape
        fours = made.data.reshape(-(-rows // 4), -1)
        some = np.unique(np.linspace(0, max(0, rows // 4 - 1), SAMPLE).astype(np.int64))
        own = np.ascontiguousarray(fours[some])
        read = aligned((4 * len(some), width), np.uint16)
        sample = Matrix(made.kind, own).struct
        self.code.unpack_matrix(ffi.addressof(sample), len(read), width, address(read), threads())
        index = (4 * some[:, None] + np.arange(4)).reshape(-1)
        there = index < rows
        theirs = numbers(self.code, one, True, index[there])
        return np.array_equal(widened(read[there]), widened(theirs))  # zeros may differ in their signs

    def plain(self, one: Parameter, room: Array) -> Matrix:
        """Numbers, in twelve bits where the build reads that and they are the same."""
        rows, width = one.tensor.shape
        size = rows * width * (2 if self.halves else 4)
        if len(room) == size and not self.twelve(rows, width):
            numbers(self.code, one, self.halves, to=room)
            return Matrix(PLAIN, room)
        own = aligned(((rows + -rows % 4) * width * size // (rows * width),), np.uint8)
        own[size:] = 0
        numbers(self.code, one, self.halves, to=own[:size])
        if not self.each(one) and (made := self.packed(own, rows, width, room)) is not None:
            return made
        return Matrix(PLAIN, own)

    def packed(self, own: Array, rows: int, width: int, room: Array) -> Matrix | None:
        """bfloat16 numbers in twelve bits; None where they cannot be written so."""
        outputs = rows + -rows % 4
        capacity = outputs // 4 + outputs // 4 * (width // BLOCK_WEIGHTS) // OTHERS
        others = aligned((capacity * OTHER,), np.uint8)  # memory that is not written takes no place
        numbers_ = address(own), outputs, width
        if not self.code.pack_bf12(*numbers_, address(room), address(others), capacity, threads()):
            return None
        made, read = Matrix(BF12, room, others), aligned((outputs, width), np.uint16)
        own_ = made.struct
        self.code.unpack_matrix(ffi.addressof(own_), outputs, width, address(read), threads())
        return made if np.array_equal(read, own.view(np.uint16).reshape(read.shape)) else None
