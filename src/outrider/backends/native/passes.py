"""One pass of a model in compiled code: over the nodes of trees, or over a chunk of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from ...core.protocols import TargetOutput
from ...core.types import Array, DraftTree
from .abi import NULL, Library, address, ffi, struct
from .arrays import addresses, integers
from .kv_cache import KVCache
from .pages import aligned
from .rope import Rope, stacked
from .weights import Weights, rounded, widened
from .workspace import Workspace

FIRST = 1024  # positions of the rotary table at first


@dataclass(frozen=True)
class Nodes:
    """What a pass computes: the nodes from `since` on of every row's tree, or of chunks that are chains.

    Attributes:
        tree: whose first `since` nodes are in the cache already; without an ancestor matrix it is a chunk of prompts.
        lengths: int64 [b], committed tokens.
        positions: int64 [b, n], of all nodes.
        bound: no position lies beyond this one.
        logit_nodes: int64 [k], the nodes whose logits are computed, counted from `since`, ascending; or [b, k], of each
            row.
        embeds: [b, n - since, h], embeddings to read in place of the tokens'; None: theirs.
    """

    tree: DraftTree
    lengths: Array
    positions: Array
    bound: int
    logit_nodes: Array
    since: int = 0
    embeds: Any = None

    @classmethod
    def of(
        cls, tree: DraftTree, lengths: Array, since: int = 0, embeds: Any = None, logit_nodes: Array | None = None
    ) -> Nodes:
        """The nodes of a tree after texts of these lengths; `logit_nodes`: None means all."""
        wanted = np.arange(tree.nodes - since, dtype=np.int64) if logit_nodes is None else logit_nodes
        depths = tree.depths if tree.ancestors is not None else np.arange(tree.nodes)
        bound = int(lengths.max()) + (tree.deepest if tree.ancestors is not None else tree.nodes - 1)
        positions = np.ascontiguousarray(lengths[:, None] + depths)
        return cls(tree, lengths, positions, bound, wanted, since, embeds)


class Forward:
    """The compiled pass over one model's weights.

    Args:
        code: the compiled library.
        weights: of the model.
        ropes: its rotary embeddings.
        context: how many positions it has.
        halves: are keys, values and features bfloat16 (the uint16 of their bits)? Else float32.
    """

    def __init__(self, code: Library, weights: Weights, ropes: tuple[Rope, ...], context: int, halves: bool):
        self.code, self.context = code, context
        self.dtype = np.dtype(np.uint16 if halves else np.float32)
        self.lock = Lock()  # of the workspace
        self.read(weights, ropes)

    def read(self, weights: Weights, ropes: tuple[Rope, ...]) -> None:
        """Compute with these from now on; widths within a layer may be others."""
        self.weights, self.ropes = weights, ropes
        self.workspace, self.table = Workspace(self.code, weights.model), stacked(ropes, 0)

    def run(self, cache: KVCache, nodes: Nodes, taps: Sequence[int]) -> TargetOutput:
        """One pass. Logits are float32 [b, k, v], those of padding are undefined; features are of the cache's
        precision, [b, n - since, h] each, and zeros at padding."""
        model, tree, n = self.weights.model, nodes.tree, nodes.tree.nodes
        b, m = len(nodes.lengths), n - nodes.since
        cache.reserve(int(nodes.lengths.max()) + n)
        tokens = np.ascontiguousarray(tree.tokens[:, nodes.since :])
        ancestors = None if tree.ancestors is None else np.ascontiguousarray(tree.ancestors)
        sizes = np.ascontiguousarray(tree.size) if ancestors is None or b > 1 else None
        layers = integers(tap if tap >= 0 else model.layers + 1 + tap for tap in taps)
        features = [self._feature(b, m, sizes is not None) for _ in taps]
        pointers = addresses(feature.__array_interface__["data"][0] for feature in features)
        count = nodes.logit_nodes.shape[-1]
        logits = aligned((b, count, model.vocab))
        with self.lock:
            table = self.rope_table(nodes.bound + 1)
            pass_ = struct(
                "Pass", rows=b, nodes=m, first_node=nodes.since, total_nodes=n, capacity=cache.capacity,
                shared_tree=ancestors is None or len(ancestors) == 1, lengths=address(nodes.lengths),
                positions=address(nodes.positions), sizes=address(sizes), ancestors=address(ancestors),
                cache=cache.pointers, rope=address(table), rope_positions=table.shape[1],
                taps=len(taps), tap_layers=layers, features=pointers,
                logit_count=count, logit_nodes=address(nodes.logit_nodes), own_logit_nodes=nodes.logit_nodes.ndim > 1,
                logits=address(logits), **self._inputs(tokens, nodes.embeds), **self.workspace.of_pass(b * m, n),
            )  # fmt: skip
            self.workspace.use_threads(pass_, b * m)
            self.code.forward(model, pass_)
        return TargetOutput(logits, dict(zip(taps, features, strict=True)))

    def head(self, states: Array) -> Array:
        """Logits [n, v] of hidden states float32 [n, h] after the final norm."""
        count = len(states)
        logits, nodes = aligned((count, self.weights.model.vocab)), np.arange(count, dtype=np.int64)
        with self.lock:
            states_buffer = self.workspace.of("states", states.size)[: states.size]
            states_buffer[:] = states.reshape(-1)
            pass_ = struct(
                "Pass", rows=1, nodes=count, total_nodes=count, hidden_states=address(states_buffer), logit_count=count,
                logit_nodes=address(nodes), logits=address(logits), **self.workspace.of_pass(count, 1),
            )  # fmt: skip
            self.workspace.use_threads(pass_, count)
            self.code.forward(self.weights.head, pass_)
        return logits

    def rope_table(self, positions: int) -> Array:
        """The rotary tables of so many positions at least, or of all there are."""
        if self.table.shape[1] < min(positions, self.context):
            self.table = stacked(self.ropes, min(self.context, max(FIRST, 1 << (positions - 1).bit_length())))
        return self.table

    def _feature(self, b: int, m: int, padded: bool) -> Array:
        made = aligned((b, m, self.weights.model.hidden), self.dtype)
        if padded:
            made[:] = 0  # a drafter's masks hide padding, but no NaN in it
        return made

    def _inputs(self, tokens: Array, embeds: Any) -> dict[str, Any]:
        """Tokens and the table, or else embeddings."""
        model, table = self.weights.model, self.weights.table
        size = tokens.size * model.hidden
        states_buffer = self.workspace.of("states", size)[:size]
        if embeds is None and table.plain is not None:
            return {
                "tokens": ffi.from_buffer("int64_t[]", tokens), "embeddings": table.address,
                "embedding_rows": table.shape[0], "hidden_states": address(states_buffer),
            }  # fmt: skip
        made = table.rows(tokens.reshape(-1)) if embeds is None else as_float(embeds)
        if embeds is None and table.scale and self.dtype == np.uint16:
            made = widened(rounded(made))  # as the pass does
        states_buffer[:] = made.reshape(-1)
        return {"tokens": NULL, "hidden_states": address(states_buffer)}


def as_float(values: Any) -> Array:
    """An array of hidden states (uint16: the bits of bfloat16), or a tensor, in float32."""
    array = np.asarray(values)
    return widened(array) if array.dtype == np.uint16 else array.astype(np.float32, copy=False)
