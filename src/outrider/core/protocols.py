"""The interfaces of targets and drafters, and the values that pass through them.

An implementation subclasses its protocol, which has the defaults of optional methods. The engine uses nothing else of
targets and drafters.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from .types import Array, Budget, DraftTree, HostRow, Question, Rows, Verdict


@dataclass(frozen=True)
class TargetOutput:
    """What a verification pass returns, for each node of its input.

    On the CPU these are numpy arrays: logits in float32 or float64, features in the precision of the target, bfloat16
    as the uint16 that holds its bits. On another device they are its tensors.
    """

    logits: Any  # [b, n, v]
    features: Mapping[int, Any] = field(default_factory=dict)  # by tap: [b, m, h]; m = n, but in prompts


@dataclass(frozen=True)
class Round:
    """One finished round (or one chunk of a prompt, where `tokens` is empty until the first token is drawn)."""

    rows: Rows
    tree: DraftTree
    output: TargetOutput
    paths: list[list[int]]  # committed node ids from the root on; -1: not one of this drafter's; [] where none is
    next: list[int]  # the next root; in a prompt's chunk its next token, -1 where the prompt ended in an earlier one
    tokens: list[list[int]]  # the tokens this round added to the text, `next` included
    unseen: Sequence[Collection[int]] = ()  # of each row, nodes of the tree that were not verified; (): none


@dataclass(frozen=True)
class Prefill:
    """One chunk of a batch's prompts, already committed: a right-padded chain."""

    tree: DraftTree  # without an ancestor matrix; `size` is 0 for a row that ended earlier
    output: TargetOutput  # logits [b, 1, v] at each row's last token of this chunk; features of every token
    last: tuple[bool, ...]  # does the row's prompt end in this chunk?
    next: list[int]  # the prompt's next token; -1 where the prompt ends here or before


@dataclass(frozen=True)
class Kept:
    """The KV cache of a text, kept for prompts with the same prefix."""

    tokens: tuple[int, ...]
    layers: Sequence[tuple[Any, ...]]  # every layer's keys and values; () where it has none
    features: Mapping[int, Any] = field(default_factory=dict)  # by tap: [n, h]

    @property
    def bytes(self) -> int:
        """Of all its arrays."""
        return sum(part.nbytes for part in [*(p for layer in self.layers for p in layer), *self.features.values()])


