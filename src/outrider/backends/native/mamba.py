"""Mamba-2 in compiled code, whose trees grow as EAGLE's do (`eagle.py`).

Logs of confidences differ from those of tensors by rounding, which may change a draft and never a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ...core.types import Array, Budget, DraftTree, Rows
from .abi import Library, Struct, address, ffi, struct
from .arrays import integers
from .drafts import (
    GROWN,
    STEP,
    Caller,
    Holder,
    Request,
    Shape,
    Sizes,
    Weights,
    float32,
    grown,
)

MULTIPLE = 16  # what lies side by side is filled up to a multiple of this
PIECE = 256  # tokens of all rows that are read at once


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
        self.draft = struct("Draft", fed_candidate=fed, **self.common(GROWN))


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
