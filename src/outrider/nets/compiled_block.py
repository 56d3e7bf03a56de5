"""A block drafter's network in compiled code: its context, its pass and the best tree of its slots in one call
(`native/lattice.h`), as `drafters/_lattice.py` finds it in tensors.

Only causal blocks without convolutions. Such a block's first slots do not see the others, so no more are computed than
a round drafts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from threading import Lock
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from ..backends.native.arrays import addresses, integers
from ..backends.native.blocks import Packed, for_drafts
from ..backends.native.parts import (
    BlockPart,
    DraftPart,
    LayerPart,
    MatrixPart,
    ModelPart,
    PassPart,
    Room,
    project,
    small,
)
from ..backends.native.weights import STEP, WIDEST
from ..core.types import Budget, DraftTree, Rows
from .block import BlockNet
from .compiled import Turns
from .grown import Pairs, listed
from .kv_cache import KVCache
from .lattice import Places, deepest, fit
from .wanted import Seconds, Shape, Wanted

WHOLE = 16  # the pair head's width is filled up by zeros to a multiple of this


class CompiledBlock:
    """`read` writes what was committed into the cache, `slots` gives the block's vectors and logits, `grow` a tree.

    Weights are rounded to eight bits where `for_drafts` does so; the pair head's, which are looked up, are as they are.
    """

    def __init__(
        self, code: ctypes.CDLL, net: BlockNet, head: Tensor, embeddings: Tensor, mask: Tensor, names: Tensor | None
    ):
        self.call, self.net, self.embeddings, self.names = code.draft_block, net, embeddings, names
        self.call.restype, self.call.argtypes = None, [ctypes.c_void_p] * 4
        config, shape, layers = net.config, net.config.layer, net.config.layers
        kept: list[Any] = [net.layers]

        def hold(weight: Tensor) -> MatrixPart:
            made: Packed = for_drafts(weight, code)
            kept.append(made)
            return made.part

        parts = (LayerPart * layers)()
        for part, layer in zip(parts, net.layers, strict=True):
            own: Any = layer
            project(part, kept, hold, own.self_attn, own.mlp)
            part.norm, part.norm_inner = small(kept, own.input_layernorm), small(kept, own.post_attention_layernorm)
            part.norm_q, part.norm_k = small(kept, own.self_attn.q_norm), small(kept, own.self_attn.k_norm)
            part.turned = 1
        self.model = ModelPart(
            hidden=shape.hidden, inner=shape.intermediate, heads=shape.heads, groups=shape.kv_heads,
            width=shape.head_dim, layers=layers, vocabulary=len(head), epsilon=shape.eps, scale=shape.head_dim**-0.5,
            layer=parts, norm=small(kept, net.norm), head=hold(head), joined=max(2, len(config.taps)) * shape.hidden,
        )  # fmt: skip
        slots = mask.detach().float().clone()
        kept += [slots, parts]
        self.block = BlockPart(
            join=hold(net.fc.weight), norm=small(kept, net.hidden_norm), mask=slots.data_ptr(),
            taps=len(config.taps), first=config.block - config.drafts,
        )  # fmt: skip
        if config.seeded:
            self.block.seed = hold(net.seed.weight)
        if config.pair_head == "markov":
            self.pairs = [_filled(w) for w in (net.markov_w1.weight, net.markov_w2.weight)]
            self.block.above, self.block.beneath = (w.data_ptr() for w in self.pairs)
            self.block.rank = self.pairs[0].shape[1]
        self.kept, self.lock, self.room = kept, Lock(), Room(code, self.model)
        self.turns = Turns(net.rope)
        self.places, self.asks, self.wants = Places(0, 0, 0, 0, 0), PassPart(), DraftPart()
        self.seconds = Seconds()

    @property
    def lattices(self) -> bool:
        """Does the code know how pairs of tokens are scored?"""
        return self.net.config.pair_head != "selector"

    def read(self, cache: KVCache, last: Float[Tensor, "b 1 h"], pairs: Sequence[Pairs]) -> None:
        """Write the keys and values of what was committed; `last`, in float32: every row's last context vector."""
        with self.lock:
            self._call(cache, last, pairs, 0, Places(len(cache.host)))

    def slots(
        self, cache: KVCache, last: Float[Tensor, "b 1 h"], pairs: Sequence[Pairs], root: Int[Tensor, " b"], depth: int
    ) -> tuple[Float[Tensor, "b d h"], Float[Tensor, "b d v"]]:
        """Normed vectors, in the network's precision, and logits, in float32, of the first `depth` slots that draft;
        before that, what `read` does."""
        b, model, first = len(root), self.model, int(self.block.first)
        slots, root = first + depth, root.contiguous()
        with torch.inference_mode(False):
            vectors, logits = torch.empty(b, slots, model.hidden), torch.empty(b, depth, model.vocabulary)
        with self.lock:
            told = {"root": root.data_ptr(), "nodes": 0}
            self._call(cache, last, pairs, depth, Places(b, slots), told, (vectors, logits))
        return vectors[:, first:].to(self.embeddings.dtype), logits

    def grow(
        self,
        cache: KVCache,
        last: Float[Tensor, "b 1 h"],
        pairs: Sequence[Pairs],
        rows: Rows,
        budget: Budget,
        shape: Shape,
    ) -> DraftTree:
        """The best tree of `shape.depth` slots for every row, by the budget's floor and price; first what `read`
        does."""
        depth, b = shape.depth, len(rows)
        with self.lock:
            wanted = Wanted(rows, budget, shape, int(self.model.vocabulary), self.seconds, self.room)
            depths, told = deepest(rows, depth), {**wanted.told, "candidates": shape.nodes}
            self.block.deepest = ctypes.addressof(depths)
            places = Places(b, int(self.block.first) + depth, 1, shape.nodes, wanted.most)
            return wanted.tree(self._call(cache, last, pairs, depth, places, told))

    def _call(
        self,
        cache: KVCache,
        last: Tensor,
        pairs: Sequence[Pairs],
        depth: int,
        places: Places,
        told: Mapping[str, Any] = MappingProxyType({}),
        kept: tuple[Tensor, Tensor] | None = None,
    ) -> int:
        """The call itself; `told`: what else the structure of the draft holds; `kept`: where vectors and logits are
        written. Returns the nodes of the widest row."""
        b = places.rows
        counts, features, _ = listed(pairs, b)
        longest = max(have + count for have, count in zip(cache.host, counts, strict=True)) + places.slots
        places = places.both(Places(b, waits=max(1, *counts)))
        if places.both(self.places) != self.places:
            self._fit(places.both(self.places))
        asks, wants = self.asks, self.wants
        cache.reserve(longest)
        turns, narrow = self.turns.upto(longest), cache.keys.element_size() * int(self.model.groups * self.model.width)
        at = [part.data_ptr() + i * narrow for i in range(self.model.layers) for part in (cache.keys, cache.values)]
        pointers, lengths, waiting, vectors = addresses(at), integers(cache.host), integers(counts), addresses(features)
        asks.rows, asks.capacity, asks.beside = b, cache.keys.shape[1], self.model.layers
        asks.cache = ctypes.addressof(pointers)
        self.room.hire(asks, self.places.rows * max(self.places.slots, self.places.waits))
        asks.turns, asks.positions = turns.data_ptr(), len(turns)
        room = self.room.held["logits"] if kept is None else kept[1]
        asks.taps, asks.tapped, asks.logits = int(kept is not None), None, room.data_ptr()
        if kept is not None:
            asks.tapped = kept[0].data_ptr()
        wants.waits, wants.waiting, wants.features = max(counts), ctypes.addressof(waiting), ctypes.addressof(vectors)
        wants.lengths, wants.last, wants.depth = ctypes.addressof(lengths), last.data_ptr(), depth
        for name, value in told.items():
            setattr(wants, name, value)
        self.call(*map(ctypes.byref, (self.model, self.block, asks, wants)))
        if max(counts):
            cache.advance(counts)
        return int(wants.kept)

    def _fit(self, places: Places) -> None:
        """Make structures with room for this; they are kept from call to call."""
        self.places, room, hidden, columns = places, self.room, int(self.model.hidden), int(self.model.vocabulary)
        b, slots = places.rows, places.slots
        together, first = b * max(slots, places.waits), int(self.block.first)
        room.of("logits", b * slots * columns)
        self.asks = PassPart(
            ask=torch.arange(first, first + slots, out=room.of("ask", slots, torch.long)).data_ptr(),
            tap=room.of("tap", 1, torch.long).fill_(self.model.layers).data_ptr(),
            states=room.of("states", together * hidden).data_ptr(), **room.addresses(together, 1),
        )  # fmt: skip
        self.wants = DraftPart(
            embeddings=self.embeddings.data_ptr(), entries=len(self.embeddings),
            spots=room.of("spots", b * slots, torch.long).data_ptr(),
            **fit(room, self.block, places, self.names),
        )  # fmt: skip