@runtime_checkable
class Session(Protocol):
    """The state of one batch inside a target: the tree cache."""

    lengths: list[int]  # [b] committed tokens

    @abstractmethod
    def prefill(self, prompts: Sequence[Sequence[int]], taps: tuple[int, ...] = ()) -> Iterator[Prefill]:
        """Prefill and commit the prompts, a chunk at a time. Each chunk has the features of its tokens for the taps."""

    @abstractmethod
    def forward(self, tree: DraftTree, taps: tuple[int, ...] = (), since: int = 0, embeds: Any = None) -> TargetOutput:
        """Logits of the nodes from `since` on; commits nothing. Nodes before `since` are in the cache already.

        `embeds` [b, n - since, h]: inputs in place of the tokens' embeddings.
        """

    @abstractmethod
    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit each row's path: node ids of the last tree, the root first (gathers, never crops)."""

    @abstractmethod
    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` tokens of row b."""

    @abstractmethod
    def wipe(self, rows: Sequence[int]) -> None:
        """Overwrite NaN in these rows, which `select` drops next."""

    @abstractmethod
    def select(self, index: Sequence[int]) -> None:
        """Row i becomes old row index[i]; repeats are forks."""

    @abstractmethod
    def join(self, other: Session) -> None:
        """Append the rows of another session of this target."""

    def taken(self, row: int, tokens: Sequence[int], features: Mapping[int, Any]) -> Kept | None:
        """A copy of the cache of this row's first tokens, `tokens`. None where texts cannot be kept."""
        return None

    def resume(self, prompt: Sequence[int], taps: tuple[int, ...], kept: Kept, same: int) -> Iterator[Prefill]:
        """As `prefill` of one prompt, whose first `same` tokens are copied from `kept`, one that `taken` gave."""
        assert 0 < same < len(prompt), "the last token of a prompt is computed, for its logits"
        return self.prefill([prompt], taps)


@runtime_checkable
class Target(Protocol):
    """The model whose distribution the text follows."""

    vocab: int  # the size of the logits
    context: int  # positions
    hidden: int  # the width of hidden states
    layers: int  # hidden states have the taps 0 .. layers; -1 is the last one, after the final norm
    precision: str  # of hidden states: float32, bfloat16, float16 or float64
    device: str = "cpu"
    exact: Literal["bits", "rounding"] = "rounding"  # as without drafts: bit for bit, or up to rounding
    model: Any = None  # the stock transformers model, where there is one
    mark: str = ""  # of the weights as they were loaded
    code: Any = None  # the compiled library of its passes, which drafters use too; None: it has none
    kernels: str = ""  # the build of that library, on which costs depend
    tensors: bool = False  # do `embed` and `head` use torch tensors, or arrays?
    opening: tuple[int, ...] = ()  # an encoder-decoder's first tokens, which its output continues; (): the prompt
    integers: bool = False  # int8 activations? Its distributions differ a little then
    logit_cap: float = 0.0  # soft cap of logits, not applied by `head_rows`; 0: none
    ragged: bool = False  # does a pass cost nothing for padding?

    @property
    def separate(self) -> bool:
        """Is its output no continuation of the prompt (encoder-decoders)?"""
        return bool(self.opening)

    @property
    def arithmetic(self) -> str:
        """Its precision, and that of its weights where it differs."""
        return self.precision

    @property
    @abstractmethod
    def config_dict(self) -> Mapping[str, Any]:
        """The model's configuration as its config.json says it; {} where there is none."""

    @abstractmethod
    def turn(self) -> AbstractContextManager[Any]:
        """The lock of this target, held for one step of a batch, without gradients. Re-entrant; released between
        steps."""

    @abstractmethod
    def embed(self, tokens: Any) -> Any:
        """Token embeddings [.., h] of ids [..], with the family's scaling."""

    @abstractmethod
    def head(self, features: Any) -> Any:
        """Logits [.., v] of hidden states [.., h] after the final norm, with the family's scale and soft cap."""

    def head_rows(self, tokens: Array | None) -> Array | None:
        """Rows [.., h] of the LM head for these token ids (None: all), in this precision, where the head is a matrix
        product (and a soft cap) and this target computes on the CPU; else None."""
        return None

    @property
    def embeddings(self) -> Any:
        """The table [v, h] of embeddings as compiled code reads it (`backends/native/weights.py: Table`), under the
        conditions of `head_rows`; else None."""
        return None

    @abstractmethod
    def open(self, capacity: int) -> Session:
        """An empty session whose rows hold up to `capacity` tokens, those of a tree included."""

    @property
    def signature(self) -> str:
        """A fingerprint of its weights: texts are the same where it is."""
        return self.mark

    def release(self) -> None:
        """Free buffers that are kept for later passes, after one ran out of memory."""
        return

    def settle(self) -> None:
        """Wait until the device has finished; on a CPU it always has."""
        return

    def judge(self, question: Question) -> Verdict | None:
        """Apply a rule where the logits are, with the results of `core.verify.judge`; None: the engine calls that."""
        return None


@runtime_checkable
class Drafting(Protocol):
    """A drafter's state for one batch. `select` and `join` come only between `observe` and `propose`."""

    @abstractmethod
    def observe(self, round: Round) -> None:
        """Take over what was committed: called for every chunk of a prompt and for every round."""

    @abstractmethod
    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        """A tree below each row's root: at most `budget.nodes` nodes, the root included, and `budget.depth` deep."""

    @abstractmethod
    def select(self, index: Sequence[int]) -> None:
        """Row i becomes old row index[i]; repeats are forks that share no mutable state."""

    @abstractmethod
    def join(self, other: Drafting) -> None:
        """Append the rows of another drafting of this drafter."""

    def expect(self, row: int, tokens: Sequence[int]) -> None:
        """What the caller expects of a row's text, after the last tokens of its prompt; called before any `observe`.
        Drafts may be copied from it."""
        return

    def sketch(self, rows: Rows, budget: Budget) -> Sequence[HostRow] | None:
        """The proposal as lists with values, where that is cheaper than a tree; else None."""
        return None

    @property
    def plain(self) -> Sequence[bool] | bool:
        """Rows (or all: True) that are never drafted for."""
        return False


@runtime_checkable
class Drafter(Protocol):
    """Weights and configuration; immutable, shared by concurrent generations."""

    taps: tuple[int, ...] = ()  # the target's layers whose hidden states it reads
    costly: bool = False  # is it a network without a scale, which a mix asks only where it pays?
    counts: bool = False  # are its confidences counts? Then their acceptance rates are learned (`Rates`)
    reads_tree: bool = True  # does `observe` look at a round's nodes, or at its tokens alone?
    scale: float | None = None  # s of its confidences softmax(r / s), where they can be scaled
    samples: bool = False  # can it sample its trees, as `rejection` and `block` allow?
    reopens: bool = True  # does its state depend on the text alone (and `expect`), so that a prefill restores it?
    parts: Sequence[Drafter] = ()  # of a mix or a choice

    @property
    def uncalibrated(self) -> Drafter:
        """The drafter itself, without its calibration (`drafters/_calibrated.py`)."""
        return self

    @property
    def remembers(self) -> bool:
        """Does it or a part keep texts of other requests, until `forget`?"""
        return any(part.remembers for part in self.parts)

    @property
    def models(self) -> Sequence[Target]:
        """Draft models, its own and its parts', which are targets of their own."""
        return [model for part in self.parts for model in part.models]

    @property
    def learners(self) -> Sequence[Any]:
        """What it and its parts learn while they are used, for `budgets.memory`."""
        return [learner for part in self.parts for learner in part.learners]

    def forget(self) -> None:
        """Forget the texts of other requests, where it or a part keeps them. What `learners` know stays."""
        for part in self.parts:
            part.forget()

    @abstractmethod
    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> Drafting:
        """The state for rows that begin with these prompts; text and tree of a row have at most `capacity` tokens."""
