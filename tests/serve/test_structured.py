"""Grammars: texts that parse, the same with any draft, masks only where they are used, and what is refused."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from serve_world import Served
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback
from tokenizers.models import BPE

from outrider.backends.torch import verify as torch_verify
from outrider.core import verify
from outrider.core.types import Question, Verdict
from outrider.engine import generate
from outrider.engine.request import Request, Row
from outrider.engine.stopping import Stop
from outrider.llm import LLM
from outrider.params import Sampling
from outrider.serve.guide import Grammars, renamed
from outrider.serve.job import Watch
from outrider.serve.protocol import StructuredOutputs

pytestmark = pytest.mark.trained
llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'outrider[serve]'")
CHAT = [{"role": "user", "content": "Who are you?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AGE = {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "greet", "parameters": AGE}}
WRONG = {"type": "nothing"}
WAYS: list[Any] = [{"speculate": False}, {"drafter": "eagle"}, {"drafter": "lookup", "budget": 5}]


def chat(served: Served, status: int = 200, **more: Any) -> Any:
    body = {"messages": CHAT, "max_tokens": 60, "temperature": 0.8, "seed": 4, **more}
    return served.post("/v1/chat/completions", body, status)


def texts(served: Served, **more: Any) -> str:
    """The text, which no way of drafting changes."""
    results = {chat(served, outrider=way, **more)["choices"][0]["message"]["content"] for way in WAYS}
    assert len(results) == 1
    return results.pop()


def test_every_end_may_end_a_text(llm: LLM) -> None:
    """Chat models end a turn by another token than a text; a grammar that is complete allows either."""
    ends = frozenset({*llm.eos, max(llm.eos) + 1, 3})
    grammars = Grammars(llm.tokenizer, llm.target.vocab, ends)
    logits = np.zeros(llm.target.vocab, np.float32)
    words = llm.tokenizer("hello there", add_special_tokens=False)["input_ids"]
    open_ended = grammars.guide(Grammars.of_structure(StructuredOutputs(regex="[a-z ]+")) or "", "regex")
    assert all(np.isfinite(open_ended(words, logits)[end]) for end in ends)
    complete = grammars.guide(Grammars.of_structure(StructuredOutputs(choice=["hello there"])) or "", "choice")
    scores = complete(words, logits)
    assert set(np.isfinite(scores).nonzero()[0].tolist()) == ends
    for end in ends:
        assert complete.follow([*words, end]) is False
        assert not complete.broken


def test_a_schema(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    person = json.loads(texts(served, response_format=form))
    assert set(person) == {"name", "age"}
    assert 0 <= person["age"] <= 99


def test_any_json(served: Served) -> None:
    assert served.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, "structured_outputs": {"json": {}}})


def test_regex_choice_and_grammar(served: Served) -> None:
    assert re.fullmatch(r"[0-9]{3}-[a-c]{2}", texts(served, structured_outputs={"regex": "[0-9]{3}-[a-c]{2}"}))
    assert texts(served, structured_outputs={"choice": ["maybe so", "never", "no"]}) in ("maybe so", "never", "no")
    grammar = 'start: "<" WORD ">"\nWORD: /[a-z]{2,5}/'
    assert re.fullmatch(r"<[a-z]{2,5}>", texts(served, structured_outputs={"grammar": grammar}))
    ends = chat(served, structured_outputs={"choice": ["no"]})["choices"][0]["finish_reason"]
    assert ends == "stop"


def test_text_that_looks_like_an_added_token_is_text(served: Served) -> None:
    """A grammar in Lark's notation may name the token itself."""
    assert texts(served, structured_outputs={"choice": ["<|user|>"]}) == "<|user|>"
    assert re.fullmatch(r"<\|end\|>[a-c]{2}", texts(served, structured_outputs={"regex": r"<\|end\|>[a-c]{2}"}))
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "<|end|>"}}}
    assert json.loads(texts(served, response_format=form)) == "<|end|>"
    assert texts(served, structured_outputs={"grammar": 'start: <|pad|> "so"'}) == "so"


@pytest.mark.parametrize("special", [False, True])
def test_added_tokens_that_are_merged_from_others(special: bool) -> None:
    """Runs of spaces and of line breaks in Gemma's vocabulary, and what ends a text."""
    words = ["a", "\n", "\n\n", "<end>"]
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [("\n", "\n")]))
    tokenizer.decoder = ByteFallback()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens([AddedToken("\n\n", special=special)])
    grammars = Grammars(tokenizer, 4, frozenset({3}))
    grammars.__dict__["words"] = llguidance.LLTokenizer(renamed(tokenizer.to_str()), n_vocab=4, eos_token=[3])
    guide = grammars.guide(grammars.of_structure(StructuredOutputs(regex="[a\n]*")) or "", "regex")
    scores = guide([0], np.zeros(4, np.float32))
    assert np.isfinite(scores).tolist() == [True, True, not special, True]


def test_rows_with_and_without_a_grammar_beside_each_other(served: Served) -> None:
    """A grammar binds its own row; samples have a grammar each."""
    alone = chat(served)["choices"][0]["message"]["content"]
    beside = chat(served, n=3, structured_outputs={"regex": "[0-9]{6}"})["choices"]
    assert all(re.fullmatch("[0-9]{6}", c["message"]["content"]) for c in beside)
    assert len({c["message"]["content"] for c in beside}) > 1
    assert chat(served)["choices"][0]["message"]["content"] == alone


