"""Servers as `serving.py` speaks to them: ours started and ended, and streams whose pieces are timed."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Stream:
    """One streamed text, in seconds from when it was asked for."""

    first: float  # until its first token
    end: float  # until its last
    text: str
    tokens: int  # as the server counts them; 0 where it does not say

    @property
    def decode(self) -> float:
        return self.end - self.first


def connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=600)


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    connection = connect(url)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    raw = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {raw[:200]!r}")
    return json.loads(raw)


def ask(url: str, body: dict[str, Any]) -> Stream:
    """One streamed text of /v1/completions. Raises RuntimeError for any status but 200."""
    connection, began = connect(url), time.monotonic()
    connection.request(
        "POST", "/v1/completions", json.dumps({**body, "stream": True}), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:200]!r}")
    first = last = 0.0
    text, tokens = "", 0
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if event["choices"] and event["choices"][0]["text"]:
            last = time.monotonic()
            first = first or last
            text += event["choices"][0]["text"]
    connection.close()
    if not first:
        return Stream(time.monotonic() - began, time.monotonic() - began, text, tokens)
    return Stream(first - began, last - began, text, tokens)


@contextmanager
def ours(model: str, drafters: Sequence[str], rows: int) -> Iterator[str]:
    """The URL of an `outrider serve` of its own process, which ends with the block."""
    with started(model, drafters, "--rows", str(rows)) as (url, _):
        yield url


@contextmanager
def started(model: str, drafters: Sequence[str], *options: str) -> Iterator[tuple[str, int]]:
    """The same, with any options: its URL and its process's id."""
    command = [sys.executable, "-m", "outrider", "serve", model, "--port", "0", "--quiet", *options]
    process = subprocess.Popen(
        [*command, *(part for spec in drafters for part in ("--drafter", spec))], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        heard = []
        for line in process.stderr:
            heard.append(line)
            if result := re.search(r" at (http://127\.0\.0\.1:\d+) ", line):
                yield result[1], process.pid
                return
        raise RuntimeError("outrider serve did not start: " + "".join(heard))
    finally:
        process.terminate()
        process.wait(60)


def prompts() -> list[str]:
    """The demo's held-out texts, their first 400 characters."""
    lines = (files("outrider") / "demo" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["text"][:400] for row in map(json.loads, lines) if "text" in row]
