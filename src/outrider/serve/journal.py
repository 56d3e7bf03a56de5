"""The log: a JSON line per request and per message, without the text of prompts and answers."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ..core.types import Usage
from .gate import PROBES, Scope
from .service import Call
from .texts import FINISH, Voice, usage_of

log = logging.getLogger("outrider.serve")


RATES = ((logging.WARNING, 3), (logging.NOTSET, 7))  # lines per second, by level: requests do not crowd out errors


class Sparing(logging.Filter):
    """Passes at most ten lines per second; the next line has the number of dropped ones (`record.left_out`)."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.count = 0, Counter[int]()
        self.left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if (now := int(monotonic())) != self.second:
            self.second, self.count = now, Counter()
        level, most = next((level, most) for level, most in RATES if record.levelno >= level)
        self.count[level] += 1
        if self.count[level] > most:
            self.left_out += 1
            return False
        record.left_out, self.left_out = self.left_out, 0
        return True


class Lines(logging.Formatter):
    """Records as single lines of JSON, with their tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        said: dict[str, Any]
        if message.startswith("{") and not record.exc_info:
            if not getattr(record, "left_out", 0):
                return message
            said = json.loads(message)
        else:
            said = {"event": "log", "level": record.levelname.lower(), "from": record.name, "message": message}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        if getattr(record, "left_out", 0):
            said["left_out"] = record.left_out  # type: ignore[attr-defined]
        return json.dumps(said)


@dataclass(eq=False)
class Entry:
    """One request in progress."""

    status: int = 500  # of its response; 500 if an error came first
    complete: bool = False  # whether its last byte was sent
    call: Call | None = None  # after its texts are accepted


class Journal:
    """The outermost ASGI middleware: logs how each request ends, and knows those in progress."""

    def __init__(self, app: Any):
        self.app = app
        self.open: set[Entry] = set()

    @property
    def answering(self) -> int:
        """The number of requests with accepted texts whose last byte is not sent yet."""
        return sum(entry.call is not None for entry in self.open)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, entry = monotonic(), Entry()

        async def watched(message: Any) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)
            entry.complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        scope["outrider.entry"] = entry
        self.open.add(entry)
        try:
            await self.app(scope, receive, watched)
        finally:
            self.open.discard(entry)
            status = 499 if entry.status < 400 and not entry.complete else entry.status
            if scope["method"] == "POST" or (status >= 400 and scope["path"] not in PROBES):
                said = {"event": "request", "path": scope["path"][:80], "status": status}
                more = {} if entry.call is None else counts(entry.call)
                log.info(json.dumps({**said, **more, "total_ms": round(1000 * (monotonic() - began), 1)}))


def counts(call: Call) -> dict[str, Any]:
    """Counts and times of texts for the log; if the client has left, those so far."""
    usages = [usage_now(voice) for voice in call.voices]
    used = usage_of(usages, call.prompts)
    first = min((job.first for job in call.jobs if job.first), default=0.0)
    return {
        "id": call.id, "texts": len(call.voices), "stream": call.request.stream,
        "finish": [finish_now(voice) for voice in call.voices],
        "prompt_tokens": used["prompt_tokens"], "completion_tokens": used["completion_tokens"],
        "accepted": used["completion_tokens_details"]["accepted_prediction_tokens"],
        "rejected": used["completion_tokens_details"]["rejected_prediction_tokens"],
        "first_token_ms": round(1000 * (first - call.jobs[0].arrived), 1) if first else None,
    }  # fmt: skip


def usage_now(voice: Voice) -> Usage:
    """A text's counts, also if its reader has not received its end."""
    if voice.end is not None:
        return voice.end.usage
    return Usage() if voice.job.row is None else voice.job.row.usage


def finish_now(voice: Voice) -> str:
    """A text's finish reason: `abort` if it is abandoned."""
    row = voice.job.row
    return voice.finish or FINISH[(row and row.finish) or "abort"]
