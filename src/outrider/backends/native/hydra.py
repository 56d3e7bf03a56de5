"""Hydra's heads in compiled code, whose trees grow as EAGLE's do (`eagle.py`), and Hydra++'s layer before them.

Logs of confidences differ from those of tensors by rounding, which may change a draft and never a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from ...core.types import Array, Budget, DraftTree, Rows
from .abi import MAX_HEAD_DIM, Library, address, ffi, struct
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
)
from .weights import Table
from .workspace import Workspace

CHUNK = 256  # features of a row that Hydra++'s layer reads at once


@dataclass(frozen=True)
class HydraHead:
    """A head's first block, the residual map above the one after SiLU, and its LM head.

    Attributes:
        block: [2 hidden, inputs].
        bias: [2 hidden].
        head: [vocab, hidden].
        head_bias: [vocab].
    """

    block: Array
    bias: Array
    head: Array
    head_bias: Array


class Hydra(Caller):
    """Every head: R x + SiLU(W x + b) of the feature and a path's embeddings, and logits of that."""

    def __init__(self, code: Library, heads: Sequence[HydraHead], embeddings: Table, names: Array | None):
        hold, self.embeddings, self.dtype = Holder(code, {}), embeddings, heads[0].head.dtype
        vocab, self.hidden = heads[0].head.shape
        model = struct("Model", hidden=self.hidden, vocab=vocab, input_dim=(len(heads) + 1) * self.hidden)
        self.heads = ffi.new("HydraHead[]", len(heads))
        for part, own in zip(self.heads, heads, strict=True):
            part.block, part.head = hold.matrix(own.block), hold.matrix(own.head)
            part.bias, part.head_bias = hold.vector(own.bias), hold.vector(own.head_bias)
        super().__init__(code, model, vocab, names, hold.kept)

    def grow(self, features: Array, rows: Rows, budget: Budget, shape: Shape) -> DraftTree:
        """A tree for every row, of no more layers than there are heads.

        Args:
            features: [b, hidden], of each row's last committed token, after the target's final norm or Hydra++'s
                layer; in the precision of the heads.
        """
        assert features.dtype == self.dtype, "features are of the drafter's precision"
        features = np.ascontiguousarray(features)
        with self.lock:
            self.fit(grown(shape, len(rows), min(shape.top_k, self.vocab)))
            request = self.request(rows, budget, shape)
            arrays = addresses(row.ctypes.data for row in features)
            self.pass_.rows, self.draft.features = len(rows), arrays
            self.workspace.use_threads(self.pass_, self.sizes.rows * self.sizes.width)
            residual = address(self.workspace.buffers["blocks"])
            self.code.draft_hydra(self.model, self.heads, residual, self.pass_, self.draft)
            return request.tree(self.draft.widest)

    def step(self, features: Array, tokens: Array, parents: Array, since: int, layer: int) -> Array:
        """Logits [b, n - since, vocab], float32, of one head below the nodes from `since` on.

        Args:
            features: as `grow` has them.
            tokens, parents: int64 [b, n], of all nodes, the root first.
            layer: the depth of these nodes, and the head's index.
        """
        (b, n), w = tokens.shape, tokens.shape[1] - since
        features = np.ascontiguousarray(features)
        nodes = np.ascontiguousarray(np.tile(np.arange(since, n), (b, 1)))
        tokens, parents = (np.ascontiguousarray(part) for part in (tokens, parents))
        arrays = addresses(row.ctypes.data for row in features)
        draft = struct(
            "Draft", **self.embeddings.lookup, features=arrays, depth=2, width=w, max_candidates=n,
            token=address(tokens), parent=address(parents), fed_candidate=address(nodes),
        )  # fmt: skip
        with self.lock:
            self.fit(Sizes(b, width=w))
            self.pass_.rows = b
            self.workspace.use_threads(self.pass_, self.sizes.rows * self.sizes.width)
            residual, logits = (self.workspace.buffers[name] for name in ("blocks", "logits"))
            self.code.step_hydra(self.model, self.heads, address(residual), self.pass_, draft, layer)
            return logits[: b * w * self.vocab].reshape(b, w, -1).copy()

    def make(self) -> None:
        """Make `pass_` and `draft` for `sizes`."""
        sizes, workspace = self.sizes, self.workspace
        together = sizes.rows * sizes.width
        workspace.of("blocks", together * 2 * self.hidden)
        logits = address(workspace.of("logits", together * self.vocab))
        self.pass_ = struct("Pass", logits=logits, **workspace.of_pass(together, 1))
        self.draft = struct(
            "Draft", **self.embeddings.lookup,
            fed_candidate=address(workspace.of("fed", sizes.rows * sizes.fed, np.int64)), **self.common(GROWN),
        )  # fmt: skip


