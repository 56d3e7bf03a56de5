"""Plain values that pass between target, drafter, rule and engine. They live on the host: numpy arrays and lists.

Arrays have a leading batch dimension `b`; each row (one sequence of a batch) has its own length, tree and acceptance.
In shape strings `n` counts tree nodes (root included), `v` is the target's vocabulary, `h` a hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..params import Rule, Sampling
from .changes import Changes
from .price import Price

Array = NDArray[Any]
HostRow = tuple[list[int], list[int], list[float]]  # tokens, parents and values (zeros where there are none) of nodes


@dataclass(frozen=True)
class DraftTree:
    """What a drafter proposes. Node 0, the root, is the last committed token; `parents[i] < i`.

    Built by the functions of `outrider.core.tree`. Nodes at index `size` and beyond are padding: parent 0, depth 0.
    Siblings carry distinct tokens, except under rejection with replacement, where order and multiplicity are kept
    (the index order of siblings is the order in which they were drawn).

    Attributes:
        tokens: int64 [b, n].
        parents: int64 [b, n].
        depths: int64 [b, n].
        size: int64 [b].
        ancestors: bool [b, n, n]; [b, i, j]: j is on the path from the root to i, i included. None: a prompt.
        deepest: an upper bound of the depths.
        values: float32 [b, n], log of the product of confidences on the path; None: there are none.
        q: [b, inner, v], the distribution that each inner node's children were drawn from, inner nodes first: an
            array, or a tensor of the device that the target computes on.
        replacement: with q: were siblings drawn with replacement?
    """

    tokens: Array
    parents: Array
    depths: Array
    size: Array
    ancestors: Array | None
    deepest: int
    values: Array | None = None
    q: Any = None
    replacement: bool = False

    @property
    def nodes(self) -> int:
        """Nodes of the widest row, the root and padding included."""
        return int(self.tokens.shape[1])

    @cached_property
    def host(self) -> list[HostRow]:
        """Every row's own nodes as lists."""
        values = np.zeros(self.tokens.shape, np.float32) if self.values is None else self.values
        parts: list[Any] = [part.tolist() for part in (self.tokens, self.parents, values, self.size)]
        rows = zip(*parts, strict=True)
        return [(tokens[:n], parents[:n], logs[:n]) for tokens, parents, logs, n in rows]

    def holding(self, rows: list[HostRow]) -> DraftTree:
        """This tree, made of these rows, which `host` need not read from its arrays. A changed copy forgets them."""
        self.__dict__["host"] = rows
        return self


@dataclass(frozen=True)
class Verdict:
    """What a rule accepted, row by row."""

    paths: list[list[int]]  # node ids of the accepted path, the root first: the tokens whose keys and values stay
    next: list[int]  # the one token that the target adds itself
    finite: list[bool]  # are the logits of all tokens chosen finite?


# (output so far, logits [v]) -> scores [v]: what a caller does to the logits, before biases and penalties.
Process = Callable[[list[int], Array], Array]


@dataclass(frozen=True)
class RowText:
    """What a row's own text does to its logits, beside its sampling."""

    prompt: Sequence[int]
    output: list[int]
    changes: Changes | None = None  # by biases and penalties, counted up to the end of `output`; None: nothing
    process: Process | None = None


@runtime_checkable
class Gumbel(Protocol):
    """Gumbel noise, a function of (seed, absolute position, token id) alone; see `outrider.core.noise`."""

    vocab: int

    def at(self, seeds: Sequence[int], positions: Sequence[int], ids: Array | None = None) -> Array:
        """Noise [b, v] in float32, row b's for seeds[b] at positions[b]; of tokens `ids` [b, ...] in their shape."""


@dataclass(frozen=True)
class Rows:
    """The rows (sequences) of a batch, as a drafter sees them. Fields but `rule` and `gumbel` have an entry per row."""

    root: tuple[int, ...]  # token of node 0
    start: tuple[int, ...]  # absolute position of node 0 = number of committed tokens before it
    seeds: tuple[int, ...]
    serial: tuple[int, ...]  # rounds since the row began
    sampling: tuple[Sampling, ...]
    rule: Rule
    remaining: tuple[int, ...]  # tokens the row may still emit: min(tokens left, context left)
    gumbel: Gumbel

    def __len__(self) -> int:
        return len(self.start)

    @property
    def sampled(self) -> bool:
        """Is any row sampled (T > 0)?"""
        return any(s.temperature > 0 for s in self.sampling)

    def noise(self, depth: int, ids: Array | None = None) -> Array:
        """G for a token at `start + depth`: float32 [b, v], or for `ids` [b, ...] the same shape."""
        return self.gumbel.at(self.seeds, [p + depth for p in self.start], ids)


@dataclass(frozen=True)
class Question:
    """The input of a rule, which answers which nodes of a tree are accepted, and which token comes after them."""

    rows: Rows
    tree: DraftTree
    logits: Any  # [b, n, v] of its nodes, where the target computes; may be overwritten
    texts: Sequence[RowText]
    epsilon: float = 0.09  # typical acceptance only
    delta: float = 0.3


@dataclass(frozen=True)
class Budget:
    """How much to draft this round. `nodes` counts the root, so 1 means: do not draft."""

    nodes: int
    depth: int
    floor: float = 0.0  # coupled only: drop nodes whose value (a probability) lies below
    reach: float = 0.0  # coupled only: stop expanding when the best value is below
    price: Price | None = None  # coupled only: keep the nodes that pay
    rate: float = 0.0  # coupled only: tokens per second of a row at present; a mix skips networks that gain less
    shape: tuple[int, ...] | None = None  # rejection: the static shape (N1, ..., Ng); a chain is (1, 1, ...)
    scale: float | None = None  # fitted s of the confidences softmax(r / s); None: the drafter's own
    part: int = 0  # of several drafters to choose from, which one


@dataclass
class Usage:
    """Counts and times of one output. `tau` counts the target's own token; the prefill is not a round.

    `drafted` counts the nodes proposed, roots left out, `accepted` those on accepted paths, `tested` the depths at
    which a draft was tested; `accepted_at[d]` and `tested_at[d]` are the rounds that accepted or tested depth d + 1.
    `cached_tokens` of the prompt were copied from a text before. Times are those of its rounds: rows of one batch count
    the same seconds, not shares.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tested: int = 0
    accepted_at: list[int] = field(default_factory=list)
    tested_at: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    cached_tokens: int = 0

    def count(self, drafted: int, accepted: int, tested: int) -> None:
        """Add a round: nodes drafted, depths accepted and depths tested."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tested += tested
        for counts, upto in ((self.accepted_at, accepted), (self.tested_at, tested)):
            counts.extend([0] * (upto - len(counts)))
            for d in range(upto):
                counts[d] += 1

    @property
    def tau(self) -> float:
        """Tokens committed per round, the target's own token included (the prompt's pass gives the first token)."""
        return (self.new_tokens - 1) / self.rounds if self.rounds else 0.0

    @property
    def alpha(self) -> float:
        """Acceptance per position tested (Theorem 3.8's alpha for a chain)."""
        return self.accepted / self.tested if self.tested else 0.0

    @property
    def overhead_seconds(self) -> float:
        """Decoding that was neither draft nor verification."""
        return max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds)
