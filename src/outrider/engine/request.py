"""One output from what it is asked to be to what it has become: requests, their running rows, outputs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.changes import Changes
from ..core.noise import digest
from ..core.protocols import Target
from ..core.sampling import penalise, wide
from ..core.types import DraftTree, Usage, Verdict
from ..params import InputError, Rule, Sampling, whole

MOST_SAMPLES = 4096  # texts of one prompt in one call
PADDING = 64, 0.25  # in one pass, so many tokens of filling are allowed, or this share of all its tokens
Cut = Callable[[Sequence[int], Sequence[int]], tuple[int, str | None]]
# (output so far, logits [1, v]) -> scores [1, v]. An output that ends in -1 is that of a row whose walk has ended while
# others go on: anything may be returned.
Process = Callable[[list[int], Tensor], Tensor]


@dataclass(frozen=True)
class Request:
    """What one output is asked to be. Seed, law and end belong to the row: a text does not depend on its neighbours."""

    prompt: Sequence[int]  # token ids, at least one
    seed: int  # any whole number; seeds that differ by a multiple of 2^64 are the same
    max_new_tokens: int  # at least 1
    sampling: Sampling = field(default_factory=Sampling)
    # (output so far, new tokens) -> how many of the new tokens are kept, and why the row ends there; None: it goes on
    cut: Cut = lambda output, new: (len(new), None)
    process: Process | None = None  # transformers' logits processors, where they came prepared


@dataclass
class Row:
    """One request while it runs."""

    request: Request
    index: int  # which request it is
    output: list[int] = field(default_factory=list)
    length: int = 0  # committed tokens, = the root's position
    serial: int = 0
    finish: str | None = None  # why it has ended: what `cut` said, length, error, or what `Batch.cancel` was told
    mixed: int | None = None  # a hash of seed and prompt
    usage: Usage = field(default_factory=Usage)
    changes: Changes | None = field(init=False)  # what its text changes in its logits

    def __post_init__(self) -> None:
        self.changes = Changes.of(self.request.sampling, self.request.prompt)

    @property
    def text(self) -> list[int]:
        """Prompt and output: what is prefilled when the row begins, or goes on after a pause."""
        return [*self.request.prompt, *self.output]

    def key(self, rule: Rule) -> int:
        """What its randomness is keyed by. Rounds, unlike positions, are no property of the text: under the rejection
        rules two prompts with one seed must not share their draws, which a budget may have seen."""
        if rule == "coupled":
            return self.request.seed
        if self.mixed is None:
            self.mixed = digest(self.request.seed, self.request.prompt)
        return self.mixed

    def remaining(self, context: int) -> int:
        """Tokens it may still emit, in a context of so many positions."""
        return min(self.request.max_new_tokens - len(self.output), context - 1 - self.length)


def altered(rows: Sequence[Row]) -> bool:
    """Are any row's logits changed, by a bias, by what it wrote, or by a processor?"""
    return any(row.request.process or row.changes is not None for row in rows)


def penalised(rows: Sequence[Row], logits: Tensor, path: Tensor | None) -> Tensor:
    """Logits [b, v] after whatever depends on a row's own text: penalties, bias, transformers' processors. `path`
    [b, d]: tokens accepted below the root so far."""
    if not altered(rows):
        return logits
    requests = [row.request for row in rows]
    if any(r.process for r in requests):
        tails = [[]] * len(rows) if path is None else path.tolist()
        scores = wide(logits)
        logits = torch.stack(
            [
                r.process([*row.output, *tail], z[None])[0] if r.process else z
                for r, row, tail, z in zip(requests, rows, tails, scores, strict=True)
            ]
        )
    history = [(r.prompt, row.output) for r, row in zip(requests, rows, strict=True)]
    return penalise(logits, [r.sampling for r in requests], history, path)


@dataclass(frozen=True)
class Piece:
    """What one round added to one row. The first `drafted` of its tokens came from the draft."""

    row: Row
    tokens: list[int]
    drafted: int