def hydra(code: Library, heads: Sequence[HydraHead], embeddings: Table, names: Array | None) -> Hydra | None:
    """The heads in compiled code; None where the code does not know such heads.

    Args:
        embeddings: of the target, [tokens, hidden].
        names: int64, token ids of the rows of the LM heads.
    """
    return None if heads[0].head.shape[1] % STEP else Hydra(code, heads, embeddings, names)


class Prefix:
    """Hydra++'s decoder layer over the features of a text, between a norm before it and one after it.

    Args:
        weights: by their names in its folder, which begin with `prefix.`.
    """

    def __init__(self, code: Library, shape: LayerSizes, weights: Weights):
        self.code, self.shape, self.rotary, self.lock = code, shape, RotaryTables(shape), Lock()
        hold, layer = Holder(code, weights), struct("Layer")
        hold.layer(layer, "prefix.layer.", {"mlp_norm": "post_attention_layernorm"})
        layer.attention_norm = {"weight": hold.vector("prefix.input_layernorm.weight")}
        self.model = struct(
            "Model", **sizes_of(shape), layers=1, attention_scale=shape.head_dim**-0.5, layer=layer,
            norm={"weight": hold.vector("prefix.norm.weight")},
        )  # fmt: skip
        self.kept, self.workspace = [*hold.kept, layer], Workspace(code, self.model)

    def cache(self, rows: int, capacity: int, dtype: Any) -> SlotCache:
        """An empty cache for these rows."""
        return SlotCache(rows, capacity, self.shape.kv_heads, self.shape.head_dim, dtype)

    def read(self, cache: SlotCache, last: Array, pairs: Sequence[Pairs]) -> None:
        """Read features of committed text; of each row that has some the last result is written to `last`, float32
        [b, hidden]."""
        rows = [
            np.concatenate([float32(one.features[0][one.rows[r], list(one.nodes[r])]) for one in pairs])
            for r in range(len(cache.host))
        ]
        for first in range(0, max(map(len, rows)), CHUNK):
            some = [row[first : first + CHUNK] for row in rows]
            made = self._pass(cache, some)
            for r, row in enumerate(some):
                if len(row):
                    last[r] = float32(made[r, len(row) - 1])

    def _pass(self, cache: SlotCache, rows: Sequence[Array]) -> Array:
        """Results [b, n, hidden] in the cache's precision, of rows [m, hidden] each; n is the largest m."""
        counts, b, h = [len(row) for row in rows], len(rows), self.model.hidden
        n, slots = max(counts), cache.longest + max(counts)
        cache.reserve(slots)
        made = np.empty((b, n, h), cache.keys.dtype)
        lengths, sizes = (np.array(part, np.int64) for part in (cache.host, counts))
        positions = lengths[:, None] + np.arange(n)
        with self.lock:
            workspace, rope = self.workspace, self.rotary.upto(slots)
            states = workspace.of("states", b * n * h)[: b * n * h].reshape(b, n, h)
            for to, row in zip(states, rows, strict=True):
                to[: len(row)] = row
            tap, features, pointers = integers([1]), addresses([made.ctypes.data]), pointers_of(cache)
            pass_ = struct(
                "Pass", rows=b, nodes=n, total_nodes=n, capacity=cache.keys.shape[1], shared_tree=1,
                lengths=address(lengths), positions=address(positions), sizes=address(sizes), cache=pointers,
                rope=address(rope), rope_positions=len(rope), hidden_states=address(states), taps=1, tap_layers=tap,
                features=features, **workspace.of_pass(b * n, n),
            )  # fmt: skip
            workspace.use_threads(pass_, b * n)
            self.code.forward(self.model, pass_)
        cache.advance(counts)
        return made


def prefix(code: Library, shape: LayerSizes, weights: Weights) -> Prefix | None:
    """The layer in compiled code; None where the code does not know such sizes."""
    widths = shape.hidden, shape.intermediate, shape.head_dim
    fits = not any(width % STEP for width in widths) and shape.head_dim <= MAX_HEAD_DIM
    return Prefix(code, shape, weights) if fits else None
