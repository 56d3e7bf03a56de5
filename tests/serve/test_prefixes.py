"""What finished rows have read is used again: the same texts, the same drafts, and nobody else's."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from serve_world import Serve

from outrider import drafters
from outrider.backends.native import session
from outrider.core.protocols import Kept
from outrider.engine import Engine, generate
from outrider.engine.prefixes import LEAST, Prefixes, common
from outrider.engine.request import Request
from outrider.engine.stopping import Stop
from outrider.llm import LLM
from outrider.params import Sampling
from outrider.serve.fleet import Choice
from outrider.serve.job import End, Event, Job, Part
from outrider.serve.scheduler import Scheduler
from outrider.serve.start import service_of

STORY = (
    "Once upon a time there was a little girl who lived in a house by the sea. Every day she went down to the shore "
    "and looked for shells. One day she found a big one."
)


def write(scheduler: Scheduler, choice: str, asked: Sequence[Request], salt: str = "") -> list[tuple[list[int], Job]]:
    """One after the other, so that each may go on from the one before."""
    made = []
    for request in asked:
        events: queue.Queue[Event] = queue.Queue()
        job = Job(request, Choice(choice), events.put, salt=salt)
        scheduler.submit([job])
        tokens: list[int] = []
        while isinstance(event := events.get(timeout=120), Part):
            tokens += event.tokens
        assert isinstance(event, End)
        assert event.finish in ("eos", "length"), event
        made.append((tokens, job))
    return made


def request(llm: LLM, prompt: Sequence[int], seed: int, limit: int = 8) -> Request:
    return Request(list(prompt), seed, limit, Sampling(0.7), Stop(llm.eos, (), limit).cut)


@pytest.mark.trained
@pytest.mark.parametrize("choice", ["", "lookup", "eagle"])
def test_a_chat_that_goes_on(llm: LLM, loaded: Any, choice: str) -> None:
    """Each turn copies the turns before it. Texts and drafts are those of a server that reads all of it again."""
    loaded = {**loaded, "eagle": drafters.load("eagle:demo/hass?scale=1", llm.target, llm.tokenizer)}  # fits nothing
    scheduler = service_of(llm, loaded, "demo", rows=2).scheduler
    afresh = service_of(llm, loaded, "demo", rows=2, prefix_cache=0).scheduler
    for one in (scheduler, afresh):
        one.thread.start()
    plain = Engine(llm.target, drafters.load("none"), llm.engine().budget, llm.engine().gumbel)
    prompt, copied = llm.encode(STORY), []
    for turn in range(3):
        asked = request(llm, prompt, turn)
        ((tokens, job),) = write(scheduler, choice, [asked])
        ((again, other),) = write(afresh, choice, [asked])
        (row,) = {piece.row.index: piece.row for piece in generate(plain, [asked])}.values()
        assert tokens == again == row.output
        assert job.row is not None
        assert other.row is not None
        counts = [(u.rounds, u.drafted, u.accepted_at) for u in (job.row.usage, other.row.usage)]
        assert counts[0] == counts[1], "a drafter that went on from a copy drafts as one that has read everything"
        assert other.row.usage.cached_tokens == 0
        copied.append(job.row.usage.cached_tokens)
        prompt = [*prompt, *tokens, *llm.encode(" And then")]
    assert copied[0] == 0
    assert all(a < b for a, b in itertools.pairwise(copied)), copied
    assert copied[1] > len(llm.encode(STORY)), "the answer is reused, not the prompt alone"
    for one in (scheduler, afresh):
        one.close()
        one.thread.join(30)
        assert not one.dead
        assert not one.fleet.failed


@pytest.mark.trained
def test_samples_of_one_prompt_share_its_reading(llm: LLM, loaded: Any, start: Serve) -> None:
    served = start(service_of(llm, loaded, "demo", rows=4))
    body = {"prompt": STORY, "max_tokens": 8, "n": 3, "seed": 5, "temperature": 0.9}
    made = served.post("/v1/completions", body)
    words = [choice["text"] for choice in made["choices"]]
    alone = [served.post("/v1/completions", {**body, "n": 1, "seed": 5 + j}) for j in range(3)]
    assert words == [one["choices"][0]["text"] for one in alone]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (made, *alone)]
    assert cached == [0, *[len(llm.encode(STORY)) - 1] * 3]
    page = served.send("GET", "/metrics")[2].decode()
    hits = next(line for line in page.splitlines() if line.startswith("vllm:prefix_cache_hits_total{"))
    assert float(hits.split()[1]) == 5 * (len(llm.encode(STORY)) - 1)


@pytest.mark.trained
@pytest.mark.parametrize("steps", [1, 3])
def test_what_was_read_for_a_client_that_left_is_kept(
    llm: LLM, loaded: Any, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editor asks at every key, and hangs up on what it asked before."""
    scheduler = service_of(llm, loaded, "demo", rows=2).scheduler
    monkeypatch.setattr(session, "CHUNK", 32)
    prompt = llm.encode(STORY * 4)
    job = Job(request(llm, prompt, 1), Choice("lookup"), lambda event: None)
    scheduler.submit([job])
    for _ in range(steps):
        scheduler._turn()
    scheduler.cancel([job])
    scheduler._turn()
    assert scheduler.reading is None
    scheduler.thread.start()
    asked = request(llm, prompt, 1)
    ((tokens, again),) = write(scheduler, "lookup", [asked])
    scheduler.close()
    assert again.row is not None
    assert again.row.usage.cached_tokens == 32 * steps
    plain = Engine(llm.target, drafters.load("none"), llm.engine().budget, llm.engine().gumbel)
    assert [*generate(plain, [asked])][-1].row.output == tokens


