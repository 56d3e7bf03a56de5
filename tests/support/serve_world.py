"""A running server as tests speak to it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Served:
    """A running server."""

    service: Any  # outrider.serve.service.Service
    port: int
    key: str = ""

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

    def idle(self, seconds: float = 60.0) -> bool:
        """Wait until no row is left; False if that takes too long."""
        scheduler, end = self.service.scheduler, time.monotonic() + seconds
        while time.monotonic() < end:
            if not scheduler.active and not scheduler.waiting and scheduler.batch is None:
                return True
            time.sleep(0.02)
        return False


Serve = Callable[..., Served]
