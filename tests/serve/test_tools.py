"""Tools: calls that parse, calls that were cut short, what a stream sends when, and tool calls of earlier turns."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from serve_world import Serve, Served, templated

from outrider.llm import LLM
from outrider.serve.guide import Calls, Grammars
from outrider.serve.protocol import ChatRequest, Function, Refusal, ResponseFormat, Tool
from outrider.serve.start import service_of
from outrider.serve.tools import Caller, caller_of

pytestmark = pytest.mark.trained
pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'outrider[serve]'")
CHAT = [{"role": "user", "content": "Who are you?"}]
AGE = {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "greet", "parameters": AGE}}
NAMED = {"type": "function", "function": {"name": "greet"}}
CALL = '<tool_call>\n{"name": "greet", "arguments": {"age": 2}}\n</tool_call>'
# A template that writes calls as Qwen's and Hermes' do; the demo model's own knows no tools.
TEMPLATE = """{{- bos_token }}
{%- if tools %}
    {{- '<|user|>' + tools | tojson + "Call with\n<tool_call>\n{\\"name\\": ..., \\"arguments\\": ...}" }}
{%- endif %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\n</tool_call>' }}
    {%- endfor %}{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""


@pytest.fixture(scope="module")
def caller(llm: LLM, loaded: dict[str, Any], start: Serve) -> Served:
    """A server whose model has a template with tools."""
    tokenizer = templated(llm.tokenizer, TEMPLATE)
    return start(service_of(replace(llm, tokenizer=tokenizer), loaded, "demo", rows=4, queue=32))


def body(**more: Any) -> dict[str, Any]:
    return {"messages": CHAT, "max_tokens": 120, "temperature": 0.8, "seed": 4, "tools": [TOOL], **more}


def chat(served: Served, status: int = 200, **more: Any) -> Any:
    return served.post("/v1/chat/completions", body(**more), status)


def choice(served: Served, **more: Any) -> Any:
    return chat(served, **more)["choices"][0]


def streamed(served: Served, **more: Any) -> list[Any]:
    """The choices of a stream's events."""
    status, _, result = served.send("POST", "/v1/chat/completions", body(stream=True, **more))
    assert status == 200, result
    events = [json.loads(line[6:]) for line in result.decode().split("\n\n") if line.startswith("data: {")]
    return [event["choices"][0] for event in events]


def content(choices: list[Any]) -> str:
    return "".join(c["delta"].get("content") or "" for c in choices)


def calls(choices: list[Any]) -> list[Any]:
    return [call for c in choices for call in c["delta"].get("tool_calls", [])]


@pytest.mark.parametrize("how", [NAMED, "required"])
def test_tools_that_must_be_called(served: Served, how: Any) -> None:
    made = choice(served, tool_choice=how, parallel_tool_calls=False)
    assert made["finish_reason"] == "tool_calls"
    assert made["message"]["content"] is None
    (call,) = made["message"]["tool_calls"]
    assert call["function"]["name"] == "greet"
    assert json.loads(call["function"]["arguments"])["age"] in (1, 2)
    pieces = streamed(served, tool_choice=how, parallel_tool_calls=False)
    assert [c["function"] for c in calls(pieces)] == [call["function"]]
    assert content(pieces) == ""
    assert pieces[-1]["finish_reason"] == "tool_calls"


NESTED = {  # a schema that refers to itself and to a part of itself, and has properties that are called like keywords
    "type": "object", "required": ["default", "next", "$ref"], "additionalProperties": False,
    "properties": {
        "default": {"$ref": "#/$defs/enum"}, "next": {"anyOf": [{"$ref": "#"}, {"const": None}]},
        "$ref": {"const": "#/x"},
    },
    "$defs": {"enum": {"enum": [7]}},
}  # fmt: skip


def test_a_schema_that_refers_to_itself(llm: LLM) -> None:
    """Its references are to itself also where one of several functions must be called."""
    tools = [Tool.model_validate(TOOL), Tool(type="function", function=Function(name="nest", parameters=NESTED))]
    asked = {"messages": CHAT, "tools": [t.model_dump() for t in tools], "tool_choice": "required"}
    caller = caller_of(ChatRequest.model_validate(asked), None)
    assert caller is not None
    assert caller.grammar is not None
    inner = {"default": 7, "next": None, "$ref": "#/x"}
    call = {"name": "nest", "arguments": {**inner, "next": inner}}
    grammars = Grammars(llm.tokenizer, llm.target.vocab, llm.eos)
    for value, fits in ((call, True), ({**call, "arguments": {**inner, "next": [call]}}, False)):
        text = json.dumps([value], separators=(",", ":"))
        ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
        taken = grammars.guide(caller.grammar, "tools").matcher.try_consume_tokens(ids)
        assert (taken == len(ids)) is fits, text


@pytest.mark.parametrize("how", [NAMED, "required"])
def test_a_call_that_was_cut_short_is_no_call(served: Served, how: Any) -> None:
    """Nobody may act on half of the arguments."""
    made = choice(served, tool_choice=how, max_tokens=4)
    assert made["finish_reason"] == "length"
    assert "tool_calls" not in made["message"]
    assert made["message"]["content"].strip()[0] in "{["
    pieces = streamed(served, tool_choice=how, max_tokens=4)
    assert calls(pieces) == []
    assert content(pieces) == made["message"]["content"]
    assert pieces[-1]["finish_reason"] == "length"


def test_a_response_may_have_a_format_or_be_a_call(caller: Served) -> None:
    """Agents ask for both at every turn; `logit_bias` decides here."""
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "x"}}}
    brace, quote, bracket = (caller.service.llm.encode(text)[-1] for text in ("<", '"', "{"))
    asked = {"response_format": form, "parallel_tool_calls": False, "temperature": 0}
    called = choice(caller, logit_bias={str(brace): 100, str(bracket): 50}, **asked)
    assert called["finish_reason"] == "tool_calls", called
    assert json.loads(called["message"]["tool_calls"][0]["function"]["arguments"])["age"] in (1, 2)
    answered = choice(caller, logit_bias={str(quote): 100}, **asked)
    assert answered["message"]["content"] == '"x"'
    hard = {"type": "function", "function": {"name": "hard", "parameters": {"not": {"type": "string"}}}}
    assert choice(caller, logit_bias={str(quote): 100}, tools=[hard], **asked)["message"]["content"] == '"x"'