@pytest.mark.trained
def test_an_answer_that_was_stopped_is_kept(llm: LLM, loaded: Any) -> None:
    scheduler = service_of(llm, loaded, "demo", rows=2).scheduler
    job = Job(request(llm, llm.encode(STORY), 1, 40), Choice("lookup"), lambda event: None)
    scheduler.submit([job])
    while job.row is None or len(job.row.output) < 4:
        scheduler._turn()
    scheduler.cancel([job])
    scheduler._turn()
    scheduler.thread.start()
    ((_, again),) = write(scheduler, "lookup", [request(llm, [*job.request.prompt, *job.row.output, 5], 1)])
    scheduler.close()
    assert again.row is not None
    assert again.row.usage.cached_tokens >= len(job.request.prompt) + 3


@pytest.mark.trained
def test_a_salt_keeps_texts_apart(llm: LLM, loaded: Any, start: Serve) -> None:
    served = start(service_of(llm, loaded, "demo", rows=2))

    def cached(**more: Any) -> int:
        made = served.post("/v1/completions", {"prompt": STORY, "max_tokens": 2, **more})
        return int(made["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(cache_salt=s) > 0 for s in ("mine", "yours", "mine")] == [False, False, True]
    assert [cached() > 0 for _ in range(2)] == [False, True]


def kept(tokens: Sequence[int]) -> Kept:
    return Kept(tuple(tokens), [(np.zeros((len(tokens), 4)),) * 2], {-1: np.zeros((len(tokens), 3))})


def test_the_longest_prefix_is_used_and_the_oldest_text_evicted() -> None:
    remaining = Prefixes(rows=2)
    a, b, c = (list(range(first, first + 40)) for first in (0, 100, 200))
    for text in (a, b):
        remaining.add(text, lambda text=text: kept(text))  # type: ignore[misc]
    assert remaining.find([*a[:30], 7, 8]) is not None
    assert remaining.find([*a[:30], 7, 8])[1] == 30  # type: ignore[index]
    assert remaining.find(a)[1] == 39, "the last token of a prompt is read"  # type: ignore[index]
    assert remaining.find([*a[: LEAST - 1], 7]) is None
    assert remaining.find(a, "salt") is None
    remaining.add(c, lambda: kept(c))  # b was not used since
    assert [text.tokens[0] for _, text in remaining.texts] == [0, 200]
    remaining.add([*c, 1, 2], lambda: kept([*c, 1, 2]))  # goes on from c, and replaces it
    assert [len(text.tokens) for _, text in remaining.texts] == [40, 42]
    remaining.add(c, lambda: pytest.fail("it is there already"))
    small = Prefixes(rows=9, limit=kept(a).bytes)
    small.add(a, lambda: kept(a))
    small.add(b, lambda: kept(b))
    assert [text.tokens[0] for _, text in small.texts] == [100]
    assert common([1, 2, 3], [1, 2, 4]) == 2
    assert replace(remaining, limit=0).add(b, lambda: pytest.fail("switched off")) is None