@dataclass(frozen=True)
class Done:
    """What a round came to, on the host, per row."""

    tokens: list[list[int]]  # accepted drafts and the target's own token
    counts: list[int]  # committed nodes, the root included
    tested: list[int]  # depths at which a draft was tested
    sizes: list[int]  # nodes drafted, the root included
    sound: list[bool]  # are the logits of the row's tokens finite?

    @classmethod
    def of(cls, tree: DraftTree, verdict: Verdict, logits: Tensor) -> Done:
        """The round's one host sync. `logits` [b, n, v] are those of the tree's nodes."""
        if logits.device.type == "cpu":
            return cls._listed(tree, verdict, logits)
        count, following = verdict.count[:, None], verdict.next[:, None]
        last = verdict.path.gather(1, count - 1)
        index = torch.arange(tree.nodes, device=last.device)
        child = (tree.parents == last) & (index > 0) & (index < tree.size[:, None])
        tested = verdict.count - 1 + child.any(1)
        spelled = tree.tokens.gather(1, verdict.path)
        said = torch.cat([spelled[:, 1:], following], 1).scatter(1, count - 1, following)
        seen = logits[torch.arange(len(last), device=last.device)[:, None], verdict.path, said]
        sound = (seen.isfinite() | (torch.arange(seen.shape[1], device=last.device) >= count)).all(1)
        columns = [*(x[:, None] for x in (tree.size, verdict.count, tested, sound.long(), verdict.next)), spelled]
        packed = torch.cat(columns, 1).tolist()
        return cls(
            tokens=[[*p[6 : 5 + p[1]], p[4]] for p in packed],
            counts=[p[1] for p in packed],
            tested=[p[2] for p in packed],
            sizes=[p[0] for p in packed],
            sound=[bool(p[3]) for p in packed],
        )

    @classmethod
    def _listed(cls, tree: DraftTree, verdict: Verdict, logits: Tensor) -> Done:
        """The same on the host, where a few numbers are read sooner than a tensor is made."""
        tokens, tested, rows, at, said = [], [], [], [], []
        for row, ((ids, parents, _), (path, following)) in enumerate(zip(tree.host, verdict.host, strict=True)):
            text = [*(ids[node] for node in path[1:]), following]
            tokens.append(text)
            tested.append(len(path) - 1 + (path[-1] in parents[1:]))
            rows += [row] * len(path)
            at += path
            said += text
        whole = verdict.sound
        if whole is None:
            whole = [True] * len(tokens)
            for row, fine in zip(rows, finite(logits, rows, at, said), strict=True):
                whole[row] = whole[row] and fine
        counts, sizes = [len(text) for text in tokens], [len(ids) for ids, _, _ in tree.host]
        return cls(tokens, counts, tested, sizes, whole)


def finite(logits: Tensor, rows: list[int], nodes: list[int], tokens: list[int]) -> list[bool]:
    """Are these logits on the host numbers? Arrays are read sooner than tensors."""
    if logits.dtype in (torch.float32, torch.float64):
        return np.isfinite(logits.numpy()[rows, nodes, tokens]).tolist()
    return logits[torch.tensor(rows), torch.tensor(nodes), torch.tensor(tokens)].isfinite().tolist()


@dataclass(frozen=True)
class Output:
    """One text, as a caller gets it.

    Attributes:
        prompt: the index of its prompt.
        text: what goes on from the prompt (its leading space included), without special tokens and without the stop
            string that ended it.
        tokens: ids of what was written, the end of text and the tokens of a stop string included.
        finish_reason: eos, stop, length, interrupted (a stream was left) or error (the model's logits were NaN or
            infinite; what was written before stays).
        seed: what its randomness came from; asked for again under the default rule, it gives the same text.
        usage: what it cost.
        exact: equal to what plain decoding writes: bit for bit ("bits"), or up to rounding ("rounding").
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
    """What one round added to a streamed text: what the drafter had guessed, then what the target chose itself."""

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
    whole("n", n, most=MOST_SAMPLES)
    given = [seed] * prompts if seed is None or not isinstance(seed, Sequence) or isinstance(seed, str) else seed
    if len(given) != prompts:
        raise InputError(f"give one seed, or one per prompt: there are {prompts} prompts and {len(given)} seeds")
    first = [secrets.randbits(63) if s is None else whole("seed", s, None) for s in given]
    return [[s + j for j in range(n)] for s in first]


def alike(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Groups of rows whose prompts are about equally long: prompts in one pass are filled up to the longest of them."""
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
