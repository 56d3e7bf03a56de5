"""Requests, the rows that serve them, and outputs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.changes import Changes
from ..core.noise import digest
from ..core.protocols import Target
from ..core.types import DraftTree, Process, RowText, Usage, Verdict
from ..params import InputError, Rule, Sampling, integer

MOST_SAMPLES = 4096  # texts of one prompt in one call
PADDING = 64, 0.25  # tokens of padding allowed in a pass, or their share of all its tokens
Cut = Callable[[Sequence[int], Sequence[int]], tuple[int, str | None]]


@dataclass(frozen=True)
class Request:
    """How one output is decoded. Seed, sampling and end belong to the row: a text does not depend on its neighbours."""

    prompt: Sequence[int]  # token ids, at least one
    seed: int  # modulo 2^64
    max_new_tokens: int  # at least 1
    sampling: Sampling = field(default_factory=Sampling)
    # (output so far, new tokens) -> how many of the new tokens are kept, and why the row ends there; None: it continues
    cut: Cut = lambda output, new: (len(new), None)
    process: Process | None = None  # transformers' logits processors, where they came prepared
    prediction: Sequence[int] = ()  # what the text may contain; drafts may be copied from it


@dataclass
class Row:
    """One request while it runs."""

    request: Request
    index: int  # which request it is
    output: list[int] = field(default_factory=list)
    length: int = 0  # committed tokens, = the root's position
    serial: int = 0
    finish: str | None = None  # why it ended: `cut`'s reason, length, error, or `Batch.cancel`'s reason
    mixed: int | None = None  # a hash of seed and prompt
    salt: str = ""  # prompts with the same salt share the prefix cache
    usage: Usage = field(default_factory=Usage)
    before: Sequence[int] = field(init=False)  # tokens that its output continues
    changes: Changes | None = field(init=False)  # what its text changes in its logits

    def __post_init__(self) -> None:
        self.continues(self.request.prompt)

    def continues(self, before: Sequence[int]) -> None:
        """Its output continues these tokens, which its penalties look at: the prompt, or a decoder's first tokens."""
        self.before, self.changes = before, Changes.of(self.request.sampling, before)

    @property
    def text(self) -> list[int]:
        """Prompt and output: what is prefilled when the row begins, or resumes after a pause."""
        return [*self.request.prompt, *self.output]

    def key(self, rule: Rule) -> int:
        """What its randomness is keyed by. Rounds, unlike positions, are no property of the text: under the rejection
        rules two prompts with one seed must not share their draws, which a budget may have seen."""
        if rule == "coupled":
            return self.request.seed
        if self.mixed is None:
            self.mixed = digest(self.request.seed, self.request.prompt)
        return self.mixed

    def row_text(self) -> RowText:
        """What its text so far does to its logits."""
        changes = None if self.changes is None else self.changes.upto(self.output)
        return RowText(self.before, self.output, changes, self.request.process)

    def remaining(self, context: int) -> int:
        """Tokens it may still emit, in a context of so many positions."""
        return min(self.request.max_new_tokens - len(self.output), context - 1 - self.length)


@dataclass(frozen=True)
class Piece:
    """The tokens that one round added to one row. The first `drafted` came from the draft."""

    row: Row
    tokens: list[int]
    drafted: int


@dataclass(frozen=True)
class Done:
    """The result of a round, per row."""

    tokens: list[list[int]]  # accepted drafts and the target's own token
    tested: list[int]  # depths at which a draft was tested
    sizes: list[int]  # nodes drafted, the root included
    finite: list[bool]  # are the logits of the row's tokens finite?

    @classmethod
    def of(cls, tree: DraftTree, verdict: Verdict) -> Done:
        """The accepted nodes of a tree as tokens."""
        tokens, tested = [], []
        for (ids, parents, _), path, following in zip(tree.host, verdict.paths, verdict.next, strict=True):
            tokens.append([*(ids[node] for node in path[1:]), following])
            tested.append(len(path) - 1 + (path[-1] in parents[1:]))
        return cls(tokens, tested, [len(ids) for ids, _, _ in tree.host], verdict.finite)


@dataclass(frozen=True)
class Output:
    """One text, as a caller gets it.

    Attributes:
        prompt: the index of its prompt.
        text: the continuation of the prompt (its leading space included), without special tokens and without the stop
            string that ended it.
        tokens: ids of what was written, the end of text and the tokens of a stop string included.
        finish_reason: eos, stop, length, interrupted (a stream was left) or error (the model's logits were NaN or
            infinite; what was written before stays).
        seed: of its randomness; under the default rule the same seed gives the same text.
        usage: what it cost.
        exact: how the text relates to plain decoding's under its seed: equal bit for bit ("bits"), or up to rounding
            ("rounding"); in distribution ("distribution": `rejection` and `block` at T > 0); or not ("lossy").
    """

    prompt: int
    text: str
    tokens: list[int]
    finish_reason: str
    seed: int
    usage: Usage
    exact: str = "rounding"


@dataclass(frozen=True)
class Chunk:
    """What one round added to a streamed text: accepted drafts, then the target's own token."""

    drafted: str
    own: str

    @property
    def text(self) -> str:
        """Both."""
        return self.drafted + self.own


def check_prompt(request: Request, target: Target) -> None:
    """Raise InputError for what cannot be decoded, before anything is computed: a prompt that is empty or fills the
    context, no token to write, or tokens beyond the vocabulary."""
    if not request.prompt:
        raise InputError("the prompt is empty; give at least one token (most models have a begin-of-text token)")
    if len(request.prompt) >= target.context:
        raise InputError(
            f"the prompt has {len(request.prompt)} tokens and the model's context is {target.context}; "
            "shorten the prompt or choose a model with a longer context"
        )
    if request.max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
    for what, ids in (("prompt", request.prompt), ("logit_bias", request.sampling.logit_bias)):
        if any(not 0 <= token < target.vocab for token in ids):
            raise InputError(f"the {what} has a token outside the model's vocabulary of {target.vocab}")


def spread_seeds(seed: Any, prompts: int, n: Any) -> list[list[int]]:
    """The seed of every sample [prompt][sample]; `seed`, `n` and errors are those of `LLM.generate`."""
    integer("n", n, most=MOST_SAMPLES)
    given = [seed] * prompts if seed is None or not isinstance(seed, Sequence) or isinstance(seed, str) else seed
    if len(given) != prompts:
        raise InputError(f"give one seed, or one per prompt (prompts: {prompts}, seeds: {len(given)})")
    first = [secrets.randbits(63) if s is None else integer("seed", s, None) for s in given]
    return [[s + j for j in range(n)] for s in first]


def alike(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Groups of rows whose prompts are about equally long: prompts in one pass are padded to the longest of them."""
    group: list[Row] = []
    total = 0
    for row in sorted(rows, key=lambda row: len(row.request.prompt)):
        size = len(row.request.prompt)
        padding = size * len(group) - total
        if padding > max(PADDING[0], PADDING[1] * (total + size)):
            yield group
            group, total = [], 0
        group.append(row)
        total += size
    if group:
        yield group
