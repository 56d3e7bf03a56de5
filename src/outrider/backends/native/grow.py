"""Trees of compiled drafters that grow layer by layer (EAGLE-2's growth): EAGLE, EAGLE-3, Hydra and Mamba-2, with their
steps in C. One call first reads what was committed since the last one, and then grows a tree for every row, as
`core/growth.py` does with steps in Python. (Those that draft in one pass have trees of another kind: `lattice.py`.)

Logs of confidences differ from those of tensors by rounding, which may change a draft and never a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ...core.types import Array, Budget, DraftTree, Rows
from .abi import MAX_FED_PAIRS, MAX_HEAD_DIM, NULL, Library, Struct, address, ffi, struct
from .arrays import addresses, integers
from .drafts import STEP, Caller, Holder, Pairs, Request, Shape, Sizes, SlotCache, Weights, float32, listed
from .rope import Rope
from .weights import Table
from .workspace import Workspace

TAPS = 3  # of EAGLE-3
MULTIPLE = 16  # what lies side by side in a Mamba-2 is filled up to a multiple of this
PIECE = 256  # tokens of all rows that a Mamba-2 reads at once
CHUNK = 256  # features of a row that Hydra++'s layer reads at once
LISTS = "token", "parent", "level", "fed", "chosen"  # of all candidates


@runtime_checkable
class LayerSizes(Protocol):
    """The sizes of a decoder layer, as `nets.layer.LayerShape` has them."""

    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def rope(self) -> Mapping[str, Any]: ...
    @property
    def eps(self) -> float: ...


def sizes_of(shape: LayerSizes) -> dict[str, Any]:
    """Fields of `Model`."""
    return {
        "hidden": shape.hidden, "intermediate": shape.intermediate, "heads": shape.heads, "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "eps": shape.eps,
    }  # fmt: skip


class RotaryTables:
    """Rotary tables, extended when more positions are needed."""

    def __init__(self, shape: LayerSizes):
        self.rope, self.table = Rope.of(shape.rope, shape.head_dim), np.zeros((0, 2, shape.head_dim), np.float32)

    def upto(self, positions: int) -> Array:
        """Cosines and sines of so many positions at least."""
        if len(self.table) < positions:
            self.table = self.rope.table(max(512, 1 << (positions - 1).bit_length()))
        return self.table


def grown(shape: Shape, rows: int, top_k: int) -> Sizes:
    """The sizes that a tree of this shape needs."""
    fed = (shape.depth - 1) * shape.width
    return Sizes(rows, max(1, fed), 1 + top_k * (1 + fed), shape.width)


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
        rope, pointers = self.rotary.upto(cache.longest + n), _pointers(cache)
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
        pass_, draft, rope, pointers = self.pass_, self.draft, self.rotary.upto(slots), _pointers(cache)
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
            **self.common(LISTS),
        )  # fmt: skip


def _pointers(cache: SlotCache) -> Any:
    return addresses((cache.keys.ctypes.data, cache.values.ctypes.data))


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
            fed_candidate=address(workspace.of("fed", sizes.rows * sizes.fed, np.int64)), **self.common(LISTS),
        )  # fmt: skip


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
            tap, features, pointers = integers([1]), addresses([made.ctypes.data]), _pointers(cache)
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


def hydra(code: Library, heads: Sequence[HydraHead], embeddings: Table, names: Array | None) -> Hydra | None:
    """The heads in compiled code; None where the code does not know such heads.

    Args:
        embeddings: of the target, [tokens, hidden].
        names: int64, token ids of the rows of the LM heads.
    """
    return None if heads[0].head.shape[1] % STEP else Hydra(code, heads, embeddings, names)


@dataclass(frozen=True)
class MambaSizes:
    """The sizes of a Mamba-2. `norm_group`: numbers that the norm before a layer's last product takes together."""

    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_kernel: int
    layers: int
    norm_group: int
    eps: float
    gated_eps: float
    dt_min: float
    dt_max: float


