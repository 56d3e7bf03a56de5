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
from serve_world import Reader, Serve, Served

from outrider.core.protocols import Session, TargetOutput
from outrider.core.types import DraftTree
from outrider.llm import LLM
from outrider.params import InputError
from outrider.serve.scheduler import Scheduler
from outrider.serve.service import Limits
from outrider.serve.start import service_of

pytestmark = pytest.mark.trained
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
PATH = "/v1/completions"
ASKED = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
LONG = {"prompt": "Once upon a time", "temperature": 0.9, "max_tokens": 1500, "ignore_eos": True, "seed": 1}


@pytest.fixture
def ends(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Why each text of the shared server ends, and after how many rounds."""
    results: list[tuple[str, int]] = []
    done = served.service.scheduler.metrics.done
    monkeypatch.setattr(
        served.service.scheduler.metrics, "done",
        lambda job, finish, usage: (results.append((finish, usage.rounds)), done(job, finish, usage)),
    )  # fmt: skip
    return results


def expected(served: Served) -> str:
    return str(served.post(PATH, ASKED)["choices"][0]["text"])


def test_a_client_that_leaves(served: Served, ends: list[tuple[str, int]]) -> None:
    """Its row is given up at once; its neighbour's text is its own."""
    text = expected(served)
    reader = Reader(served.port, PATH, LONG)
    beside: list[str] = []
    other = threading.Thread(target=lambda: beside.append(expected(served)))
    other.start()
    reader.sock.close()
    other.join(60)
    assert beside == [text]
    assert served.idle(30)
    given_up(ends)


def given_up(ends: list[tuple[str, int]]) -> None:
    """The long text was ended before its end, and only that one."""
    (rounds,) = [rounds for finish, rounds in ends if finish == "abort"]
    assert rounds < 400, "a row without a reader went on"


def test_a_client_that_leaves_before_the_answer(served: Served, ends: list[tuple[str, int]]) -> None:
    raw = json.dumps(LONG).encode()
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    head = HEAD + b"content-length: %d\r\n\r\n" % len(raw)
    sock.sendall(head + raw)
    end = time.monotonic() + 30
    while not served.service.scheduler.active and time.monotonic() < end:
        time.sleep(0.01)
    sock.close()
    assert served.idle(30)
    given_up(ends)


def test_a_slow_reader(llm: LLM, loaded: Any, start: Serve) -> None:
    """More text waits for it than any buffer holds; it holds up nobody, and gets all of its text."""
    served = start(service_of(llm, loaded, "demo"), buffer=4096)
    body = {**LONG, "max_tokens": 200, "logprobs": 20, "return_token_ids": True}
    full = served.post(PATH, body)["choices"][0]
    reader = Reader(served.port, PATH, body)
    assert expected(served)
    assert served.paused(), "its text went on"
    assert served.server.journal.answering == 1, "nothing waits for the reader: this test proves nothing"
    assert expected(served), "a reader holds up another"
    events = [event["choices"][0] for event in reader.rest()]
    assert "".join(event["text"] for event in events) == full["text"]
    assert [token for event in events for token in event.get("token_ids", [])] == full["token_ids"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[]", b'"x"', b"null", b'{"prompt": "\\ud800"}', b"[" * 5000, b'{"prompt": 1e999}'],
)
def test_malformed_bytes(served: Served, body: bytes) -> None:
    status, _, answer = served.send("POST", PATH, body)
    assert status == 400
    assert json.loads(answer)["error"]["message"]


def test_a_body_that_is_too_large(served: Served) -> None:
    limit = served.service.limits.body
    assert served.send("POST", PATH, b" " * 10, {"content-length": str(limit + 1)})[0] == 413

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
    """The queue is bounded; accepted requests are answered, the others get 429 with Retry-After."""
    served = start(service_of(llm, loaded, "demo", rows=2, queue=4))
    scheduler: Scheduler = served.service.scheduler
    refusals, lock, answers = [0], threading.Lock(), []
    body = {**ASKED, "max_tokens": 3}

    def knock(times: int) -> None:
        for _ in range(times):
            status, headers, answer = served.send("POST", PATH, body)
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


def test_more_texts_than_places(llm: LLM, loaded: Any, start: Serve) -> None:
    """Free rows are places too; what never fits is refused without Retry-After."""
    served = start(service_of(llm, loaded, "demo", rows=2, queue=1))
    assert len(served.post(PATH, {**ASKED, "max_tokens": 3, "n": 3})["choices"]) == 3
    error = served.post(PATH, {**ASKED, "n": 4}, 400)["error"]
    assert (error["param"], error["type"]) == ("n", "invalid_request_error")
    assert "3 texts, not 4" in error["message"]


def test_a_row_that_would_outgrow_its_slot(served: Served, llm: LLM) -> None:
    remaining = llm.target.context - 3
    made = served.post(PATH, {"prompt": [5] * remaining, "max_tokens": 3, "ignore_eos": True, "n": 2})
    assert [c["finish_reason"] for c in made["choices"]] == ["length"] * 2
    error = served.post(PATH, {"prompt": [5] * remaining, "max_tokens": 4}, 400)["error"]
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
        assert served.post(PATH, body)["choices"][0]["text"] == wanted
    report = served.get("/v1/models")["data"][0]["outrider"]
    assert report["drafters"] == ["lookup"]
    assert "broken down" in report["failed_drafters"]["brittle"]
    assert b"outrider:failed_drafters_total{" in served.send("GET", "/metrics")[2]


def test_a_round_that_fails(llm: LLM, loaded: Any, start: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory runs out: its rows fail with a reason, and the next ones are served."""
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
    error = served.post(PATH, {**ASKED, "max_tokens": 40}, 500)["error"]
    assert error["type"] == "server_error"
    assert "the round failed" in error["message"]
    left[0] = 3
    assert "the round failed" in Reader(served.port, PATH, LONG).rest()[-1]["error"]["message"]
    assert expected(served) == text
    assert served.get("/health")


def test_nan_logits_fail_their_row_alone(llm: LLM, loaded: Any, start: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """That row fails; the one beside it writes its own text."""
    served = start(service_of(llm, {"lookup": loaded["lookup"]}, "demo"))
    text = expected(served)
    poison, kind = 4000, type(llm.target.open(8))
    forward = kind.forward

    def spoilt(self: Session, tree: DraftTree, taps: tuple[int, ...] = ()) -> TargetOutput:
        """As if the embedding of one token were NaN."""
        embeds = llm.target.embed(torch.from_numpy(tree.tokens))
        embeds[tree.tokens == poison] = float("nan")
        return forward(self, tree, taps, embeds=embeds)

    with monkeypatch.context() as spoiling:
        spoiling.setattr(kind, "forward", spoilt)
        beside: list[str] = []
        other = threading.Thread(target=lambda: beside.append(expected(served)))
        other.start()
        bad = {"prompt": [5, 6], "logit_bias": {str(poison): 100}, "temperature": 0, "max_tokens": 9}
        assert "NaN or infinite" in served.post(PATH, bad, 500)["error"]["message"]
        other.join(60)
        assert beside == [text]
    assert expected(served) == text


def test_late_requests_end(llm: LLM, loaded: Any, start: Serve) -> None:
    served = start(service_of(llm, loaded, "demo", rows=1, limits=Limits(seconds=2.0)))
    made = served.post(PATH, LONG)["choices"][0]
    assert made["finish_reason"] == "abort"
    assert served.idle()


def test_a_loop_that_hangs_is_reported(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.get("/health")
    monkeypatch.setattr("outrider.serve.app.STUCK", 0.0)
    reader = Reader(served.port, PATH, LONG)
    end = time.monotonic() + 20
    while served.send("GET", "/health")[0] != 503 and time.monotonic() < end:
        time.sleep(0.01)
    assert served.get("/health", 503)["status"] == "unhealthy"
    reader.sock.close()
    assert served.idle()


def test_a_loop_that_has_ended_is_reported(
    llm: LLM, loaded: Any, start: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running and waiting requests fail with the reason, no more are accepted, and /health reports it."""
    service = service_of(llm, loaded, "demo", rows=1)
    served, scheduler = start(service), service.scheduler
    readers = [Reader(served.port, PATH, {**LONG, "echo": True}, events=1) for _ in range(2)]

    def break_down() -> None:
        raise SystemError("the loop is broken")

    monkeypatch.setattr(scheduler, "_sweep", break_down)
    for reader in readers:
        assert "SystemError: the loop is broken" in reader.rest()[-1]["error"]["message"]
    scheduler.thread.join(20)
    for path in ("/health", "/ready"):
        assert served.send("GET", path)[0] == 503
    assert "the loop is broken" in served.get("/health", 503)["reason"]
    assert "the loop is broken" in served.post(PATH, ASKED, 503)["error"]["message"]


def test_nothing_slow_is_left_for_the_first_request(llm: LLM, loaded: Any) -> None:
    """The fingerprint reads all weights, and the detokenizer many tokens: both are there before the first request."""
    fresh = replace(llm)
    assert "fingerprint" in vars(service_of(fresh, loaded, "demo"))
    assert "detokenizer" in vars(fresh)


def test_two_servers_on_one_port(served: Served) -> None:
    from outrider.serve.server import listen

    with pytest.raises(InputError, match=r"cannot listen on 127\.0\.0\.1 port"):
        listen("127.0.0.1", served.port)


def test_the_queue_drops_clients_that_have_left(llm: LLM, loaded: Any) -> None:
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
