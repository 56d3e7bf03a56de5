"""A running server as tests speak to it."""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any


@dataclass
class Served:
    """A running server."""

    service: Any  # outrider.serve.service.Service
    port: int
    key: str = ""
    server: Any = None  # outrider.serve.server.Drained
    loop: Any = None  # its event loop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """(status, headers, body) of one request; a body that is no bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        more = {"content-type": "application/json"} if body is not None else {}
        if self.key:
            more["authorization"] = f"Bearer {self.key}"
        data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {**more, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        got, _, answer = self.send("POST", path, body)
        assert got == status, answer
        return json.loads(answer)

    def get(self, path: str, status: int = 200) -> Any:
        got, _, answer = self.send("GET", path)
        assert got == status, answer
        return json.loads(answer)

    def signal(self) -> None:
        """As SIGTERM and SIGINT do."""
        self.loop.call_soon_threadsafe(self.server.stop)

    def idle(self, seconds: float = 60.0) -> bool:
        """Wait until no row is left; False if that takes too long."""
        scheduler, end = self.service.scheduler, time.monotonic() + seconds
        while time.monotonic() < end:
            if not scheduler.active and not scheduler.waiting and scheduler.batch is None:
                return True
            time.sleep(0.02)
        return False

    def paused(self, texts: int = 1, seconds: float = 60.0) -> bool:
        """Wait until no row is left but so many texts wait; False if that takes too long."""
        scheduler, end = self.service.scheduler, time.monotonic() + seconds
        while time.monotonic() < end:
            if not scheduler.active and scheduler.batch is None and len(scheduler.waiting) == texts:
                return True
            time.sleep(0.02)
        return False


class Reader:
    """A client that reads a stream as slowly as it likes; few bytes lie in its own buffer."""

    def __init__(self, port: int, path: str, body: dict[str, Any], events: int = 2):
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sock.settimeout(200)
        self.sock.connect(("127.0.0.1", port))
        raw = json.dumps({**body, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self.sock.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        self.seen = b""
        while self.seen.count(b"data: ") < events and b"[DONE]" not in self.seen:
            more = self.sock.recv(1024)
            assert more, self.seen
            self.seen += more

    def rest(self) -> list[dict[str, Any]]:
        """Read to the end, which must be there: the events of the whole stream."""
        while not self.seen.endswith(b"\r\n0\r\n\r\n") and (more := self.sock.recv(1 << 16)):
            self.seen += more
        self.sock.close()
        answer = http.client.HTTPResponse(self)  # type: ignore[arg-type]
        answer.begin()
        *lines, done, nothing = answer.read().decode().split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        return [json.loads(line[6:]) for line in lines]

    def makefile(self, *_: Any) -> io.BytesIO:
        """What was received, as http.client reads it."""
        return io.BytesIO(self.seen)


def templated(tokenizer: Any, template: str) -> Any:
    """A copy of a tokenizer with another chat template."""
    made = copy(tokenizer)
    object.__setattr__(made, "chat_template", template)  # native models' tokenizers are frozen
    return made


def finishes(events: list[dict[str, Any]]) -> list[str]:
    """Why the texts of a stream ended."""
    return [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]


Serve = Callable[..., Served]