def test_calls_have_the_models_own_tags(llm: LLM) -> None:
    """As tokens, where its vocabulary has them."""
    grammars = Grammars(llm.tokenizer, llm.target.vocab, llm.eos)
    calls = Calls("<|user|>", "<|end-of-call|>", {"const": 1})
    guide = grammars.guide(grammars.of_format(ResponseFormat(type="json_object"), calls) or "", "response_format")
    for mark, taken in (("<|user|>", True), ("<|assistant|>", False)):
        ids = llm.tokenizer(f"{mark}1<|end-of-call|>", add_special_tokens=False)["input_ids"]
        assert (guide.fork().matcher.try_consume_tokens(ids) == len(ids)) is taken


def test_one_call_where_parallel_calls_are_off(caller: Served) -> None:
    """Also where the model calls in its own words."""
    said = {"grammar": f"start: {json.dumps(CALL + CALL)}"}
    both = choice(caller, structured_outputs=said)
    assert len(both["message"]["tool_calls"]) == 2
    one = choice(caller, structured_outputs=said, parallel_tool_calls=False)
    assert [c["function"] for c in one["message"]["tool_calls"]] == [both["message"]["tool_calls"][0]["function"]]
    assert (one["message"]["content"], one["finish_reason"]) == (None, "tool_calls")
    pieces = streamed(caller, structured_outputs=said, parallel_tool_calls=False)
    assert [c["function"] for c in calls(pieces)] == [c["function"] for c in one["message"]["tool_calls"]]


def test_complete_calls_of_a_truncated_text_keep_its_finish_reason(caller: Served) -> None:
    """The call is there, and `length` says that more might have come."""
    said = {"grammar": f"start: {json.dumps(CALL)} /[a-z ]+/"}
    made = choice(caller, structured_outputs=said, max_tokens=60)
    assert made["message"]["tool_calls"][0]["function"]["arguments"] == '{"age": 2}'
    assert made["finish_reason"] == "length"
    pieces = streamed(caller, structured_outputs=said, max_tokens=60)
    assert calls(pieces)[0]["function"]["arguments"] == '{"age": 2}'
    assert content(pieces) == made["message"]["content"]
    assert pieces[-1]["finish_reason"] == "length"


