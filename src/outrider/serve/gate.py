"""Checks before the endpoints: the API key, the size of bodies, and the Host header."""

from __future__ import annotations

import hmac
import json
from typing import Any

import anyio

from .protocol import Refusal

PROBES = ("/health", "/ready")
OPEN = ("/", *PROBES)  # without a key, like the page's files
PATIENCE = 60.0  # seconds in which a body must arrive
SMALL = 64 << 10  # bytes of a body that do not count towards BODIES
BODIES = 32  # limit on the bytes of all bodies, in bodies of the largest size
CLOSING = (401, 408, 413, 429)  # after these the rest of the body is not read
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Scope = dict[str, Any]


class Gate:
    """ASGI middleware. body: maximum bytes of one body. local: the Host header must be a loopback name, so that pages
    of other sites cannot reach a server without a key through a browser."""

    def __init__(self, app: Any, key: str = "", body: int = 1 << 20, local: bool = False):
        self.app, self.key, self.body, self.local = app, key, body, local
        self.held = 0  # bytes of the bodies of requests in progress, beyond SMALL of each

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        body = Body(self, receive)
        try:
            self.check(scope, headers)
            await self.app(scope, body.receive, send)
        except Refusal as refusal:
            await answer(send, refusal)
        finally:
            self.held -= body.counted

    def check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        path = scope["path"]
        if self.local:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            if host and name.strip("[]").lower() not in LOOPBACK:
                raise Refusal(
                    "this server accepts the host localhost only; start it with --api-key to allow others",
                    status=403, kind="permission_error",
                )  # fmt: skip
        if self.key and path not in OPEN and not path.startswith("/page/"):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self.key.encode()):
                raise Refusal(
                    "the API key is missing or wrong; send it as Authorization: Bearer KEY", status=401,
                    kind="authentication_error", code="invalid_api_key",
                )  # fmt: skip
        length = headers.get(b"content-length", b"")
        if length and b"transfer-encoding" in headers:  # proxies could disagree about the end of the body
            raise Refusal("a request has either Content-Length or Transfer-Encoding; send one of them", status=400)
        if length.isdigit() and int(length) > self.body:
            raise self.too_large()
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if kind != b"application/json":
                raise Refusal("the body must be sent as Content-Type: application/json", status=415)

    def too_large(self) -> Refusal:
        return Refusal(f"the body is larger than {self.body} bytes; send less", status=413)

    def crowded(self) -> Refusal:
        busy = "the server has no memory left for requests of this size; try again later"
        return Refusal(busy, status=429, kind="rate_limit_error", code="queue_full")


class Body:
    """One request's body as it arrives, with its size (also without Content-Length) and its deadline checked."""

    def __init__(self, gate: Gate, receive: Any):
        self.gate, self.receive_next = gate, receive
        self.seen = self.counted = 0  # bytes received; those that count towards BODIES
        self.more, self.end = True, anyio.current_time() + PATIENCE

    async def receive(self) -> Any:
        """The next message. Raises Refusal for a body that is late, too large, or too much beside the others."""
        with anyio.CancelScope(deadline=self.end if self.more else float("inf")) as scope:
            message = await self.receive_next()
        if scope.cancelled_caught:
            raise Refusal(f"the body did not arrive within {PATIENCE:g} seconds", status=408)
        self.more = message.get("more_body", False)
        self.seen += len(message.get("body", b""))
        if self.seen > self.gate.body:
            raise self.gate.too_large()
        fresh = max(0, self.seen - SMALL) - self.counted
        if fresh and self.gate.held + fresh > BODIES * self.gate.body:
            raise self.gate.crowded()
        self.counted += fresh
        self.gate.held += fresh
        return message


async def answer(send: Any, refusal: Refusal) -> None:
    """Send a refusal from the middleware. The body is not read, so the connection is closed."""
    body = json.dumps(refusal.body(), ensure_ascii=False).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    spelt = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": spelt})
    await send({"type": "http.response.body", "body": body})


def closing(status: int) -> dict[str, str]:
    """The header that closes the connection if the rest of the body must not be read."""
    return {"connection": "close"} if status in CLOSING else {}
