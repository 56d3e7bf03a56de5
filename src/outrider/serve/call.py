"""One HTTP request that generates text, and how its rows' events reach it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .job import End, Event, Job, Part, size
from .protocol import ChatRequest, CompletionRequest, Ours
from .texts import Voice
from .tools import Caller

# Where a reader has not taken so many tokens of one text, and this share of all that text's tokens, the texts of the
# request pause. The share bounds what prefilling again may cost: a text of L tokens has L/4 new ones each time.
AHEAD, SHARE = 64, 1 / 4
MOST = 1 << 17  # what may lie undelivered in one channel, in `job.size`s: some 15 MB


class Behind(RuntimeError):
    """A reader has not taken what was sent to it, it has become too much, and its text cannot pause."""


class Channel:
    """Events of one request's rows, from the engine's thread to the event loop. It never makes the engine wait: what a
    slow reader has not taken lies here and is delivered as one piece. `behind` says that the texts must pause, and
    `wake` is called when they may go on."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake, self.behind = wake, False
        self.sent = 0  # sizes of all events, counted by the engine's thread
        self.taken = 0  # of those that were taken, counted by the event loop
        self.loop = asyncio.get_running_loop()
        self.pending: dict[int, list[Event]] = {}
        self.ahead: Counter[int] = Counter()  # tokens among these, by text
        self.ready = asyncio.Event()

    def deliver(self, index: int, tokens: int) -> Callable[[Event], None]:
        """Where the events of text `index` go; its prompt has so many tokens."""

        def put(event: Event) -> None:
            nonlocal tokens
            self.pending.setdefault(index, []).append(event)
            if isinstance(event, Part):
                tokens += len(event.tokens)
                self.ahead[index] += len(event.tokens)
            if self.ahead[index] > AHEAD + SHARE * tokens or self.sent - self.taken > MOST // 2:
                self.behind = True
            self.ready.set()

        def call(event: Event) -> None:
            """Raises Behind where too much is undelivered, but never for the end."""
            if self.sent - self.taken > MOST and not isinstance(event, End):
                raise Behind
            self.sent += size(event)
            self.loop.call_soon_threadsafe(put, event)

        return call

    async def take(self) -> dict[int, list[Event]]:
        await self.ready.wait()
        self.ready.clear()
        taken, self.pending = self.pending, {}
        self.ahead.clear()
        self.taken += sum(size(event) for events in taken.values() for event in events)
        if self.behind:
            self.behind = False
            self.wake()
        return taken


@dataclass
class Call:
    """One HTTP request that generates text."""

    id: str
    request: ChatRequest | CompletionRequest
    channel: Channel
    voices: list[Voice]
    prompts: int  # tokens of all prompts, each counted once
    echoes: list[str] = field(default_factory=list)  # what stands before each text
    caller: Caller | None = None  # how tool calls are told from text
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def jobs(self) -> list[Job]:
        return [voice.job for voice in self.voices]

    @property
    def scored(self) -> bool:
        """Are the prompts' tokens in its logprobs too?"""
        return bool(self.echoes) and self.request.logprobs is not None

    @property
    def ours(self) -> Ours | None:
        return self.request.outrider
