"""The vocabulary: plain values that pass between target, drafter, rule and engine, and the two seams.

Every tensor has a leading batch dimension `b`; rows have their own length, tree and acceptance. In shape strings
`n` counts tree nodes (root included), `v` the target's vocabulary, `h` a hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .params import LOSSY as LOSSY
from .params import RULES as RULES
from .params import InputError as InputError
from .params import Rule as Rule
from .params import Sampling as Sampling
from .price import Price as Price

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
class TargetOutput:
    """What a verification pass returns, per node it was asked about."""

    logits: Float[Tensor, "b n v"]
    features: Mapping[int, Float[Tensor, "b m h"]] = field(default_factory=dict)  # by tap; m = n, but in prompts


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


@dataclass(frozen=True)
class Round:
    """One finished round (or one chunk of a prompt, where `tokens` is empty until the first token is drawn)."""

    rows: Rows
    tree: DraftTree
    output: TargetOutput
    path: Int[Tensor, "b k"]  # node ids from the root; -1: not one of this drafter's nodes
    count: Int[Tensor, " b"]  # nodes committed; 0 for a row whose prompt ended in an earlier chunk
    next: Int[Tensor, " b"]  # the next root
    tokens: list[list[int]]  # the tokens this round added to the text, `next` included


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


@dataclass(frozen=True)
class Prefill:
    """One chunk of a batch's prompts, already committed: a right-padded chain."""

    tree: DraftTree  # without an ancestor matrix
    output: TargetOutput  # logits [b, 1, v] at each row's last token of this chunk; features of every token
    count: Int[Tensor, " b"]  # tokens of this chunk per row; 0 for a row that ended earlier
    last: tuple[bool, ...]  # does the row's prompt end in this chunk?
    next: Int[Tensor, " b"]  # the prompt's next token; -1 where the prompt ends here or before


@dataclass(frozen=True)
class Kept:
    """A text that a target has read, kept for prompts that begin like it."""

    tokens: tuple[int, ...]
    layers: Sequence[tuple[Tensor, ...]]  # every layer's keys and values [1, heads, n, d]; () where it has none
    features: Mapping[int, Float[Tensor, "n h"]] = field(default_factory=dict)  # by tap

    @property
    def bytes(self) -> int:
        """Of all its tensors."""
        tensors = [part for layer in self.layers for part in layer] + list(self.features.values())
        return sum(t.numel() * t.element_size() for t in tensors)


@runtime_checkable
class Session(Protocol):
    """The state of one batch inside a target: the tree cache."""

    lengths: Tensor  # [b] committed tokens, on the device; a new tensor where they change
    longest: int  # an upper bound of `lengths`, on the host

    def prefill(self, prompts: Sequence[Sequence[int]], taps: tuple[int, ...] = ()) -> Iterator[Prefill]:
        """Read and commit the prompts, a chunk at a time. Each chunk holds the features of its tokens for the taps."""

    def forward(
        self, tree: DraftTree, taps: tuple[int, ...] = (), since: int = 0, embeds: Tensor | None = None
    ) -> TargetOutput:
        """Logits of the nodes from `since` on; commits nothing. Nodes before `since` are in the cache already.

        `embeds` [b, n - since, h]: embeddings to read in place of the tokens'.
        """

    def keep(self, path: Tensor, count: Tensor) -> None:
        """Commit `path[:, :count]` (node ids of the last tree; gathers, never crops)."""

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` tokens of row b."""

    def wipe(self, rows: Sequence[int]) -> None:
        """Leave nothing in these rows that is not a number; they are left out next."""

    def select(self, index: Sequence[int]) -> None:
        """Row i becomes old row index[i]; repeats are forks."""

    def join(self, other: Session) -> None:
        """Append the rows of another session of this target."""


@runtime_checkable
class Keeper(Protocol):
    """A session whose texts can be kept, and that can go on from one."""

    def taken(self, row: int, tokens: Sequence[int], features: Mapping[int, Tensor]) -> Kept | None:
        """A copy of what this row has read: `tokens`, its first ones. None where rows hold more than that."""

    def resume(self, prompt: Sequence[int], taps: tuple[int, ...], kept: Kept, same: int) -> Iterator[Prefill]:
        """As `prefill` of one prompt, whose first `same` tokens are copied from `kept`."""


@runtime_checkable
class Target(Protocol):
    """The model whose distribution is the truth, and all that drafters know of it."""

    vocab: int  # the size of the logits
    context: int  # how many positions there are
    device: torch.device
    dtype: torch.dtype
    hidden: int  # the width of hidden states
    layers: int  # hidden states have the taps 0 .. layers; -1 is the last one, after the final norm

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held for each step of a batch over this target, never between two; always the same, re-entrant."""

    @property
    def config_dict(self) -> Mapping[str, Any]:
        """The model's configuration as its config.json says it; {} where there is none."""

    @property
    def exact(self) -> str:
        """What logits with drafts are equal to: "bits", those without; "rounding", those up to rounding."""

    @property
    def recorded(self) -> bool:
        """Are passes recorded and replayed? Draft models then do the same."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings [.., h] of ids [..], with the family's scaling."""

    def head(self, features: Tensor) -> Tensor:
        """Logits [.., v] of hidden states [.., h] after the final norm, with the family's scale and soft cap."""

    def open(self, capacity: int) -> Session:
        """An empty session whose rows have room for `capacity` tokens, those of a tree included."""


@runtime_checkable
class Drafting(Protocol):
    """A drafter's state for one batch. `select` and `join` come only between `observe` and `propose`."""

    def observe(self, round: Round) -> None:
        """Learn what was committed: told of every chunk of a prompt and of every round."""

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        """A tree below each row's root: at most `budget.nodes` nodes, the root included, and `budget.depth` deep."""

    def select(self, index: Sequence[int]) -> None:
        """Row i becomes old row index[i]; repeats are forks that share nothing that changes."""

    def join(self, other: Drafting) -> None:
        """Append the rows of another drafting of this drafter."""


@runtime_checkable
class Drafter(Protocol):
    """Weights and configuration; immutable, shared by concurrent generations.

    A drafter whose `observe` looks at a round's tokens alone may say so by `reads_tree = False`; then a mix does not
    translate the round into the drafter's own nodes. One whose confidences are counts may say so by `counts = True`;
    then it is learnt how often they come true.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose hidden states it reads; () for none."""

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> Drafting:
        """The state for rows that begin with these prompts; text and tree of a row have at most `capacity` tokens."""
