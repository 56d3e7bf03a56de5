"""A farm of servers, simulated: arrivals, batches and budgets over recorded acceptance, with a model of time.

A trace holds, for every token of a real text, how many of DEPTH drafted tokens would have been accepted after it; so
any policy is replayed exactly, whatever it drafts and when. A simulated server takes the turns of `outrider.serve`: a
newcomer's prompt is read, then it joins the others, and reading gets its share of the time. A `Machine` says what a
turn takes: measured on this one (`farm_runs.py`), or the cost model of a GPU (`cost.py`). Budgets are
the engine's own. Texts go to the server with the fewest.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from outrider.budgets.budgeter import Budgeter, Report

from .cost import Cost

DEPTH = 8  # tokens that a trace's drafts are deep


@dataclass(frozen=True)
class Text:
    """A recorded text. `accepts[i]`: drafted tokens that were right after its i-th token; none for the last."""

    prompt: int
    accepts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.accepts) + 1


class Machine(Protocol):
    """Seconds of what a server does."""

    def read(self, tokens: int) -> float:
        """A prompt, read alone."""

    def round(self, rows: int, context: int, depth: int) -> tuple[float, float]:
        """(drafting, the rest) of a round of `rows` rows, of `context` tokens together, that drafts `depth` tokens."""


@dataclass(frozen=True)
class Gpu:
    """GPUs that hold one copy of a target, by the cost model. `step` is one step of the drafter; None: it is free.

    Prompts are read beside rounds, as engines of GPUs do: they cost arithmetic, and no reading of weights.
    """

    target: Cost
    step: Cost | None

    def read(self, tokens: int) -> float:
        return 2 * (self.target.parameters + self.target.share * self.target.experts) * tokens / self.target.flops

    def round(self, rows: int, context: int, depth: int) -> tuple[float, float]:
        draft = depth * self.step.pass_seconds(rows, context) if self.step else 0.0
        return draft, self.target.pass_seconds(rows * (depth + 1), context)


@dataclass
class Asked:
    """One request: when it came, and when its first and its last token did."""

    text: Text
    came: float
    first: float = 0.0
    end: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second that its user saw, after the first."""
        return (self.text.tokens - 1) / (self.end - self.first)


@dataclass
class Seen:
    """What a budget sees of the rows."""

    remaining: list[int]
    serial: list[int]  # 0 for a row that begins
    sampled: bool = False  # is any row sampled?

    def __len__(self) -> int:
        return len(self.remaining)


@dataclass
class Server:
    """One copy of the target, as `serve/scheduler.py` drives it."""

    machine: Machine
    budget: Budgeter
    rows: int
    share: float = 0.5  # of the time, that reading may take while others write
    waiting: deque[Asked] = field(default_factory=deque)
    live: list[Asked] = field(default_factory=list)
    at: list[int] = field(default_factory=list)  # tokens that each live row has written
    owed: float = 0.0
    rounds: int = 0
    depths: float = 0.0
    busy: bool = False

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.live)

    def turn(self, now: float) -> tuple[float, list[Asked]]:
        """When the turn that begins now ends, and who is then served. Nothing to do: it ends now."""
        if self.waiting and len(self.live) < self.rows and (not self.live or self.owed <= 0):
            asked = self.waiting.popleft()
            spent = self.machine.read(asked.text.prompt)
            asked.first = asked.end = now + spent
            self.owed += spent * (1 - self.share) / self.share
            if asked.text.tokens == 1:
                return now + spent, [asked]
            self.live.append(asked)
            self.at.append(1)
            return now + spent, []
        if not self.live:
            self.owed = 0.0
            return now, []
        return self.round(now)

    def round(self, now: float) -> tuple[float, list[Asked]]:
        """One round of every live row."""
        left = [asked.text.tokens - at for asked, at in zip(self.live, self.at, strict=True)]
        chosen: Any = self.budget.choose(Seen(left, [at - 1 for at in self.at]))  # type: ignore[arg-type]  # budgets ask no more of the rows
        depth = 0 if chosen.nodes < 2 else max(0, min(chosen.depth, DEPTH, max(left) - 1))
        context = sum(asked.text.prompt + at for asked, at in zip(self.live, self.at, strict=True))
        draft, rest = self.machine.round(len(self.live), context, depth)
        right = [min(asked.text.accepts[at - 1], depth) for asked, at in zip(self.live, self.at, strict=True)]
        hits = [sum(r > d for r in right) for d in range(depth)]
        self.budget.learn(Report(len(self.live), depth, depth + 1, draft, rest, 0.0, hits))
        self.rounds, self.depths = self.rounds + 1, self.depths + depth
        now += draft + rest
        self.owed = max(0.0, self.owed - draft - rest)
        self.at = [at + min(r + 1, n) for at, r, n in zip(self.at, right, left, strict=True)]
        done = [asked for asked, at in zip(self.live, self.at, strict=True) if at >= asked.text.tokens]
        for asked in done:
            asked.end = now
        staying = [i for i, asked in enumerate(self.live) if self.at[i] < asked.text.tokens]
        self.live, self.at = [self.live[i] for i in staying], [self.at[i] for i in staying]
        return now, done


