"""What compiled drafters are made of and called with: matrices rounded to eight bits, the pairs that are still to be
read, keys and values, and the arguments of every call that drafts trees.

Weights are numpy arrays, by the names that they have in a drafter's folder; bfloat16 as the uint16 of its bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from ...core.noise import SLOPES, VALUES
from ...core.price import Price
from ...core.protocols import Round
from ...core.sampling import POOL, POOLED
from ...core.types import Array, Budget, DraftTree, Rows
from .abi import INTEGER, NULL, PLAIN, Library, Pointer, Struct, address, struct
from .arrays import doubles, floats, integers, seeds
from .kv_cache import FIRST
from .pages import aligned, fresh
from .weights import Q8_0, Matrix, widened
from .workspace import Workspace

STEP = 32  # what widths are multiples of
F32 = 0  # its number among GGUF's kinds
GROWN = "token", "parent", "level", "fed", "chosen"  # arrays of all candidates of a tree that grows layer by layer


def float32(values: Array) -> Array:
    """Numbers in float32; uint16: the bits of bfloat16."""
    return widened(values) if values.dtype == np.uint16 else values.astype(np.float32)


def matrix(weight: Array, code: Library) -> Matrix:
    """A drafter's matrix [outputs, inputs], rounded to int8 in builds for bfloat16. Products of integers round
    activations too, which is no harm: drafts need not be exact."""
    if not code.bf16_weights:
        return Matrix(PLAIN, np.ascontiguousarray(weight))
    rows, width = weight.shape
    own, buffer = np.ascontiguousarray(float32(weight)), aligned((code.int8_bytes(Q8_0, rows, width),), np.uint8)
    if not code.pack_int8(F32, address(own), rows, width, NULL, 1, address(buffer), 1):
        return Matrix(PLAIN, np.ascontiguousarray(weight))  # weights that are NaN draft nothing
    return Matrix(INTEGER + Q8_0, buffer)


class Pairs(NamedTuple):
    """What a round committed: of each row the nodes whose features are read, and the token after each of them. (A
    tuple: one is made in every round.)"""

    features: Sequence[Array]  # of each tap, [r, m, h]
    nodes: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    rows: Sequence[int]  # where each row lies in the features

    @classmethod
    def of(cls, round: Round, taps: Sequence[int]) -> Pairs:
        """Those of a round, or of a chunk of the prompts."""
        features = [round.output.features[tap] for tap in taps]
        if round.tree.ancestors is not None:
            nodes = [path[: len(tokens)] for path, tokens in zip(round.paths, round.tokens, strict=True)]
            return cls(features, nodes, round.tokens, range(len(nodes)))
        tokens = []
        for (row, _, _), upcoming in zip(round.tree.host, round.next, strict=True):
            tokens.append([*row[1:], max(0, upcoming)] if row else [])
        return cls(features, [range(len(row)) for row in tokens], tokens, range(len(tokens)))

    def select(self, index: Sequence[int]) -> Pairs:
        """Row i := old row index[i]."""
        nodes, tokens = ([part[i] for i in index] for part in (self.nodes, self.tokens))
        return Pairs(self.features, nodes, tokens, [self.rows[i] for i in index])

    def beside(self, before: int, after: int) -> Pairs:
        """With so many rows before and after these, which committed nothing."""
        nodes, tokens = ([*[()] * before, *part, *[()] * after] for part in (self.nodes, self.tokens))
        return Pairs(self.features, nodes, tokens, [*[0] * before, *self.rows, *[0] * after])


def listed(pairs: Sequence[Pairs], rows: int) -> tuple[list[int], list[int], list[int]]:
    """How many pairs each row has; addresses of their features, a pair's side by side, and their tokens, row by row."""
    counts, features, following = [0] * rows, list[int](), list[int]()
    for r in range(rows):
        for one in pairs:
            nodes, tokens = one.nodes[r], one.tokens[r]
            parts = [(part.ctypes.data, *part.strides[:2]) for part in one.features]
            at = one.rows[r]
            features += [start + at * row + node * step for node in nodes for start, row, step in parts]
            following += tokens
            counts[r] += len(nodes)
    return counts, features, following