def _filled(weight: Float[Tensor, "v r"]) -> Float[Tensor, "v r2"]:
    return functional.pad(weight.detach(), (0, -weight.shape[1] % WHOLE)).contiguous()


def compiled_block(
    code: ctypes.CDLL,
    net: BlockNet,
    head: Tensor | None,
    embeddings: Tensor | None,
    mask: Tensor,
    names: Tensor | None,
) -> CompiledBlock | None:
    """The network in compiled code; None where the code does not know such a network.

    Args:
        code: of `nets/compiled.py: code_for`.
        net: its products as they were made: not replaced by faster ones.
        head: the rows of a head without bias.
        embeddings: of the target's tokens, in the network's precision.
        mask: what stands in the slots behind the anchor.
        names: token ids of the head's columns.
    """
    config, weight = net.config, net.fc.weight
    widths = config.layer.hidden, config.layer.intermediate, config.layer.head_dim
    if head is None or embeddings is None:
        return None
    if head.dtype != weight.dtype or weight.device.type != "cpu":
        return None
    if any(w % STEP for w in widths) or widths[2] > WIDEST or config.layer.inputs != widths[0]:
        return None
    if not config.causal or config.conv:
        return None
    return CompiledBlock(code, net, head.contiguous(), embeddings, mask, names)
