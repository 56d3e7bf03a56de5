"""Trees of compiled drafters of one pass: block drafters and Medusa, whose slots have candidates each. A tree is the
best part of this lattice (`c/abi.h`), as `drafters/_lattice.py` finds it in Python. Nothing is fed again, so a call
needs other arrays and writes to other workspace than those of `eagle.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.types import Array, Budget, DraftTree, Rows
from .abi import MAX_HEAD_DIM, NULL, Library, Struct, address, ffi, struct
from .arrays import addresses, integers
from .draft_layer import LayerSizes, RotaryTables, sizes_of
from .drafts import STEP, Caller, Holder, Pairs, Request, Shape, Sizes, SlotCache, Weights, listed
from .weights import Table

MULTIPLE = 16  # the pair head's width is filled up by zeros to a multiple of this
LISTS = "token", "parent", "level", "chosen"  # of all nodes
NORMS = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}  # fmt: skip


class LatticeCaller(Caller):
    """A drafter with a lattice."""

    lattice: Struct

    def wanted(self, rows: Rows, budget: Budget, shape: Shape, sizes: Sizes) -> tuple[Request, Any]:
        """What `request` does, with how deep the tree of each row may go."""
        self.fit(sizes)
        request = self.request(rows, budget, shape)
        depths = integers(min(shape.depth, remaining - 1) for remaining in rows.remaining)
        self.lattice.max_depths, self.draft.max_candidates = depths, shape.nodes
        return request, depths

    def lattice_fields(self) -> dict[str, Any]:
        """Fields of `Draft`, whose candidates are the nodes; sets the workspace of `lattice`."""
        sizes, workspace = self.sizes, self.workspace
        b, slots, nodes, top_k = sizes.rows, sizes.slots, sizes.candidates, sizes.top_k
        for name, size, dtype in (
            ("columns", slots * top_k, np.int64), ("confidences", slots * top_k, np.float32),
            ("logs", nodes * top_k, np.float32), ("order", nodes * top_k, np.int64), ("next", nodes, np.int64),
            ("value", nodes, np.float64),
        ):  # fmt: skip
            setattr(self.lattice, name, address(workspace.of(f"of a lattice: {name}", b * size, dtype)))
        return self.common(LISTS)


@dataclass(frozen=True)
class BlockParts:
    """What a block drafter is made of.

    Attributes:
        weights: by their names in its folder.
        shape: of each of its `layers` layers.
        taps: how many of the target's hidden states it reads.
        first_slot: the slot that drafts the first token.
        pairs: has it a pair head that scores tokens by the token before (`markov`)?
        head: [vocab, hidden], rows of a head without bias.
        embeddings: of the target, [tokens, hidden].
        mask: [hidden], what stands in the slots after the anchor.
        names: int64 [vocab], token ids of the head's rows; None: 0 .. vocab - 1.
        logit_cap: a soft cap of the head's logits; 0: none.
    """

    weights: Weights
    shape: LayerSizes
    layers: int
    taps: int
    first_slot: int
    pairs: bool
    head: Array
    embeddings: Table
    mask: Array
    names: Array | None
    logit_cap: float = 0.0


class Block(LatticeCaller):
    """`read` writes what was committed into the cache, `slots` gives the block's vectors and logits, `grow` a tree.

    Causal blocks without convolutions alone: their first slots do not see the others, so no more are computed than a
    round drafts. The pair head's weights, which are looked up, are as they are.
    """

    def __init__(self, code: Library, parts: BlockParts):
        hold, shape = Holder(code, parts.weights), parts.shape
        layers = ffi.new("Layer[]", parts.layers)
        for i, layer in enumerate(layers):
            hold.layer(layer, f"layers.{i}.", NORMS)
        model = struct(
            "Model", **sizes_of(shape), layers=parts.layers, vocab=len(parts.head),
            attention_scale=shape.head_dim**-0.5, layer=layers, norm={"weight": hold.vector("norm.weight")},
            head=hold.matrix(parts.head), input_dim=max(2, parts.taps) * shape.hidden, logit_cap=parts.logit_cap,
        )  # fmt: skip
        self.lattice = struct(
            "Lattice", feature_proj=hold.matrix("fc.weight"), norm=hold.vector("hidden_norm.weight"),
            mask=hold.vector(parts.mask), taps=parts.taps, first_slot=parts.first_slot,
        )  # fmt: skip
        if "seed.weight" in parts.weights:
            self.lattice.seed = hold.matrix("seed.weight")
        if parts.pairs:
            left, right = (_filled(parts.weights[f"{name}.weight"]) for name in ("markov_w1", "markov_w2"))
            self.lattice.pair_left, self.lattice.pair_right = hold.table(left), hold.table(right)
            self.lattice.rank = left.shape[1]
        self.embeddings, self.shape, self.rotary = parts.embeddings, shape, RotaryTables(shape)
        self.dtype = parts.head.dtype
        super().__init__(code, model, len(parts.head), parts.names, [*hold.kept, layers])

    def cache(self, rows: int, capacity: int) -> SlotCache:
        """An empty cache for these rows."""
        heads = self.model.layers * self.shape.kv_heads
        return SlotCache(rows, capacity, heads, self.shape.head_dim, self.dtype)

    def read(self, cache: SlotCache, last: Array, pairs: Sequence[Pairs]) -> None:
        """Write the keys and values of what was committed; `last`, float32 [b, h]: every row's last context vector."""
        with self.lock:
            counts = self._fit_pairs(pairs, Sizes(len(cache.host)))
            self._call(cache, last, pairs, counts, 0, 1)

    def slots(
        self, cache: SlotCache, last: Array, pairs: Sequence[Pairs], roots: Sequence[int], depth: int
    ) -> tuple[Array, Array]:
        """Normed vectors [b, d, h] and logits [b, d, v], in float32, of the first `depth` slots that draft; before
        that, what `read` does."""
        b, first = len(roots), self.lattice.first_slot
        vectors = np.empty((b, first + depth, self.model.hidden), np.float32)
        logits, ids = np.empty((b, depth, self.vocab), np.float32), integers(roots)
        with self.lock:
            counts = self._fit_pairs(pairs, Sizes(b, slots=first + depth))
            self.draft.roots, self.draft.max_nodes = ids, 0
            self._call(cache, last, pairs, counts, depth, first + depth, (vectors, logits))
        return vectors[:, first:], logits

    def grow(
        self, cache: SlotCache, last: Array, pairs: Sequence[Pairs], rows: Rows, budget: Budget, shape: Shape
    ) -> DraftTree:
        """The best tree of `shape.depth` slots for every row, by the budget's floor and price; first what `read`
        does."""
        with self.lock:
            slots = self.lattice.first_slot + shape.depth
            sizes = Sizes(len(rows), candidates=shape.nodes, slots=slots, top_k=min(shape.top_k, self.vocab))
            counts = self._fit_pairs(pairs, sizes)
            request, depths = self.wanted(rows, budget, shape, sizes)
            self._call(cache, last, pairs, counts, shape.depth, slots)
            del depths
            return request.tree(self.draft.widest)

    def _fit_pairs(self, pairs: Sequence[Pairs], sizes: Sizes) -> list[int]:
        """Fit the workspace to these pairs. Returns how many each row has."""
        counts = [sum(len(one.nodes[r]) for one in pairs) for r in range(sizes.rows)]
        self.fit(sizes.both(Sizes(pending=max(1, *counts))))
        return counts

    def _call(
        self, cache: SlotCache, last: Array, pairs: Sequence[Pairs], counts: Sequence[int], depth: int, slots: int,
        kept: tuple[Array, Array] | None = None,
    ) -> None:  # fmt: skip
        """The call itself; `kept`: where vectors and logits are written."""
        b, model, pass_, draft = len(counts), self.model, self.pass_, self.draft
        _, features, _ = listed(pairs, b)
        longest = max(have + count for have, count in zip(cache.host, counts, strict=True)) + slots
        cache.reserve(longest)
        rope, each = self.rotary.upto(longest), cache.keys.itemsize * model.kv_heads * model.head_dim
        parts = cache.keys.ctypes.data, cache.values.ctypes.data
        pointers = addresses(part + i * each for i in range(model.layers) for part in parts)
        arrays = integers(counts), integers(cache.host), addresses(features)
        pass_.rows, pass_.capacity, pass_.slot_layers, pass_.cache = b, cache.keys.shape[1], model.layers, pointers
        self.workspace.use_threads(pass_, self.sizes.rows * max(self.sizes.slots, self.sizes.pending))
        pass_.rope, pass_.rope_positions = address(rope), len(rope)
        pass_.logits = address(self.workspace.buffers["logits"] if kept is None else kept[1])
        pass_.taps, pass_.tapped = int(kept is not None), NULL if kept is None else address(kept[0])
        draft.most_pending, draft.last_hidden, draft.depth = max(counts), address(last), depth
        draft.pending, draft.lengths, draft.features = arrays
        self.code.draft_block(model, self.lattice, pass_, draft)
        if max(counts):
            cache.advance(counts)

    def make(self) -> None:
        """Make `pass_` and `draft` for `sizes`."""
        sizes, workspace, model = self.sizes, self.workspace, self.model
        b, first = sizes.rows, self.lattice.first_slot
        together = b * max(sizes.slots, sizes.pending)
        workspace.of("logits", b * sizes.slots * self.vocab)
        self.pass_ = struct(
            "Pass", logit_nodes=address(workspace.filled("logit nodes of a block", range(first, first + sizes.slots))),
            tap_layers=address(workspace.filled("tap", [model.layers])),
            hidden_states=address(workspace.of("states", together * model.hidden)), **workspace.of_pass(together, 1),
        )  # fmt: skip
        self.draft = struct(
            "Draft", **self.embeddings.lookup,
            positions=address(workspace.of("positions", b * sizes.slots, np.int64)), **self.lattice_fields(),
        )  # fmt: skip


