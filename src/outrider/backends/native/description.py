"""A model as data: its sizes, the options of its layers, and which parameters hold what a pass reads.

`families.py` makes it of a config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...core.types import Array
from .rope import Rope

MLP = "gate", "up", "down"
MATRICES = "q", "k", "v", "o", *MLP
NORMS = "attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm", "q_norm", "k_norm"
ALIKE, EACH_HEAD, ALL_HEADS = "alike", "each head", "all heads"  # how norms of queries and keys share weights


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of a layer's MLP.

    Attributes:
        count: experts.
        top_k: experts that a row chooses.
        intermediate: width of each.
        normalised: are a row's weights the softmax of the logits that it chose? Else of all logits.
        shared: width of the expert that computes all rows, with a gate of its own; 0: none.
        router: the name of what makes the logits.
        first: do the experts' weights come before the router's in transformers' modules?
        biases: have the router and the experts biases?
        alpha, limit: as in abi.h's `Experts`; 0: the model's activation.
    """

    count: int
    top_k: int
    intermediate: int
    normalised: bool = True
    shared: int = 0
    router: str = "gate"
    first: bool = False
    biases: bool = False
    alpha: float = 0.0
    limit: float = 0.0

    def padded(self, name: str) -> tuple[int, int]:
        """After how many rows and columns of one of its parameters passes have padding, up to the next multiple of 32;
        0: nowhere."""
        width = self.shared if "shared_expert." in name else self.intermediate
        rows = name.split(".")[-2] in ("gate_proj", "up_proj")
        return (width if rows else 0), (width if ".down_proj." in name else 0)

    def shapes(self, at: str, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of its parameters; each expert has matrices of its own, named as Qwen's are."""
        router = list(_linear(f"{at}{self.router}", self.count, hidden, self.biases))
        if not self.first:
            yield from router
        for e in range(self.count):
            yield from _gated(f"{at}experts.{e}.", self.intermediate, hidden, self.biases)
        if self.first:
            yield from router
        if self.shared:
            yield from _gated(f"{at}shared_expert.", self.shared, hidden)
            yield f"{at}shared_expert_gate.weight", (1, hidden)


def _linear(name: str, rows: int, width: int, bias: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, width)
    if bias:
        yield f"{name}.bias", (rows,)


def _gated(at: str, inner: int, hidden: int, bias: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _linear(f"{at}gate_proj", inner, hidden, bias)
    yield from _linear(f"{at}up_proj", inner, hidden, bias)
    yield from _linear(f"{at}down_proj", hidden, inner, bias)


@dataclass(frozen=True)
class LayerOptions:
    """What the layers of a model differ in."""

    window: int = 0  # of sliding-window attention; 0: none
    rope: int = 1  # which rotary embedding of the model, from 1 on; 0: none
    experts: Experts | None = None  # in place of "gate", "up" and "down"


@dataclass(frozen=True)
class Names:
    """Where a family keeps its parameters.

    Attributes:
        layer: the module of each part of a layer, in the order of the stock model's modules: the matrices, "qkv" or
            "gate_up" where they are rows of one, the norms, "sinks". A name with {} is of one head.
        layers: what the names of all layers begin with.
        embeddings, positions, norm, head: modules outside of the layers; positions "": none are learned.
        transposed: are matrices of layers stored as [inputs, outputs]?
    """

    layer: Mapping[str, str]
    layers: str = "model.layers."
    embeddings: str = "model.embed_tokens"
    positions: str = ""
    norm: str = "model.norm"
    head: str = "lm_head"
    transposed: bool = False


@dataclass(frozen=True)
class Place:
    """Where the numbers of a part lie: in these parameters one after another, of which these rows; None: all."""

    names: tuple[str, ...]
    rows: Array | None = None


@dataclass(frozen=True)
class Description:
    """A decoder. Options that are left out are Llama's.

    Attributes:
        family: as in config.json's `model_type`.
        ropes: the rotary embeddings that layers choose from.
        rotary_dim: the first elements of each head, which are rotated.
        tied: is the head's matrix the table of embeddings?
        biases: the parts that have one, by the names in `Names.layer`, "norm" and "head".
        layer_norm: are norms layer norms? Else RMS norms.
        norm_offset: added to the weights of all norms.
        qk_norm: how norms of queries and keys share weights.
        by_group: are the rows of "qkv" sorted by key head, with the queries first? Else by queries, keys and values.
        adjacent: are elements that are rotated together adjacent? Else they lie in both halves.
        parallel: does the MLP read what attention reads?
        activation: "SILU" and so on, as in abi.h.
        attention_scale: of scores; 0: one over the root of head_dim.
        embedding_scale, residual_scale, logit_scale: factors; 0: none.
        rounds_scale: is `embedding_scale` rounded to the precision of the weights?
        score_cap, logit_cap: soft caps; 0: none.
    """

    family: str
    names: Names
    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    eps: float
    ropes: tuple[Rope, ...]
    rotary_dim: int
    tied: bool
    layers: tuple[LayerOptions, ...]
    biases: frozenset[str] = field(default_factory=frozenset)
    layer_norm: bool = False
    norm_offset: float = 0.0
    qk_norm: str = ALIKE
    by_group: bool = False
    adjacent: bool = False
    parallel: bool = False
    activation: str = "SILU"
    attention_scale: float = 0.0
    embedding_scale: float = 0.0
    rounds_scale: bool = False
    residual_scale: float = 0.0
    logit_scale: float = 0.0
    score_cap: float = 0.0
    logit_cap: float = 0.0

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all parameters, in the hub's names and in the order of transformers' modules."""
        names = self.names
        yield f"{names.embeddings}.weight", (self.vocab, self.hidden)
        if names.positions:
            yield f"{names.positions}.weight", (self.context, self.hidden)
        for i, options in enumerate(self.layers):
            for part, stem in names.layer.items():
                if options.experts is None or part not in MLP:
                    yield from self._shapes_of(part, f"{names.layers}{i}.{stem}")
                elif part == "gate":
                    yield from options.experts.shapes(self.mixture(i), self.hidden)
        yield f"{names.norm}.weight", (self.hidden,)
        if "norm" in self.biases:
            yield f"{names.norm}.bias", (self.hidden,)
        if not self.tied:
            yield f"{names.head}.weight", (self.vocab, self.hidden)
        if "head" in self.biases:
            yield f"{names.head}.bias", (self.vocab,)

    def place(self, layer: int, part: str, kind: str = "weight") -> Place | None:
        """Where a matrix ("q") or norm, or its bias, of a layer lies; None: it has none.

        Rows are those that a pass reads, in its order: the elements of a head that are rotated together lie in both
        halves of what is rotated.
        """
        fused, rows = part, None
        if part in MLP and self.layers[layer].experts is not None:
            return None
        if part not in self.names.layer:
            fused = "qkv" if part in ("q", "k", "v") else "gate_up" if part in ("gate", "up") else ""
            rows = self.rows_of_fused(part) if fused in self.names.layer else None
        if fused not in self.names.layer or (kind == "bias" and fused not in self.biases):
            return None
        if self.adjacent and part in ("q", "k", "q_norm", "k_norm"):
            halves = self._halves(self._heads(part))
            rows = halves if rows is None else rows[halves]
        stem = f"{self.names.layers}{layer}.{self.names.layer[fused]}"
        heads = self._heads(part) if "{}" in stem else 1
        return Place(tuple(f"{stem.format(h)}.{kind}" for h in range(heads)), rows)

    def mixture(self, layer: int) -> str:
        """What the names of a layer's experts begin with."""
        return f"{self.names.layers}{layer}.mlp."

    @property
    def experts(self) -> Experts | None:
        """Those of the layers that have experts, which are alike."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    def padded_rows(self, part: str) -> int:
        """After how many rows of a part passes have padding, up to the next multiple of 32; 0: nowhere."""
        if part in ("q", "k", "v", "q_norm", "k_norm"):
            return self.head_dim
        return self.intermediate if part in ("gate", "up") else 0

    def padded_columns(self, part: str) -> int:
        """The same of columns."""
        return {"o": self.head_dim, "down": self.intermediate}.get(part, 0)

    def _heads(self, part: str) -> int:
        """How many heads' weights a matrix of queries or keys, or their norm, has."""
        heads = self.heads if part.startswith("q") else self.kv_heads
        return 1 if part.endswith("norm") and self.qk_norm == ALIKE else heads

    def rows_of_fused(self, part: str) -> Array:
        """The rows of "qkv" or "gate_up" that are a part."""
        if part in ("gate", "up"):
            return np.arange(self.intermediate) + (self.intermediate if part == "up" else 0)
        group = self.heads // self.kv_heads
        if self.by_group:
            rows = np.arange(self.kv_heads * (group + 2) * self.head_dim).reshape(self.kv_heads, group + 2, -1)
            own = {"q": rows[:, :group], "k": rows[:, group], "v": rows[:, group + 1]}[part]
            return own.reshape(-1)
        heads, first = {
            "q": (self.heads, 0), "k": (self.kv_heads, self.heads), "v": (self.kv_heads, self.heads + self.kv_heads),
        }[part]  # fmt: skip
        return np.arange(heads * self.head_dim) + first * self.head_dim

    def _halves(self, heads: int) -> Array:
        """Rows whose rotated pairs are adjacent, in the order where each head's halves are rotated."""
        rows = np.arange(heads * self.head_dim).reshape(heads, self.head_dim)
        rotated = rows[:, : self.rotary_dim].reshape(heads, -1, 2).transpose(0, 2, 1).reshape(heads, -1)
        return np.concatenate([rotated, rows[:, self.rotary_dim :]], 1).reshape(-1)

    def _shapes_of(self, part: str, stem: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of a part's weight and bias."""
        wide, narrow, names = self.heads * self.head_dim, self.kv_heads * self.head_dim, [stem]
        rows = {
            "q": wide, "k": narrow, "v": narrow, "qkv": wide + 2 * narrow, "gate": self.intermediate,
            "up": self.intermediate, "gate_up": 2 * self.intermediate,
        }.get(part, self.hidden)  # fmt: skip
        width = {"o": wide, "down": self.intermediate}.get(part, self.hidden)
        shape: tuple[int, ...] = (rows,)
        if part in ("q_norm", "k_norm"):
            heads = self._heads(part)
            shape = (heads, self.head_dim) if self.qk_norm == EACH_HEAD else (heads * self.head_dim,)
            if "{}" in stem:
                names, shape = [stem.format(h) for h in range(heads)], (self.head_dim,)
        elif part == "sinks":
            yield stem, (self.heads,)
            return
        elif part not in NORMS:
            shape = (width, rows) if self.names.transposed else (rows, width)
        for name in names:
            yield f"{name}.weight", shape
            if part in self.biases:
                yield f"{name}.bias", (rows,) if len(shape) > 1 else shape