class SlotCache:
    """Keys and values [rows, capacity, layers * kv_heads, head_dim] of the text that a drafter has read: row b's are in
    the slots 0 .. host[b] - 1, and what is after them lasts for one call."""

    def __init__(self, rows: int, capacity: int, heads: int, head_dim: int, dtype: Any):
        self.host = [0] * rows
        shape = rows, max(1, min(capacity, FIRST)), heads, head_dim
        self.keys, self.values = (_zeros(shape, dtype) for _ in range(2))

    @property
    def longest(self) -> int:
        """Slots of the longest row."""
        return max(self.host, default=0)

    def reserve(self, slots: int) -> None:
        """Grow to at least `slots` slots a row, by doubling."""
        have = self.keys.shape[1]
        if slots > have:
            self._resize(max(slots, 2 * have))

    def advance(self, counts: Sequence[int]) -> None:
        """The next counts[b] slots are text from now on."""
        self.host = [have + count for have, count in zip(self.host, counts, strict=True)]

    def select(self, index: Sequence[int]) -> None:
        """Row i := old row index[i]; repeats fork."""
        old, used = (self.keys, self.values), self.longest
        shape = len(index), *self.keys.shape[1:]
        self.keys, self.values = (_zeros(shape, part.dtype, used) for part in old)
        for made, part in zip((self.keys, self.values), old, strict=True):
            made[:, :used] = part[list(index), :used]
        self.host = [self.host[i] for i in index]

    def join(self, other: SlotCache) -> None:
        """Append another's rows."""
        rows, used = len(self.host), (self.longest, other.longest)
        old, more = (self.keys, self.values), (other.keys, other.values)
        shape = rows + len(other.host), max(old[0].shape[1], more[0].shape[1]), *old[0].shape[2:]
        self.keys, self.values = (_zeros(shape, part.dtype, min(used)) for part in old)
        for made, mine, theirs in zip((self.keys, self.values), old, more, strict=True):
            made[:rows, : used[0]], made[rows:, : used[1]] = mine[:, : used[0]], theirs[:, : used[1]]
        self.host = self.host + other.host

    def _resize(self, capacity: int) -> None:
        old, used = (self.keys, self.values), self.longest
        shape = len(self.host), capacity, *self.keys.shape[2:]
        self.keys, self.values = (_zeros(shape, part.dtype, used) for part in old)
        for made, part in zip((self.keys, self.values), old, strict=True):
            made[:, :used] = part[:, :used]


def _zeros(shape: Sequence[int], dtype: Any, since: int = 0) -> Array:
    made = fresh(shape, dtype)
    made[:, since:] = 0  # slots beyond the text must be finite: masks multiply them by zero
    return made


@dataclass(frozen=True)
class Shape:
    """Of a tree: `depth` layers, the `width` best nodes of each are fed, at most `nodes` are kept, the root included;
    `top_k` candidates below a node, confidences softmax(r / scale)."""

    depth: int
    width: int
    nodes: int
    top_k: int
    scale: float


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call's workspace: rows of the batch, and of a row the nodes fed, its candidates, the nodes fed at
    once, the pairs that are pending, the slots of a lattice, the nodes kept and the candidates of a node."""

    rows: int = 0
    fed: int = 1
    candidates: int = 1
    width: int = 1
    pending: int = 1
    slots: int = 1
    nodes: int = 1
    top_k: int = 1

    def both(self, other: Sizes) -> Sizes:
        """Sizes that suffice for either."""
        return Sizes(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


def grown(shape: Shape, rows: int, top_k: int) -> Sizes:
    """The sizes that a tree of this shape needs."""
    fed = (shape.depth - 1) * shape.width
    return Sizes(rows, max(1, fed), 1 + top_k * (1 + fed), shape.width)


class Caller:
    """A compiled drafter: what its structures point to, its workspace, and the trees that it drafts. One call
    runs at a time.

    Args:
        code: the compiled library.
        model: `Model`, whose widths size the workspace.
        vocab: tokens that can be drafted.
        names: int64 [vocab], their token ids; None: 0 .. vocab - 1.
        kept: what must live as long.
    """

    def __init__(self, code: Library, model: Struct, vocab: int, names: Array | None, kept: Sequence[Any]):
        self.code, self.model, self.vocab, self.names = code, model, vocab, names
        self.kept, self.lock, self.workspace = [*kept, model], Lock(), Workspace(code, model)
        self.sizes, self.pass_, self.draft = Sizes(), struct("Pass"), struct("Draft")
        self.price: Price | None = None
        self.seconds: Any = doubles([0])  # of the price, which seldom changes

    def fit(self, sizes: Sizes) -> None:
        """Make structures of at least these sizes, unless there are; they are kept from call to call."""
        if (sizes := sizes.both(self.sizes)) != self.sizes:
            self.sizes = sizes
            self.make()

    def make(self) -> None:
        """Make `pass_` and `draft` for `sizes`."""
        raise NotImplementedError

    def common(self, lists: Sequence[str]) -> dict[str, Any]:
        """Fields of every `Draft`; `lists`: those of integers that hold all candidates."""
        count = self.sizes.rows * self.sizes.candidates
        return {
            "token_ids": address(self.names), "knots": address(VALUES), "slopes": address(SLOPES),
            "max_candidates": self.sizes.candidates, "value": address(self.workspace.of("value", count)),
            **self.workspace.split("candidates", np.int64, **dict.fromkeys(lists, count)),
        }  # fmt: skip

    def request(self, rows: Rows, budget: Budget, shape: Shape) -> Request:
        """Write to `draft` that trees are wanted for these rows, cut by the budget's floor, reach and price."""
        made = Request(rows, shape)
        top_k, price = min(shape.top_k, self.vocab), budget.price
        if price is not None and price is not self.price:
            self.price, self.seconds = price, doubles(price.seconds)
        pool = max(POOL, top_k) if self.vocab > POOLED else self.vocab
        values = {
            **made.fields, "top_k": top_k, "pool": pool, "floor": _log(budget.floor), "reach": _log(budget.reach),
            "trust": price.trust if price else 1.0, "max_priced": len(price.seconds) if price else 0,
            "price_total": int(price.summed) if price else 0, "seconds": self.seconds,
            **self._ranking(len(rows), shape, top_k, pool),
        }  # fmt: skip
        for name, value in values.items():
            setattr(self.draft, name, value)
        return made

    def _ranking(self, rows: int, shape: Shape, top_k: int, pool: int) -> dict[str, Pointer]:
        """The workspace of ranking and keeping candidates."""
        items, nodes = rows * max(shape.depth, shape.width), rows * shape.nodes
        candidates = max(shape.nodes, 1 + top_k * (1 + (shape.depth - 1) * shape.width))
        return {
            **self.workspace.split(
                "ranks", np.float32, noisy=items * pool, top_values=items * (pool + top_k),
                all_values=nodes, sorted_values=nodes, best_values=max(shape.nodes, shape.width),
            ),
            **self.workspace.split(
                "places", np.int64, top_columns=items * (pool + top_k), order=nodes, new_index=candidates, ends=rows
            ),
            "gains": address(self.workspace.of("gains", nodes, np.float64)),
        }  # fmt: skip


