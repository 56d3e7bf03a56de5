"""Plain values that pass between target, drafter, rule and engine.

Every tensor has a leading batch dimension `b`; rows have their own length, tree and acceptance. In shape strings
`n` counts tree nodes (root included), `v` the target's vocabulary, `h` a hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..params import Rule, Sampling
from .price import Price

HostRow = tuple[list[int], list[int], list[float]]  # tokens, parents and values (zeros where there are none) of nodes


@dataclass(frozen=True)
class DraftTree:
    """What a drafter proposes. Node 0, the root, is the last committed token; `parents[i] < i`.

    Built by the functions of `outrider.core.tree`. Nodes at index `size` and beyond are padding: parent 0, depth 0.
    Siblings carry distinct tokens, except under rejection with replacement, where order and multiplicity are kept
    (the index order of siblings is the order in which they were drawn).
    """

    tokens: Int[Tensor, "b n"]
    parents: Int[Tensor, "b n"]
    depths: Int[Tensor, "b n"]
    size: Int[Tensor, " b"]
    ancestors: Bool[Tensor, "b n n"] | None  # [b, i, j]: j is on the path from root to i, i included; None: a prompt
    deepest: int  # an upper bound of the depths, known to the host
    values: Float[Tensor, "b n"] | None = None  # log of the product of confidences on the path
    q: Float[Tensor, "b inner v"] | None = None  # the law each inner node's children were drawn from; inner nodes first
    replacement: bool = False  # with q: were siblings drawn with replacement?

    @property
    def nodes(self) -> int:
        """Nodes of the widest row, the root and padding included."""
        return self.tokens.shape[1]

    @cached_property
    def host(self) -> list[HostRow]:
        """Every row's own nodes on the host, read once: away from the CPU this waits for the device."""
        values = torch.zeros_like(self.tokens, dtype=torch.float32) if self.values is None else self.values
        parts = [self.tokens, self.parents, values, self.size[:, None]]
        if values.device.type != "cpu":  # one fetch
            whole = torch.cat([part.double() for part in parts], 1).cpu().split([part.shape[1] for part in parts], 1)
            parts = [there.to(part.dtype) for there, part in zip(whole, parts, strict=True)]
        tokens, parents, logs, sizes = (part.tolist() for part in parts)
        rows = zip(tokens, parents, logs, sizes, strict=True)
        return [(ids[:n], ups[:n], worth[:n]) for ids, ups, worth, (n,) in rows]


@dataclass(frozen=True)
class Verdict:
    """The accepted path (node ids from the root, padded by 0) and the one token the target adds itself."""

    path: Int[Tensor, "b k"]
    count: Int[Tensor, " b"]  # valid entries of `path`, root included = tokens whose keys and values are committed
    next: Int[Tensor, " b"]
    sound: list[bool] | None = None  # are the logits of all tokens chosen finite? None: nobody has looked yet

    @cached_property
    def host(self) -> list[tuple[list[int], int]]:
        """Every row's path without padding, and its token, on the host."""
        parts = zip(self.path.tolist(), self.count.tolist(), self.next.tolist(), strict=True)
        return [(path[:count], token) for path, count, token in parts]


@runtime_checkable
class Gumbel(Protocol):
    """Gumbel noise, a function of (seed, absolute position, token id) alone; see `outrider.core.noise`."""

    def at(self, seeds: Sequence[int], positions: Sequence[int], ids: Tensor | None = None) -> Tensor:
        """Noise [b, v] in float32, row b's for seeds[b] at positions[b]; of tokens `ids` [b, ...] in their shape."""


@dataclass(frozen=True)
class Rows:
    """What a drafter may know about the requests of a batch."""

    root: Int[Tensor, " b"]  # token of node 0
    position: Int[Tensor, " b"]  # absolute position of node 0 = number of committed tokens before it
    start: tuple[int, ...]  # the same, on the host
    seeds: tuple[int, ...]
    serial: tuple[int, ...]  # rounds since the row began
    sampling: tuple[Sampling, ...]
    rule: Rule
    remaining: tuple[int, ...]  # tokens the row may still emit: min(tokens left, context left)
    gumbel: Gumbel

    def __len__(self) -> int:
        return len(self.start)

    @property
    def hot(self) -> bool:
        """Is any row sampled (T > 0)?"""
        return any(s.temperature > 0 for s in self.sampling)

    @property
    def temperature(self) -> Float[Tensor, " b"]:
        """Of each row; 0 is greedy."""
        return torch.tensor([s.temperature for s in self.sampling], device=self.root.device)

    def noise(self, depth: int, ids: Tensor | None = None) -> Tensor:
        """G for a token at `position + depth`: [b, v], or for `ids` [b, ...] the same shape."""
        return self.gumbel.at(self.seeds, tuple(p + depth for p in self.start), ids)

    def some_noise(self, depth: int, rows: Sequence[int], ids: Tensor | None = None) -> Tensor:
        """The same for some of the rows alone."""
        return self.gumbel.at([self.seeds[i] for i in rows], [self.start[i] + depth for i in rows], ids)


@dataclass(frozen=True)
class Budget:
    """How much to draft this round. `nodes` counts the root, so 1 means: do not draft."""

    nodes: int
    depth: int
    floor: float = 0.0  # coupled only: drop nodes whose value (a probability) lies below
    reach: float = 0.0  # coupled only: stop expanding when the best value is below
    price: Price | None = None  # coupled only: keep the nodes that pay
    rate: float = 0.0  # coupled only: tokens a second and row as things are; a mix asks no network that brings less
    shape: tuple[int, ...] | None = None  # rejection: the static shape (N1, ..., Ng); a chain is (1, 1, ...)
    scale: float | None = None  # s of the confidences softmax(r / s), where it is fitted; None: the drafter's own
    part: int = 0  # of several drafters to choose from, which one


@dataclass
class Usage:
    """What one output cost. `tau` counts the target's own token; the prompt's pass is no round.

    `drafted` counts the nodes proposed, roots left out, `accepted` those on accepted paths, `tested` the depths at
    which a draft was tested; `accepted_at[d]` and `tested_at[d]` are the rounds that accepted or tested depth d + 1.
    Times are those of the rounds it took part in: rows that decode side by side have the same seconds, not shares.
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