def _filled(weight: Array) -> Array:
    return np.pad(weight, ((0, 0), (0, -weight.shape[1] % MULTIPLE)))


def block(code: Library, parts: BlockParts) -> Block | None:
    """The network in compiled code; None where the code does not know such sizes."""
    shape = parts.shape
    if any(w % STEP for w in (shape.hidden, shape.intermediate, shape.head_dim)) or shape.head_dim > MAX_HEAD_DIM:
        return None
    dtype = parts.weights["fc.weight"].dtype
    if shape.inputs != shape.hidden or parts.head.dtype != dtype:
        return None
    return Block(code, parts)


@dataclass(frozen=True)
class MedusaParts:
    """What Medusa's heads are made of.

    Attributes:
        blocks: [heads, hidden, hidden], every head's one residual block, [outputs, inputs] each.
        bias: [heads, hidden].
        lm_heads: each [vocab, hidden]: one that all heads share, or one for each.
        head_bias: [heads, vocab], of LM heads of their own; None: they have none.
        names: int64 [vocab], token ids of the rows of an LM head; None: 0 .. vocab - 1.
        logit_cap: a soft cap of the logits of a shared LM head; 0: none.
    """

    blocks: Array
    bias: Array
    lm_heads: Sequence[Array]
    head_bias: Array | None
    names: Array | None
    logit_cap: float = 0.0


