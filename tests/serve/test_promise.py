"""The promise: an answer is a function of prompt, seed and parameters, whatever else the server does meanwhile."""

from __future__ import annotations

import queue
import random
import time
from dataclasses import replace
from importlib.resources import files
from json import dumps, loads
from typing import Any

import pytest
import torch

from outrider import drafters
from outrider.budgets.adaptive import AdaptiveBudget
from outrider.cli import main
from outrider.engine import Engine, Request, generate
from outrider.engine.stopping import Stop
from outrider.llm import LLM, load
from outrider.params import InputError, Sampling
from outrider.serve.fleet import Choice
from outrider.serve.job import End, Event, Job, Part, Scored, Watch
from outrider.serve.start import service_of

pytestmark = pytest.mark.trained
PLANS: dict[str, list[Choice]] = {
    "none": [Choice("")],
    "lookup": [Choice("lookup")],
    "eagle": [Choice("eagle")],
    "block": [Choice("block")],
    "mixed": [Choice("eagle"), Choice("lookup"), Choice(""), Choice("eagle", 4), Choice("lookup", 3)],
}


@pytest.fixture(scope="module")
def block(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A block drafter of one layer, trained for a minute: it is right now and then, and wrong more often."""
    folder = tmp_path_factory.mktemp("block")
    data = folder / "data.jsonl"
    data.write_text("\n".join(dumps({"text": text[:600]}) for text in held_out()), encoding="utf-8")
    settings = ["--steps", "60", "--rows", "2", "--length", "128", "--limit", "1", "--evaluate", "1000"]
    out = ["--out", str(folder / "run"), "--option", "layers=1", "--json"]
    assert main(["train", "block", "demo", "--data", str(data), *settings, *out]) == 0
    return drafters.load(f"block:{folder / 'run' / 'best'}", llm.target, llm.tokenizer)


def held_out() -> list[str]:
    lines = (files("outrider") / "demo" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["text"] for line in map(loads, lines) if "text" in line]


def requests(llm: LLM, count: int) -> list[Request]:
    """Random prompts, seeds, samplings, lengths and ends."""
    chance = random.Random(11)
    texts, results = held_out(), []
    for _ in range(count):
        ids = llm.encode(chance.choice(texts))
        first = chance.randrange(max(1, len(ids) - 24))
        sampling = Sampling(
            chance.choice([0.0, 0.7, 1.0]), top_k=chance.choice([0, 0, 20]), top_p=chance.choice([1.0, 0.9]),
            repetition_penalty=chance.choice([1.0, 1.0, 1.2]), frequency_penalty=chance.choice([0.0, 0.0, 0.4]),
            logit_bias=chance.choice([{}, {}, {100: 3.0}]),
        )  # fmt: skip
        limit = chance.randint(1, 9)
        ends = Stop(llm.eos | {chance.randrange(llm.target.vocab)}, (), limit)
        results.append(
            Request(ids[first : first + chance.randint(1, 24)], chance.randrange(1 << 63), limit, sampling, ends.cut)
        )
    return results


def offline(llm: LLM, asked: list[Request]) -> list[list[int]]:
    """Plain decoding by the engine that everybody uses, in batches of another size."""
    engine = Engine(llm.target, drafters.load("none"), AdaptiveBudget(), llm.engine().gumbel)
    rows = {piece.row.index: piece.row for piece in generate(engine, asked, 5)}
    return [rows[i].output for i in range(len(asked))]


def served(
    llm: LLM,
    loaded: Any,
    asked: list[Request],
    plan: list[Choice],
    gap: float,
    auto: bool = False,
    scores: dict[int, list[Scored]] | None = None,
) -> list[list[int]]:
    """The same through the scheduler, arriving at random; now and then someone leaves in the middle, and every third
    text pauses at random. `scores` gets the logprobs of requests with them."""
    scheduler = service_of(llm, loaded, "demo", rows=4, queue=10_000).scheduler
    if auto:
        scheduler.engine = replace(scheduler.engine, budget=AdaptiveBudget())
    scheduler.thread.start()
    chance, done = random.Random(3), queue.Queue[tuple[int, End]]()
    outputs: list[list[int]] = [[] for _ in asked]
    accepted = 0

    def deliver(i: int, event: Event) -> None:
        if isinstance(event, Part):
            outputs[i] += event.tokens
            if scores is not None and event.scores:
                scores.setdefault(i, []).extend(event.scores)
        else:
            done.put((i, event))

    for i, request in enumerate(asked):
        watch = Watch(top=1) if i % 5 == 0 else None
        job = Job(request, chance.choice(plan), lambda event, i=i: deliver(i, event), watch=watch)  # type: ignore[misc]
        if i % 3 == 0:
            reads = random.Random(i)
            job.behind = lambda reads=reads: reads.random() < 0.2  # type: ignore[misc]
        scheduler.submit([job])
        if chance.random() < 0.1:  # a passer-by
            other = Job(
                replace(request, max_new_tokens=40, cut=lambda o, n: (len(n), None)), job.choice, lambda e: None
            )
            scheduler.submit([other])
            time.sleep(chance.random() * 0.02)
            scheduler.cancel([other])
        if gap:
            time.sleep(chance.expovariate(1 / gap))
    for _ in asked:
        i, end = done.get(timeout=120)
        assert end.finish in ("eos", "length"), end
        assert end.usage.new_tokens == len(outputs[i])
        accepted += end.usage.accepted
    scheduler.close()
    scheduler.thread.join(30)
    assert not scheduler.thread.is_alive()
    assert not scheduler.jobs
    assert not scheduler.dead
    assert not scheduler.fleet.failed
    assert scheduler.metrics.preempted._value.get() > 0, "no text paused"
    assert accepted or auto or all(choice.plain for choice in plan)
    return outputs


@pytest.mark.parametrize(("plan", "gap"), [("eagle", 0.02), ("mixed", 0.0)])
def test_served_is_offline(llm: LLM, loaded: Any, plan: str, gap: float) -> None:
    asked = requests(llm, 20)
    assert served(llm, loaded, asked, PLANS[plan], gap) == offline(llm, asked)


def test_logprobs_do_not_depend_on_drafts_or_load(llm: LLM, loaded: Any) -> None:
    asked, results = requests(llm, 20), list[dict[int, list[Scored]]]()
    for plan, gap in (("eagle", 0.0), ("none", 0.01)):
        results.append({})
        served(llm, loaded, asked, PLANS[plan], gap, scores=results[-1])
    drafted, plain = results
    assert drafted.keys() == plain.keys()
    assert drafted, "somebody asked"
    for i, mine in drafted.items():
        assert [s.token for s in mine] == [s.token for s in plain[i]]
        near = 0.0 if llm.target.exact == "bits" else 1e-4
        assert [s.logprob for s in mine] == pytest.approx([s.logprob for s in plain[i]], rel=0, abs=near)


def test_the_fingerprint_changes_with_whatever_changes_texts(llm: LLM) -> None:
    half = load("demo", "none", dtype="bfloat16")
    before, made = torch.get_num_threads(), []
    try:
        for threads, one in ((1, llm), (1, llm), (2, llm), (1, half)):
            torch.set_num_threads(threads)
            made.append(service_of(one, {}, "demo").fingerprint)
    finally:
        torch.set_num_threads(before)
    assert made[0] == made[1]
    assert len(set(made)) == 3


def test_served_in_16_bits_is_offline(llm: LLM) -> None:
    """Bit for bit, where this machine and torch's products allow it."""
    try:
        halves = load("demo", "eagle:demo/hass", dtype="bfloat16", exact="bits", budget="16x6")
    except InputError as error:
        pytest.skip(str(error))
    asked = requests(llm, 20)
    loaded = {"eagle": halves.drafter, "lookup": drafters.load("lookup", halves.target, halves.tokenizer)}
    assert served(halves, loaded, asked, PLANS["mixed"], 0.0) == offline(halves, asked)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("gap", [0.0, 0.02], ids=["at once", "one by one"])
def test_served_is_offline_200_times(
    llm: LLM, loaded: Any, request: pytest.FixtureRequest, plan: str, gap: float
) -> None:
    """At once under the adaptive budget, whose trees depend on the clock; one by one with a draft in every round."""
    more = {"block": request.getfixturevalue("block")} if plan == "block" else {}
    asked = requests(llm, 200)
    assert served(llm, {**loaded, **more}, asked, PLANS[plan], gap, auto=not gap) == offline(llm, asked)
