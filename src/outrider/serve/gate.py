"""What stands before the endpoints: the key, the size of bodies, and who may be addressed by which name."""

from __future__ import annotations

import hmac
import json
from typing import Any

import anyio

from .protocol import Refusal

PROBES = ("/health", "/ready")
OPEN = ("/", *PROBES)  # no key is asked for; nor for the page's files
PATIENCE = 60.0  # seconds in which a body must have come
CLOSING = (401, 408, 413)  # the rest of the body is not read after these
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Scope = dict[str, Any]


class Gate:
    """ASGI middleware. `local`: only loopback names may stand in the Host header, so that no page of another site can
    reach a server without a key through its reader's browser."""

    def __init__(self, app: Any, key: str = "", body: int = 8 << 20, local: bool = False):
        self.app, self.key, self.body, self.local = app, key, body, local

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            self.check(scope, headers)
            await self.app(scope, self.bounded(receive), send)
        except Refusal as refusal:
            await answer(send, refusal)

    def check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        path = scope["path"]
        if self.local:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            if host and name.strip("[]").lower() not in LOOPBACK:
                raise Refusal(
                    "this server answers to localhost alone; start it with --api-key to allow other names",
                    status=403, kind="permission_error",
                )  # fmt: skip
        if self.key and path not in OPEN and not path.startswith("/page/"):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self.key.encode()):
                raise Refusal(
                    "the API key is missing or wrong; send it as Authorization: Bearer KEY", status=401,
                    kind="authentication_error", code="invalid_api_key",
                )  # fmt: skip
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.body:
            raise self.too_large()
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if kind != b"application/json":
                raise Refusal("the body must be sent as Content-Type: application/json", status=415)

    def bounded(self, receive: Any) -> Any:
        """A body that says nothing of its length is counted as it comes, and none may take for ever."""
        seen, more, end = 0, True, anyio.current_time() + PATIENCE

        async def receive_some() -> Any:
            nonlocal seen, more
            with anyio.CancelScope(deadline=end if more else float("inf")) as scope:
                message = await receive()
            if scope.cancelled_caught:
                raise Refusal(f"the body did not come within {PATIENCE:g} seconds", status=408)
            more = message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self.body:
                raise self.too_large()
            return message

        return receive_some

    def too_large(self) -> Refusal:
        return Refusal(f"the body is larger than {self.body} bytes; send less", status=413)


async def answer(send: Any, refusal: Refusal) -> None:
    """Send a refusal from where there is no application yet."""
    body = json.dumps(refusal.body(), ensure_ascii=False).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **closing(refusal.status)}
    spelt = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": spelt})
    await send({"type": "http.response.body", "body": body})


def closing(status: int) -> dict[str, str]:
    """The header that closes a connection, where the rest of the body must not be read."""
    return {"connection": "close"} if status in CLOSING else {}