@dataclass(frozen=True)
class Found:
    """What a run of the farm came to."""

    tokens_per_second: float  # of all servers together
    speed: float  # tokens per second of a user, the mean over texts
    pace: float  # tokens over the seconds from asking to the end, so that waiting counts
    depth: float  # tokens drafted in a round, the mean over rounds
    texts: int
    left: int  # that were still waiting or being written at the end


def farm(
    servers: Sequence[Server], texts: Sequence[Text], seconds: float, rate: float = 0.0, clients: int = 0, seed: int = 1
) -> Found:
    """Run a farm for so many simulated seconds, of which the first third warms up; or until all texts are written.

    Args:
        servers: Fresh ones; they are used up.
        texts: What is asked for, in an order that `seed` draws.
        rate: Texts per second that come by chance (Poisson).
        clients: Or so many users who ask for the next of the texts when theirs is written, until each was asked for
            once; nothing warms up then.
    """
    chance, events, number = random.Random(seed), list[tuple[float, int, int]](), 0
    loads = np.zeros(len(servers), dtype=np.int64)
    asked, served = 0, list[tuple[float, Asked]]()

    def push(when: float, what: int) -> None:  # what: a server whose turn ends, or -1 for a text that comes
        nonlocal number
        number += 1
        heapq.heappush(events, (when, number, what))

    for _ in range(clients):
        push(0.0, -1)
    if rate:
        push(chance.expovariate(rate), -1)
    ending: dict[int, list[Asked]] = {}
    while events and events[0][0] < seconds:
        now, _, what = heapq.heappop(events)
        if what < 0:
            if clients and asked == len(texts):
                continue
            text = texts[asked] if clients else chance.choice(texts)
            asked += 1
            what = int(loads.argmin())
            servers[what].waiting.append(Asked(text, now))
            loads[what] += 1
            if rate:
                push(now + chance.expovariate(rate), -1)
            if servers[what].busy:
                continue
        for one in ending.pop(what, []):
            served.append((now, one))
            loads[what] -= 1
            if clients:
                push(now, -1)
        server = servers[what]
        end, ending[what] = server.turn(now)
        server.busy = end > now
        if server.busy:
            push(end, what)
    begin = 0.0 if clients else seconds / 3
    seconds = served[-1][0] if clients else seconds
    counted = [one for _, one in served if one.came >= begin]
    made = sum(one.text.tokens for when, one in served if when >= begin)
    rounds = max(1, sum(s.rounds for s in servers))
    return Found(
        made / (seconds - begin), fmean([o.speed for o in counted if o.text.tokens > 1] or [0.0]),
        sum(o.text.tokens for o in counted) / max(1e-9, sum(o.end - o.came for o in counted)),
        sum(s.depths for s in servers) / rounds, len(counted), int(loads.sum()),
    )  # fmt: skip


def servers(count: int, machine: Machine, budget: Callable[[], Budgeter], rows: int) -> list[Server]:
    """So many servers alike, each with a budget of its own."""
    return [Server(machine, budget(), rows) for _ in range(count)]