class Medusa(LatticeCaller):
    """x + SiLU(W_k x + b_k) for every head k, and an LM head for each or one for all."""

    def __init__(self, code: Library, parts: MedusaParts):
        (vocab, hidden), hold = parts.lm_heads[0].shape, Holder(code, {})
        self.dtype = parts.blocks.dtype
        self.heads = struct(
            "MedusaHeads", blocks=hold.matrix(parts.blocks.reshape(-1, hidden)), bias=hold.vector(parts.bias.ravel())
        )
        model = struct("Model", hidden=hidden, vocab=vocab, logit_cap=parts.logit_cap)
        if len(parts.lm_heads) == 1 and parts.head_bias is None:
            model.head = hold.matrix(parts.lm_heads[0])
        else:
            self.lm_heads = ffi.new("Matrix[]", [hold.matrix(one) for one in parts.lm_heads])
            self.heads.lm_heads = self.lm_heads
            if parts.head_bias is not None:
                self.heads.lm_head_bias = hold.vector(parts.head_bias.ravel())
        self.lattice = struct("Lattice")
        super().__init__(code, model, vocab, parts.names, hold.kept)

    def grow(self, features: Array, rows: Rows, budget: Budget, shape: Shape) -> DraftTree:
        """The best tree of the first `shape.depth` heads for every row, by the budget's floor and price.

        Args:
            features: [b, hidden], of each row's last committed token, after the target's final norm; in the precision
                of the heads.
        """
        with self.lock:
            top_k = min(shape.top_k, self.vocab)
            sizes = Sizes(len(rows), candidates=shape.nodes, slots=shape.depth, top_k=top_k)
            request, depths = self.wanted(rows, budget, shape, sizes)
            self._call(features)
            del depths
            return request.tree(self.draft.widest)

    def logits(self, features: Array, depth: int) -> Array:
        """Logits [b, depth, vocab], float32, of the first `depth` heads."""
        with self.lock:
            self.fit(Sizes(len(features), slots=depth))
            self.draft.depth, self.draft.max_nodes = depth, 0
            self._call(features)
            made = self.workspace.buffers["logits"][: len(features) * depth * self.vocab]
            return made.reshape(len(features), depth, self.vocab).copy()

    def _call(self, features: Array) -> None:
        assert features.dtype == self.dtype, "features are of the drafter's precision"
        features = np.ascontiguousarray(features)
        arrays = addresses(row.ctypes.data for row in features)
        self.pass_.rows, self.draft.features = len(features), arrays
        self.workspace.use_threads(self.pass_, self.sizes.rows * self.sizes.slots)
        self.code.draft_medusa(self.model, self.heads, self.lattice, self.pass_, self.draft)

    def make(self) -> None:
        """Make `pass_` and `draft` for `sizes`."""
        workspace, together = self.workspace, self.sizes.rows * self.sizes.slots
        self.heads.output = address(workspace.of("blocks", together * self.model.hidden))
        logits = address(workspace.of("logits", together * self.vocab))
        self.pass_ = struct("Pass", logits=logits, **workspace.of_pass(together, 1))
        self.draft = struct("Draft", **self.lattice_fields())


def medusa(code: Library, parts: MedusaParts) -> Medusa | None:
    """The heads in compiled code; None where the code does not know such heads."""
    alike = all(one.dtype == parts.blocks.dtype for one in parts.lm_heads)
    return Medusa(code, parts) if alike and parts.blocks.shape[-1] % STEP == 0 else None
