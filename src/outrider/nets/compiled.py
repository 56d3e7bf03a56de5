"""A drafter's network of one layer, and its head, in the compiled code that runs the target's passes."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..backends.native.abi import MAX_HEAD_DIM, NULL, Library, Struct, address, struct
from ..backends.native.arrays import addresses
from ..backends.native.blocks import for_drafts, reads
from ..backends.native.library import library
from ..backends.native.weights import STEP, projections, small
from ..backends.native.workspace import Workspace
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

    def __init__(self, code: Library, layer: Layer, join: nn.Linear | Fusing, head: Float[Tensor, "v h"]):
        self.call, self.turned, self.numbers = code.forward, Turns(layer.rope).upto, torch.arange(0)
        self.drafts, shape = code.draft_tree, layer.shape
        kept: list[Any] = []

        def hold(weight: Tensor) -> Struct:
            kept.append(for_drafts(weight, code))
            return kept[-1].struct

        part = struct("Layer", mlp_norm=small(kept, layer.post_attention_layernorm), rope=1)
        projections(part, kept, hold, layer.self_attn, layer.mlp)
        sizes = {
            "hidden": shape.hidden, "intermediate": shape.intermediate, "heads": shape.heads,
            "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab": len(head), "eps": shape.eps,
            "head": hold(head),
        }  # fmt: skip
        if isinstance(join, Fusing):
            inputs = torch.cat([join.embeds.weight, join.vectors.weight]).detach().float()
            sizes["norm"], self.fuse, self.taps = small(kept, join.norm), hold(join.fc.weight), TAPS
            given: dict[str, Any] = {
                "pair_norms": address(inputs), "input_dim": max(shape.inputs, join.fc.in_features),
            }  # fmt: skip
            self.wide = join.fc.in_features // TAPS
            kept.append(inputs)
        else:
            self.fuse, self.taps, self.wide = struct("Matrix")[0], 1, shape.hidden
            given = {
                "input_proj": hold(join.weight), "input_bias": small(kept, join, "bias"), "input_dim": join.in_features,
            }  # fmt: skip
        kept.append(part)
        self.step = struct("Model", **sizes, **given, layers=1, attention_scale=shape.head_dim**-0.5, layer=part)
        self.end = struct("Model", **sizes, layers=0)
        self.kept = kept
        self.code, self.workspace, self.lock = code, Workspace(code, self.step), Lock()

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
        self, model: Struct, cache: KVCache | None, given: Tensor, spots: Tensor, since: int, ancestors: Any, ask: int
    ) -> tuple[Tensor, Tensor]:
        (b, m), n, layers = given.shape[:2], spots.shape[1], model.layers
        if cache is not None:
            cache.reserve(cache.longest + n)
        lengths = spots[:, 0].contiguous() if cache is None else cache.lengths
        with torch.inference_mode(False), self.lock:
            vectors, logits = torch.empty(layers, b, m, model.hidden), torch.empty(b, ask, model.vocab)
            states = self.workspace.copy("inputs" if layers else "states", given)
            turns, asked = self.turned(0 if cache is None else cache.longest + n), self.counted(ask)
            tap = torch.ones(1, dtype=torch.long)  # behind the one layer
            pointers = addresses([] if cache is None else [cache.keys.data_ptr(), cache.values.data_ptr()])
            pass_ = struct(
                "Pass", rows=b, nodes=m, first_node=since, total_nodes=n,
                capacity=0 if cache is None else cache.keys.shape[1],
                shared_tree=ancestors is None or len(ancestors) == 1, lengths=address(lengths),
                positions=address(spots), ancestors=address(ancestors), cache=pointers,
                rope=address(turns), rope_positions=len(turns), **self.workspace.of_pass(b * m, n),
                taps=layers, tap_layers=address(tap), tapped=address(vectors),
                logit_count=ask, logit_nodes=address(asked), logits=address(logits),
                inputs=address(states) if layers else NULL,
                hidden_states=address(self.workspace.of("states", b * m * model.hidden) if layers else states),
            )  # fmt: skip
            self.workspace.use_threads(pass_, b * m)
            self.call(model, pass_)
        return vectors[0] if layers else given, logits

    def counted(self, n: int) -> Int[Tensor, " n"]:
        """0 .. n - 1 at least."""
        if len(self.numbers) < n:
            self.numbers = torch.arange(max(64, n))
        return self.numbers


def runs(target: object) -> bool:
    """Do this target's passes run in the compiled code? Its drafters do so too, then."""
    return getattr(target, "native", None) is not None


def code_for(target: object, dtype: torch.dtype) -> Library | None:
    """The compiled code for a drafter in this precision; None where its target's passes do not run in such code, or
    there is none on this machine.

    It is the target's own where that reads rounded weights. On processors with AVX2 alone that is so where the target's
    weights have 16 bits, though all else is float32; a drafter's float32 weights would be four times as many bytes.
    """
    native: Any = getattr(target, "native", None)
    if native is None:
        return None
    if native.kept == dtype and reads(native.code):
        own: Library = native.code
        return own
    name = str(dtype).removeprefix("torch.")
    return library(name, name) if name in ("bfloat16", "float32") else None


def compiled(code: Library, layer: Layer, join: nn.Linear | Fusing, head: Tensor | None) -> CompiledLayer | None:
    """The layer in compiled code; None where the code does not know such a layer. `code`: of `code_for`. `head`: the
    rows of a head without bias."""
    shape, fuses = layer.shape, isinstance(join, Fusing)
    first = join.fc if isinstance(join, Fusing) else join
    read = first.in_features // (TAPS if fuses else 1)
    if head is None or head.dtype != first.weight.dtype or {head.device.type, first.weight.device.type} != {"cpu"}:
        return None
    if any(width % STEP for width in (shape.hidden, shape.intermediate, shape.head_dim, read)):
        return None
    if shape.head_dim > MAX_HEAD_DIM or shape.inputs != shape.hidden * (2 if fuses else 1):
        return None
    return CompiledLayer(code, layer, join, head.contiguous())
