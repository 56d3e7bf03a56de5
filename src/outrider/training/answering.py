"""Training data from OpenAI-compatible servers: each question is sent to one of them until it is answered.

A server's workers take the next question after the answer to the last, so that a fast server answers more. If a server
fails, the question returns to the queue and the server pauses: for its `Retry-After`, or twice as long each time. An
answer is a line whose id is a hash of the question, so that an interrupted run resumes.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from .. import files
from ..params import Interrupted
from .endpoints import Failed, Refused, Wish, ask, body, headers, line
from .questions import Asked, by, finished, keys, same_author

PATIENCE = 1800.0  # seconds until an answer counts as lost
REST, REST_LONGEST = 0.25, 60.0  # seconds of pause after a server's first failure, and at most
GIVEN_UP = 300.0  # seconds of nothing but failures, at least three, after which a server is dropped
SPOILT = 5  # truncated or malformed answers to a question, after which it is skipped
REFUSALS = 16  # excess of refusals over answers that ends the run


class EndpointError(RuntimeError):
    """The servers do not answer; answers so far are kept. The command line exits with 1."""


@dataclass
class Server:
    """One server: until when it pauses (monotonic clock), and its consecutive failures."""

    url: str
    rests: float = 0.0
    failures: int = 0
    since: float = 0.0  # time of the first of them
    reason: str = ""

    @property
    def given_up(self) -> bool:
        return self.failures >= 3 and time.monotonic() - self.since > GIVEN_UP

    def fail(self, failed: Failed) -> None:
        now = time.monotonic()
        if now >= self.rests:  # concurrent failures count once
            self.since = self.since if self.failures else now
            self.failures, self.reason = self.failures + 1, failed.reason
        ours = min(REST_LONGEST, REST * 2 ** (self.failures - 1)) * random.uniform(0.5, 1.0)
        self.rests = max(self.rests, now + (ours if failed.wait is None else failed.wait))


@dataclass
class Written:
    """Counts of a run: answers, those without token ids, and the refused questions with their positions."""

    answers: int = 0
    texts: int = 0
    refused: list[str] = field(default_factory=list)


def write(
    urls: Sequence[str],
    items: Sequence[tuple[str, Asked]],
    out: str | Path,
    wish: Wish,
    concurrency: int = 32,
    done: Callable[[int], None] = lambda count: None,
    say: Callable[[str], None] = print,
) -> Written:
    """Append an answer for every question without one in `out`.

    Args:
        urls: the servers, as `connect` gives them.
        items: (position for messages, question).
        out: JSON lines.
        wish: the model and its sampling.
        concurrency: concurrent requests per server.
        done: called with 1 for each finished question.
        say: called with a message about each dropped server.

    Returns:
        Counts. Blank answers are not written.

    Raises:
        InputError: `out` is not a file of this command or cannot be written, or a server denies access.
        EndpointError: no server is left, or almost all questions are refused.
        Interrupted: at Ctrl-C; the answers so far are kept.
    """
    out, result = Path(out), Written()

    def keep(row: dict[str, Any]) -> None:
        files.append(out, json.dumps(row))

    try:
        with files.alone(out):
            have = finished(out, str)
            same_author(out, have, by(wish.model, wish.temperature))
            questions = put(items, wish)
            waiting = [question for question in questions if question.key not in have]
            before = len(questions) - len(waiting)
            asyncio.run(answer([Server(url) for url in urls], waiting, concurrency, keep, result, before, done, say))
    except KeyboardInterrupt:
        more = f"{result.answers} answer{'' if result.answers == 1 else 's'} more"
        raise Interrupted(f"{out} has {more}; the same command resumes from there") from None
    return result


@dataclass
class Question:
    """Position, id and request of a question; spoilt: number of incomplete answers."""

    where: str
    key: str
    body: dict[str, Any]
    spoilt: int = 0


def put(items: Sequence[tuple[str, Asked]], wish: Wish) -> list[Question]:
    """Questions as requests."""
    names = keys([what for _, what in items])
    return [
        Question(where, key, body(what, wish, i))
        for i, ((where, what), key) in enumerate(zip(items, names, strict=True))
    ]


async def answer(
    servers: Sequence[Server],
    waiting: Sequence[Question],
    concurrency: int,
    keep: Callable[[dict[str, Any]], None],
    written: Written,
    before: int = 0,
    done: Callable[[int], None] = lambda count: None,
    say: Callable[[str], None] = print,
) -> None:
    """Send every question to the servers and pass each answer's line to `keep`; counts them in `written`. `before`:
    the number of answers from earlier sessions, whose refused questions are sent again first.

    Raises:
        InputError, EndpointError: as `write`.
    """
    queue: asyncio.Queue[Question] = asyncio.Queue()
    for question in waiting:
        queue.put_nowait(question)

    def settle(question: Question, row: dict[str, Any] | None, refusal: str = "") -> None:
        if row is None:
            written.refused.append(f"{question.where}: {refusal}")
        else:
            bare = "token_ids" not in row
            text = row["messages"][-1]["content"] if "messages" in row else row["completion"]
            if text.strip() or not bare:
                keep(row)
                written.answers, written.texts = written.answers + 1, written.texts + bare
        done(1)
        if len(written.refused) >= before + written.answers + REFUSALS:
            raise EndpointError(f"{len(written.refused)} questions were refused, the last: {written.refused[-1]}")

    async def work(client: httpx2.AsyncClient, server: Server) -> None:
        while not server.given_up:
            if (rest := server.rests - time.monotonic()) > 0:
                await asyncio.sleep(rest)
                continue
            question = await queue.get()
            try:
                if server.rests > time.monotonic():  # another worker failed meanwhile; other servers may answer
                    queue.put_nowait(question)
                    continue
                settle(question, line(question.key, question.body, await ask(client, server.url, question.body)))
                server.failures = 0
            except Refused as refused:
                settle(question, None, str(refused))
            except Failed as failed:
                server.fail(failed)
                question.spoilt += failed.spoilt
                if question.spoilt >= SPOILT:
                    settle(question, None, f"{server.url}: {failed.reason}")
                else:
                    queue.put_nowait(question)
            finally:
                queue.task_done()

    options: dict[str, Any] = {"limits": httpx2.Limits(max_connections=None), "headers": headers()}
    async with httpx2.AsyncClient(timeout=httpx2.Timeout(PATIENCE, connect=10), **options) as client:
        workers = {asyncio.create_task(work(client, s)): s for s in servers for _ in range(concurrency)}
        end = asyncio.create_task(queue.join())
        dropped: set[str] = set()
        try:
            while not end.done():
                ready, _ = await asyncio.wait({end, *workers}, return_when=asyncio.FIRST_COMPLETED)
                for task in ready - {end}:
                    task.result()
                    server = workers.pop(task)
                    if server.url not in dropped:
                        dropped.add(server.url)
                        say(f"{server.url} {server.reason}; it gets no more requests")
                if not workers and not end.done():
                    raise EndpointError(f"no server is left, {servers[-1].url} {servers[-1].reason}")
        finally:
            for task in (end, *workers):
                task.cancel()
            await asyncio.gather(end, *workers, return_exceptions=True)
