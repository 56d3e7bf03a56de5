"""A drafter's network of one layer, and its head, in the compiled code that runs the target's passes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..backends.native.blocks import for_drafts, reads
from ..backends.native.build import library
from ..backends.native.parts import LayerPart, MatrixPart, ModelPart, PassPart, Room, project, small
from ..backends.native.weights import STEP, WIDEST
from .kv_cache import KVCache
from .layer import Layer, RMSNorm, Rope

TAPS = 3  # of EAGLE-3


class Turns:
    """Rotations as the code reads them, for more positions as they are asked for."""

    def __init__(self, rope: Rope):
        self.rope, self.table = rope, torch.zeros(0)

    def upto(self, positions: int) -> Float[Tensor, "n 2 d"]:
        """Cosines and sines of so many positions at least."""
        if len(self.table) < positions:
            table = self.rope.table(max(512, positions), torch.float32, torch.device("cpu"))[:, :, 0]
            half = table.shape[2] // 2
            sines = torch.cat([-table[:, 1, :half], table[:, 1, half:]], -1)
            self.table = torch.stack([table[:, 0], sines], 1).contiguous()
        return self.table


@dataclass(frozen=True)
class Fusing:
    """What EAGLE-3 has around its layer: norms of embeddings and of vectors, what makes one vector of the target's
    features, and the norm before the head."""

    embeds: RMSNorm
    vectors: RMSNorm
    fc: nn.Linear
    norm: RMSNorm


class CompiledLayer:
    """x = W cat(...) + bias, the layer on x without a norm before its attention, and the head: one call for a step.
    With `Fusing` in place of W: the layer on the norms of both, added to the vector.

    Weights are rounded to eight bits where `for_drafts` does so, else read where they lie. Vectors and logits are of
    float32.
    """

    def __init__(self, code: ctypes.CDLL, layer: Layer, join: nn.Linear | Fusing, head: Float[Tensor, "v h"]):
        self.call, self.turned, self.numbers = code.forward, Turns(layer.rope).upto, torch.arange(0)
        self.call.restype, self.call.argtypes = None, [ctypes.c_void_p] * 2
        self.drafts = code.draft
        self.drafts.restype, self.drafts.argtypes = None, [ctypes.c_void_p] * 4
        shape = layer.shape
        kept: list[Any] = []

        def hold(weight: Tensor) -> MatrixPart:
            kept.append(for_drafts(weight, code))
            return kept[-1].part

        part = LayerPart(norm_inner=small(kept, layer.post_attention_layernorm), turned=1)
        project(part, kept, hold, layer.self_attn, layer.mlp)
        sizes = {
            "hidden": shape.hidden, "inner": shape.intermediate, "heads": shape.heads, "groups": shape.kv_heads,
            "width": shape.head_dim, "vocabulary": len(head), "epsilon": shape.eps, "head": hold(head),
        }  # fmt: skip
        if isinstance(join, Fusing):
            inputs = torch.cat([join.embeds.weight, join.vectors.weight]).detach().float()
            sizes["norm"], self.fuse, self.taps = small(kept, join.norm), hold(join.fc.weight), TAPS
            given: dict[str, Any] = {
                "norm_given": inputs.data_ptr(), "joined": max(shape.inputs, join.fc.in_features),
            }  # fmt: skip
            self.wide = join.fc.in_features // TAPS
            kept.append(inputs)
        else:
            self.fuse, self.taps, self.wide = MatrixPart(), 1, shape.hidden
            given = {
                "join": hold(join.weight), "bias_join": small(kept, join, "bias"), "joined": join.in_features,
            }  # fmt: skip
        kept.append(part)
        self.step = ModelPart(**sizes, **given, layers=1, scale=shape.head_dim**-0.5, layer=ctypes.pointer(part))
        self.end = ModelPart(**sizes, layers=0)
        self.kept = kept
        self.code, self.room, self.lock = code, Room(code, self.step), Lock()

    def chain(self, cache: KVCache, given: Float[Tensor, "b m joined"]) -> Float[Tensor, "b m h"]:
        """Vectors behind each row's text, each seeing those before it."""
        spots = cache.lengths[:, None] + torch.arange(given.shape[1])
        return self._run(self.step, cache, given, spots, 0, None, 0)[0]

    def tree(
        self,
        cache: KVCache,
        given: Float[Tensor, "b m joined"],
        depths: Int[Tensor, "b n"],
        ancestors: Bool[Tensor, "#b n n"],
    ) -> tuple[Float[Tensor, "b m h"], Float[Tensor, "b m v"]]:
        """Vectors and logits of the last m of n nodes behind each row's text; `depths` of the first ones are 0."""
        n, m = depths.shape[1], given.shape[1]
        return self._run(self.step, cache, given, cache.lengths[:, None] + depths, n - m, ancestors.contiguous(), m)

    def logits(self, vectors: Float[Tensor, "b m h"]) -> Float[Tensor, "b m v"]:
        """The head alone."""
        spots = torch.zeros(vectors.shape[:2], dtype=torch.long)
        return self._run(self.end, None, vectors, spots, 0, None, vectors.shape[1])[1]

    def _run(
        self, part: ModelPart, cache: KVCache | None, given: Tensor, spots: Tensor, since: int, ancestors: Any, ask: int
    ) -> tuple[Tensor, Tensor]:
        (b, m), n, layers = given.shape[:2], spots.shape[1], int(part.layers)
        if cache is not None:
            cache.reserve(cache.longest + n)
        lengths = spots[:, 0].contiguous() if cache is None else cache.lengths
        with torch.inference_mode(False), self.lock:
            vectors, logits = torch.empty(layers, b, m, part.hidden), torch.empty(b, ask, part.vocabulary)
            states = self.room.own("given" if layers else "states", given)
            turns, asked = self.turned(0 if cache is None else cache.longest + n), self.counted(ask)
            tap = torch.ones(1, dtype=torch.long)  # behind the one layer
            parts = [] if cache is None else [cache.keys.data_ptr(), cache.values.data_ptr()]
            pointers = (ctypes.c_void_p * len(parts))(*parts)
            asks = PassPart(
                rows=b, nodes=m, since=since, all=n, capacity=0 if cache is None else cache.keys.shape[1],
                shared=ancestors is None or len(ancestors) == 1, lengths=lengths.data_ptr(), spots=spots.data_ptr(),
                ancestors=None if ancestors is None else ancestors.data_ptr(), cache=ctypes.addressof(pointers),
                turns=turns.data_ptr(), positions=len(turns), **self.room.addresses(b * m, n),
                taps=layers, tap=tap.data_ptr(), tapped=vectors.data_ptr(),
                asked=ask, ask=asked.data_ptr(), logits=logits.data_ptr(),
            )  # fmt: skip
            self.room.hire(asks, b * m)
            if layers:
                asks.given, asks.states = states.data_ptr(), self.room.of("states", b * m * part.hidden).data_ptr()
            else:
                asks.states = states.data_ptr()
            self.call(ctypes.byref(part), ctypes.byref(asks))
        return vectors[0] if layers else given, logits

    def counted(self, n: int) -> Int[Tensor, " n"]:
        """0 .. n - 1 at least."""
        if len(self.numbers) < n:
            self.numbers = torch.arange(max(64, n))
        return self.numbers


