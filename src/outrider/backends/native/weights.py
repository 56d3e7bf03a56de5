"""A model's weights as passes read them, made of its files without a copy of the model in between, or of the memory
of a loaded module, whose matrices are read where they lie.

Matrices whose blocks this build reads keep their blocks, in the kernels' order; others become bfloat16 (in twelve bits
where the build has that) or float32. The weights are the numbers that the file's own reader makes, rounded to bfloat16
where the model computes in it. Of every matrix in blocks a sample of rows is compared with these at load, bit for bit.
A matrix that differs, or has a scale that its blocks cannot keep, is read as numbers.

With `weights` native (auto) or int8, matrices are multiplied as integers (`c/gemm/int8.h`) where they can be: by the
quants of their own blocks, or rounded to int8.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ...core.types import Array
from ...machine import threads
from ...params import INTEGERS, InputError
from .abi import BF12, BLOCK_WEIGHTS, INTEGER, PLAIN, Library, Struct, address, ffi, struct
from .checkpoint import Checkpoint
from .description import ALIKE, ALL_HEADS, EACH_HEAD, MATRICES, MLP, NORMS, Description, Place
from .files import KINDS, SAFETENSORS, Tensor
from .model import Parameter, picked
from .padding import Padded, padded, padded_size, padded_width
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
    copies: list[Callable[[], Any]] = field(default_factory=list)  # what copies a loaded module's numbers again

    def refresh(self) -> None:
        """Copy what is not read where it lies in a loaded module: vectors, and changed matrices that are transposed,
        padded, or sorted by rows."""
        for copy in self.copies:
            copy()

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
    scale: float = 0.0  # by which embeddings are multiplied; 0: not

    @property
    def address(self) -> Any:
        """Of the table as a pass reads it; NULL where rows are made one by one (`rows`)."""
        return address(self.plain)

    @classmethod
    def of(cls, values: Array, code: Library) -> Table:
        """That of an array [n, h] of float32, or of the uint16 that holds the bits of bfloat16."""
        halves = values.dtype == np.uint16
        own = np.ascontiguousarray(values)
        tensor = Tensor(
            "embeddings", SAFETENSORS["BF16" if halves else "F32"], own.shape, own.view(np.uint8).reshape(-1)
        )
        return cls(code, Parameter(tensor.name, tensor, None), halves)

    @property
    def shape(self) -> tuple[int, ...]:
        """Tokens and width."""
        return self.parameter.tensor.shape

    @property
    def lookup(self) -> dict[str, Any]:
        """Fields of `Draft`, by which rows are decoded where the table lies."""
        tensor = self.parameter.tensor
        assert self.parameter.order is None, "tables of embeddings keep their order"
        return {
            "embeddings": address(tensor.data), "embedding_rows": tensor.shape[0], "embedding_bf16": int(self.halves),
            "embedding_kind": tensor.kind.number, "embedding_scale": self.scale,
        }  # fmt: skip

    def rows(self, tokens: Array) -> Array:
        """Embeddings of tokens: float32 [n, h], of weights as the model has them, scaled."""
        made = numbers(self.code, self.parameter, self.halves, tokens)
        made = widened(made) if self.halves else made
        return made * np.float32(self.scale) if self.scale else made


def where_changed(source: Array, copy: Callable[[], Any]) -> Callable[[], None]:
    """Copies again where the bytes of the source, uint8, are not those of the call before, by sums of its parts."""
    words = next(source.view(kind) for kind in (np.uint64, np.uint32, np.uint16) if source.nbytes % kind().nbytes == 0)
    parts = np.array_split(words, max(1, min(64, len(words) >> 12)))
    before = [int(part.sum(dtype=np.uint64)) for part in parts]

    def again() -> None:
        now = [int(part.sum(dtype=np.uint64)) for part in parts]
        if now != before:
            copy()
            before[:] = now

    return again


def widened(values: Array) -> Array:
    """The float32 of bfloat16 numbers, as the uint16 of their bits."""
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def rounded(values: Array) -> Array:
    """float32 numbers rounded to bfloat16, to nearest even, as the uint16 of their bits. NaN stays NaN."""
    own = np.ascontiguousarray(values, np.float32)
    bits = own.view(np.uint32)
    made = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    if (odd := np.isnan(own)).any():  # the sum may have been carried into the sign
        made[odd] = bits[odd] >> np.uint32(16) | np.uint32(0x40)
    return made.astype(np.uint16)


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
    if one.transposed or one.shift:
        return _changed(code, one, halves, rows, to)
    tensor = one.tensor
    width = tensor.shape[1] if len(tensor.shape) > 1 else 1
    if width == 1 and tensor.kind.elements > 1:
        raise InputError(f"the vector {one.name} is stored in blocks ({tensor.kind.name}); fetch the model again")
    order = one.order if rows is None else rows if one.order is None else one.order[rows]
    place = None if order is None else np.ascontiguousarray(order, np.int64)
    count, kind = tensor.shape[0] if place is None else len(place), np.uint16 if halves else np.float32
    made = aligned((count, width), kind) if to is None else to.view(kind).reshape(count, width)
    workers = workers or (1 if count * width < 1 << 16 else threads())
    data, arguments = tensor.data, (address(place), address(made), int(halves), workers)
    done = code.dequantise(tensor.kind.number, address(data), count, width, *arguments)
    assert done == count, "the checkpoint has checked that its kinds are supported"
    return made


def _changed(code: Library, one: Parameter, halves: bool, rows: Array | None, to: Array | None) -> Array:
    """`numbers` of a parameter that is stored transposed, or shifted."""
    if one.transposed:
        made = numbers(code, Parameter(one.name, one.tensor, None), False).T
        made = made if one.order is None else made[one.order]
        made = made if rows is None else made[rows]
    else:
        made = numbers(code, replace(one, shift=0.0), False, rows) + np.float32(one.shift)
    values = rounded(made) if halves else np.ascontiguousarray(made, np.float32)
    if to is None:
        return values
    into = to.view(values.dtype).reshape(values.shape)
    into[:] = values
    return into


def single(code: Library, one: Parameter, places: Array) -> Array:
    """Single weights of a parameter, rounded to bfloat16: float32 [n]. Only the blocks that hold them are opened.

    Args:
        code: the compiled pass, of any precision.
        one: the parameter.
        places: int64 [n], where they lie in it as the model has it, row by row.
    """
    tensor, width = one.tensor, one.shape[1] if len(one.shape) > 1 else 1
    rows, columns = places // width, places % width
    rows = rows if one.order is None else one.order[rows]
    places = columns * tensor.shape[-1] + rows if one.transposed else rows * width + columns
    size = tensor.kind.elements
    blocks = np.ascontiguousarray(places // size)
    made = np.empty((len(blocks), size), np.float32)
    code.dequantise(tensor.kind.number, address(tensor.data), len(blocks), size, address(blocks), address(made), 0, 1)
    values = made[np.arange(len(blocks)), places % size]
    return widened(rounded(values + np.float32(one.shift) if one.shift else values))


def vector(code: Library, one: Parameter, halves: bool) -> Array:
    """A norm's weights or a bias: float32 [n], rounded to bfloat16 where the model is."""
    made = numbers(code, replace(one, order=None), halves)
    made = (widened(made) if halves else made).reshape(-1)
    return made if one.order is None else made[one.order]


