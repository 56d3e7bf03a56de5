"""A text whose reader does not read leaves the batch, and goes on bit for bit when it is read again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from serve_world import Reader, Serve, finishes

from outrider.engine import Batch
from outrider.llm import LLM
from outrider.serve.call import Behind, Channel
from outrider.serve.fleet import Choice
from outrider.serve.job import End, Event, Heading, Job, Part, Scored
from outrider.serve.service import Limits
from outrider.serve.start import service_of

pytestmark = pytest.mark.trained
PATH = "/v1/completions"
LONG = {"prompt": "Once upon a time", "temperature": 0.9, "max_tokens": 400, "ignore_eos": True, "seed": 1}
BESIDE = {**LONG, "seed": 2, "max_tokens": 60}
LIKELY = [Scored(1, -1.0, ((1, -1.0),) * 20)]
PENALTIES = {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {"7": 2.0}}


def run(made: Any, until: Callable[[], bool] = lambda: False) -> None:
    while (made.jobs or made.waiting) and not until():
        made._turn()


@pytest.mark.parametrize("drafter", ["", "lookup", "eagle"])
@pytest.mark.parametrize("cache", [512, 0], ids=["kept", "read again"])
@pytest.mark.parametrize("fields", [{}, PENALTIES], ids=["plain", "penalties"])
def test_a_text_with_pauses_has_the_same_tokens(
    llm: LLM, loaded: Any, drafter: str, cache: int, fields: dict[str, Any]
) -> None:
    """Paused after every few tokens beside another row: the tokens are those of `LLM`, each delivered once."""
    options = {**fields, "logit_bias": {7: 2.0}} if fields else {}
    made = service_of(llm, loaded, "demo", rows=3, prefix_cache=cache).scheduler
    requests = llm.requests(["The", "A dog"], max_new_tokens=60, temperature=0.8, seed=3, ignore_eos=True, **options)[0]
    wanted = [output.tokens for output in llm.generate(["The", "A dog"], max_new_tokens=60, temperature=0.8, seed=3,
                                                       ignore_eos=True, **options)]  # fmt: skip
    heard: list[list[Event]] = [[], []]
    jobs = [Job(request, Choice(drafter), events.append) for request, events in zip(requests, heard, strict=True)]
    pending, pauses, looks = [0], [0], [0]

    def deliver(event: Event) -> None:
        heard[0].append(event)
        pending[0] += len(event.tokens) if isinstance(event, Part) else 0

    def behind() -> bool:
        """Paused, it is read when the scheduler looks at it for the second time."""
        if jobs[0] in made.waiting and jobs[0].row is not None:
            looks[0] += 1
            if looks[0] % 2 == 0:
                pauses[0] += 1
                pending[0] = 0
        return pending[0] > 7

    jobs[0].deliver, jobs[0].behind = deliver, behind
    made.submit(jobs)
    run(made)
    assert [[t for event in events if isinstance(event, Part) for t in event.tokens] for events in heard] == wanted
    ends = [event for events in heard for event in events if isinstance(event, End)]
    assert [(end.finish, end.usage.new_tokens) for end in ends] == [("length", 60)] * 2
    assert [end.usage.cached_tokens for end in ends] == [0, 0], "its own text is no prompt that was known"
    assert pauses[0] >= 2


@pytest.mark.parametrize("late", [True, False])
def test_the_scores_of_a_long_prompt_are_no_backlog(late: bool) -> None:
    """The first token follows them at once, before the loop has taken them; other scores are bounded."""

    async def delivered() -> list[Event]:
        channel = Channel(lambda: None)
        receive = channel.deliver(0, 10_000)
        receive(Heading(LIKELY * 10_000) if late else Part([1], 0, LIKELY * 10_000))
        receive(Part([1], 0, LIKELY))
        return (await channel.take())[0]

    if late:
        assert [type(event) for event in asyncio.run(delivered())] == [Heading, Part]
    else:
        with pytest.raises(Behind):
            asyncio.run(delivered())


def test_its_place_is_free_meanwhile(llm: LLM, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nobody reads, its row is in no round, others have its place, and it is the first to begin again."""
    made = service_of(llm, loaded, "demo", rows=1).scheduler
    requests = llm.requests(["The", "A dog"], max_new_tokens=40, ignore_eos=True)[0]
    ends: list[int] = []
    behind = [False]
    rounds: list[int] = []
    decode = Batch.round

    def round(self: Batch) -> Any:
        rounds.extend(row.index for row in self.rows)
        behind[0] = behind[0] or len(rounds) == 3
        return decode(self)

    def deliver(number: int) -> Callable[[Event], None]:
        return lambda event: ends.append(number) if isinstance(event, End) else None

    monkeypatch.setattr(Batch, "round", round)
    jobs = [Job(request, Choice(""), deliver(i)) for i, request in enumerate(requests)]
    jobs[0].behind = lambda: behind[0]
    made.submit(jobs)
    run(made, lambda: ends == [1])
    assert rounds[:3] == [1, 1, 1]
    assert set(rounds[3:]) == {2}
    assert made.active == 0
    assert list(made.waiting) == [jobs[0]]
    late = Job(requests[1], Choice(""), deliver(2))
    made.submit([late])
    behind[0] = False
    run(made)
    assert ends == [1, 0, 2]


def test_who_waits_paused_is_dropped_in_time(llm: LLM, loaded: Any) -> None:
    """A pause does not outlive the request's deadline, nor its client."""
    made = service_of(llm, loaded, "demo", rows=2).scheduler
    requests = llm.requests(["The", "A dog"], max_new_tokens=40, ignore_eos=True)[0]
    heard: list[Event] = []
    jobs = [Job(request, Choice(""), heard.append, behind=lambda: len(heard) > 6) for request in requests]
    made.submit(jobs)
    run(made, lambda: not made.jobs and len(heard) > 6)
    assert len(made.waiting) == 2
    jobs[0].deadline = 0.0
    made.cancel(jobs[1:])
    run(made)
    assert [event.finish for event in heard if isinstance(event, End)] == ["abort", "abort"]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_is_not_read_pauses(llm: LLM, loaded: Any, start: Serve, n: int) -> None:
    """A bounded number of its tokens are written, its neighbour is answered, and when it is read again it has the
    text of a reader who reads at once."""
    served = start(service_of(llm, loaded, "demo", rows=4, limits=Limits(send=600.0)), buffer=4096)
    scheduler, wordy = served.service.scheduler, {**LONG, "logprobs": 20, "n": n}
    wanted = served.post(PATH, wordy)["choices"]
    beside = served.post(PATH, BESIDE)["choices"]
    reader = Reader(served.port, PATH, wordy)
    assert served.paused(n)
    jobs = list(scheduler.waiting)
    written = [len(job.row.output) for job in jobs]
    assert max(written) < 300, "it ran on"
    assert served.post(PATH, BESIDE)["choices"] == beside
    assert [len(job.row.output) for job in jobs] == written, "a paused text went on"
    events = reader.rest()
    assert finishes(events) == ["length"] * n
    choices = [c for e in events for c in e["choices"]]
    assert ["".join(c["text"] for c in choices if c["index"] == i) for i in range(n)] == [c["text"] for c in wanted]
    for i, choice in enumerate(wanted):
        lines = [c["logprobs"] for c in choices if c["index"] == i and c["logprobs"]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for line in lines for value in line[name]] == choice["logprobs"][name]
    assert served.idle()