def test_calls_in_the_models_own_words() -> None:
    text = 'Well.\n<tool_call>\n{"name": "greet", "arguments": {"age": 3}}\n</tool_call>'
    said, (call,) = Caller("auto").split(text)
    assert said == "Well."
    assert call["function"] == {"name": "greet", "arguments": '{"age": 3}'}
    assert Caller("auto").split("no call") == ("no call", [])
    assert Caller("auto").split("<tool_call>{broken}</tool_call>") == ("<tool_call>{broken}</tool_call>", [])
    broken = '<tool_call>{"name": "a" "arguments": {}}</tool_call>'
    assert Caller("auto").split(broken + CALL) == (broken + CALL, [])
    cut = '<tool_call>{"' * 20_000 + "</tool_call>"
    assert Caller("auto").split(cut) == (cut, [])
    assert Caller("named", "greet").split('{"age": ') == ('{"age": ', [])
    assert Caller("named", "greet").split("[" * 100_000) == ("[" * 100_000, [])


@pytest.mark.parametrize(
    ("made", "arguments"),
    [
        ('{"name": "greet", "parameters": {"age": 3}}', '{"age": 3}'),
        (r'{"name": "greet", "arguments": "{\"age\": 3}"}', '{"age": 3}'),
        ('{"name": "greet"}', "{}"),
        ('{"name": "greet", "input": {"age": 3}}', None),
        ('{"name": "greet", "arguments": ""}', "{}"),
        ('{"name": "greet", "id": "1"}', "{}"),
        ('{"name": "greet", "arguments": "three"}', None),
        ('{"name": "greet", "arguments": "5"}', None),
        (r'{"name": "greet", "arguments": "{\"age\": NaN}"}', None),
    ],
)
def test_other_ways_to_write_arguments(made: str, arguments: str | None) -> None:
    text = f"<tool_call>{made}</tool_call>"
    content, found = Caller("auto").split(text)
    assert [call["function"]["arguments"] for call in found] == ([] if arguments is None else [arguments])
    assert content == (text if arguments is None else None)


@pytest.mark.parametrize(
    "call",
    [
        r'{"name": "greet", "arguments": {"age": "\ud83d"}}',
        r'{"name": "\ud83d", "arguments": {}}',
        '{"name": "greet", "arguments": {"age": 1e999}}',
        '{"name": "greet", "arguments": {"age": NaN}}',
    ],
)
def test_what_cannot_be_sent_as_json_is_content(call: str) -> None:
    """Half of a surrogate pair, and numbers that JSON has not."""
    text = f"<tool_call>{call}</tool_call>"
    assert Caller("auto").split(text) == (text, [])
    if "NaN" not in call:
        assert Caller("required").split(f"[{call}]") == (f"[{call}]", [])
    assert Caller("named", "greet").split('{"age": 1e999}')[1][0]["function"]["arguments"] == '{"age": 1e999}'


@pytest.mark.parametrize(
    "said", ["</tool_call>", "} </tool_call>", '"}\n</tool_call>', "<tool_call>{", "\\", '\\"}</tool_call>', CALL]
)
def test_a_string_argument_may_hold_what_ends_a_call(said: str) -> None:
    text = f'Well. <tool_call>{{"name": "greet", "arguments": {json.dumps({"words": said})}}}</tool_call>'
    content, made = Caller("auto").split(text + "\n" + text)
    assert [json.loads(call["function"]["arguments"]) for call in made] == [{"words": said}] * 2
    assert content == "Well.\nWell."
    full, cut = CALL, text[: text.index("}}")]  # a call that was cut short after it takes none with it
    content, made = Caller("auto").split(full + cut)
    assert [call["function"]["arguments"] for call in made] == ['{"age": 2}']
    assert content == cut


@pytest.mark.parametrize(
    "text", ["plain", " a < b <tool", f"Well. \n{CALL}", f"{CALL}\n{CALL} and\n", f"<tool_call>x {CALL} end \n", " \n"]
)
def test_text_sent_early_is_a_prefix_of_the_content(text: str) -> None:
    caller = Caller("auto")
    full = caller.split(text)[0] or ""
    ready = [caller.ready(text[:i]) for i in range(len(text) + 1)]
    assert all(full.startswith(early) for early in ready)
    assert all(len(a) <= len(b) for a, b in pairwise(ready))
    begins = text.find("<tool_call>")
    assert ready[-1] == (text.removesuffix("<tool") if begins < 0 else text[:begins]).rstrip()


