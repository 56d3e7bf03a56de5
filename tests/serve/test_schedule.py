"""Whose turn it is: chunks of prompts and rounds share the time as `--prefill-share` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.engine import Batch
from outrider.llm import LLM
from outrider.serve import scheduler
from outrider.serve.fleet import Choice
from outrider.serve.job import Job
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
    with torch.no_grad():
        while turns.count("chunk") < 4:
            assert made._turn()
        assert turns == ["chunk", *(["round"] * between + ["chunk"]) * 3]
        for _ in range(3):
            made._turn()
    assert len(made.jobs) == 1, "the newcomer joined at once and has ended; the other goes on"
