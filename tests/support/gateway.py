"""A real HTTP server between a client and a real server, which fails on demand: what networks and engines do."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread


class Gateway(ThreadingHTTPServer):
    """Failures are taken from `script`, one for each question; then questions are passed on to `behind`.

    busy: 503 with Retry-After; cut: half an answer, then the connection is closed; garbage: no JSON; abort: an answer
    that was given up; bare: an answer without token ids.
    """

    daemon_threads = True

    def __init__(self, behind: str, script: list[str]):
        super().__init__(("127.0.0.1", 0), Passing)
        self.behind, self.script, self.lock = behind, list(script), Lock()
        self.asked: list[tuple[float, str]] = []  # when, and what was done

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Passing(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self.reply(*self.passed(None))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        with self.server.lock:
            what = self.server.script.pop(0) if self.server.script else "pass"
            self.server.asked.append((time.monotonic(), what))
        if what == "busy":
            self.reply(503, b'{"error": {"message": "loading"}}', ("retry-after", "1"))
        elif what == "garbage":
            self.reply(200, b"<html>")
        elif what == "cut":
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            status, answer = self.passed(body)
            made = json.loads(answer)
            for choice in made.get("choices", []):
                if what == "abort":
                    choice["finish_reason"] = "abort"
                if what == "bare":
                    choice.pop("token_ids")
            self.reply(status, json.dumps(made).encode())

    def passed(self, body: bytes | None) -> tuple[int, bytes]:
        request = urllib.request.Request(
            self.server.behind + self.path, body, {"content-type": "application/json"} if body else {}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def reply(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (("content-length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def gateway(behind: str, *script: str) -> Iterator[Gateway]:
    """A gateway that runs during the block."""
    made = Gateway(behind, list(script))
    thread = Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()
        thread.join(10)
