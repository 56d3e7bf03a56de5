"""One HTTP request that writes text, and the way that its rows' events take to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .job import End, Event, Job, size
from .protocol import ChatRequest, CompletionRequest, Ours
from .texts import Voice
from .tools import Caller

MOST = 1 << 17  # what may lie undelivered in one channel, in `job.size`s: some 15 MB


class Behind(RuntimeError):
    """A reader has not taken what was sent to it, and it has become too much."""


class Channel:
    """Events of one request's rows, from the engine's thread to the event loop. It never makes the engine wait: what a
    slow reader has not taken lies here, and is one piece when it comes for it. Where that becomes too much, its rows
    end."""

    def __init__(self) -> None:
        self.sent = 0  # sizes of all events: the engine's thread counts them
        self.taken = 0  # of those that were taken: the event loop does
        self.loop = asyncio.get_running_loop()
        self.pending: dict[int, list[Event]] = {}
        self.ready = asyncio.Event()

    def deliver(self, index: int) -> Callable[[Event], None]:
        def put(event: Event) -> None:
            self.pending.setdefault(index, []).append(event)
            self.ready.set()

        def call(event: Event) -> None:
            """Raises Behind for what has no room any more, but never for the end."""
            if self.sent - self.taken > MOST and not isinstance(event, End):
                raise Behind
            self.sent += size(event)
            self.loop.call_soon_threadsafe(put, event)

        return call

    async def take(self) -> dict[int, list[Event]]:
        await self.ready.wait()
        self.ready.clear()
        taken, self.pending = self.pending, {}
        self.taken += sum(size(event) for events in taken.values() for event in events)
        return taken


@dataclass
class Call:
    """One HTTP request that writes text."""

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
