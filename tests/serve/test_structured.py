"""Grammars and tools: texts that parse, the same with any draft, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from serve_world import Served

pytestmark = pytest.mark.trained
pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'outrider[serve]'")
CHAT = [{"role": "user", "content": "Who are you?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AGE = {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "greet", "parameters": AGE}}
WAYS: list[Any] = [{"speculate": False}, {"drafter": "eagle"}, {"drafter": "lookup", "budget": 5}]


def chat(served: Served, status: int = 200, **more: Any) -> Any:
    body = {"messages": CHAT, "max_tokens": 60, "temperature": 0.8, "seed": 4, **more}
    return served.post("/v1/chat/completions", body, status)


def texts(served: Served, **more: Any) -> str:
    """The text, which no way of drafting changes."""
    found = {chat(served, outrider=way, **more)["choices"][0]["message"]["content"] for way in WAYS}
    assert len(found) == 1
    return found.pop()


def test_a_schema(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    person = json.loads(texts(served, response_format=form))
    assert set(person) == {"name", "age"}
    assert 0 <= person["age"] <= 99


def test_regex_choice_and_grammar(served: Served) -> None:
    assert re.fullmatch(r"[0-9]{3}-[a-c]{2}", texts(served, structured_outputs={"regex": "[0-9]{3}-[a-c]{2}"}))
    assert texts(served, structured_outputs={"choice": ["maybe so", "never", "no"]}) in ("maybe so", "never", "no")
    grammar = 'start: "<" WORD ">"\nWORD: /[a-z]{2,5}/'
    assert re.fullmatch(r"<[a-z]{2,5}>", texts(served, structured_outputs={"grammar": grammar}))
    ends = chat(served, structured_outputs={"choice": ["no"]})["choices"][0]["finish_reason"]
    assert ends == "stop"


def test_rows_with_and_without_a_grammar_beside_each_other(served: Served) -> None:
    """A grammar binds its own row; samples have a grammar each."""
    alone = chat(served)["choices"][0]["message"]["content"]
    beside = chat(served, n=3, structured_outputs={"regex": "[0-9]{6}"})["choices"]
    assert all(re.fullmatch("[0-9]{6}", c["message"]["content"]) for c in beside)
    assert len({c["message"]["content"] for c in beside}) > 1
    assert chat(served)["choices"][0]["message"]["content"] == alone


def test_tools_that_must_be_called(served: Served) -> None:
    named = {"type": "function", "function": {"name": "greet"}}
    for choice in (named, "required"):
        made = chat(served, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=120)["choices"][0]
        assert made["finish_reason"] == "tool_calls"
        (call,) = made["message"]["tool_calls"]
        assert call["function"]["name"] == "greet"
        assert json.loads(call["function"]["arguments"])["age"] in (1, 2)
    body = {"messages": CHAT, "tools": [TOOL], "tool_choice": named, "stream": True, "seed": 4, "max_tokens": 120}
    _, _, streamed = served.send("POST", "/v1/chat/completions", body)
    events = [json.loads(line[6:]) for line in streamed.decode().split("\n\n") if line.startswith("data: {")]
    calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", [])]
    assert json.loads(calls[0]["function"]["arguments"])
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_in_the_models_own_words() -> None:
    from outrider.serve.tools import Caller

    text = 'Well.\n<tool_call>\n{"name": "greet", "arguments": {"age": 3}}\n</tool_call>'
    content, (call,) = Caller("auto").split(text)
    assert content == "Well."
    assert call["function"] == {"name": "greet", "arguments": '{"age": 3}'}
    assert Caller("auto").split("no call") == ("no call", [])
    assert Caller("auto").split("<tool_call>{broken}</tool_call>") == ("<tool_call>{broken}</tool_call>", [])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"structured_outputs": {"regex": "("}}, "grammar or schema"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "grammar or schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one of"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "exclude"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"tools": [TOOL]}, "knows no tools"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "no tool"),
    ],
)
def test_refused(served: Served, more: Any, words: str) -> None:
    assert words in chat(served, 400, **more)["error"]["message"]