def load(checkpoint: Checkpoint, code: Library, halves: bool, way: str = "full", names: Array | None = None) -> Weights:
    """The weights of a model.

    Args:
        checkpoint: its files.
        code: the compiled pass.
        halves: does the model compute with bfloat16 weights? Else float32.
        way: "full"; "native" or "int8": products of integers, with the quants of the file's own blocks, or with weights
            rounded to int8. Matrices that have no such form stay full, which is logged. "auto": as native, where it can
            be.
        names: int64 [v], the tokens that have logits, in this order; None: all.

    Raises:
        InputError: no matrix has the form that was asked for.
    """
    made = checkpoint.description
    loader = _Loader(code, halves, made, checkpoint.parameters, way)
    table = checkpoint.parameters[f"{made.names.embeddings}.weight"]
    head = picked(table if made.tied else checkpoint.parameters[f"{made.names.head}.weight"], names)
    layers = ffi.new("Layer[]", len(made.layers))
    parts = [(i, part) for i in range(len(layers)) for part in MATRICES if made.place(i, part) is not None]
    mixtures = loader.mixtures()
    sources = [*(loader.parameter(*part) for part in parts), *mixtures, head]
    matrices = loader.matrices(sources)
    if way != "full":
        loader.agree(parts, sources, matrices)
    if way in INTEGERS:
        report(checkpoint, way, sources, matrices)
    named = {one.name: matrix.struct for one, matrix in zip(mixtures, matrices[len(parts) :], strict=False)}
    for (i, part), matrix in zip(parts, matrices, strict=False):
        setattr(layers[i], part, matrix.struct)
    for i in range(len(layers)):
        loader.fill(layers[i], i)
        loader.mixture(layers[i], i, named)
    model, end = struct("Model"), struct("Model")
    for one in (model, end):
        loader.sizes(one, names)
        one.head = matrices[-1].struct
    model.layers, model.layer = len(layers), layers
    loader.norm(model.norm, f"{made.names.norm}.weight", f"{made.names.norm}.bias" if "norm" in made.biases else "")
    if made.names.positions:
        model.position_embeddings = loader.vector(f"{made.names.positions}.weight")
        model.position_rows = made.context
    plain = matrices[-1].data if made.tied and names is None and matrices[-1].kind == PLAIN else None
    if plain is None and table.tensor.kind.name == ("BF16" if halves else "F32") and table.plain:
        plain = table.tensor.data
    kept = [*matrices, *loader.kept, layers]
    return Weights(model, end, Table(code, table, halves, plain, model.embedding_scale), kept, loader.copies)


