"""One HTTP request that generates text, and the channel of its rows' events."""

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

# The texts of a request pause while this many tokens of a text, and this share of all its tokens, are undelivered. The
# share bounds the cost of prefilling again: a text of L tokens has L/4 new ones each time.
AHEAD, SHARE = 64, 1 / 4
MOST = 1 << 17  # limit of undelivered events of one channel, in units of `job.size`: about 15 MB


class Behind(RuntimeError):
    """Too much is undelivered to a slow client, and its text cannot pause."""


class Channel:
    """Events of one request's rows, from the engine's thread to the event loop. The engine never waits: what a slow
    client has not read is queued and delivered as one piece. `behind`: whether the texts must pause. `wake` is called
    when they may continue."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake, self.behind = wake, False
        self.sent = 0  # total size of all events; written by the engine's thread
        self.taken = 0  # of the delivered ones; written by the event loop
        self.loop = asyncio.get_running_loop()
        self.pending: dict[int, list[Event]] = {}
        self.ahead: Counter[int] = Counter()  # tokens among these, by text
        self.ready = asyncio.Event()

    def deliver(self, index: int, tokens: int) -> Callable[[Event], None]:
        """The receiver of the events of text `index`. prompt: its number of prompt tokens."""

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
            """Raises Behind if too much is undelivered, but never for the last event."""
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
    echoes: list[str] = field(default_factory=list)  # echoed before each text
    caller: Caller | None = None  # separates tool calls from text
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def jobs(self) -> list[Job]:
        return [voice.job for voice in self.voices]

    @property
    def scored(self) -> bool:
        """Whether its logprobs include the prompts' tokens."""
        return bool(self.echoes) and self.request.logprobs is not None

    @property
    def ours(self) -> Ours | None:
        return self.request.outrider
