"""One HTTP request that writes text, and the way that its rows' events take to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .job import Event, Job
from .protocol import ChatRequest, CompletionRequest, Ours
from .texts import Voice
from .tools import Caller


class Channel:
    """Events of one request's rows, from the engine's thread to the event loop. It never makes the engine wait: what a
    slow reader has not taken lies here, and is one piece when it comes for it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.pending: dict[int, list[Event]] = {}
        self.ready = asyncio.Event()

    def deliver(self, index: int) -> Callable[[Event], None]:
        def put(event: Event) -> None:
            self.pending.setdefault(index, []).append(event)
            self.ready.set()

        def call(event: Event) -> None:
            self.loop.call_soon_threadsafe(put, event)

        return call

    async def take(self) -> dict[int, list[Event]]:
        await self.ready.wait()
        self.ready.clear()
        taken, self.pending = self.pending, {}
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