def report(checkpoint: Checkpoint, way: str, sources: Sequence[Parameter], matrices: Sequence[Matrix]) -> None:
    """Say which matrices have no integer form; refuse a model that has none."""
    full = [one for one, made in zip(sources, matrices, strict=True) if made.kind < INTEGER]
    kinds = " and ".join(sorted({one.tensor.kind.name for one in full}))
    if len(full) == len(matrices):
        choose = "full" if way == "int8" else "int8 or full"
        raise InputError(f"the {kinds} matrices of {checkpoint.place} have no form for {way} weights; choose {choose}")
    if full:
        logger.warning(
            "%d of the %d matrices of %s (%s) have no form for %s weights and stay full",
            len(full), len(matrices), checkpoint.place.name, kinds, way,
        )  # fmt: skip


SPANS = {ALIKE: "NORM_HEADS_ALIKE", EACH_HEAD: "NORM_EACH_HEAD", ALL_HEADS: "NORM_ALL_HEADS"}


@dataclass
class _Loader:
    code: Library
    halves: bool
    made: Description
    parameters: Mapping[str, Parameter]
    way: str = "full"
    kept: list[Any] = field(default_factory=list)  # what structures point to
    copies: list[Callable[[], Any]] = field(default_factory=list)

    def parameter(self, layer: int, part: str) -> Parameter:
        """A matrix of a layer, as a pass reads it."""
        place = self.made.place(layer, part)
        assert place is not None
        one = self.parameters[place.names[0]]
        one = picked(replace(one, transposed=one.transposed ^ self.made.names.transposed), place.rows)
        return self.padded(one, self.made.padded_rows(part), self.made.padded_columns(part))

    def padded(self, one: Parameter, rows: int, columns: int) -> Parameter:
        """A matrix with zeros after every so many rows and columns (0: nowhere). In blocks it stays where only
        rows are added, else it becomes numbers."""
        shape = padded_size(one.shape[0], rows), padded_size(one.shape[1], columns)
        if shape == one.shape:
            return one

        def rows_as_stored() -> Array:
            own = one.tensor.rows if one.order is None else one.tensor.rows[one.order]
            return padded(own, rows).reshape(-1)

        def as_numbers() -> Array:
            made = padded(padded(numbers(self.code, one, self.halves), rows), columns, 1)
            return made.reshape(-1).view(np.uint8)

        stored = columns == 0 and not one.transposed and not one.shift
        kind = one.tensor.kind if stored else SAFETENSORS["BF16" if self.halves else "F32"]
        return Parameter(one.name, Padded(one.tensor, kind, shape, rows_as_stored if stored else as_numbers))

    def sizes(self, model: Struct, names: Array | None) -> None:
        """Sizes and options of all layers, and of a head for these tokens."""
        made = self.made
        for name in ("hidden", "heads", "kv_heads", "eps", "rotary_dim", "residual_scale", "logit_scale",
                     "score_cap", "logit_cap"):  # fmt: skip
            setattr(model, name, getattr(made, name))
        model.head_dim, model.unpadded_head_dim = padded_width(made.head_dim), made.head_dim
        model.intermediate = padded_width(made.intermediate)
        model.attention_scale = made.attention_scale or made.head_dim**-0.5
        scale = np.array([made.embedding_scale], np.float32)
        model.embedding_scale = float(widened(rounded(scale))[0] if made.rounds_scale and self.halves else scale[0])
        model.activation = ffi.integer_const(made.activation)
        model.vocab = made.vocab if names is None else len(names)
        if "head" in made.biases:
            model.head_bias = self.vector(Place((f"{made.names.head}.bias",), names))
        if (experts := made.experts) is not None:
            model.experts, model.top_k = experts.count, experts.top_k
            model.expert_intermediate = padded_width(experts.intermediate)
            model.shared_intermediate = padded_width(experts.shared)

    def fill(self, layer: Struct, i: int) -> None:
        """Write a layer's norms, biases and options."""
        made, options = self.made, self.made.layers[i]
        for part in NORMS:
            if (place := made.place(i, part)) is not None:
                self.norm(getattr(layer, part), place, made.place(i, part, "bias"), made.padded_rows(part))
        for part in MATRICES:
            if (place := made.place(i, part, "bias")) is not None:
                setattr(layer, f"{part}_bias", self.vector(place, width=made.padded_rows(part)))
        if "sinks" in made.names.layer:
            layer.sinks = self.vector(f"{made.names.layers}{i}.{made.names.layer['sinks']}")
        layer.window, layer.rope, layer.parallel = options.window, options.rope, int(made.parallel)
        layer.qk_norm_span = ffi.integer_const(SPANS[made.qk_norm])

    def mixtures(self) -> list[Parameter]:
        """The matrices of all experts, and of what chooses them."""
        return [
            self.padded(self.parameters[name], *options.experts.padded(name))
            for i, options in enumerate(self.made.layers) if options.experts is not None
            for name, shape in options.experts.shapes(self.made.mixture(i), self.made.hidden) if len(shape) > 1
        ]  # fmt: skip

    def mixture(self, layer: Struct, i: int, matrices: Mapping[str, Struct]) -> None:
        """Write a layer's `Experts`, where it has them."""
        own, at = self.made.layers[i].experts, self.made.mixture(i)
        if own is None:
            return
        made = struct(
            "Experts", router=matrices[f"{at}{own.router}.weight"], normalised=int(own.normalised), alpha=own.alpha,
            limit=own.limit,
        )  # fmt: skip
        if own.biases:
            made.router_bias = self.vector(f"{at}{own.router}.bias")
        for part in MLP:
            names = [f"{at}experts.{e}.{part}_proj" for e in range(own.count)]
            self.kept.append(ffi.new("Matrix[]", [matrices[f"{name}.weight"] for name in names]))
            setattr(made, part, self.kept[-1])
            if own.biases:
                place, width = Place(tuple(f"{name}.bias" for name in names)), own.padded(names[0] + ".bias")[0]
                setattr(made, f"{part}_bias", self.vector(place, width=width))
            if own.shared:
                setattr(made, f"shared_{part}", matrices[f"{at}shared_expert.{part}_proj.weight"])
        if own.shared:
            made.shared_router = matrices[f"{at}shared_expert_gate.weight"]
        self.kept.append(made)
        layer.experts = made

    def norm(self, norm: Struct, weight: Place | str, bias: Place | str | None, width: int = 0) -> None:
        """Write a norm's structure; `width`: see `vector`."""
        norm.weight = self.vector(weight, self.made.norm_offset, width)
        if bias:
            norm.bias = self.vector(bias, width=width)
        norm.kind = ffi.integer_const("LAYER_NORM" if self.made.layer_norm else "RMS_NORM")

    def vector(self, place: Place | str, offset: float = 0.0, width: int = 0) -> Any:
        """The address of the numbers of a place, or of all of a parameter, each with this offset, and with zeros after
        every `width` of them (0: nowhere)."""
        place = Place((place,)) if isinstance(place, str) else place
        made = padded(self.values(place, offset), width)
        self.kept.append(made)
        if not self.parameters[place.names[0]].tensor.mapped:
            self.copies.append(lambda: np.copyto(made, padded(self.values(place, offset), width)))
        return address(made)

    def values(self, place: Place, offset: float) -> Array:
        """The numbers of a place, float32 [n]."""
        made = np.concatenate([vector(self.code, self.parameters[name], self.halves) for name in place.names])
        made = made if place.rows is None else made[place.rows]
        with np.errstate(invalid="ignore"):  # NaN, which is refused after a first pass
            return np.ascontiguousarray(made + np.float32(offset))

    def matrices(self, parameters: Sequence[Parameter]) -> list[Matrix]:
        """Matrices in one stretch of memory. A thread reads a matrix alone, the largest first: most are small, and
        threads that share one mostly wait for each other."""
        buffers = stretch([self.size(one) for one in parameters])
        order = sorted(range(len(buffers)), key=lambda i: -len(buffers[i]))
        with ThreadPoolExecutor(threads()) as pool:
            made = dict(zip(order, pool.map(lambda i: self.matrix(parameters[i], buffers[i]), order), strict=True))
        return [made[i] for i in range(len(buffers))]

    def matrix(self, one: Parameter, buffer: Array) -> Matrix:
        """A matrix, written into `buffer`. The file's own pages are released as soon as they are read."""
        if self.in_place(one):
            return Matrix(PLAIN, one.tensor.data)
        if not one.tensor.mapped:
            copy = partial(numbers, self.code, one, self.halves, to=buffer)
            self.copies.append(where_changed(one.tensor.origin, copy))
            copy()
            return Matrix(PLAIN, buffer)
        made = self.integers(one, buffer) if self.int8_size(one) else self.full(one, buffer)
        one.tensor.forget()
        return made

    def full(self, one: Parameter, buffer: Array | None = None) -> Matrix:
        """A matrix with all its bits, in `buffer` or in memory of its own."""
        if buffer is None:
            (buffer,) = stretch([self.full_size(one)])
        return self.blocks(one, buffer) or self.plain(one, buffer)

    def agree(self, parts: Sequence[tuple[int, str]], sources: Sequence[Parameter], matrices: list[Matrix]) -> None:
        """Make both halves of a gated layer full where one is, for they read the same activations."""
        names = [f"{layer} {part}" for layer, part in parts] + [one.name for one in sources[len(parts) :]]
        index = {name: n for n, name in enumerate(names)}
        for name, n in index.items():
            other = index.get(name.replace("gate", "up"), n)
            if (matrices[n].kind >= INTEGER) != (matrices[other].kind >= INTEGER):
                for i in (n, other):
                    matrices[i] = self.full(sources[i])

    def in_place(self, one: Parameter) -> bool:
        """Is it read where it lies, in memory of a loaded module?"""
        if one.tensor.mapped or isinstance(one.tensor, Padded):
            return False
        return one.plain and one.tensor.kind.name == ("BF16" if self.halves else "F32")

    def size(self, one: Parameter) -> int:
        """Bytes that a matrix takes in the stretch."""
        if self.in_place(one):
            return 0
        if not one.tensor.mapped:
            return math.prod(one.shape) * (2 if self.halves else 4)
        return self.int8_size(one) or self.full_size(one)

    def int8_size(self, one: Parameter) -> int:
        """Bytes of a matrix for integer products; 0: it has no such form, or is not wanted in it."""
        if self.way == "full" or one.transposed:
            return 0
        return int(self.code.int8_bytes(Q8_0 if self.way == "int8" else one.tensor.kind.number, *one.shape))

    def integers(self, one: Parameter, buffer: Array) -> Matrix:
        """A matrix for integer products; full where a scale does not allow it."""
        rows, width = one.shape
        place = None if one.order is None else np.ascontiguousarray(one.order, np.int64)
        data = one.tensor.data
        own = one.tensor.kind.number, address(data), rows, width, address(place)
        made = Matrix(int(self.code.pack_int8(*own, int(self.way == "int8"), address(buffer), 1)), buffer)
        fits = made.kind != PLAIN and (self.way == "int8" or self.integers_agree(made, one))
        return made if fits else self.full(one)

    def integers_agree(self, made: Matrix, one: Parameter) -> bool:
        """Are the weights of the first and the last panel those of the file?"""
        rows, width = one.shape
        panels = made.data.reshape(-(-rows // PANEL), -1)
        for panel in {0, len(panels) - 1}:
            index = np.arange(PANEL * panel, min(rows, PANEL * (panel + 1)))
            own, read = panels[panel], aligned((len(index), width))
            sample = Matrix(made.kind, own).struct
            self.code.unpack_int8(ffi.addressof(sample), *read.shape, address(read))
            if not np.array_equal(read, numbers(self.code, one, False, index, workers=1)):
                return False
        return True

    def full_size(self, one: Parameter) -> int:
        """Bytes of a matrix that is not multiplied as integers."""
        rows, width = one.shape
        if each := self.each(one):
            return each * (rows + -rows % 4)
        return self.twelve(rows, width) or rows * width * (2 if self.halves else 4)

    def each(self, one: Parameter) -> int:
        """Bytes of a row in blocks; 0: they are not read so."""
        if not self.code.block_lanes or not self.halves or one.transposed:
            return 0
        return int(self.code.repacked_bytes(one.tensor.kind.number, one.shape[1]))

    def twelve(self, rows: int, width: int) -> int:
        """Bytes of a matrix in twelve bits a number; 0: this build does not read that, or not at this width."""
        fits = self.halves and self.code.block_lanes == 8 and width % BLOCK_WEIGHTS == 0
        return -(-rows // 4) * 4 * (width // BLOCK_WEIGHTS * 48 + 16) if fits else 0

    def blocks(self, one: Parameter, buffer: Array) -> Matrix | None:
        """The file's blocks; None where they are not read so."""
        if not self.each(one):
            return None
        rows, width = one.shape
        place = None if one.order is None else np.ascontiguousarray(one.order, np.int64)
        data = one.tensor.data
        kind = self.code.repack(one.tensor.kind.number, address(data), rows, width, address(place), address(buffer), 1)
        made = Matrix(int(kind), buffer)
        return made if kind != PLAIN and self.agrees(made, one) else None

    def agrees(self, made: Matrix, one: Parameter) -> bool:
        """Are the weights that a pass reads those of the file, in a sample of rows?"""
        rows, width = one.shape
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

    def plain(self, one: Parameter, buffer: Array) -> Matrix:
        """Numbers, in twelve bits where the build reads that and they are the same."""
        rows, width = one.shape
        size = rows * width * (2 if self.halves else 4)
        if len(buffer) == size and not self.twelve(rows, width):
            numbers(self.code, one, self.halves, to=buffer, workers=1)
            return Matrix(PLAIN, buffer)
        own = aligned(((rows + -rows % 4) * width * size // (rows * width),), np.uint8)
        own[size:] = 0
        numbers(self.code, one, self.halves, to=own[:size], workers=1)
        if not self.each(one) and (made := self.packed(own, rows, width, buffer)) is not None:
            return made
        return Matrix(PLAIN, own)

    def packed(self, own: Array, rows: int, width: int, buffer: Array) -> Matrix | None:
        """bfloat16 numbers in twelve bits; None where they cannot be written so."""
        outputs = rows + -rows % 4
        capacity = outputs // 4 + outputs // 4 * (width // BLOCK_WEIGHTS) // OTHERS
        others = aligned((capacity * OTHER,), np.uint8)  # memory that is not written takes no place
        numbers_ = address(own), outputs, width
        if not self.code.pack_bf12(*numbers_, address(buffer), address(others), capacity, 1):
            return None
        made, read = Matrix(BF12, buffer, others), aligned((outputs, width), np.uint16)
        own_ = made.struct
        self.code.unpack_matrix(ffi.addressof(own_), outputs, width, address(read), 1)
        return made if np.array_equal(read, own.view(np.uint16).reshape(read.shape)) else None
