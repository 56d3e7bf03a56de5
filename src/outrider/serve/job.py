"""One text in the server: its request, and the events that its reader receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.protocols import Round
from ..core.types import Array, Usage
from ..engine.request import Cut, Request, Row
from .fleet import Choice
from .guide import Guide

if TYPE_CHECKING:
    from .scoring import Scoring


@dataclass(frozen=True)
class Scored:
    """A token's log probability before temperature and filters, and the most likely tokens at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def scored(token: int, logits: Any, top: int) -> Scored:
    """The scores of a token under logits [v] (an array, or a device's tensor), with the `top` most likely ones."""
    x = (logits if isinstance(logits, np.ndarray) else logits.float().cpu().numpy()).astype(np.float64)
    logs = x - x.max()
    logs -= np.log(np.exp(logs).sum())
    likely = np.sort(np.argpartition(-logs, min(top, len(logs)) - 1)[:top])
    best = likely[np.argsort(-logs[likely], kind="stable")]
    return Scored(token, float(logs[token]), tuple(zip(best.tolist(), logs[best].tolist(), strict=True)))


@dataclass(frozen=True)
class Shown:
    """One round's tree, for display: node 0 is the root; `path` has the accepted nodes, root first."""

    tokens: list[int]
    parents: list[int]
    path: list[int]


@dataclass(frozen=True)
class Part:
    """The tokens of one round; the first `drafted` of them are the drafter's."""

    tokens: list[int]
    drafted: int
    scores: list[Scored] | None = None
    shown: Shown | None = None


@dataclass(frozen=True)
class End:
    """The text has ended: eos, stop, length, abort (cancelled, late or shut down) or error."""

    finish: str
    usage: Usage
    error: str = ""


@dataclass(frozen=True)
class Heading:
    """The scores of the prompt's tokens from the second on; sent before any part."""

    scores: list[Scored]


Event = Heading | Part | End


def size(event: Event) -> int:
    """Approximate memory of an event, in units of about 100 bytes. A heading counts for nothing: it comes once, before
    anybody could have read it, and the limits of prompts are its own."""
    if isinstance(event, End):
        return 1
    if isinstance(event, Heading):
        return 0
    scores = event.scores or ()
    shown = len(event.shown.tokens) if isinstance(event, Part) and event.shown is not None else 0
    return 1 + shown + sum(2 + len(scored.top) for scored in scores)


@dataclass
class Watch:
    """Records or restricts the target's choices of one row (`Request.process` and `Request.cut`)."""

    top: int | None = None  # number of alternatives per token; None: no logprobs
    least: int = 0  # minimum number of tokens
    ends: tuple[int, ...] = ()
    guide: Guide | None = None
    seen: dict[int, Array] = field(default_factory=dict)  # position in the output -> logits [v]

    def __call__(self, output: list[int], logits: Array) -> Array:
        if self.top is not None:
            self.seen[len(output)] = logits.copy()  # a position may be visited again; the last visit counts
        if len(output) < self.least and self.ends:
            logits = logits.copy()
            logits[list(self.ends)] = -np.inf
        return logits if self.guide is None else self.guide(output, logits)

    @property
    def broken(self) -> str:
        """Why the row must end, or ""."""
        return "" if self.guide is None else self.guide.broken

    def cutting(self, cut: Cut) -> Cut:
        """The row's own cut, and the end where its grammar is broken: then it fails and drops the round's tokens. A
        text that ends before that position is not affected, since plain decoding would not have reached it."""

        def cutting(output: Sequence[int], new: Sequence[int]) -> tuple[int, str | None]:
            if self.guide is None or not self.guide.broken:
                return cut(output, new)
            kept, why = cut(output, new)
            return (kept, why) if why and len(output) + kept <= len(self.guide.have) else (0, "error")

        return cutting

    def scores(self, first: int, tokens: Sequence[int]) -> list[Scored] | None:
        """Scores of the tokens at positions first, first + 1, ... of the output."""
        if self.top is None:
            return None
        scores = [scored(token, self.seen[place], self.top) for place, token in enumerate(tokens, first)]
        self.seen.clear()
        return scores


@dataclass(eq=False)
class Job:
    """One row, before and while it runs. `deliver` is called in the engine's thread."""

    request: Request
    choice: Choice
    deliver: Callable[[Event], None]
    deadline: float = float("inf")  # by time.monotonic
    watch: Watch | None = None
    show: bool = False  # whether to send its trees
    salt: str = ""  # the prefix cache is shared among prompts with the same salt
    scoring: Scoring | None = None  # computes the prompt's scores
    behind: Callable[[], bool] = lambda: False  # whether its reader is behind, so that it must pause
    row: Row | None = None
    party: int = 0  # number of its request
    turn: int = 0  # order in the queue
    cancelled: bool = False  # set by the reader; checked between rounds
    arrived: float = field(default_factory=monotonic)
    started: float = 0.0  # start of prefill
    first: float = 0.0  # time of its first token
    last: float = 0.0  # time of its latest token

    def __post_init__(self) -> None:
        if self.watch is not None:
            cut = self.watch.cutting(self.request.cut)
            self.request = replace(self.request, process=self.watch, cut=cut)


def shown(round: Round, i: int) -> Shown:
    """Row i of a round."""
    tokens, parents, _ = round.tree.host[i]
    return Shown(list(tokens), list(parents), list(round.paths[i]))
