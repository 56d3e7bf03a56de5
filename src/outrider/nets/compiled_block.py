"""A block drafter's network in compiled code: its context, its pass and the best tree of its slots in one call
(`native/lattice.h`), as `drafters/_lattice.py` finds it in tensors.

Only causal blocks without convolutions. Such a block's first slots do not see the others, so no more are computed than
a round drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from ..backends.native.abi import MAX_HEAD_DIM, NULL, Library, Struct, address, ffi, struct
from ..backends.native.arrays import addresses, integers
from ..backends.native.blocks import Packed, for_drafts
from ..backends.native.weights import STEP, projections, small
from ..backends.native.workspace import Workspace
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
        self, code: Library, net: BlockNet, head: Tensor, embeddings: Tensor, mask: Tensor, names: Tensor | None
    ):
        self.call, self.net, self.embeddings, self.names = code.draft_block, net, embeddings, names
        config, shape, layers = net.config, net.config.layer, net.config.layers
        kept: list[Any] = [net.layers]

        def hold(weight: Tensor) -> Struct:
            made: Packed = for_drafts(weight, code)
            kept.append(made)
            return made.struct

        parts = ffi.new("Layer[]", layers)
        for part, layer in zip(parts, net.layers, strict=True):
            own: Any = layer
            projections(part, kept, hold, own.self_attn, own.mlp)
            part.attention_norm = small(kept, own.input_layernorm)
            part.mlp_norm = small(kept, own.post_attention_layernorm)
            part.q_norm, part.k_norm = small(kept, own.self_attn.q_norm), small(kept, own.self_attn.k_norm)
            part.rope = 1
        self.model = struct(
            "Model", hidden=shape.hidden, intermediate=shape.intermediate, heads=shape.heads, kv_heads=shape.kv_heads,
            head_dim=shape.head_dim, layers=layers, vocab=len(head), eps=shape.eps,
            attention_scale=shape.head_dim**-0.5, layer=parts, norm=small(kept, net.norm), head=hold(head),
            input_dim=max(2, len(config.taps)) * shape.hidden,
        )  # fmt: skip
        slots = mask.detach().float().clone()
        kept += [slots, parts]
        self.lattice = struct(
            "Lattice", feature_proj=hold(net.fc.weight), norm=small(kept, net.hidden_norm), mask=address(slots),
            taps=len(config.taps), first_slot=config.block - config.drafts,
        )  # fmt: skip
        if config.seeded:
            self.lattice.seed = hold(net.seed.weight)
        if config.pair_head == "markov":
            self.pairs = [_filled(w) for w in (net.markov_w1.weight, net.markov_w2.weight)]
            self.lattice.pair_left, self.lattice.pair_right = map(address, self.pairs)
            self.lattice.rank = self.pairs[0].shape[1]
        self.kept, self.lock, self.workspace = kept, Lock(), Workspace(code, self.model)
        self.turns = Turns(net.rope)
        self.places, self.pass_, self.draft = Places(0, 0, 0, 0, 0), struct("Pass"), struct("Draft")
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
        b, model, first = len(root), self.model, self.lattice.first_slot
        slots, root = first + depth, root.contiguous()
        with torch.inference_mode(False):
            vectors, logits = torch.empty(b, slots, model.hidden), torch.empty(b, depth, model.vocab)
        with self.lock:
            told = {"roots": address(root), "max_nodes": 0}
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
            wanted = Wanted(rows, budget, shape, self.model.vocab, self.seconds, self.workspace)
            depths, told = deepest(rows, depth), {**wanted.told, "max_candidates": shape.nodes}
            self.lattice.max_depths = depths
            places = Places(b, self.lattice.first_slot + depth, 1, shape.nodes, wanted.most)
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
        pass_, draft = self.pass_, self.draft
        cache.reserve(longest)
        turns, narrow = self.turns.upto(longest), cache.keys.element_size() * self.model.kv_heads * self.model.head_dim
        at = [part.data_ptr() + i * narrow for i in range(self.model.layers) for part in (cache.keys, cache.values)]
        pointers, lengths, waiting, vectors = addresses(at), integers(cache.host), integers(counts), addresses(features)
        pass_.rows, pass_.capacity, pass_.slot_layers = b, cache.keys.shape[1], self.model.layers
        pass_.cache = pointers
        self.workspace.use_threads(pass_, self.places.rows * max(self.places.slots, self.places.waits))
        pass_.rope, pass_.rope_positions = address(turns), len(turns)
        pass_.logits = address(self.workspace.buffers["logits"] if kept is None else kept[1])
        pass_.taps, pass_.tapped = int(kept is not None), NULL if kept is None else address(kept[0])
        draft.most_pending, draft.pending, draft.features = max(counts), waiting, vectors
        draft.lengths, draft.last_hidden, draft.depth = lengths, address(last), depth
        for name, value in told.items():
            setattr(draft, name, value)
        self.call(self.model, self.lattice, pass_, draft)
        if max(counts):
            cache.advance(counts)
        return int(draft.widest)

    def _fit(self, places: Places) -> None:
        """Make structures with room for this; they are kept from call to call."""
        self.places, room, hidden, columns = places, self.workspace, self.model.hidden, self.model.vocab
        b, slots = places.rows, places.slots
        together, first = b * max(slots, places.waits), self.lattice.first_slot
        room.of("logits", b * slots * columns)
        nodes = torch.arange(first, first + slots, out=room.of("logit nodes of a block", slots, torch.long))
        self.pass_ = struct(
            "Pass", logit_nodes=address(nodes),
            tap_layers=address(room.of("tap", 1, torch.long).fill_(self.model.layers)),
            hidden_states=address(room.of("states", together * hidden)), **room.of_pass(together, 1),
        )  # fmt: skip
        self.draft = struct(
            "Draft", embeddings=address(self.embeddings), embedding_rows=len(self.embeddings),
            positions=address(room.of("positions", b * slots, torch.long)),
            **fit(room, self.lattice, places, self.names),
        )  # fmt: skip


def _filled(weight: Float[Tensor, "v r"]) -> Float[Tensor, "v r2"]:
    return functional.pad(weight.detach(), (0, -weight.shape[1] % WHOLE)).contiguous()


def compiled_block(
    code: Library,
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
    if any(w % STEP for w in widths) or widths[2] > MAX_HEAD_DIM or config.layer.inputs != widths[0]:
        return None
    if not config.causal or config.conv:
        return None
    return CompiledBlock(code, net, head.contiguous(), embeddings, mask, names)