class Mamba(Caller):
    """A Mamba-2, whose states belong to its user: `conv` [layers, rows, slots, channels, kernel - 1] in its precision
    and `ssm` [layers, rows, slots, heads, head_dim, state_size] in float32.

    Args:
        weights: by their names in its folder.
    """

    def __init__(self, code: Library, sizes: MambaSizes, weights: Weights, head: Array, names: Array | None):
        hold, layers = Holder(code, weights), ffi.new("MambaLayer[]", sizes.layers)
        for i, layer in enumerate(layers):
            at = f"backbone.layers.{i}."
            mixer, taken = f"{at}mixer.", weights[f"{at}mixer.in_proj.weight"]
            filled = np.concatenate([taken, np.zeros((-len(taken) % MULTIPLE, taken.shape[1]), taken.dtype)])
            conv = weights[f"{mixer}conv1d.weight"][:, 0]
            layer.in_proj, layer.out_proj = hold.matrix(filled), hold.matrix(f"{mixer}out_proj.weight")
            layer.norm, layer.gated_norm = hold.vector(f"{at}norm.weight"), hold.vector(f"{mixer}norm.weight")
            layer.conv_weight = hold.vector(conv)
            layer.conv_bias = hold.vector(weights.get(f"{mixer}conv1d.bias", np.zeros(len(conv), np.float32)))
            layer.dt_bias, layer.d = hold.vector(f"{mixer}dt_bias"), hold.vector(f"{mixer}D")
            layer.a = hold.vector(-np.exp(float32(weights[f"{mixer}A_log"])))
        self.outputs, table = len(filled), weights["backbone.embeddings.weight"]
        self.mamba = struct(
            "Mamba", hidden=sizes.hidden, intermediate=sizes.intermediate, heads=sizes.heads, head_dim=sizes.head_dim,
            state_size=sizes.state_size, groups=sizes.groups, conv_kernel=sizes.conv_kernel, layers=sizes.layers,
            vocab=len(head), in_proj_rows=self.outputs, norm_group=sizes.norm_group, eps=sizes.eps,
            gated_eps=sizes.gated_eps, dt_min=sizes.dt_min, dt_max=sizes.dt_max, layer=layers,
            norm=hold.vector("backbone.norm_f.weight"), head=hold.matrix(head), embeddings=hold.table(table),
            embedding_rows=len(table),
        )  # fmt: skip
        model = struct("Model", hidden=sizes.hidden, intermediate=sizes.intermediate)
        super().__init__(code, model, len(head), names, [*hold.kept, layers])

    def grow(
        self, conv: Array, ssm: Array, pending: Sequence[Sequence[int]], rows: Rows, budget: Budget, shape: Shape
    ) -> tuple[DraftTree, list[list[int]]]:
        """A tree for every row, and the slots of its nodes' states (-1: not fed).

        Args:
            conv, ssm: states, with slots for the nodes that are fed; slot 0 has what was before `pending`, and is moved
                after it.
            pending: the tokens that are read first, one at least for each row, the root last.
        """
        with self.lock:
            self.fit(grown(shape, len(rows), min(shape.top_k, self.vocab)))
            request: Request = self.request(rows, budget, shape)
            self.draft.fed_index = address(request.fed_index)
            self._read(conv, ssm, pending)
            n = self.draft.widest
            return request.tree(n), request.indices(n)

    def read(self, conv: Array, ssm: Array, pending: Sequence[Sequence[int]]) -> Array:
        """Logits [b, v] after what `grow` reads first."""
        with self.lock:
            self.fit(Sizes(len(pending)))
            self.draft.depth = 0
            self._read(conv, ssm, pending)
            return self._logits(len(pending))

    def skip(self, conv: Array, ssm: Array, pending: Sequence[Sequence[int]]) -> None:
        """Move the states in slot 0 after these tokens, without logits."""
        slots = ssm.shape[2]
        nodes = [(token, r * slots) for r, row in enumerate(pending) for token in row]
        with self.lock:
            for first in range(0, len(nodes), PIECE):
                piece = nodes[first : first + PIECE]
                self.fit(Sizes(len(pending), width=-(-len(piece) // len(pending))))
                states = self._states(conv, ssm)
                tokens, places = (integers(part) for part in zip(*piece, strict=True))
                states.token, states.source, states.target = tokens, places, places
                self.pass_.rows = len(pending)
                self.workspace.use_threads(self.pass_, self.sizes.rows * self.sizes.width)
                self.code.read_mamba(self.mamba, states, self.pass_, len(piece))

    def step(self, conv: Array, ssm: Array, tokens: Array, above: Array, since: int) -> Array:
        """Logits [b, w, v] below w nodes of every row: `above` [b, w] are the slots of their parents, their own are
        `since` and on."""
        (b, w), slots = tokens.shape, ssm.shape[2]
        base = slots * np.arange(b)[:, None]
        arrays = [np.ascontiguousarray(part) for part in (tokens, base + above, base + since + np.arange(w))]
        with self.lock:
            self.fit(Sizes(b, width=w))
            states = self._states(conv, ssm)
            states.token, states.source, states.target = map(address, arrays)
            self.pass_.rows = b
            self.workspace.use_threads(self.pass_, self.sizes.rows * self.sizes.width)
            self.code.step_mamba(self.mamba, states, self.pass_, b * w)
            return self._logits(b * w).reshape(b, w, -1)

    def _read(self, conv: Array, ssm: Array, pending: Sequence[Sequence[int]]) -> None:
        counts, draft = [len(row) for row in pending], self.draft
        assert min(counts) > 0, "every row's root is pending"
        arrays = integers(counts), integers(chain(*pending))
        draft.most_pending, draft.pending, draft.next_tokens = max(counts), *arrays
        self.pass_.rows = len(pending)
        self.workspace.use_threads(self.pass_, self.sizes.rows * self.sizes.width)
        self.code.draft_mamba(self.mamba, self._states(conv, ssm), self.pass_, draft)

    def _states(self, conv: Array, ssm: Array) -> Struct:
        count = self.sizes.rows * self.sizes.width
        nodes = self.workspace.split("nodes", np.int64, **dict.fromkeys(("source", "target", "token"), count))
        return struct("MambaStates", slots=ssm.shape[2], conv=address(conv), ssm=address(ssm), **nodes)

    def _logits(self, count: int) -> Array:
        return self.workspace.buffers["logits"][: count * self.vocab].reshape(count, -1).copy()

    def make(self) -> None:
        """Make `pass_` and `draft` for `sizes`."""
        sizes, workspace, model = self.sizes, self.workspace, self.mamba
        together = sizes.rows * sizes.width
        widths = {
            "hidden_states": model.hidden, "normed": model.hidden, "attention": model.intermediate,
            "qkv": self.outputs, "logits": self.vocab,
        }  # fmt: skip
        self.pass_ = struct("Pass", **{name: address(workspace.of(name, together * n)) for name, n in widths.items()})
        fed = address(workspace.of("fed", sizes.rows * sizes.fed, np.int64))
        self.draft = struct("Draft", fed_candidate=fed, **self.common(LISTS))


def mamba(code: Library, sizes: MambaSizes, weights: Weights, head: Array, names: Array | None) -> Mamba | None:
    """The network in compiled code; None where the code does not know such sizes.

    Args:
        weights: by their names in its folder.
        head: [vocab, hidden].
        names: int64 [vocab], token ids of the head's rows; None: 0 .. vocab - 1.
    """
    channels = len(weights["backbone.layers.0.mixer.conv1d.weight"])
    if any(size % STEP for size in (sizes.hidden, sizes.intermediate)) or sizes.conv_kernel < 2:
        return None
    if any(size % MULTIPLE for size in (channels, sizes.state_size, sizes.norm_group)):
        return None
    if any(name.endswith(("in_proj.bias", "out_proj.bias")) for name in weights):
        return None
    return Mamba(code, sizes, weights, head, names)
