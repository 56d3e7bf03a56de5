"""The structures of pass.c, and the memory that a pass works in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .sanitized import sanitizer

APART = sanitizer() != ""  # is each slice of a workspace an allocation of its own?
Hold = Callable[[Tensor], "MatrixPart"]  # a weight as the pass reads it, kept as long as the pass
address, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class MatrixPart(ctypes.Structure):
    """`Matrix`."""

    _fields_ = [("data", address), ("kind", whole)]


class LayerPart(ctypes.Structure):
    """`Layer`."""

    _fields_ = [
        *((name, MatrixPart) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, address) for name in ("norm", "norm_inner", "norm_q", "norm_k")),
        *((name, address) for name in ("bias_q", "bias_k", "bias_v", "bias_o")),
        ("window", whole),
        ("turned", whole),
    ]


class ModelPart(ctypes.Structure):
    """`Model`."""

    _fields_ = [
        *((name, whole) for name in ("hidden", "inner", "heads", "groups", "width", "layers", "vocabulary")),
        ("epsilon", real),
        ("scale", real),
        ("layer", ctypes.POINTER(LayerPart)),
        ("norm", address),
        ("head", MatrixPart),
        ("join", MatrixPart),
        ("bias_join", address),
        ("joined", whole),
        ("norm_given", address),
    ]


class PassPart(ctypes.Structure):
    """`Pass`."""

    _fields_ = [
        *((name, whole) for name in ("rows", "nodes", "since", "all", "capacity", "shared")),
        *((name, address) for name in ("lengths", "spots", "sizes", "ancestors", "cache", "turns")),
        ("positions", whole),
        *((name, address) for name in ("given", "tokens", "embeddings")),
        ("entries", whole),
        *((name, address) for name in ("states", "normed", "query", "seen")),
        *((name, address) for name in ("inside", "made", "paths", "live", "starts")),
        ("taps", whole),
        ("tap", address),
        *((name, address) for name in ("tapped", "features")),
        ("asked", whole),
        ("ask", address),
        ("logits", address),
        ("threads", whole),
        ("beside", whole),
        *((name, address) for name in ("from_", "to", "scratch")),
        ("scratch_each", whole),
    ]


class DraftPart(ctypes.Structure):
    """`Draft`."""

    _fields_ = [
        ("waits", whole),
        *((name, address) for name in ("waiting", "features")),
        ("fuse", MatrixPart),
        *((name, whole) for name in ("taps", "wide")),
        *((name, address) for name in ("behind", "lengths")),
        *((name, whole) for name in ("depth", "width", "most", "pool")),
        *((name, real) for name in ("scale", "floor", "reach")),
        ("nodes", whole),
        ("sizes", whole),
        ("summed", whole),
        ("seconds", address),
        ("trust", ctypes.c_double),
        ("embeddings", address),
        ("entries", whole),
        *((name, address) for name in ("names", "temperature", "seeds", "starts", "knots", "slopes", "root", "last")),
        *(
            (name, address)
            for name in ("raced", "top_values", "top_columns", "all", "sorted", "tops", "order", "renamed")
        ),
        *((name, address) for name in ("gains", "ends", "last_features", "last_behind", "last_waiting")),
        *((name, address) for name in ("vectors", "spots", "ancestors")),
        ("candidates", whole),
        *((name, address) for name in ("place", "token", "below", "level", "fed", "chosen", "value")),
        ("kept", whole),
        *((name, address) for name in ("size", "tokens", "parents", "depths", "where", "values", "sees")),
    ]


class BlockPart(ctypes.Structure):
    """`Block`."""

    _fields_ = [
        ("join", MatrixPart),
        ("seed", MatrixPart),
        *((name, address) for name in ("norm", "mask")),
        *((name, whole) for name in ("taps", "first", "rank")),
        *((name, address) for name in ("above", "beneath", "deepest", "columns", "confidences", "logs", "order")),
        *((name, address) for name in ("next", "value")),
    ]


class HeadsPart(ctypes.Structure):
    """`Heads`."""

    _fields_ = [("blocks", MatrixPart), ("bias", address), ("made", address)]


class HydraPart(ctypes.Structure):
    """`HydraHead`."""

    _fields_ = [("block", MatrixPart), ("bias", address), ("head", MatrixPart), ("shift", address)]


class MambaLayerPart(ctypes.Structure):
    """`MambaLayer`."""

    _fields_ = [
        *((name, MatrixPart) for name in ("into", "out")),
        *((name, address) for name in ("norm", "taps", "bias", "bias_time", "rate", "skip", "norm_out")),
    ]


class MambaPart(ctypes.Structure):
    """`Mamba`."""

    _fields_ = [
        *((name, whole) for name in ("hidden", "inner", "heads", "width", "states", "groups", "kernel", "layers")),
        *((name, whole) for name in ("vocabulary", "outputs", "normed")),
        *((name, real) for name in ("epsilon", "epsilon_out", "shortest", "longest")),
        ("layer", ctypes.POINTER(MambaLayerPart)),
        ("norm", address),
        ("head", MatrixPart),
        ("embeddings", address),
        ("entries", whole),
    ]


class SlabPart(ctypes.Structure):
    """`Slab`."""

    _fields_ = [("slots", whole), *((name, address) for name in ("inputs", "memory", "from_", "to", "token"))]


class WalkPart(ctypes.Structure):
    """`Walk`."""

    _fields_ = [
        *((name, whole) for name in ("rows", "nodes", "depth", "vocabulary")),
        *((name, address) for name in ("logits", "tokens", "parents", "sizes", "temperature")),
        *((name, address) for name in ("top_k", "top_p", "min_p")),
        *((name, address) for name in ("changes", "changed", "said", "factors", "biases")),
        *((name, address) for name in ("repetition", "presence", "frequency", "penalised")),
        ("changeable", whole),
        ("scratch", address),
        *((name, address) for name in ("seeds", "starts", "knots", "slopes", "found")),
        ("threads", whole),
    ]


STRUCTURES = (
    MatrixPart, LayerPart, ModelPart, PassPart, DraftPart, BlockPart, HeadsPart, HydraPart, MambaLayerPart, MambaPart,
    SlabPart, WalkPart,
)  # fmt: skip
FEW = 16  # pairs of a row that a drafter's layer reads at once
WIDEST = 256  # numbers of a head
BLOCK = 32  # numbers of a block of weights


def check(code: ctypes.CDLL) -> None:
    """Raise RuntimeError where compiled code has structures of another size than these, or other constants."""
    sizes = (whole * whole.in_dll(code, "structures").value).in_dll(code, "structure_sizes")
    here = {part.__name__: ctypes.sizeof(part) for part in STRUCTURES}
    there = dict(zip(here, sizes, strict=True))
    for name, value in (("few_pairs", FEW), ("widest_head", WIDEST), ("block_numbers", BLOCK)):
        here[name], there[name] = value, whole.in_dll(code, name).value
    for name, value in here.items():
        if there[name] != value:
            raise RuntimeError(f"{name} is {value} in parts.py and {there[name]} in the compiled code: make them agree")


def fresh(count: int, size: int) -> Sequence[Tensor]:
    """So many tensors of `size` int64 each, side by side in one stretch of memory."""
    if APART:
        return [torch.empty(size, dtype=torch.long) for _ in range(count)]
    return torch.empty(count, size, dtype=torch.long).unbind()


class Room:
    """A workspace: memory kept from pass to pass, since fresh memory costs a pass as much as using it.

    Where the code is sanitized, each slice is an allocation of its own and exactly as large as was asked for, so that
    writing past its end shows.

    Args:
        code: the compiled pass.
        part: the model that it is for.
    """

    def __init__(self, code: ctypes.CDLL, part: ModelPart):
        self.part, self.bytes = part, code.scratch_bytes
        self.bytes.restype, self.bytes.argtypes = whole, [whole, whole]
        self.held: dict[str, Tensor] = {}
        self.found: dict[tuple[int, int], dict[str, int]] = {}  # what `addresses` gave last
        self.hired = 0, 0, 0, 0  # rows, threads, bytes of scratch for each, and its address, as `hire` told last

    def of(self, name: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Room for so many numbers."""
        held = self.held.get(name)
        if held is None or len(held) < size or (APART and len(held) > size):
            held = self.held[name] = torch.empty(size, dtype=dtype)
            self.found.clear()
        return held

    def own(self, name: str, given: Tensor) -> Tensor:
        """A copy in float32, which the pass may change."""
        return self.of(name, given.numel())[: given.numel()].copy_(given.flatten())

    def cut(self, name: str, dtype: torch.dtype, **sizes: int) -> dict[str, int]:
        """Addresses of so many numbers each, side by side in one stretch of room."""
        if APART:
            return {part: self.of(f"{name}: {part}", size, dtype).data_ptr() for part, size in sizes.items()}
        at, found = self.of(name, sum(sizes.values()), dtype).data_ptr(), {}
        for part, size in sizes.items():
            found[part], at = at, at + size * dtype.itemsize
        return found

    def addresses(self, rows: int, nodes: int) -> dict[str, int]:
        """What a pass over so many rows needs, each with a path of so many nodes at most."""
        if (known := self.found.get((rows, nodes))) is not None:
            return known
        part = self.part
        wide, narrow = part.heads * part.width, part.groups * part.width
        sizes = {
            "normed": max(part.hidden, part.joined), "query": wide, "seen": wide, "inside": part.inner,
            "made": wide + 2 * narrow,
        }  # fmt: skip
        found = {name: self.of(name, rows * size).data_ptr() for name, size in sizes.items()}
        whole = self.cut("paths", torch.int32, paths=rows * nodes, live=rows)
        starts = self.of("starts", rows + 1, torch.long).data_ptr()
        made = {**found, **whole, **self.cut("asked", torch.long, from_=rows, to=rows), "starts": starts}
        self.found = {(rows, nodes): made}
        return made

    def hire(self, asks: PassPart, rows: int) -> None:
        """Tell a pass over at most so many rows how many threads it may take, and their scratch."""
        if self.hired[:2] != (rows, threads := torch.get_num_threads()):
            part = self.part
            widest = max(part.hidden * (2 if part.norm_given else 1), part.joined, part.inner, part.heads * part.width)
            each = self.bytes(rows, widest)
            self.hired = rows, threads, each, self.of("scratch", threads * each, torch.uint8).data_ptr()
        _, asks.threads, asks.scratch_each, asks.scratch = self.hired


def project(part: LayerPart, kept: list[Any], hold: Hold, attention: Any, inner: Any) -> None:
    """Write a layer's products into its structure: those around attention, with biases, and its gated network's."""
    for name in ("q", "k", "v", "o"):
        module = getattr(attention, f"{name}_proj")
        setattr(part, name, hold(module.weight))
        setattr(part, f"bias_{name}", small(kept, module, "bias"))
    for name in ("gate", "up", "down"):
        setattr(part, name, hold(getattr(inner, f"{name}_proj").weight))


def small(kept: list[Any], module: Any, name: str = "weight") -> int | None:
    """The address of a norm's or a bias's numbers, copied in float32 to what is kept; None where there is none."""
    tensor = getattr(module, name, None)
    if tensor is None:
        return None
    kept.append(tensor.detach().float().clone())
    return int(kept[-1].data_ptr())
