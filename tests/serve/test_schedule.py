"""Whose turn it is: chunks of prompts and rounds share the time as `--prefill-share` says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider.engine import Batch
from outrider.llm import LLM
from outrider.serve import scheduler
from outrider.serve.fleet import Choice
from outrider.serve.job import Job
from outrider.serve.scoring import Scoring
from outrider.serve.start import service_of

pytestmark = pytest.mark.trained
CHUNK, ROUND = 1.0, 0.125  # seconds that the test's clock gives them


@pytest.mark.parametrize(("share", "between"), [(1.0, 0), (0.5, 8), (0.25, 24)])
def test_the_share_of_prompts(
    llm: LLM, loaded: Any, share: float, between: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of three chunks is read while another text is written: the rounds between two chunks have (1 - s) / s
    times a chunk's time."""
    clock, turns = [0.0], []
    read, decode = Batch.take, Batch.round

    def take(self: Batch, *chunk: Any) -> None:
        clock[0] += CHUNK
        turns.append("chunk")
        read(self, *chunk)

    def round(self: Batch) -> Any:
        clock[0] += ROUND
        turns.append("round")
        return decode(self)

    monkeypatch.setattr(Batch, "take", take)
    monkeypatch.setattr(Batch, "round", round)
    monkeypatch.setattr(scheduler, "monotonic", lambda: clock[0])
    made = service_of(llm, loaded, "demo", rows=2, prefill_share=share).scheduler
    (first,), _ = llm.requests("The", max_new_tokens=100, ignore_eos=True)
    (second,), _ = llm.requests([[5] * 1500], max_new_tokens=2, ignore_eos=True)
    heard: list[Any] = []
    made.submit([Job(request, Choice(""), heard.append) for request in (first, second)])
    while turns.count("chunk") < 4:
        assert made._turn()
    assert turns == ["chunk", *(["round"] * between + ["chunk"]) * 3]
    for _ in range(3):
        made._turn()
    assert len(made.jobs) == 1, "the newcomer joined at once and has ended; the other goes on"


def test_nothing_is_owed_where_nobody_writes(llm: LLM, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one token, and prompts that are scored alone, leave no debt to whoever comes later."""
    clock, turns = [0.0], []
    read, decode, score = Batch.take, Batch.round, Scoring.read

    def take(self: Batch, *chunk: Any) -> None:
        clock[0] += CHUNK
        read(self, *chunk)

    def scored(self: Scoring, *target: Any) -> Any:
        for step in score(self, *target):
            clock[0] += CHUNK
            yield step

    def round(self: Batch) -> Any:
        clock[0] += ROUND
        turns.append(len(self.rows))
        return decode(self)

    monkeypatch.setattr(Batch, "take", take)
    monkeypatch.setattr(Batch, "round", round)
    monkeypatch.setattr(Scoring, "read", scored)
    monkeypatch.setattr(scheduler, "monotonic", lambda: clock[0])
    made = service_of(llm, loaded, "demo", rows=2).scheduler
    requests = llm.requests(["The", "A cat", "One", "A dog"], max_new_tokens=40, ignore_eos=True)[0]
    jobs = [Job(request, Choice(""), lambda event: None) for request in requests]
    for job, limit in zip(jobs, (1, 0), strict=False):
        job.request = replace(job.request, max_new_tokens=limit)
    jobs[1].scoring = Scoring(jobs[1].request.prompt, 0)
    made.submit(jobs)
    while 2 not in turns:
        assert made._turn()
    assert jobs[1].scoring.scores is not None
    assert turns.count(1) == CHUNK / ROUND, "the second text waited for its own chunk's share, and for no other"
