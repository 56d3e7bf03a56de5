"""How it ends: what was accepted is answered to its last byte, or ended when its time is over or at a second signal."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import time
from typing import Any

import pytest
from serve_world import Reader, Serve, Served, finishes
from test_process import begin, started

from outrider.llm import LLM
from outrider.serve import server
from outrider.serve.start import service_of

pytestmark = pytest.mark.trained
__all__ = ["started"]
PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 1, "seed": 2, "ignore_eos": True}
WORDY = {**CHAT, "max_tokens": 200, "logprobs": True, "top_logprobs": 20}  # some 300 KB
ENDLESS = {**CHAT, "max_tokens": 1900}


def ended(served: Served, seconds: float) -> bool:
    """Has its event loop closed by then?"""
    end = time.monotonic() + seconds
    while not served.loop.is_closed() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(served.loop.is_closed())


def test_a_slow_reader_gets_the_rest(llm: LLM, loaded: Any, start: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text has paused, most of its bytes are not written or not read yet: that is what the server waits for."""
    monkeypatch.setattr(server, "LAST", 0.2)
    served = start(service_of(llm, loaded, "demo"), buffer=4096)
    reader = Reader(served.port, PATH, WORDY)
    assert served.paused()
    served.signal()
    time.sleep(0.3)
    status, headers, answer = served.send("POST", PATH, CHAT)
    assert (status, headers["retry-after"]) == (503, "5")
    assert "shutting down" in json.loads(answer)["error"]["message"]
    time.sleep(0.6)  # longer than LAST
    assert served.server.journal.answering == 1
    events = reader.rest()
    assert finishes(events) == ["length"]
    assert sum(len(c["logprobs"]["content"]) for e in events for c in e["choices"] if c["logprobs"]) == 200
    assert ended(served, 20)


def test_what_takes_too_long_is_ended(llm: LLM, loaded: Any, start: Serve) -> None:
    served = start(service_of(llm, loaded, "demo"), patience=0.5)
    reader = Reader(served.port, PATH, {**ENDLESS, "stream_options": {"include_usage": True}})
    served.signal()
    events = reader.rest()
    assert finishes(events) == ["abort"]
    assert events[-1]["usage"]["completion_tokens"] < 1900
    assert ended(served, 20)


def test_a_second_signal_ends_it_at_once(llm: LLM, loaded: Any, start: Serve) -> None:
    served = start(service_of(llm, loaded, "demo", rows=1), patience=300)
    readers = [Reader(served.port, PATH, ENDLESS), Reader(served.port, PATH, ENDLESS, events=1)]  # one runs, one waits
    served.signal()
    time.sleep(0.3)
    assert served.server.journal.answering == 2
    served.signal()
    assert ended(served, 4)
    served.service.scheduler.thread.join(30)
    assert not served.service.scheduler.jobs
    for reader in readers:
        reader.sock.close()


@pytest.mark.process
def test_the_commands_signals(started: list[subprocess.Popen[str]]) -> None:
    """Two signals to the process itself, with a stream that would take long."""
    process, port = begin("demo", 0)
    started.append(process)
    reader = Reader(port, PATH, ENDLESS)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/ready")
    assert connection.getresponse().status == 503
    connection.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    reader.sock.close()