# Each lets the text begin and then reaches a limit of llguidance, or a place where no token can follow.
ALTERNATIVES = "\n".join(f"x{i}: y{i} B y{i}\ny{i}: (C | D) (C | D)" for i in range(600))
BREAKING = {
    "max is 2000": f"""start: A ({" | ".join(f"x{i}" for i in range(600))})\n{ALTERNATIVES}
        A: "a"\nB: "b"\nC: "c"\nD: "d\"""",
    "Too many items": 'start: "a" x\nx: "b" x',
    "no token can follow": 'start: "a" NEVER\nNEVER: /b/ & /c/',
}


@pytest.mark.parametrize("why", BREAKING)
def test_a_grammar_that_breaks_fails_its_own_row(served: Served, why: str) -> None:
    """Never a text that the grammar did not make; who decodes beside it is not touched."""
    alone = chat(served)["choices"][0]["message"]["content"]
    beside: list[str] = []
    neighbour = threading.Thread(target=lambda: beside.append(chat(served)["choices"][0]["message"]["content"]))
    neighbour.start()
    error = chat(served, 400, structured_outputs={"grammar": BREAKING[why]})["error"]
    neighbour.join()
    assert beside == [alone]
    assert "the grammar or schema failed" in error["message"]
    assert why in error["message"]
    assert error["param"] == "structured_outputs"
    body = {"messages": CHAT, "max_tokens": 60, "temperature": 0.8, "seed": 4, "stream": True}
    body["structured_outputs"] = {"grammar": BREAKING[why]}
    streamed = served.send("POST", "/v1/chat/completions", body)[2].decode()
    events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    assert events[-1]["error"] == error
    assert not any(
        "content" in c["delta"] and len(c["delta"]["content"]) > 2 for e in events[:-1] for c in e["choices"]
    )
    assert streamed.endswith("data: [DONE]\n\n")
    assert served.idle()


def test_a_text_that_ends_before_its_grammar_breaks_is_complete(llm: LLM) -> None:
    """An accepted draft makes the walk look beyond a stop, where decoding without one would never have looked."""
    grammars = Grammars(llm.tokenizer, llm.target.vocab, llm.eos)
    grammar = Grammars.of_structure(StructuredOutputs(grammar=BREAKING["no token can follow"]))
    watch = Watch(guide=grammars.guide(grammar or "", ""))
    (a,) = llm.tokenizer.encode("a", add_special_tokens=False)
    scores = np.zeros(llm.target.vocab, np.float32)
    for place in ([], [a]):
        watch(place, scores)
    assert watch.broken
    assert watch.cutting(Stop(llm.eos, ("a",), 9, llm.detokenizer).cutting([]))([], [a, 5]) == (1, "stop")
    assert watch.cutting(Stop(llm.eos, (), 1).cut)([], [a, 5]) == (1, "length")
    assert watch.cutting(Stop(llm.eos, (), 2).cut)([], [a, 5]) == (0, "error")


class Counted:
    """llguidance's matcher, and how many masks it computed."""

    def __init__(self, matcher: Any):
        self.matcher, self.masks = matcher, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)

    def compute_bitmask(self) -> Any:
        self.masks += 1
        return self.matcher.compute_bitmask()


def in_tensors(question: Question) -> Verdict:
    """As on a device other than the CPU."""
    return torch_verify.judge(replace(question, logits=torch.from_numpy(question.logits)))


@pytest.mark.parametrize("judge", [verify.judge, in_tensors], ids=["arrays", "tensors"])
def test_masks_are_made_where_the_walk_goes_and_nowhere_else(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, judge: Callable[[Question], Verdict]
) -> None:
    """One for every token, also in rows whose walk has ended while others go on. The end needs none: the
    grammar is complete there."""
    monkeypatch.setattr(type(llm.target), "judge", lambda self, question: judge(question))
    grammars = Grammars(llm.tokenizer, llm.target.vocab, llm.eos)
    first = grammars.guide(Grammars.of_structure(StructuredOutputs(regex="[A-Za-z ,.!']{60}")) or "", "regex")
    guides = [first.fork() for _ in range(4)]
    for guide in guides:
        guide.matcher = Counted(guide.matcher)
    requests = [
        Request(llm.encode(CHAT), seed, 120, Sampling(temperature=0.7), Stop(llm.eos, (), 120).cut, Watch(guide=guide))
        for seed, guide in enumerate(guides)
    ]
    rows: dict[int, Row] = {}
    for piece in generate(llm.engine(), requests):
        rows[piece.row.index] = piece.row
    assert [row.finish for row in rows.values()] == ["eos"] * 4
    assert len({row.usage.rounds for row in rows.values()}) > 1
    assert sum(row.usage.accepted for row in rows.values()) > 8
    assert [guide.matcher.masks for guide in guides] == [len(rows[i].output) - 1 for i in range(4)]


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "grammar or schema"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs", "grammar or schema"),
        ({"structured_outputs": {"grammar": "((("}}, "structured_outputs", "grammar"),
        ({"structured_outputs": {"grammar": 'root ::= "a'}}, "structured_outputs", "grammar cannot be used"),
        ({"structured_outputs": {"json": WRONG}}, "structured_outputs", "schema cannot be used"),
        ({"structured_outputs": {"json": None}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, None, "exclude"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": WRONG}}},
            "response_format",
            "schema cannot be used",
        ),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "ignore_eos"),
        ({"tools": [TOOL]}, "tool_choice", "writes no JSON"),
        (
            {"tools": [{**TOOL, "function": {"name": "x", "parameters": WRONG}}], "tool_choice": "required"},
            "tools",
            "used",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "no tool"),
    ],
)
def test_refused(served: Served, more: Any, param: str | None, words: str) -> None:
    error = chat(served, 400, **more)["error"]
    assert words in error["message"]
    assert error["param"] == param
