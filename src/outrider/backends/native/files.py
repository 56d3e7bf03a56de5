"""Model files read in place: what a GGUF or safetensors file holds, and where in it. Nothing is converted or copied.

A file is mapped into memory, and its header is checked against the file's size before anything is allocated, so that a
truncated or altered file ends in an `InputError` of one sentence.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ...params import InputError
from .pages import forget

MAGIC = b"GGUF"
VERSIONS = (2, 3)
PART = re.compile(r"(.*)-\d{5}-of-(\d{5})(\.gguf)", re.IGNORECASE)  # of a file that was split
DIMENSIONS, NAME, DEPTH = 4, 64, 2  # most dimensions and name bytes of a tensor; most levels of nested arrays
HEADER = 100_000_000  # most bytes of a safetensors header, as the format's own reader has it


@dataclass(frozen=True)
class Kind:
    """How the elements of a tensor are stored: in blocks of `elements`, each `bytes` long."""

    name: str
    elements: int
    bytes: int
    number: int  # of the kind in a GGUF


# GGUF's number of a kind -> the kind. The numbers missing here were withdrawn from the format.
KINDS = {
    number: Kind(name, elements, size, number)
    for number, name, elements, size in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (28, "F64", 1, 8), (30, "BF16", 1, 2),
        (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8),
        (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34), (20, "IQ4_NL", 32, 18), (39, "MXFP4", 32, 17),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210), (23, "IQ4_XS", 256, 136),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (22, "IQ2_S", 256, 82), (18, "IQ3_XXS", 256, 98),
        (21, "IQ3_S", 256, 110), (19, "IQ1_S", 256, 50), (29, "IQ1_M", 256, 56),
        (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
    )
}  # fmt: skip
SAFETENSORS = {
    **{kind.name: kind for kind in KINDS.values() if kind.elements == 1},
    **{name: Kind(name, 1, 1, -1) for name in ("U8", "BOOL", "F8_E4M3", "F8_E5M2")},
}
DTYPES = {  # of what is not quantised
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U8": "<u1", "BOOL": "?",
}  # fmt: skip
# GGUF's number of a value's type -> its dtype; 7 is a boolean, 8 a string and 9 an array
ITEMS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
STRING, ARRAY, BOOLEAN = 8, 9, 7


@dataclass(frozen=True)
class Tensor:
    """A tensor as it lies in a mapped file, or in memory that others may write to: `data` is a view, uint8 [bytes]."""

    name: str
    kind: Kind
    shape: tuple[int, ...]  # rows first; the last dimension is contiguous
    data: np.ndarray
    mapped: bool = False  # does it lie in a file?

    def forget(self) -> None:
        """Give back the memory of its part of a mapped file, which is read again where it is needed."""
        if self.mapped:
            forget(self.data)

    @property
    def origin(self) -> np.ndarray:
        """The bytes that it is made of."""
        return self.data

    @property
    def rows(self) -> np.ndarray:
        """The same bytes, one row of the last dimension each: uint8 [rows, bytes of a row]."""
        return self.data.reshape(math.prod(self.shape[:-1]), -1)

    def array(self) -> np.ndarray:
        """A copy as numbers; bfloat16 as the uint16 of its bits. Raises InputError for a tensor that is quantised."""
        if self.kind.name not in DTYPES:
            raise InputError(f"{self.name} is kept as {self.kind.name}, not as plain numbers")
        made: np.ndarray = self.data.copy().view(DTYPES[self.kind.name]).reshape(self.shape)
        return made


@dataclass(frozen=True)
class ModelFile:
    """A model's file, mapped: its metadata and its tensors. Views of its data keep the mapping alive."""

    path: Path
    metadata: Mapping[str, Any]  # a GGUF's values; a safetensors file's `__metadata__`
    tensors: Mapping[str, Tensor]