def runs(target: object) -> bool:
    """Do this target's passes run in the compiled code? Its drafters do so too, then."""
    return getattr(target, "native", None) is not None


def code_for(target: object, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled code for a drafter in this precision; None where its target's passes do not run in such code, or
    there is none on this machine.

    It is the target's own where that reads rounded weights. On processors with AVX2 alone that is so where the target's
    weights have 16 bits, though all else is float32; a drafter's float32 weights would be four times as many bytes.
    """
    native: Any = getattr(target, "native", None)
    if native is None:
        return None
    if native.kept == dtype and reads(native.code):
        own: ctypes.CDLL = native.code
        return own
    name = str(dtype).removeprefix("torch.")
    return library(name, name) if name in ("bfloat16", "float32") else None


def compiled(code: ctypes.CDLL, layer: Layer, join: nn.Linear | Fusing, head: Tensor | None) -> CompiledLayer | None:
    """The layer in compiled code; None where the code does not know such a layer. `code`: of `code_for`. `head`: the
    rows of a head without bias."""
    shape, fuses = layer.shape, isinstance(join, Fusing)
    first = join.fc if isinstance(join, Fusing) else join
    read = first.in_features // (TAPS if fuses else 1)
    if head is None or head.dtype != first.weight.dtype or {head.device.type, first.weight.device.type} != {"cpu"}:
        return None
    if any(width % STEP for width in (shape.hidden, shape.intermediate, shape.head_dim, read)):
        return None
    if shape.head_dim > WIDEST or shape.inputs != shape.hidden * (2 if fuses else 1):
        return None
    return CompiledLayer(code, layer, join, head.contiguous())
