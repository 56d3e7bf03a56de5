"""What goes wrong stays small: clients that leave, bytes that make no sense, models and drafters that break."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from serve_world import Serve, Served

from outrider.llm import LLM
from outrider.serve.scheduler import Scheduler
from outrider.serve.start import service_of
from outrider.types import InputError

pytestmark = pytest.mark.trained
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ASKED = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
LONG = {"prompt": "Once upon a time", "temperature": 0.9, "max_tokens": 1500, "ignore_eos": True, "seed": 1}


def stream(served: Served, body: dict[str, Any]) -> tuple[socket.socket, bytes]:
    """A raw connection that has asked for a stream and has read its first bytes."""
    raw = json.dumps({**body, "stream": True}).encode()
    head = HEAD + b"content-length: %d\r\n\r\n" % len(raw)
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    sock.sendall(head + raw)
    seen = b""
    while seen.count(b"data: ") < 2:
        seen += sock.recv(4096)
    return sock, seen


def expected(served: Served) -> str:
    return str(served.post("/v1/completions", ASKED)["choices"][0]["text"])


def test_a_client_that_leaves(served: Served) -> None:
    """Its row is given up at once; its neighbour's text is its own."""
    text = expected(served)
    sock, _ = stream(served, LONG)
    beside: list[str] = []
    other = threading.Thread(target=lambda: beside.append(expected(served)))
    other.start()
    sock.close()
    other.join(60)
    assert beside == [text]
    assert served.idle(30), "a row without a reader went on"


def test_a_client_that_leaves_before_the_answer(served: Served) -> None:
    raw = json.dumps(LONG).encode()
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    head = HEAD + b"content-length: %d\r\n\r\n" % len(raw)
    sock.sendall(head + raw)
    end = time.monotonic() + 30
    while not served.service.scheduler.active and time.monotonic() < end:
        time.sleep(0.01)
    sock.close()
    assert served.idle(30)


def test_a_slow_reader(served: Served) -> None:
    """It holds up nobody, and gets all of its text."""
    whole = served.post("/v1/completions", {**LONG, "max_tokens": 60})["choices"][0]["text"]
    sock, seen = stream(served, {**LONG, "max_tokens": 60})
    assert expected(served)
    assert served.idle(60), "the engine waited for a reader"
    while not seen.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        seen += sock.recv(256)
    sock.close()
    lines = [line for line in seen.decode().split("\r\n") if line.startswith("data: {")]
    events = [json.loads(part[6:]) for line in lines for part in line.split("\n\n") if part.startswith("data: {")]
    assert "".join(e["choices"][0]["text"] for e in events) == whole


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[]", b'"x"', b"null", b'{"prompt": "\\ud800"}', b"[" * 5000, b'{"prompt": 1e999}'],
)
def test_malformed_bytes(served: Served, body: bytes) -> None:
    status, _, answer = served.send("POST", "/v1/completions", body)
    assert status == 400
    assert json.loads(answer)["error"]["message"]


def test_a_body_that_is_too_large(served: Served) -> None:
    limit = served.service.limits.body
    assert served.send("POST", "/v1/completions", b" " * 10, {"content-length": str(limit + 1)})[0] == 413

    sock = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    sock.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    try:
        for _ in range((limit >> 20) + 2):
            sock.sendall(chunk)
        answer = sock.recv(4096)
    except (BrokenPipeError, ConnectionResetError):
        answer = b" 413 "  # it was refused while it was being sent
    sock.close()
    assert b" 413 " in answer.split(b"\r\n")[0]
    assert expected(served)