def open_gguf(path: str | Path) -> ModelFile:
    """Read the header of a .gguf file and map its tensors. A file that has not changed is not read again.

    Args:
        path: a file of version 2 or 3, little-endian; or one of the parts of such a file, which lie beside it.

    Returns:
        Metadata (numbers, strings and booleans; arrays of numbers as numpy arrays, of strings as lists) and tensors.

    Raises:
        InputError: the file cannot be read, is not GGUF, or its header does not fit its size.
    """
    path = Path(path)
    try:
        about = path.stat()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    key = path.resolve(), about.st_size, about.st_mtime_ns
    if (file := _open.get(key)) is None:
        file = _open[key] = _merged(_gguf(path))
    _last[:] = [file]
    return file


# Files that somebody reads, and the one that was asked for last, which will be read soon.
_open: WeakValueDictionary[tuple[Path, int, int], ModelFile] = WeakValueDictionary()
_last: list[ModelFile] = []


def _gguf(path: Path) -> ModelFile:
    data = _mapped(path)
    if data[: len(MAGIC)] != MAGIC:
        raise InputError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
    try:
        return _Header(path, data).parse()
    except _Damaged as damaged:
        raise InputError(f"{path} is damaged or cut off ({damaged}); fetch it again") from None


def _merged(part: ModelFile) -> ModelFile:
    """A split file, from any of its parts: the metadata of the first, the tensors of all."""
    count = part.metadata.get("split.count", 1)
    if count == 1:
        return part
    named = PART.fullmatch(part.path.name)
    if named is None or int(named[2]) != count:
        raise InputError(f"{part.path} is one of {count} parts, named as in model-00001-of-{count:05}.gguf; name it so")
    tensors: dict[str, Tensor] = {}
    metadata: Mapping[str, Any] = {}
    for i in range(1, count + 1):
        path = part.path.with_name(f"{named[1]}-{i:05}-of-{named[2]}{named[3]}")
        if not path.exists():
            raise InputError(f"{part.path} is one of {count} parts, and {path.name} is not beside it; fetch it too")
        other = part if path == part.path else _gguf(path)
        metadata = metadata or other.metadata
        if both := sorted(tensors.keys() & other.tensors):
            raise InputError(f"{path} holds {both[0]}, as another part does; fetch the parts again")
        tensors |= other.tensors
    return ModelFile(part.path, metadata, tensors)


def open_safetensors(path: str | Path) -> ModelFile:
    """Read the header of a .safetensors file and map its tensors.

    Raises:
        InputError: the file cannot be read, or its header is damaged or does not fit its size.
    """
    path = Path(path)
    data = _mapped(path)
    try:
        if len(data) < 8:
            raise _Damaged("it has no header")
        (size,) = struct.unpack_from("<Q", data)
        if size > min(HEADER, len(data) - 8):
            raise _Damaged("its header is longer than the file")
        try:
            header = json.loads(data[8 : 8 + size])
        except (ValueError, RecursionError):
            raise _Damaged("its header is not JSON") from None
        if not isinstance(header, dict):
            raise _Damaged("its header is not a JSON object")
        metadata = header.pop("__metadata__", {})
        content = np.frombuffer(data, np.uint8)[8 + size :]
        return ModelFile(path, metadata, {name: _stored(name, about, content) for name, about in header.items()})
    except _Damaged as damaged:
        raise InputError(f"{path} is damaged or cut off ({damaged}); fetch it again") from None


class _Damaged(Exception):
    """What is wrong with a file."""


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise InputError(f"{path} is empty; fetch it again") from None
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"{path} cannot be mapped") from None
        raise InputError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None


