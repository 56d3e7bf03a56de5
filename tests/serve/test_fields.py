"""Every field of a request has its effect: answers are those of the offline engine with the same options."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from serve_world import Serve, Served, templated

from outrider.llm import LLM
from outrider.serve.protocol import ChatRequest, CompletionRequest, Refusal, parse
from outrider.serve.start import service_of

pytestmark = pytest.mark.trained
CHAT = [{"role": "user", "content": "Tell me a story about a dog."}]
PROMPT = "Once upon a time there was a dog. The dog was big and the dog was old."
# One number for as many as can take it: two fields that changed places would not go unseen.
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4},
    {"top_p": 0.5},
    {"min_p": 0.5},
    {"top_k": 5},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.7, "temperature": 0.2},
    {"frequency_penalty": 1.7, "temperature": 0.2},
    {"logit_bias": {"300": 8.0, "301": -100.0}},
]


@pytest.fixture(scope="module")
def offline(llm: LLM) -> list[str]:
    """The texts of all samplings."""
    texts = []
    for fields in SAMPLINGS:
        own = {**fields, "logit_bias": {int(k): v for k, v in fields.get("logit_bias", {}).items()}}
        made = llm.generate(PROMPT, max_new_tokens=32, seed=9, **{"temperature": 1.1, **own})
        texts.append(made[0].text)
    return texts


def test_null_counts_as_absent_at_every_depth(served: Served) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": None, "parameters": None}}
    options = {"include_usage": None, "continuous_usage_stats": None}
    body = {"messages": CHAT, "max_tokens": 2, "seed": None, "tools": [tool], "tool_choice": "none"}
    made = served.post("/v1/chat/completions", {**body, "stream": False, "stream_options": options})
    assert made["usage"]["completion_tokens"] == 2


def test_a_prompt_that_does_not_fit_names_its_field(served: Served) -> None:
    error = served.post("/v1/completions", {"prompt": [5] * 5000}, 400)["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_the_first_drafter_is_the_default(llm: LLM, loaded: Any) -> None:
    """`none` first: requests draft only where they name a drafter."""
    for names, default in ((("lookup", "none"), "lookup"), (("none", "lookup"), ""), (("none",), "")):
        one = service_of(llm, {name: loaded.get(name, llm.drafter) for name in names}, "demo")
        assert one.scheduler.fleet.default == default
        assert set(one.scheduler.fleet.drafters) == {*names} - {"none"}


def test_the_samplings_differ(offline: list[str]) -> None:
    """Else the next test could not tell one field from another."""
    assert len(set(offline)) == len(SAMPLINGS)


@pytest.mark.parametrize("i", range(len(SAMPLINGS)), ids=lambda i: next(iter(SAMPLINGS[i]), "none"))
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_every_sampling_field_has_its_effect(served: Served, llm: LLM, offline: list[str], i: int, chat: bool) -> None:
    body = {"max_tokens": 32, "seed": 9, "temperature": 1.1, **SAMPLINGS[i]}
    if not chat:
        made = served.post("/v1/completions", {**body, "prompt": PROMPT})["choices"][0]
        assert made["text"] == offline[i]
        return
    plain = served.post("/v1/chat/completions", {**body, "messages": CHAT, "return_token_ids": True})
    again = {**body, "prompt": plain["prompt_token_ids"], "return_token_ids": True}
    assert plain["choices"][0]["token_ids"] == served.post("/v1/completions", again)["choices"][0]["token_ids"]


def test_all_sampling_fields_at_once(served: Served, llm: LLM) -> None:
    fields = {
        "temperature": 1.3, "top_p": 0.9, "min_p": 0.02, "top_k": 40, "repetition_penalty": 1.2,
        "presence_penalty": -0.5, "frequency_penalty": 0.3,
    }  # fmt: skip
    expected = llm.generate(PROMPT, max_new_tokens=32, seed=2, **fields)[0].text
    made = served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 32, "seed": 2, **fields})
    assert made["choices"][0]["text"] == expected


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_how_long_a_chat_may_be(served: Served, name: str) -> None:
    made = served.post("/v1/chat/completions", {"messages": CHAT, "temperature": 0, name: 7})
    assert made["usage"]["completion_tokens"] == 7
    both = {"messages": CHAT, "max_tokens": 7, "max_completion_tokens": 7}
    assert served.post("/v1/chat/completions", both, 400)["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("body", "template"),
    [
        ({}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
    ],
    ids=str,
)
def test_how_a_chat_goes_on(served: Served, llm: LLM, body: dict[str, Any], template: dict[str, Any]) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Once upon"}]
    made = served.post(
        "/v1/chat/completions",
        {"messages": messages, "max_tokens": 5, "temperature": 0, "return_token_ids": True, **body},
    )
    prompt = llm.tokenizer.apply_chat_template(messages, return_dict=True, **template)["input_ids"]
    assert made["prompt_token_ids"] == list(prompt)
    assert made["choices"][0]["token_ids"] == llm.generate([list(prompt)], max_new_tokens=5)[0].tokens


def test_what_is_for_the_template_comes_to_it(llm: LLM, loaded: dict[str, Any], start: Serve) -> None:
    tokenizer = templated(llm.tokenizer, "{{ bos_token }}{{ mood }} {{ messages[0].content }}")
    served = start(service_of(replace(llm, tokenizer=tokenizer), loaded, "demo", rows=2, queue=8))
    body = {"messages": CHAT, "max_tokens": 2, "return_token_ids": True, "chat_template_kwargs": {"mood": "sad"}}
    made = served.post("/v1/chat/completions", body)
    assert tokenizer.decode(made["prompt_token_ids"]).endswith("sad " + CHAT[0]["content"])


PERSON = {"type": "object", "properties": {"name": {"enum": ["Ann", "Bo"]}}, "required": ["name"]}
PERSON["additionalProperties"] = False
FORMS: list[dict[str, Any]] = [
    {"structured_outputs": {"json": PERSON}},
    {"structured_outputs": {"json": json.dumps(PERSON)}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
]


@pytest.mark.parametrize("form", FORMS, ids=["object", "text", "format"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_forms_of_a_schema(served: Served, llm: LLM, form: dict[str, Any], path: str) -> None:
    """Without white space, of which JSON allows any amount and the demo model is fond."""
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'outrider[serve]'")
    given: dict[str, Any] = {"messages": CHAT} if "chat" in path else {"prompt": PROMPT}
    spaces = {str(i): -100.0 for i in range(llm.target.vocab) if llm.tokenizer.decode([i]).isspace()}
    choice = served.post(path, {**given, "max_tokens": 60, "seed": 3, "logit_bias": spaces, **form})["choices"][0]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert json.loads(text)["name"] in ("Ann", "Bo")
    assert choice["finish_reason"] == "stop"


def test_any_object(served: Served, llm: LLM) -> None:
    """Closing it is made likely, for the demo model would go on with it."""
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'outrider[serve]'")
    closing = {str(i): 100.0 for i in range(llm.target.vocab) if llm.tokenizer.decode([i]) == "}"}
    assert closing
    body = {"messages": CHAT, "max_tokens": 60, "seed": 3, "logit_bias": closing}
    choice = served.post("/v1/chat/completions", {**body, "response_format": {"type": "json_object"}})["choices"][0]
    assert json.loads(choice["message"]["content"]) == {}
    assert choice["finish_reason"] == "stop"


def test_the_table_of_openais_fields_is_the_code() -> None:
    """Every field of the `openai` package is in the table of the serving page, with what the code does with it."""
    pytest.importorskip("openai", reason="the openai package is not installed")
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as Chats
    from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as Completions

    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([a-z-]+) \| ([a-z-]+) \|", page, re.MULTILINE)
    table = {name: statuses for name, *statuses in rows}
    for i, (kind, theirs) in enumerate(((ChatRequest, Chats), (CompletionRequest, Completions))):
        fields = set(get_type_hints(theirs))
        assert fields <= set(table)
        for name, statuses in table.items():
            assert statuses[i] == (treated(kind, name) if name in fields or statuses[i] != "-" else "-"), name


def treated(kind: Any, name: str) -> str:
    """What happens to a field of a request."""
    if name in kind.model_fields:
        return "honoured"
    body = {"messages": CHAT} if kind is ChatRequest else {"prompt": PROMPT}
    try:
        parse(json.dumps({**body, name: "something"}).encode(), kind)
    except Refusal as refusal:
        return "refused" if refusal.param == name else str(refusal)
    return "ignored"