def test_a_stream_with_auto_sends_text_as_it_comes(caller: Served) -> None:
    """Without a call it is the stream of the same chat without tools (whose template shows none); with one, all that
    stands before it comes in pieces."""
    pieces = streamed(caller, max_tokens=40)
    said = [c for c in pieces if c["delta"].get("content")]
    assert len(said) > 3
    assert content(pieces) == choice(caller, max_tokens=40)["message"]["content"]
    before = "Once upon a time, there was a little dog. " * 3
    forced = {"choice": [before + CALL]}
    pieces = streamed(caller, structured_outputs=forced)
    kinds = ["call" if "tool_calls" in c["delta"] else "text" for c in pieces if len(c["delta"]) and c["delta"] != {}]
    assert kinds.index("call") > 3
    assert content(pieces) == before.rstrip() == choice(caller, structured_outputs=forced)["message"]["content"]
    assert json.loads(calls(pieces)[0]["function"]["arguments"]) == {"age": 2}
    assert pieces[-1]["finish_reason"] == "tool_calls"


def test_a_stream_that_may_not_call_is_a_stream(served: Served) -> None:
    """`none` is the chat without tools, piece by piece."""
    plain = streamed(served, tools=None, max_tokens=24)
    none = streamed(served, tool_choice="none", max_tokens=24)
    assert sum(bool(c["delta"].get("content")) for c in none) > 3
    assert content(none) == content(plain)


@pytest.mark.parametrize("how", [NAMED, "required", "auto", "none"])
def test_a_stream_with_tools_has_every_requested_field(caller: Served, how: Any) -> None:
    options = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "outrider": {"rounds": True}}
    options["parallel_tool_calls"] = False
    if how == "auto":
        options["structured_outputs"] = {"choice": ["Well. " + CALL]}
    if how == "none":
        options["max_tokens"] = 20
    full, pieces = choice(caller, tool_choice=how, **options), streamed(caller, tool_choice=how, **options)
    assert [t for c in pieces for t in c.get("token_ids", [])] == full["token_ids"]
    logprobs = [entry for c in pieces if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert [entry["token"] for entry in logprobs] == [entry["token"] for entry in full["logprobs"]["content"]]
    assert len(logprobs) == len(full["token_ids"])

    def text(rounds: list[Any]) -> str:
        return "".join(part for r in rounds for part, _ in r["text"])

    rounds = [r for c in pieces for r in c.get("outrider", {}).get("rounds", [])]
    assert text(rounds) == text(full["outrider"]["rounds"]) != ""


@pytest.mark.parametrize(
    ("template", "taken"),
    [
        (TEMPLATE, True),
        ("{{- '<tool_call>\\n' }}\n{{- '{\"name\": ' }}", True),
        ({"default": "{{ messages }}", "tool_use": "<tool_call>\n{'name'"}, True),
        ("{% if message.tool_calls %}[TOOL_CALLS]{% endif %}", False),
        ("{% for tool_call in message.tool_calls %}{{ tool_call.function.name }}{% endfor %}", False),
        ("'<tool_call>\\n<function=' + tool_call.name + '>'", False),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", False),
        (None, False),
    ],
)
def test_auto_needs_a_template_that_writes_calls_as_we_read_them(template: Any, taken: bool) -> None:
    request = ChatRequest.model_validate({"messages": CHAT, "tools": [TOOL]})
    if taken:
        made = caller_of(request, template)
        assert made is not None
        assert (made.kind, made.grammar) == ("auto", None)
    else:
        with pytest.raises(Refusal, match="tool_choice 'required'"):
            caller_of(request, template)


def test_calls_of_an_earlier_turn_are_written_as_the_model_wrote_them(caller: Served) -> None:
    """OpenAI's clients send arguments as JSON in a string."""

    def prompt(arguments: Any, status: int = 200) -> str:
        call = {"id": "call_1", "type": "function", "function": {"name": "greet", "arguments": arguments}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        made = caller.post("/tokenize", {"messages": [*CHAT, turn]}, status)
        if status != 200:
            return str(made["error"]["message"])
        return str(caller.post("/detokenize", {"tokens": made["tokens"]})["prompt"])

    assert CALL in prompt('{"age": 2}')
    assert prompt({"age": 2}) == prompt('{"age": 2}')
    assert '"arguments": {}' in prompt("")
    assert "not JSON" in prompt('{"age": ', 400)
    assert "not JSON" in prompt("[" * 100_000, 400)