def _stored(name: str, about: Any, content: np.ndarray) -> Tensor:
    """One entry of a safetensors header."""
    try:
        kind, shape, (begin, end) = SAFETENSORS[about["dtype"]], about["shape"], about["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError):
        raise _Damaged(f"the entry of tensor {name[:NAME]!r} cannot be understood") from None
    if not all(type(n) is int and n >= 0 for n in numbers) or not begin <= end <= len(content):
        raise _Damaged(f"tensor {name[:NAME]!r} lies outside the file")
    if math.prod(shape) * kind.bytes != end - begin:
        raise _Damaged(f"tensor {name[:NAME]!r} does not have the size of its shape")
    return Tensor(name, kind, tuple(shape), content[begin:end], mapped=True)


class _Header:
    """A cursor over a GGUF header; every read is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, len(MAGIC)

    def parse(self) -> ModelFile:
        version = self.number("<I")
        if version not in VERSIONS:
            raise _Damaged(f"it says that its version is {version}, and only {VERSIONS} are known")
        tensors, values = self.count("tensors", 24), self.count("values", 12)
        metadata: dict[str, Any] = {}
        for _ in range(values):
            key = self.string()
            if key in metadata:
                raise _Damaged(f"{key[:NAME]!r} stands in it twice")
            metadata[key] = self.value(self.number("<I"))
        headers = [self.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise _Damaged(f"its alignment is {alignment!r}")
        content = np.frombuffer(self.data, np.uint8)[-(-self.at // alignment) * alignment :]
        placed: dict[str, Tensor] = {}
        for name, shape, kind, offset in headers:
            size = math.prod(shape) // kind.elements * kind.bytes
            if offset % alignment or offset + size > len(content):
                raise _Damaged(f"tensor {name!r} lies outside the file")
            if name in placed:
                raise _Damaged(f"tensor {name!r} stands in it twice")
            placed[name] = Tensor(name, kind, shape, content[offset : offset + size], mapped=True)
        return ModelFile(self.path, metadata, placed)

    def take(self, size: int) -> int:
        """Where the next `size` bytes lie."""
        at = self.at
        if size > len(self.data) - at:
            raise _Damaged("its header ends too early")
        self.at = at + size
        return at

    def number(self, code: str) -> Any:
        return struct.unpack_from(code, self.data, self.take(struct.calcsize(code)))[0]

    def count(self, what: str, least: int) -> int:
        """A number of things, each of which takes `least` bytes or more."""
        count = self.number("<Q")
        if count * least > len(self.data) - self.at:
            raise _Damaged(f"it says that it has {count} {what}, more than fit in it")
        return count

    def string(self) -> str:
        size = self.count("characters", 1)
        at = self.take(size)
        return self.data[at : at + size].decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        value = self.items(kind, 1)[0].item()
        return bool(value) if kind == BOOLEAN else value

    def items(self, kind: int, count: int) -> np.ndarray:
        """The next `count` numbers, as a view of the file."""
        if kind not in ITEMS:
            raise _Damaged(f"a value has the unknown type {kind}")
        item = np.dtype(ITEMS[kind])
        return np.frombuffer(self.data, item, count, self.take(count * item.itemsize))

    def array(self, depth: int = 1) -> Any:
        kind = self.number("<I")
        if kind == STRING:
            return self.strings()
        if kind == ARRAY:
            if depth >= DEPTH:
                raise _Damaged("its arrays are nested too deeply")
            return [self.array(depth + 1) for _ in range(self.count("arrays", 12))]
        values = self.items(kind, self.count("elements", 1))
        return values != 0 if kind == BOOLEAN else values

    def strings(self) -> list[str]:
        """An array of strings: hundreds of thousands in a vocabulary, so the loop is as tight as it gets."""
        count, data, at, end = self.count("strings", 8), self.data, self.at, len(self.data)
        length, strings = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            if at + 8 > end:
                raise _Damaged("its header ends too early")
            stop = at + 8 + length(data, at)[0]
            if stop > end:
                raise _Damaged("its header ends too early")
            strings.append(data[at + 8 : stop].decode("utf-8", "surrogateescape"))
            at = stop
        self.at = at
        return strings

    def tensor(self) -> tuple[str, tuple[int, ...], Kind, int]:
        name = self.string()
        if len(name.encode("utf-8", "surrogateescape")) > NAME:
            raise _Damaged("a tensor's name is too long")
        dimensions = self.number("<I")
        if not 0 < dimensions <= DIMENSIONS:
            raise _Damaged(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
        number, offset = self.number("<I"), self.number("<Q")
        if number not in KINDS:
            raise _Damaged(f"tensor {name!r} has the unknown type {number}")
        kind = KINDS[number]
        if shape[-1] % kind.elements or 0 in shape:
            raise _Damaged(f"tensor {name!r} of type {kind.name} cannot have the shape {list(shape)}")
        return name, shape, kind, offset
