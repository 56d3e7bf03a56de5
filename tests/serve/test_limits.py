"""The limits: what a server refuses, bounds and drops, so that nobody waits for another's abuse."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from serve_world import Reader, Serve, Served, finishes

from outrider.llm import LLM
from outrider.serve import call, gate, guide, journal, scheduler
from outrider.serve.connection import Connection, capacity
from outrider.serve.fleet import Choice
from outrider.serve.job import End, Job, Watch
from outrider.serve.protocol import StructuredOutputs
from outrider.serve.scheduler import Full
from outrider.serve.server import Drained, listen, run
from outrider.serve.service import PROBE, Limits
from outrider.serve.start import service_of
from outrider.serve.turns import Turns

pytestmark = pytest.mark.trained
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
PATH, CHATS = "/v1/completions", "/v1/chat/completions"
ASKED = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 2}
LONG = {"prompt": "Once upon a time", "temperature": 0.9, "max_tokens": 1500, "ignore_eos": True, "seed": 1}


class Counting:
    """A tokenizer, and how many characters it was given."""

    def __init__(self, inner: Any):
        self.inner, self.characters = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __call__(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self.inner(text, **options)

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        assert not options.get("tokenize", True), "the template's text is measured before it is tokenized"
        return self.inner.apply_chat_template(*args, **options)


@pytest.mark.parametrize("unit", ["a b ", "          "])
def test_a_text_that_cannot_fit_is_not_tokenized(llm: LLM, loaded: Any, start: Serve, unit: str) -> None:
    """Words that are a token each, and spaces of which many make one."""
    counting: Any = Counting(llm.tokenizer)
    service = service_of(replace(llm, tokenizer=counting), loaded, "demo", rows=2)
    served, text = start(service), unit * 80_000
    for path, body in (
        (PATH, {"prompt": text}),
        (PATH, {"prompt": ["short", text]}),
        (CHATS, {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
    ):
        counting.characters = 0
        error = served.post(path, body, 400)["error"]
        assert error["code"] == "context_length_exceeded"
        assert "shorten it" in error["message"]
        assert counting.characters <= 4 * PROBE * llm.target.context
    assert served.post(PATH, ASKED)


def test_a_long_text_of_long_tokens_fits(served: Served, llm: LLM) -> None:
    """More characters than are looked at first, and few enough tokens."""
    ids = llm.tokenizer.get_vocab()
    words = sorted(ids, key=len)[-40:]
    longest = max(words, key=lambda word: len(word) / len(llm.encode(llm.tokenizer.decode(llm.tokenizer.encode(word)))))
    text = llm.tokenizer.decode([ids[longest]]) * (PROBE * llm.target.context // len(longest) + 100)
    tokens = llm.encode(text)
    assert len(text) > PROBE * llm.target.context
    assert len(tokens) < llm.target.context - 2
    made = served.post(PATH, {**ASKED, "prompt": text, "return_token_ids": True})
    assert made["choices"][0]["prompt_token_ids"] == tokens


def test_the_largest_body_follows_the_context() -> None:
    assert Limits().fitted(2048, 99).body == 1 << 20
    assert Limits().fitted(1 << 17, 99).body == 8 << 20
    assert Limits(body=5000).fitted(1 << 17, 9) == Limits(body=5000, texts=9)


def test_work_waits_in_bounds_and_who_has_gone_is_dropped() -> None:
    """One piece at a time, the smallest first; a piece whose client hangs up while it waits is never begun."""
    done: list[str] = []

    async def all_of_it() -> None:
        turns, hold = Turns("test", 3), threading.Event()
        first = asyncio.ensure_future(turns.run(1, hold.wait))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(turns.run(size, done.append, str(size))) for size in (30, 20, 10)]
        await asyncio.sleep(0)
        with pytest.raises(Full):
            await turns.run(1, done.append, "too many")
        others[1].cancel()
        await asyncio.sleep(0)
        others.append(asyncio.ensure_future(turns.run(5, done.append, "5")))
        await asyncio.sleep(0)
        hold.set()
        result = await asyncio.gather(first, *others, return_exceptions=True)
        assert isinstance(result[2], asyncio.CancelledError)
        turns.close()

    asyncio.run(all_of_it())
    assert done == ["5", "10", "30"]


def test_requests_that_wait_for_the_tokenizer_count(
    llm: LLM, loaded: Any, start: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is read, one waits, and the next gets 429 with Retry-After; who hangs up frees its place."""
    service = service_of(llm, loaded, "demo", rows=1, queue=1)
    served, hold, reading = start(service), threading.Event(), threading.Semaphore(0)
    encode, prompts = service.encode, list[Any]()

    def slow(prompt: Any) -> list[int]:
        prompts.append(prompt)
        reading.release()
        assert hold.wait(60)
        return encode(prompt)

    monkeypatch.setattr(service, "encode", slow)
    answers: list[int] = []

    def ask(prompt: str) -> threading.Thread:
        body = {**ASKED, "prompt": prompt}
        thread = threading.Thread(target=lambda: answers.append(served.send("POST", PATH, body)[0]))
        thread.start()
        return thread

    first = ask("first")
    assert reading.acquire(timeout=60)
    raw = json.dumps({**ASKED, "prompt": "gone"}).encode()
    waits = socket.create_connection(("127.0.0.1", served.port))
    waits.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(raw) + raw)
    until(lambda: served.send("POST", PATH, ASKED)[0] == 429)
    status, headers, answer = served.send("POST", PATH, ASKED)
    assert (status, json.loads(answer)["error"]["code"]) == (429, "queue_full")
    assert int(headers["retry-after"]) >= 1
    waits.close()
    until(lambda: not service_line(served))
    second = ask("second")
    hold.set()
    first.join(60)
    second.join(60)
    assert answers == [200, 200]
    assert "gone" not in prompts


