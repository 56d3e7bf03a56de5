"""Calls for one text go on from the text before: only what is new of a prompt is read, and nothing else changes."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace
from typing import Any

import pytest
from compiled_code import needs_code
from small import build

import outrider
from outrider import drafters
from outrider.bench.config import Config
from outrider.bench.models import Models
from outrider.bench.peers.outrider import load as as_peer
from outrider.bench.types import Ask, Method
from outrider.commands.compare import compare
from outrider.engine.loop import Batch
from outrider.engine.prefixes import LEAST
from outrider.llm import LLM

pytestmark = needs_code

STORY = "Once upon a time there was a little girl who lived in a house by the sea. She looked for shells."
TURNS = " And then", " One day", " So"
DRAFTERS = "none", "lookup", "eagle:demo/hass?scale=1", "lookup + eagle3:demo?scale=1", "medusa:demo"


def talk(llm: LLM, temperature: float) -> list[Any]:
    """The outputs of a chat of three turns, each of whose prompts has the texts before in it."""
    prompt, made = llm.encode(STORY), []
    for seed, line in enumerate(TURNS):
        stream = llm.stream(prompt, max_new_tokens=24, seed=seed, temperature=temperature, budget="8x4")
        list(stream)
        made.append(stream.output)
        prompt = [*prompt, *stream.output.tokens, *llm.encode(line)]
    return made


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_chat_reads_what_is_new_and_writes_the_same(drafter: str, temperature: float) -> None:
    """Texts, rounds and drafts are those of a model that reads each prompt from its start."""
    copying, reading = (outrider.load("demo", drafter) for _ in range(2))
    first, again = talk(copying, temperature), talk(replace(reading, prefixes=None), temperature)
    for mine, whole in zip(first, again, strict=True):
        assert mine.tokens == whole.tokens
        assert replace(mine.usage, **NOT_COUNTED) == replace(whole.usage, **NOT_COUNTED)
        assert whole.usage.cached_tokens == 0
    cached = [output.usage.cached_tokens for output in first]
    assert cached[0] == 0
    for before, copied in itertools.pairwise(range(3)):
        read = first[before].usage
        assert cached[copied] == read.prompt_tokens + read.new_tokens - 1, "all but the last token, which nothing read"


NOT_COUNTED = {"cached_tokens": 0, **{f"{what}_seconds": 0.0 for what in ("prefill", "decode", "draft", "verify")}}


@pytest.mark.parametrize("step", ["propose", "judge", "account"])
def test_a_chat_goes_on_from_an_answer_that_was_stopped(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, wherever in a round it comes."""
    llm = outrider.load("demo", "lookup", budget="8x4")
    stream = llm.stream(STORY, max_new_tokens=60, seed=1)
    assert [next(stream) for _ in range(3)]
    inner = getattr(Batch, step)
    monkeypatch.setattr(Batch, step, lambda *given: (signal.raise_signal(signal.SIGINT), inner(*given))[1])
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    monkeypatch.undo()
    read = stream.output
    assert read.finish_reason == "interrupted"
    prompt = [*llm.encode(STORY), *read.tokens, *llm.encode(TURNS[0])]
    (mine,) = llm.generate(prompt, max_new_tokens=12, seed=2)
    assert mine.usage.cached_tokens >= read.usage.prompt_tokens + len(read.tokens) - 1
    (whole,) = replace(llm, prefixes=None).generate(prompt, max_new_tokens=12, seed=2)
    assert mine.tokens == whole.tokens


def test_a_stream_that_is_left_keeps_nothing() -> None:
    """It may be collected at any moment, also while another call looks for what is kept."""
    llm = outrider.load("demo", "lookup")
    stream = llm.stream(STORY, max_new_tokens=60, seed=1)
    assert [next(stream) for _ in range(3)]
    stream.close()
    assert llm.prefixes is not None
    assert not llm.prefixes.texts


def test_several_texts_are_read_whole() -> None:
    llm = outrider.load("demo", "none")
    llm.generate(STORY, max_new_tokens=4)
    for more in ({"n": 2}, {}):
        outputs = llm.generate([STORY] if more else [STORY, STORY], max_new_tokens=4, **more)
        assert [output.usage.cached_tokens for output in outputs] == [0, 0]
    assert llm.generate(STORY, max_new_tokens=4)[0].usage.cached_tokens == len(llm.encode(STORY)) - 1


def test_a_drafter_that_needs_more_hidden_states_reads_again() -> None:
    """`replace`, as in the chat's /drafter, keeps the text: without the states of layers that nobody asked for."""
    plain = outrider.load("demo", "none")
    plain.generate(STORY, max_new_tokens=4)
    eagle = replace(plain, drafter=drafters.load("eagle:demo/hass", plain.target, plain.tokenizer))
    for llm, copies in ((eagle, False), (eagle, True), (plain, True)):
        (output,) = llm.generate(STORY, max_new_tokens=4)
        assert (output.usage.cached_tokens > LEAST) == copies


def test_models_that_may_change_or_round_otherwise_read_again() -> None:
    for llm in (outrider.load(build("llama"), "none"), outrider.load("demo", "none", compile=False)):
        assert llm.prefixes is None


def test_comparisons_read_every_prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = outrider.load("demo", "lookup")
    asked: list[Any] = []
    generate = LLM.generate
    monkeypatch.setattr(LLM, "generate", lambda self, *a, **k: asked.extend(generate(self, *a, **k)) or asked[-1:])
    options = {"max_new_tokens": 8, "rule": "coupled", "sampling": outrider.Sampling(), "budget": None}
    compare(llm, [STORY], 1, options, as_json=True)
    capsys.readouterr()
    assert len(asked) > 3
    assert not any(output.usage.cached_tokens for output in asked)


def test_a_benchmark_reads_first_turns_whole() -> None:
    models = Models.of(Config("demo"))
    peer, ids = as_peer(Method("lookup"), models), models.llm().encode(STORY)
    for turn, copied in ((0, 0), (1, len(ids) - 1), (0, 0)):
        answer = peer.run([ids], Ask(6, 0.0, (1,), frozenset(), turn))
        assert answer.usages[0].cached_tokens == copied
