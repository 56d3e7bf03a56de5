"""One text on its way through the server: what it is asked to be, and what it tells those who wait for it."""

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
    """The logarithm of a token's probability before any temperature or filter, and the likeliest tokens there."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def scored(token: int, logits: Any, top: int) -> Scored:
    """A token under the logits [v] of its place (an array, or a device's tensor), and the `top` likeliest ones."""
    x = (logits if isinstance(logits, np.ndarray) else logits.float().cpu().numpy()).astype(np.float64)
    logs = x - x.max()
    logs -= np.log(np.exp(logs).sum())
    likely = np.sort(np.argpartition(-logs, min(top, len(logs)) - 1)[:top])
    best = likely[np.argsort(-logs[likely], kind="stable")]
    return Scored(token, float(logs[token]), tuple(zip(best.tolist(), logs[best].tolist(), strict=True)))


@dataclass(frozen=True)
class Shown:
    """One round's tree, for those who want to see it: node 0 is the root; `path` are the accepted nodes, root first."""

    tokens: list[int]
    parents: list[int]
    path: list[int]


@dataclass(frozen=True)
class Part:
    """What one round added. The first `drafted` tokens were guessed by the drafter."""

    tokens: list[int]
    drafted: int
    scores: list[Scored] | None = None
    shown: Shown | None = None


@dataclass(frozen=True)
class End:
    """The text is finished: eos, stop, length, abort (cancelled, late or shut down) or error."""

    finish: str
    usage: Usage
    error: str = ""


@dataclass(frozen=True)
class Heading:
    """The scores of the prompt's tokens from the second on; it comes before any part."""

    scores: list[Scored]


Event = Heading | Part | End


def size(event: Event) -> int:
    """About how much memory an event takes, in objects of some hundred bytes."""
    if isinstance(event, End):
        return 1
    scores = event.scores or ()
    shown = len(event.shown.tokens) if isinstance(event, Part) and event.shown is not None else 0
    return 1 + shown + sum(2 + len(scored.top) for scored in scores)


@dataclass
class Watch:
    """What looks at, or restricts, the target's choices of one row (`Request.process` and `Request.cut`)."""

    top: int | None = None  # alternatives that are wanted beside each token's own logprob; None: no logprobs
    least: int = 0  # tokens before which no end is allowed
    ends: tuple[int, ...] = ()
    guide: Guide | None = None
    seen: dict[int, Array] = field(default_factory=dict)  # place in the output -> logits [v] there

    def __call__(self, output: list[int], logits: Array) -> Array:
        if self.top is not None:
            self.seen[len(output)] = logits.copy()  # a place may be asked about again: the last look is the true one
        if len(output) < self.least and self.ends:
            logits = logits.copy()
            logits[list(self.ends)] = -np.inf
        return logits if self.guide is None else self.guide(output, logits)

    @property
    def broken(self) -> str:
        """Why the row cannot go on, if it cannot."""
        return "" if self.guide is None else self.guide.broken

    def cutting(self, cut: Cut) -> Cut:
        """The row's ends, and one more: where its grammar is broken, it fails and drops what the round has drawn. A
        text that ends before that place is not concerned: without a draft, nobody would have looked there."""

        def cutting(output: Sequence[int], new: Sequence[int]) -> tuple[int, str | None]:
            if self.guide is None or not self.guide.broken:
                return cut(output, new)
            kept, why = cut(output, new)
            return (kept, why) if why and len(output) + kept <= len(self.guide.have) else (0, "error")

        return cutting

    def scores(self, first: int, tokens: Sequence[int]) -> list[Scored] | None:
        """Of the tokens at places first, first + 1, ... of the output."""
        if self.top is None:
            return None
        found = [scored(token, self.seen[place], self.top) for place, token in enumerate(tokens, first)]
        self.seen.clear()
        return found


@dataclass(eq=False)
class Job:
    """One row to be. `deliver` is called in the engine's thread."""

    request: Request
    choice: Choice
    deliver: Callable[[Event], None]
    deadline: float = float("inf")  # by time.monotonic
    watch: Watch | None = None
    show: bool = False  # are its trees wanted?
    salt: str = ""  # only prompts of one salt share what was read
    scoring: Scoring | None = None  # the prompt's scores, where they are wanted
    behind: Callable[[], bool] = lambda: False  # is its reader behind, so that it must not go on?
    cached: int = 0  # tokens of its prompt that were copied, not read
    row: Row | None = None
    party: int = 0  # which request it belongs to
    turn: int = 0  # those that wait begin in this order
    cancelled: bool = False  # set by whoever waits; looked at between two rounds
    arrived: float = field(default_factory=monotonic)
    started: float = 0.0  # when its prompt began to be read
    first: float = 0.0  # when its first token was there
    last: float = 0.0  # when its latest one was

    def __post_init__(self) -> None:
        if self.watch is not None:
            cut = self.watch.cutting(self.request.cut)
            self.request = replace(self.request, process=self.watch, cut=cut)


def shown(round: Round, i: int) -> Shown:
    """Row i of a round."""
    tokens, parents, _ = round.tree.host[i]
    return Shown(list(tokens), list(parents), list(round.paths[i]))
