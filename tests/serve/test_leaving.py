"""Who leaves is gone at the next border between two rounds: no further round has its row."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from serve_world import Reader, Serve

from outrider.engine import Batch
from outrider.llm import LLM
from outrider.serve.fleet import Choice
from outrider.serve.job import Job, Part
from outrider.serve.start import service_of

pytestmark = pytest.mark.trained
PATH = "/v1/completions"
LONG = {"prompt": "Once upon a time", "temperature": 0.9, "max_tokens": 1500, "ignore_eos": True, "seed": 1}
BESIDE = {**LONG, "seed": 2, "max_tokens": 60}


@pytest.mark.parametrize("when", ["between", "inside"])
def test_no_round_has_a_cancelled_row(llm: LLM, loaded: Any, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Cancelled between two rounds, a row is in none of those to come; inside of one, it is in that one still. Two
    leave, one round after the other."""
    made = service_of(llm, loaded, "demo", rows=3).scheduler
    requests = llm.requests(["The", "A dog", "One"], max_new_tokens=90, ignore_eos=True)[0]
    heard: list[list[Any]] = [[] for _ in requests]
    jobs = [Job(request, Choice("lookup"), events.append) for request, events in zip(requests, heard, strict=True)]
    rounds: list[list[int]] = []  # the jobs whose rows each of them had
    leaving, left, decode = [1, 0], dict[int, int](), Batch.round

    def leave() -> None:
        if leaving and rounds and len(rounds[-1]) == 3 - len(left):
            job = leaving.pop(0)
            left[job] = len(rounds)
            made.cancel([jobs[job]])

    def round(self: Batch) -> Any:
        rounds.append([row.index - 1 for row in self.rows])
        if when == "inside":
            leave()
        return decode(self)

    monkeypatch.setattr(Batch, "round", round)
    made.submit(jobs)
    while made._turn() and (made.jobs or made.waiting):
        if when == "between":
            leave()
    assert left[0] == left[1] + 1 < len(rounds) - 10
    for job, first in left.items():
        assert job in rounds[first - 1]
        assert all(job not in rows for rows in rounds[first:]), "a row that nobody waits for was decoded"
    assert [events[-1].finish for events in heard] == ["abort", "abort", "length"]
    for job, events in enumerate(heard):
        parts = sum(isinstance(event, Part) for event in events)
        assert parts == 1 + sum(job in rows for rows in rounds), "the prompt's own token, and a part for every round"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_hangs_up(
    llm: LLM, loaded: Any, start: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """It hangs up inside a round, which waits until the server has noticed: the next round goes without its row, and
    the text beside it is its own."""
    served = start(service_of(llm, loaded, "demo", rows=2))
    scheduler = served.service.scheduler
    wanted = served.post(PATH, BESIDE)["choices"][0]["text"]
    inside, noticed, leaving = threading.Event(), threading.Event(), threading.Event()
    rounds: list[list[int]] = []
    decode, cancel = Batch.round, scheduler.cancel

    def round(self: Batch) -> Any:
        rounds.append([row.request.seed for row in self.rows])
        if leaving.is_set() and len(self.rows) == 2 and not inside.is_set():
            inside.set()
            assert noticed.wait(60), "nobody noticed that the client has gone"
        return decode(self)

    def cancelled(jobs: Sequence[Job]) -> None:
        cancel(jobs)
        if any(job.request.seed == LONG["seed"] for job in jobs):
            noticed.set()

    monkeypatch.setattr(Batch, "round", round)
    monkeypatch.setattr(scheduler, "cancel", cancelled)
    if stream:
        client: Any = Reader(served.port, PATH, LONG).sock
    else:
        connection = http.client.HTTPConnection("127.0.0.1", served.port)
        connection.request("POST", PATH, json.dumps(LONG), {"content-type": "application/json"})
        client = connection
    leaving.set()
    beside: list[str] = []
    other = threading.Thread(target=lambda: beside.append(served.post(PATH, BESIDE)["choices"][0]["text"]))
    other.start()
    assert inside.wait(60)
    last = len(rounds)
    client.close()
    other.join(60)
    assert served.idle()
    assert set(rounds[last - 1]) == {1, 2}, "the round that it left in"
    assert len(rounds) - last > 5
    assert all(rows == [2] for rows in rounds[last:]), "a row that nobody waits for was decoded"
    assert beside == [wanted]
