"""Work outside the event loop, such as tokenising: one task at a time, the smallest waiting one first."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from .scheduler import Full


class Turns:
    """A thread and its queue of at most `most` tasks. A task that is cancelled while waiting never starts."""

    def __init__(self, name: str, most: int):
        self.thread, self.most = ThreadPoolExecutor(1, name), most
        self.line: list[tuple[int, int, asyncio.Future[None]]] = []  # (size, number, start)
        self.number, self.busy = count(), False

    async def run(self, size: int, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function. size: of its work, in any unit. Raises Full if too many tasks wait."""
        loop = asyncio.get_running_loop()
        if self.busy:
            if sum(not turn.cancelled() for _, _, turn in self.line) >= self.most:
                raise Full(1)
            turn = loop.create_future()
            heapq.heappush(self.line, (size, next(self.number), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it has started
                    self._next()
                raise
        self.busy = True
        try:
            return await loop.run_in_executor(self.thread, function, *args)
        finally:
            self._next()

    def _next(self) -> None:
        self.line = [entry for entry in self.line if not entry[2].cancelled()]
        heapq.heapify(self.line)
        self.busy = bool(self.line)
        if self.line:
            heapq.heappop(self.line)[2].set_result(None)

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