class Request:
    """The trees of one call, a tree for each row: what C writes, and the arguments for them."""

    def __init__(self, rows: Rows, shape: Shape):
        self.rows, self.depth, count = len(rows), shape.depth, len(rows) * shape.nodes
        self.tokens, self.parents, self.depths, self.size, self.fed_index = (
            np.empty(count, np.int64) for _ in range(5)
        )
        self.values, self.visible = np.empty(count, np.float32), np.empty(count * shape.nodes, np.bool_)
        names = "tokens", "parents", "depths", "size", "values", "visible"
        heat = floats(s.temperature for s in rows.sampling)
        arguments = integers(rows.root), heat, seeds(rows.seeds), integers(rows.start)
        self.fields: dict[str, Any] = {
            "depth": shape.depth, "width": shape.width, "max_nodes": shape.nodes, "scale": shape.scale,
            "roots": arguments[0], "temperature": heat, "start_positions": arguments[3],
            "seeds": arguments[2] if rows.rule == "coupled" and rows.sampled else NULL,
            **{name: address(getattr(self, name)) for name in names},
        }  # fmt: skip
        self.kept = arguments  # as long as the call

    def tree(self, widest: int) -> DraftTree:
        """What was written, so many nodes in the largest tree."""
        b, n = self.rows, widest
        tokens, parents, depths, values = (
            part[: b * n].reshape(b, n) for part in (self.tokens, self.parents, self.depths, self.values)
        )
        visible = self.visible[: b * n * n].reshape(b, n, n)
        return DraftTree(tokens, parents, depths, self.size[:b], visible, self.depth, values)

    def indices(self, widest: int) -> list[list[int]]:
        """`Draft.fed_index` of every node, where it was requested."""
        result: list[list[int]] = self.fed_index[: self.rows * widest].reshape(self.rows, widest).tolist()
        return result


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


Weights = Mapping[str, Array]
PROJECTIONS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


class Holder:
    """Writes weights to structures, and keeps what these point to."""

    def __init__(self, code: Library, weights: Weights):
        self.code, self.weights = code, weights
        self.kept: list[Any] = []

    def matrix(self, weight: str | Array) -> Struct:
        """`Matrix` of a weight."""
        self.kept.append(matrix(self.weights[weight] if isinstance(weight, str) else weight, self.code))
        return self.kept[-1].struct

    def vector(self, values: str | Array) -> Pointer:
        """Numbers in float32; NULL where there are none of this name."""
        array = self.weights.get(values) if isinstance(values, str) else values
        if array is None:
            return NULL
        self.kept.append(np.ascontiguousarray(float32(array)))
        return address(self.kept[-1])

    def table(self, values: Array) -> Pointer:
        """Numbers as they are."""
        self.kept.append(np.ascontiguousarray(values))
        return address(self.kept[-1])

    def layer(self, layer: Struct, at: str, norms: Mapping[str, str]) -> None:
        """Write a decoder layer whose weights' names begin with `at`; `norms`: the fields of its norms."""
        for name, of in PROJECTIONS.items():
            setattr(layer, name, self.matrix(f"{at}{of}.weight"))
        for name in ("q", "k", "v", "o"):
            setattr(layer, f"{name}_bias", self.vector(f"{at}{PROJECTIONS[name]}.bias"))
        for name, of in norms.items():
            getattr(layer, name).weight = self.vector(f"{at}{of}.weight")
        layer.rope = 1
