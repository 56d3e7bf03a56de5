"""The two seams: what a target and a drafter are to the engine, and what passes through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .types import Budget, DraftTree, Rows


@dataclass(frozen=True)
class TargetOutput:
    """What a verification pass returns, per node it was asked about."""

    logits: Float[Tensor, "b n v"]
    features: Mapping[int, Float[Tensor, "b m h"]] = field(default_factory=dict)  # by tap; m = n, but in prompts


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