def service_line(served: Served) -> int:
    """How many connections have a request that is not answered yet, the first one left out."""
    return len(served.server.journal.open) - 1


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_bodies_share_a_limit_of_bytes(llm: LLM, loaded: Any, start: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large bodies that come slowly hold up no small one, and what they held is given back."""
    monkeypatch.setattr(gate, "BODIES", 1)
    served = start(service_of(llm, loaded, "demo", limits=Limits(body=200_000)))
    slow = socket.create_connection(("127.0.0.1", served.port))
    slow.sendall(HEAD + b"content-length: 190000\r\n\r\n" + b" " * 180_000)
    large = {**ASKED, "prompt": " " * 160_000}
    until(lambda: served.send("POST", PATH, large)[0] == 429)
    assert served.post(PATH, ASKED)
    slow.close()
    until(lambda: served.send("POST", PATH, large)[0] == 400)


CHUNKED = b"GET /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n"
LATE = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"


@pytest.mark.parametrize("sent", [b"", HEAD, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET", CHUNKED, LATE])
def test_a_header_has_a_deadline(llm: LLM, loaded: Any, start: Serve, sent: bytes) -> None:
    """Nothing, half of a header, half of a second one, and a body that goes on after its response; bytes that trickle
    do not put it off."""
    served = start(service_of(llm, loaded, "demo", limits=Limits(header=1.0)))
    served.server.config.timeout_keep_alive = 1
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
        sock.sendall(sent)
        sock.settimeout(0.2)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                if not sock.recv(4096):
                    break
            except TimeoutError:
                if sent == HEAD:
                    sock.sendall(b"x")
                elif sent == CHUNKED:
                    sock.sendall(b"1\r\nx\r\n")
            except ConnectionError:
                break
        assert time.monotonic() < end, "the connection was never cut"
    assert served.post(PATH, ASKED)


def test_a_connection_that_rests_after_an_answer_takes_the_next_request(llm: LLM, loaded: Any, start: Serve) -> None:
    """The deadline of its header begins with its first byte."""
    served = start(service_of(llm, loaded, "demo", limits=Limits(header=0.5)))
    asked = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
        for _ in range(2):
            sock.sendall(asked[:20])
            time.sleep(0.05)
            sock.sendall(asked[20:])
            answer = b""
            while b'"ok"}' not in answer:
                more = sock.recv(4096)
                assert more, "it was closed without an answer"
                answer += more
            time.sleep(0.8)


def test_idle_connections_are_closed_for_new_ones(llm: LLM, loaded: Any, start: Serve) -> None:
    """The one that has been without a request for the longest time goes; a busy one never does."""
    served = start(service_of(llm, loaded, "demo", limits=Limits(connections=3)))
    idle = [socket.create_connection(("127.0.0.1", served.port), timeout=20) for _ in range(3)]
    until(lambda: len(served.server.server_state.connections) == 3)
    assert served.post(PATH, ASKED)
    assert idle[0].recv(1) == b""
    readers = [Reader(served.port, PATH, LONG) for _ in range(3)]
    for sock in idle[1:]:
        assert sock.recv(1) == b""
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 503 ")
    for sock in (*idle, *(reader.sock for reader in readers)):
        sock.close()


def test_an_answer_that_is_being_sent_is_not_cut_for_a_new_connection(llm: LLM, loaded: Any, start: Serve) -> None:
    """Its client reads slowly, so that it waits in the server's buffer; new ones get 503 until it is read."""
    served = start(service_of(llm, loaded, "demo", limits=Limits(connections=1)))
    body = json.dumps({**LONG, "max_tokens": 400, "logprobs": 20}).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(20)
        slow.connect(("127.0.0.1", served.port))
        slow.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer = slow.recv(1000)
        (own,) = served.server.server_state.connections
        until(lambda: own.transport.get_write_buffer_size() > 0)
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
            assert sock.recv(4096).startswith(b"HTTP/1.1 503 ")
        header, _, start_of_body = answer.partition(b"\r\n\r\n")
        left = int(re.search(rb"content-length: (\d+)", header)[1]) - len(start_of_body)  # type: ignore[index]
        while left:
            more = slow.recv(65536)
            assert more, f"cut off {left} bytes before its end"
            left -= len(more)
        until(lambda: own.transport.get_write_buffer_size() == 0)
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
            assert slow.recv(1) == b"", "now it is idle, and goes"
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_websockets_are_not_taken(llm: LLM, start: Serve, loaded: Any) -> None:
    """An upgrade is a request like others, with the checks of others, whatever packages are installed."""
    served = start(service_of(llm, loaded, "demo"), "secret")
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    for path, status in ((b"/health", b"200"), (b"/v1/models", b"401")):
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
            sock.sendall(b"GET %s HTTP/1.1\r\nhost: localhost\r\n%ssec-websocket-version: 13\r\n\r\n" % (path, upgrade))
            assert sock.recv(4096).startswith(b"HTTP/1.1 " + status)


def test_closing_one_does_not_scan_every_connection(
    llm: LLM, loaded: Any, start: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of connections costs the event loop the same for each of them, however many are open."""
    looked, idle = [0], Connection.idle

    def counted(self: Connection) -> bool:
        looked[0] += 1
        return bool(idle.fget(self))  # type: ignore[attr-defined]

    monkeypatch.setattr(Connection, "idle", property(counted))
    served = start(service_of(llm, loaded, "demo", limits=Limits(connections=20)))
    made = [socket.create_connection(("127.0.0.1", served.port), timeout=20) for _ in range(40)]
    for sock in made[:20]:
        assert sock.recv(1) == b""
    assert looked[0] < 5 * len(made)
    assert served.post(PATH, ASKED)
    for sock in made:
        sock.close()


@pytest.mark.parametrize("sent", [HEAD, HEAD + b"content-length: 2\r\n\r\n{}", b""], ids=["half", "whole", "nothing"])
def test_half_a_header_is_not_accepted_while_the_server_is_full(sent: bytes) -> None:
    """A whole one is, and so is a connection that says nothing, a second later: it makes an older one go."""
    with listen("127.0.0.1", 0) as sock:
        sock.setblocking(False)
        sock.full = lambda: True
        with pytest.raises(BlockingIOError):
            sock.accept()
        client = socket.create_connection(sock.getsockname(), timeout=20)
        client.sendall(sent)
        accepted: list[socket.socket] = []

        def come() -> bool:
            with contextlib.suppress(BlockingIOError):
                accepted.append(sock.accept()[0])
            return bool(accepted) or (sent == HEAD and closed(client))

        until(come)
        assert len(accepted) == (sent != HEAD)
        for one in (client, *accepted):
            one.close()


def closed(client: socket.socket) -> bool:
    """Has the other side closed the connection?"""
    try:
        return client.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_connections_leave_descriptors_to_the_rest() -> None:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert capacity(Limits(connections=1 << 40)) < allowed - 32
    assert capacity(Limits(connections=1)) == 1


def test_a_client_that_takes_nothing_is_dropped(llm: LLM, loaded: Any, start: Serve) -> None:
    """Of a stream as of a whole answer; its rows end, and so does its connection."""
    served = start(service_of(llm, loaded, "demo", limits=Limits(send=1.0)), buffer=4096)
    wordy = {**LONG, "logprobs": 20, "max_tokens": 600}
    reader = Reader(served.port, PATH, wordy)
    until(lambda: not served.server.server_state.connections, 60)
    assert served.idle()
    reader.sock.close()
    full = socket.socket()
    full.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    full.connect(("127.0.0.1", served.port))
    raw = json.dumps({**wordy, "max_tokens": 200}).encode()
    full.sendall(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
    until(lambda: bool(served.server.server_state.connections))
    until(lambda: not served.server.server_state.connections, 60)
    full.close()


def test_a_slow_client_is_not_dropped(llm: LLM, loaded: Any, start: Serve) -> None:
    """It takes some in every half of the time that it has, and gets all of it."""
    served = start(service_of(llm, loaded, "demo", limits=Limits(send=1.0)), buffer=4096)
    reader = Reader(served.port, PATH, {**LONG, "logprobs": 20, "max_tokens": 100})
    end = time.monotonic() + 4
    while time.monotonic() < end:
        time.sleep(0.4)
        reader.seen += reader.sock.recv(16 << 10)
    assert finishes(reader.rest()) == ["length"]


def test_unread_output_is_bounded(llm: LLM, loaded: Any, start: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that cannot pause, as those of an encoder-decoder, end where too much of them lies in the server; what is
    there can still be read."""
    monkeypatch.setattr(call, "MOST", 1000)
    monkeypatch.setattr(llm.target, "opening", (0,))
    served = start(service_of(llm, loaded, "demo", limits=Limits(send=600.0)), buffer=4096)
    reader = Reader(served.port, PATH, {**LONG, "logprobs": 20})
    assert served.idle()
    events = reader.rest()
    assert finishes(events) == ["abort"]
    tokens = sum(len(c["logprobs"]["tokens"]) for e in events for c in e["choices"] if c["logprobs"])
    assert 40 < tokens < 1000


def test_the_last_quarter_of_the_rows_is_for_others(llm: LLM, loaded: Any) -> None:
    """Three of four rows write one party's texts: its fourth waits, another's begins."""
    made = service_of(llm, loaded, "demo", rows=4).scheduler
    requests = llm.requests(["The", "A cat", "One", "A dog", "They"], max_new_tokens=40, ignore_eos=True)[0]
    mine = [Job(request, Choice(""), lambda event: None) for request in requests[:4]]
    made.submit(mine)
    while made.batch is None or len(made.batch.rows) < 3:
        made._turn()
    assert made._next() is None
    other = Job(requests[4], Choice(""), lambda event: None)
    made.submit([other])
    assert made._next() is other
    assert list(made.waiting) == [mine[3], other]


def test_who_is_turned_away_hears_when_to_come_again(llm: LLM, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seconds that texts have taken of late."""
    clock = [0.0]
    monkeypatch.setattr(scheduler, "monotonic", lambda: clock[0])
    made = service_of(llm, loaded, "demo", rows=1).scheduler
    made.queue = 0
    (request,) = llm.requests("The", max_new_tokens=8, ignore_eos=True)[0]
    seconds = []
    for _ in range(2):
        made.submit([Job(request, Choice(""), lambda event: None)])
        with pytest.raises(Full) as caught:
            made.submit([Job(request, Choice(""), lambda event: None)])
        seconds.append(caught.value.seconds)
        while made.jobs or made.waiting:
            clock[0] += 10.0
            made._turn()
    assert seconds[0] == 1 < seconds[1]


def test_texts_begin_in_a_fair_order(llm: LLM, loaded: Any) -> None:
    """A request's first text comes before the second ones of others; no text waits for ever."""
    scheduler = service_of(llm, loaded, "demo", rows=8).scheduler
    request = llm.requests("The", max_new_tokens=2)[0][0]

    def submit(texts: int) -> list[Job]:
        jobs = [Job(request, Choice(""), lambda event: None) for _ in range(texts)]
        scheduler.submit(jobs)
        return jobs

    def begin() -> Job:
        job = scheduler._next()
        assert job is not None
        scheduler.waiting.remove(job)
        scheduler.count += 1
        return job

    many, begun = submit(4), list[Job]()
    begun.append(begin())
    (one,) = submit(1)
    begun.append(begin())
    assert begun == [many[0], one]
    for _ in range(60):
        submit(1)
        begun.append(begin())
    assert [job in begun for job in many] == [True] * 4


def test_a_grammar_has_limits(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'outrider[serve]'")
    long = "start: " + " ".join(f'"{i}"' for i in range(12_000))
    error = served.post(PATH, {**ASKED, "structured_outputs": {"grammar": long}}, 400)["error"]
    assert "65536 are allowed" in error["message"]
    properties = {f"p{i}": {"type": "string", "description": "x" * 100} for i in range(600)}
    body = {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": properties}}}}
    assert "65536 are allowed" in served.post(PATH, body, 400)["error"]["message"]
    monkeypatch.setattr(guide, "GRACE", -1.0)
    error = served.post(PATH, {**ASKED, "structured_outputs": {"regex": "[a-z]+"}}, 400)["error"]
    assert "take too long" in error["message"]
    assert served.idle()


def test_the_texts_of_a_grammar_that_breaks_end_together(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one has failed the request has: the others are not written."""
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'outrider[serve]'")
    ends: list[str] = []
    metrics = served.service.scheduler.metrics
    done = metrics.done
    monkeypatch.setattr(metrics, "done", lambda job, finish, usage: (ends.append(finish), done(job, finish, usage)))
    grammar = 'start: "a" x\nx: "b" x'
    error = served.post(PATH, {**ASKED, "n": 16, "structured_outputs": {"grammar": grammar}}, 400)["error"]
    assert "Too many items" in error["message"]
    assert served.idle()
    assert ends.count("abort") > 8


def test_texts_that_wait_or_have_ended_hold_no_matcher(llm: LLM, loaded: Any) -> None:
    """A grammar bomb's matchers are large: there is one for each row, not for each text."""
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'outrider[serve]'")
    made = service_of(llm, loaded, "demo", rows=2)
    scheduler, grammars = made.scheduler, made.grammars
    first = grammars.guide(grammars.of_structure(StructuredOutputs(regex="[a-z ]{30}")) or "", "regex")
    guides = [first.fork() for _ in range(6)]
    requests = llm.requests(["The"] * 6, max_new_tokens=40, seed=1)[0]
    ends: list[Any] = []
    jobs = [
        Job(request, Choice(""), ends.append, watch=Watch(guide=guide))
        for request, guide in zip(requests, guides, strict=True)
    ]
    scheduler.submit(jobs)
    most = 0
    while scheduler.jobs or scheduler.waiting:
        scheduler._turn()
        most = max(most, sum("matcher" in vars(guide) for guide in guides))
    assert most == 2
    assert not any("matcher" in vars(guide) for guide in guides)
    assert [event.finish for event in ends if isinstance(event, End)] == ["eos"] * 6


def test_the_event_loop_gets_its_turn_soon(llm: LLM, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server has the process for itself, no thread keeps the interpreter for long while the loop waits."""
    before, seen = sys.getswitchinterval(), list[float]()
    monkeypatch.setattr(Drained, "run", lambda self, sockets: seen.append(sys.getswitchinterval()))
    service = service_of(llm, loaded, "demo")
    service.scheduler.thread.start()
    service.scheduler.close()
    with listen("127.0.0.1", 0) as sock:
        try:
            run(service, sock, "127.0.0.1")
        finally:
            sys.setswitchinterval(before)
    assert seen[0] <= before / 4


def test_two_lengths_are_refused(served: Served) -> None:
    raw = json.dumps(ASKED).encode()
    head = HEAD + b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n" % len(raw)
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
        sock.sendall(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(raw), raw))
        answer = b""
        while more := sock.recv(4096):
            answer += more
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"either Content-Length or Transfer-Encoding" in answer


def test_bodies_that_are_read_do_not_put_off_the_end(llm: LLM, loaded: Any, start: Serve) -> None:
    served = start(service_of(llm, loaded, "demo"), patience=300)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as sock:
        sock.sendall(HEAD + b"content-length: 5000\r\n\r\n{")
        until(lambda: bool(served.server.journal.open))
        served.signal()
        until(served.loop.is_closed, 20)


def test_the_log_is_sparing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten lines a second, what is wrong apart from requests; the next line says how many were left out."""
    sparing, lines = journal.Sparing(), journal.Lines()
    now = [5.0]
    monkeypatch.setattr(journal, "monotonic", lambda: now[0])

    def say(level: int) -> dict[str, Any] | None:
        record = logging.LogRecord("outrider", level, "", 0, '{"event": "request"}', (), None)
        return json.loads(lines.format(record)) if sparing.filter(record) else None

    said = [say(logging.INFO) for _ in range(5000)] + [say(logging.ERROR) for _ in range(5000)]
    assert sum(line is not None for line in said) == 10
    assert said[5000] is not None, "requests hide what is wrong"
    now[0] += 1
    assert say(logging.INFO) == {"event": "request", "left_out": 9990 - 4993}
    assert say(logging.INFO) == {"event": "request"}


def test_prompts_of_one_request_have_seeds_of_their_own(served: Served) -> None:
    """Without a seed; with one, each prompt has it, and its texts those that follow."""
    body = {"prompt": ["Once"] * 3, "temperature": 1.5, "max_tokens": 12, "n": 2, "ignore_eos": True}
    texts = [c["text"] for c in served.post(PATH, body)["choices"]]
    assert len(set(texts)) == 6
    named = [c["text"] for c in served.post(PATH, {**body, "request_id": "mine"})["choices"]]
    assert named == [c["text"] for c in served.post(PATH, {**body, "request_id": "mine"})["choices"]]
    seeded = [c["text"] for c in served.post(PATH, {**body, "seed": 4})["choices"]]
    assert seeded == seeded[:2] * 3
