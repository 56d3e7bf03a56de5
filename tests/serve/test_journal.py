"""The log: one JSON line a request, refused and abandoned ones too, and never a word of prompts and answers."""

from __future__ import annotations

import json
import logging
import socket
import time
from typing import Any

import pytest
from serve_world import Reader, Serve, Served

from outrider.engine import Batch
from outrider.llm import LLM
from outrider.serve import gate
from outrider.serve.journal import Lines
from outrider.serve.start import service_of

pytestmark = pytest.mark.trained
PATH = "/v1/completions"
SECRET = "Zanzibar"
ASKED = {"prompt": f"{SECRET} said", "temperature": 0, "max_tokens": 8}
LONG = {**ASKED, "temperature": 1, "seed": 1, "max_tokens": 1900, "ignore_eos": True}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """The log's lines so far, once there are `count` of requests."""
    caplog.set_level(logging.INFO, "outrider.serve")

    def lines(count: int) -> list[dict[str, Any]]:
        end = time.monotonic() + 20
        while True:
            written = [Lines().format(record) for record in caplog.records]
            results = [json.loads(line) for line in written]
            requests = [line for line in results if line["event"] == "request"]
            if len(requests) >= count or time.monotonic() > end:
                assert len(requests) == count
                assert SECRET not in "".join(written), "a prompt stands in the log"
                assert not any("\n" in line for line in written)
                return results
            time.sleep(0.02)

    return lines


def test_an_answer(served: Served, said: Any) -> None:
    text = served.post(PATH, {**ASKED, "n": 2, "request_id": "mine"})["choices"][0]["text"]
    (line,) = said(1)
    assert {k: line[k] for k in ("path", "status", "id", "texts", "stream", "finish", "completion_tokens")} == {
        "path": PATH, "status": 200, "id": "mine", "texts": 2, "stream": False, "finish": ["length"] * 2,
        "completion_tokens": 16,
    }  # fmt: skip
    assert 0 < line["first_token_ms"] <= line["total_ms"]
    assert text.strip()
    assert text.strip() not in json.dumps(line)


def test_refusals(served: Served, said: Any, llm: LLM, loaded: Any, start: Serve) -> None:
    """The server's key, its size, its manners and its fields: a line for each. Probes that are answered write none."""
    keyed = start(service_of(llm, loaded, "demo", rows=1, queue=1), key="s3cret")
    body = json.dumps(ASKED).encode()
    limit = served.service.limits.body
    assert keyed.send("POST", PATH, body, {"authorization": "Bearer wrong"})[0] == 401
    assert served.send("POST", PATH, body, {"content-length": str(limit + 1)})[0] == 413
    assert served.send("POST", PATH, body, {"content-type": "text/plain"})[0] == 415
    assert served.send("POST", PATH, {**ASKED, "top_p": 7})[0] == 400
    assert served.send("POST", PATH, {**ASKED, SECRET: 7})[0] == 400
    assert served.send("GET", "/nothing")[0] == 404
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert served.send("GET", path)[0] == 200
    keyed.service.scheduler.close()
    assert keyed.send("POST", PATH, ASKED)[0] == 503
    assert keyed.send("GET", "/ready")[0] == 503
    assert sorted(line["status"] for line in said(7)) == [400, 400, 401, 404, 413, 415, 503]


def test_the_busy_one(said: Any, llm: LLM, loaded: Any, start: Serve) -> None:
    served = start(service_of(llm, loaded, "demo", rows=1, queue=1))
    readers = [Reader(served.port, PATH, {**LONG, "echo": True}, events=1) for _ in range(2)]
    assert served.send("POST", PATH, ASKED)[0] == 429
    for reader in readers:
        reader.sock.close()
    assert sorted(line["status"] for line in said(3)) == [429, 499, 499]
    assert served.idle()


def test_a_client_that_leaves(served: Served, said: Any) -> None:
    """It is distinguished from one that read all, with the text written for it until then."""
    reader = Reader(served.port, PATH, LONG, events=4)
    reader.sock.close()
    (line,) = said(1)
    assert (line["status"], line["finish"], line["stream"]) == (499, ["abort"], True)
    assert 2 <= line["completion_tokens"] < 1900
    assert line["prompt_tokens"] > 1
    assert served.idle()


def test_a_round_that_fails(llm: LLM, loaded: Any, start: Serve, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its traceback is a field of one line."""
    served = start(service_of(llm, loaded, "demo"))

    def fail(self: Batch) -> Any:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(Batch, "round", fail)
    assert served.send("POST", PATH, ASKED)[0] == 500
    events = Reader(served.port, PATH, LONG, events=1).rest()
    assert "the round failed" in events[-1]["error"]["message"]
    lines = said(2)
    assert [(line["status"], line["finish"]) for line in lines if line["event"] == "request"] == [
        (500, ["error"]), (200, ["error"]),
    ]  # fmt: skip
    failed = [line for line in lines if line["event"] == "log"]
    assert len(failed) == 2
    assert (failed[0]["level"], failed[0]["message"]) == ("error", "a round has failed")
    assert "RuntimeError: no more memory" in failed[0]["traceback"]


def test_a_body_that_never_ends(served: Served, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused in time, and its connection closed."""
    monkeypatch.setattr(gate, "PATIENCE", 0.5)
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
        sock.sendall(head.encode() + b'{"prompt": ')
        answer = b""
        while more := sock.recv(4096):
            answer += more
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"within 0.5 seconds" in answer
    assert said(1)[0]["status"] == 408
    # Whoever has sent all may wait for longer.
    reader = Reader(served.port, PATH, {**LONG, "max_tokens": 100})
    time.sleep(0.8)
    assert reader.rest()[-1]["choices"][0]["finish_reason"] == "length"
