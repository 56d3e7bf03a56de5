"""EAGLE and EAGLE-3 in compiled code. One call first reads what was committed since the last one, and then grows a tree
for every row, as `core/growth.py` does with steps in Python.

Logs of confidences differ from those of tensors by rounding, which may change a draft and never a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.types import Array, Budget, DraftTree, Rows
from .abi import MAX_FED_PAIRS, MAX_HEAD_DIM, NULL, Library, Struct, address, struct
from .arrays import addresses, integers
from .draft_layer import LayerSizes, RotaryTables, pointers_of, sizes_of
from .drafts import (
    GROWN,
    STEP,
    Caller,
    Holder,
    Pairs,
    Shape,
    Sizes,
    SlotCache,
    Weights,
    float32,
    grown,
    listed,
)
from .weights import Table
from .workspace import Workspace

TAPS = 3  # of EAGLE-3


@dataclass(frozen=True)
class EagleParts:
    """What an EAGLE or EAGLE-3 is made of.

    Attributes:
        weights: by their names in its folder.
        shape: of its layer, which reads `inputs` numbers.
        layer: how the names of the layer's weights begin.
        fuses: is it an EAGLE-3, whose layer reads norms of an embedding and of three fused features?
        head: [vocab, hidden], rows of a head without bias.
        embeddings: of the target, [tokens, hidden].
        names: int64 [vocab], token ids of the head's rows; None: 0 .. vocab - 1.
        logit_cap: a soft cap of the head's logits; 0: none.
    """

    weights: Weights
    shape: LayerSizes
    layer: str
    fuses: bool
    head: Array
    embeddings: Table
    names: Array | None
    logit_cap: float = 0.0


class Eagle(Caller):
    """x = W cat(embedding, vector) + bias, the layer on x without a norm before its attention, and the head. An EAGLE-3
    has the layer on the norms of both, added to the vector. Vectors and logits are of float32."""

    def __init__(self, code: Library, parts: EagleParts):
        hold, shape = Holder(code, parts.weights), parts.shape
        layer = struct("Layer")
        hold.layer(layer, parts.layer, {"mlp_norm": "post_attention_layernorm"})
        sizes = {**sizes_of(shape), "vocab": len(parts.head), "head": hold.matrix(parts.head)}
        sizes["logit_cap"] = parts.logit_cap
        self.embeddings, self.dtype = parts.embeddings, parts.head.dtype
        fc = parts.weights["fc.weight"]
        if parts.fuses:
            norms = [
                float32(parts.weights[parts.layer + name]) for name in ("input_layernorm.weight", "hidden_norm.weight")
            ]
            sizes["norm"], self.fuse, self.taps = {"weight": hold.vector("norm.weight")}, hold.matrix(fc), TAPS
            inputs = {"pair_norms": hold.vector(np.concatenate(norms)), "input_dim": max(shape.inputs, fc.shape[1])}
        else:
            self.fuse, self.taps = struct("Matrix")[0], 1
            inputs = {"input_proj": hold.matrix(fc), "input_bias": hold.vector("fc.bias"), "input_dim": fc.shape[1]}
        self.feature_dim = fc.shape[1] // TAPS if parts.fuses else shape.hidden
        step = struct("Model", **sizes, **inputs, layers=1, attention_scale=shape.head_dim**-0.5, layer=layer)
        super().__init__(code, step, len(parts.head), parts.names, [*hold.kept, layer, self.embeddings])
        self.end, self.rotary, self.shape = struct("Model", **sizes, layers=0), RotaryTables(shape), shape
        self.steps = Workspace(code, step)  # of steps that are not those of `draft_tree`, whose addresses stay

    def cache(self, rows: int, capacity: int) -> SlotCache:
        """An empty cache for these rows."""
        return SlotCache(rows, capacity, self.shape.kv_heads, self.shape.head_dim, self.dtype)

    def read(self, cache: SlotCache, last: Array, pairs: Sequence[Pairs]) -> None:
        """Feed pairs alone, as `grow` does first."""
        with self.lock:
            self.draft.depth = 0
            self._call(cache, last, pairs, Sizes(len(cache.host)), 0)

    def grow(
        self, cache: SlotCache, last: Array, pairs: Sequence[Pairs], rows: Rows, budget: Budget, shape: Shape
    ) -> DraftTree:
        """A tree for every row.

        Args:
            cache: the layer's keys and values of the text; what is fed for the tree lasts for this call.
            last: float32 [b, hidden], the vectors after every row's last pair, which the candidates below the roots
                come from; written here where a row has pairs to be fed.
            pairs: what is fed first.
            rows: as a drafter's `propose` has them.
            budget: its floor, reach and price cut the tree.
            shape: of the tree.
        """
        with self.lock:
            sizes, fed = grown(shape, len(rows), min(shape.top_k, self.vocab)), (shape.depth - 1) * shape.width
            return self._call(cache, last, pairs, sizes, fed, rows, budget, shape)

    def step(self, cache: SlotCache, inputs: Array, depths: Array, ancestors: Array) -> tuple[Array, Array]:
        """Vectors [b, m, h] and logits [b, m, v] of the last m of n nodes after each row's text.

        Args:
            inputs: [b, m, inputs], what they read.
            depths: int64 [b, n], those of the first ones 0.
            ancestors: bool [b, n, n].
        """
        n, m = depths.shape[1], inputs.shape[1]
        lengths = np.array(cache.host, np.int64)
        cache.reserve(cache.longest + n)
        rope, pointers = self.rotary.upto(cache.longest + n), pointers_of(cache)
        own = np.ascontiguousarray(ancestors)
        positions = np.ascontiguousarray(lengths[:, None] + depths)
        fields = {
            "first_node": n - m, "total_nodes": n, "capacity": cache.keys.shape[1], "lengths": address(lengths),
            "positions": address(positions), "ancestors": address(own), "cache": pointers, "rope": address(rope),
            "rope_positions": len(rope),
        }  # fmt: skip
        with self.lock:
            return self._run(self.model, inputs, fields)

    def logits(self, vectors: Array) -> Array:
        """The head alone: [b, m, h] to [b, m, v]."""
        lengths = np.zeros(vectors.shape[0], np.int64)
        positions = np.zeros(vectors.shape[:2], np.int64)
        fields = {
            "total_nodes": vectors.shape[1], "shared_tree": 1, "lengths": address(lengths),
            "positions": address(positions),
        }  # fmt: skip
        with self.lock:
            return self._run(self.end, vectors, fields)[1]

    def _run(self, model: Struct, inputs: Array, fields: Mapping[str, Any]) -> tuple[Array, Array]:
        """A pass over nodes that read `inputs`: vectors and logits of all of them."""
        b, m, _ = inputs.shape
        workspace, states = self.steps, np.array(inputs, np.float32, order="C")
        vectors, logits = np.empty((b, m, model.hidden), np.float32), np.empty((b, m, self.vocab), np.float32)
        nodes, tap = np.arange(m, dtype=np.int64), np.ones(1, np.int64)  # after the one layer
        hidden = workspace.of("states", b * m * model.hidden) if model.layers else states
        pass_ = struct(
            "Pass", rows=b, nodes=m, taps=model.layers, tap_layers=address(tap), tapped=address(vectors),
            logit_count=m, logit_nodes=address(nodes), logits=address(logits), hidden_states=address(hidden),
            inputs=address(states) if model.layers else NULL,
            **workspace.of_pass(b * m, fields["total_nodes"]), **fields,
        )  # fmt: skip
        workspace.use_threads(pass_, b * m)
        self.code.forward(model, pass_)
        return vectors, logits

    def _call(
        self, cache: SlotCache, last: Array, pairs: Sequence[Pairs], sizes: Sizes, fed: int,
        rows: Rows | None = None, budget: Budget | None = None, shape: Shape | None = None,
    ) -> Any:  # fmt: skip
        """The call itself."""
        counts, features, following = listed(pairs, sizes.rows)
        pending = max(counts)
        self.fit(Sizes(sizes.rows, sizes.fed, sizes.candidates, sizes.width, max(1, pending)))
        request = None if rows is None or budget is None or shape is None else self.request(rows, budget, shape)
        slots = cache.longest + pending + fed
        cache.reserve(slots)
        pass_, draft, rope, pointers = self.pass_, self.draft, self.rotary.upto(slots), pointers_of(cache)
        arrays = integers(counts), integers(cache.host), addresses(features), integers(following)
        pass_.rows, pass_.capacity, pass_.cache = sizes.rows, cache.keys.shape[1], pointers
        pass_.rope, pass_.rope_positions = address(rope), len(rope)
        self.workspace.use_threads(pass_, self.sizes.rows * max(self.sizes.width, self.sizes.pending))
        draft.most_pending, draft.last_hidden = pending, address(last)
        draft.pending, draft.lengths, draft.features, draft.next_tokens = arrays
        self.code.draft_tree(self.model, self.end, pass_, draft)
        if pending:
            cache.advance(counts)
        return None if request is None else request.tree(draft.widest)

    def make(self) -> None:
        """Make `pass_` and `draft` for `sizes`."""
        sizes, workspace, hidden = self.sizes, self.workspace, self.model.hidden
        b, fed = sizes.rows, sizes.fed
        together, most = b * max(sizes.width, sizes.pending), max(fed, min(MAX_FED_PAIRS, sizes.pending))
        nodes = workspace.filled("logit nodes of a step", range(sizes.width))
        self.pass_ = struct(
            "Pass", rows=b, logit_nodes=address(nodes), tap_layers=address(workspace.filled("tap", [1])),
            **workspace.of_pass(together, fed),
            **workspace.split(
                "a step", np.float32, inputs=together * self.model.input_dim, hidden_states=together * hidden,
                tapped=together * hidden, logits=b * sizes.width * self.vocab,
            ),
        )  # fmt: skip
        self.draft = struct(
            "Draft", fuse=self.fuse, taps=self.taps, feature_dim=self.feature_dim, **self.embeddings.lookup,
            ancestors=address(workspace.of("ancestors", b * fed * fed, np.uint8)),
            hidden_states=address(workspace.of("fed states", b * fed * hidden)),
            **workspace.split(
                "fed", np.int64, positions=b * most, fed_candidate=b * fed,
                last_features=b * self.taps, last_tokens=b, last_pending=b,
            ),
            **self.common(GROWN),
        )  # fmt: skip


def eagle(code: Library, parts: EagleParts) -> Eagle | None:
    """The drafter in compiled code; None where the code does not know such sizes."""
    shape, first = parts.shape, parts.weights["fc.weight"]
    reads = first.shape[1] // (TAPS if parts.fuses else 1)
    widths = shape.hidden, shape.intermediate, shape.head_dim, reads
    if any(width % STEP for width in widths) or shape.head_dim > MAX_HEAD_DIM:
        return None
    if parts.head.dtype != first.dtype:
        return None
    return Eagle(code, parts) if shape.inputs == shape.hidden * (2 if parts.fuses else 1) else None