def test_ten_thousand_waiting(llm: LLM, loaded: Any, start: Serve) -> None:
    """The waiting room has an end; whoever is let in is answered, the others are told when to come again."""
    served = start(service_of(llm, loaded, "demo", rows=2, queue=4))
    scheduler: Scheduler = served.service.scheduler
    refusals, lock, answers = [0], threading.Lock(), []
    body = {**ASKED, "max_tokens": 3}

    def knock(times: int) -> None:
        for _ in range(times):
            status, headers, answer = served.send("POST", "/v1/completions", body)
            with lock:
                if status == 429:
                    refusals[0] += int(headers["retry-after"]) >= 1
                else:
                    answers.append((status, json.loads(answer)["choices"][0]["text"]))

    threads = [threading.Thread(target=knock, args=(4,)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert refusals[0] > 0
    assert len(answers) + refusals[0] == 64
    assert len(set(answers)) == 1
    assert answers[0][0] == 200
    # The queue itself, ten thousand at once, without the sockets.
    from outrider.serve.fleet import Choice
    from outrider.serve.job import Job
    from outrider.serve.scheduler import Full

    request = llm.requests("The", max_new_tokens=2)[0][0]
    taken, done = 0, []
    for _ in range(10_000):
        try:
            scheduler.submit([Job(request, Choice(""), done.append)])
            taken += 1
        except Full:
            pass
    assert 4 <= taken < 10_000
    assert served.idle()
    assert served.get("/ready")


def test_a_row_that_would_outgrow_its_slot(served: Served, llm: LLM) -> None:
    remaining = llm.target.context - 3
    made = served.post("/v1/completions", {"prompt": [5] * remaining, "max_tokens": 3, "ignore_eos": True, "n": 2})
    assert [c["finish_reason"] for c in made["choices"]] == ["length"] * 2
    error = served.post("/v1/completions", {"prompt": [5] * remaining, "max_tokens": 4}, 400)["error"]
    assert error["code"] == "context_length_exceeded"


def test_a_drafter_that_fails(llm: LLM, loaded: Any, start: Serve) -> None:
    """It is switched off and its rows go on: the text is the same, and so is that of another drafter's row."""

    class Brittle:
        taps = loaded["eagle"].taps

        def open(self, prompts: Any, capacity: int) -> Any:
            inner, calls = loaded["eagle"].open(prompts, capacity), [0]
            propose = inner.propose

            def break_down(rows: Any, budget: Any) -> Any:
                calls[0] += 1
                if calls[0] > 2:
                    raise RuntimeError("the drafter has broken down")
                return propose(rows, budget)

            inner.propose = break_down
            return inner

    served = start(service_of(llm, {"brittle": Brittle(), "lookup": loaded["lookup"]}, "demo"))
    wanted = llm.generate("Once upon a time", max_new_tokens=30)[0].text
    for way in ({}, {"drafter": "brittle"}, {"drafter": "lookup"}):
        body = {**ASKED, "max_tokens": 30, "outrider": way}
        assert served.post("/v1/completions", body)["choices"][0]["text"] == wanted
    told = served.get("/v1/models")["data"][0]["outrider"]
    assert told["drafters"] == ["lookup"]
    assert "broken down" in told["failed_drafters"]["brittle"]
    assert b"outrider:failed_drafters_total{" in served.send("GET", "/metrics")[2]


def test_a_round_that_fails(llm: LLM, loaded: Any, start: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory runs out: its rows are told, and the next ones are served."""
    served = start(service_of(llm, loaded, "demo"))
    text = expected(served)
    from outrider.engine import Batch

    real, left = Batch.round, [3]

    def round(self: Batch) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory") if hasattr(torch, "OutOfMemoryError") else MemoryError()
        return real(self)

    monkeypatch.setattr(Batch, "round", round)
    error = served.post("/v1/completions", {**ASKED, "max_tokens": 40}, 500)["error"]
    assert error["type"] == "server_error"
    assert "the round failed" in error["message"]
    left[0] = 3
    sock, seen = stream(served, LONG)
    while b"[DONE]" not in seen:
        seen += sock.recv(4096)
    sock.close()
    assert b'"error"' in seen
    assert expected(served) == text
    assert served.get("/health")


def test_logits_that_are_not_numbers(llm: LLM, loaded: Any, start: Serve) -> None:
    """That row fails; the one beside it writes its own text."""
    served = start(service_of(llm, {"lookup": loaded["lookup"]}, "demo"))
    text = expected(served)
    poison = 4000

    def spoil(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        return out.masked_fill((given[0] == poison)[..., None], float("nan"))

    hook = llm.target.model.get_input_embeddings().register_forward_hook(spoil)  # type: ignore[attr-defined]
    try:
        beside: list[str] = []
        other = threading.Thread(target=lambda: beside.append(expected(served)))
        other.start()
        bad = {"prompt": [5, 6], "logit_bias": {str(poison): 100}, "temperature": 0, "max_tokens": 9}
        assert "not numbers" in served.post("/v1/completions", bad, 500)["error"]["message"]
        other.join(60)
        assert beside == [text]
    finally:
        hook.remove()
    assert expected(served) == text


def test_late_requests_end(llm: LLM, loaded: Any, start: Serve) -> None:
    served = start(service_of(llm, loaded, "demo", rows=1, seconds=2.0))
    made = served.post("/v1/completions", LONG)["choices"][0]
    assert made["finish_reason"] == "abort"
    assert served.idle()


def test_a_loop_that_hangs_is_told(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.get("/health")
    monkeypatch.setattr("outrider.serve.app.STUCK", 0.0)
    sock, _ = stream(served, LONG)
    end = time.monotonic() + 20
    while served.send("GET", "/health")[0] != 503 and time.monotonic() < end:
        time.sleep(0.01)
    assert served.get("/health", 503)["status"] == "unhealthy"
    sock.close()
    assert served.idle()


def test_two_servers_on_one_port(served: Served) -> None:
    from outrider.serve.server import listen

    with pytest.raises(InputError, match=r"cannot listen on 127\.0\.0\.1 port"):
        listen("127.0.0.1", served.port)


def test_the_waiting_room_forgets_who_has_left(llm: LLM, loaded: Any) -> None:
    from outrider.serve.fleet import Choice
    from outrider.serve.job import End, Job

    scheduler = service_of(llm, loaded, "demo", rows=1, queue=3).scheduler
    request, heard = llm.requests("The", max_new_tokens=200, ignore_eos=True)[0][0], []
    first = Job(request, Choice(""), heard.append)
    waiting = [Job(replace(request), Choice(""), heard.append) for _ in range(2)]
    scheduler.submit([first, *waiting])
    scheduler.cancel(waiting)
    scheduler.thread.start()
    end = time.monotonic() + 30
    while scheduler.waiting and time.monotonic() < end:
        time.sleep(0.01)
    assert not scheduler.waiting
    scheduler.abort()
    scheduler.thread.join(30)
    assert [e.finish for e in heard if isinstance(e, End)] == ["abort"] * 3
