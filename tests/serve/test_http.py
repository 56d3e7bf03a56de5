"""The interface: OpenAI's own client against a real server, and bodies that are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serve_world import Serve, Served

from outrider.llm import LLM
from outrider.serve.start import service_of

pytestmark = pytest.mark.trained
CHAT = [{"role": "user", "content": "Tell me a story about a dog."}]


@pytest.fixture(scope="module")
def client(served: Served) -> Any:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)


def complete(served: Served, **more: Any) -> Any:
    return served.post("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12, **more})


def test_completion_is_the_offline_text(served: Served, client: Any, llm: LLM) -> None:
    made = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=20, temperature=0.8, seed=5)
    expected = llm.generate("Once upon a time", max_new_tokens=20, temperature=0.8, seed=5)[0]
    assert made.choices[0].text == expected.text
    assert made.choices[0].finish_reason == "length"
    assert made.usage.completion_tokens == 20
    assert made.usage.prompt_tokens == expected.usage.prompt_tokens
    assert made.system_fingerprint.startswith("fp_")


def test_a_streamed_chat_equals_one_in_one_piece(client: Any, llm: LLM) -> None:
    full = client.chat.completions.create(model="demo", messages=CHAT, max_tokens=24, temperature=0, seed=1)
    assert full.choices[0].message.content == llm.generate(CHAT, max_new_tokens=24)[0].text
    stream = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=24, temperature=0, seed=1, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == full.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == full.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == full.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_every_chunk_has_usage_where_the_option_is_set(client: Any) -> None:
    """guidellm requests it."""
    stream = client.completions.create(
        model="demo", prompt="Once upon a time", max_tokens=20, temperature=0, n=2, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    used = [chunk.usage for chunk in stream]
    counts = [u.completion_tokens for u in used]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == 40
    assert all(u.total_tokens == u.prompt_tokens + u.completion_tokens for u in used)
    assert len({u.prompt_tokens for u in used}) == 1


def test_samples_are_those_of_their_seeds(client: Any, llm: LLM) -> None:
    made = client.completions.create(model="demo", prompt="The", max_tokens=8, temperature=1, seed=40, n=3)
    expected = llm.generate("The", max_new_tokens=8, temperature=1.0, seed=40, n=3)
    assert [c.text for c in made.choices] == [o.text for o in expected]


def test_several_prompts_tokens_and_echo(served: Served, llm: LLM) -> None:
    ids = llm.encode("Once upon")
    made = complete(served, prompt=["Once upon a time", "The cat"], echo=True, n=2)
    assert [c["text"].startswith(("Once upon a time", "The cat")) for c in made["choices"]] == [True] * 4
    assert [c["index"] for c in made["choices"]] == [0, 1, 2, 3]
    one = complete(served, prompt=ids, return_token_ids=True)["choices"][0]
    assert one["token_ids"] == llm.generate([ids], max_new_tokens=12)[0].tokens
    assert complete(served, prompt=[ids, ids])["choices"][1]["text"] == one["text"]


def test_speculation_changes_no_text(served: Served) -> None:
    ways: list[Any] = [
        {"speculate": False}, {"drafter": "lookup"}, {"drafter": "eagle", "budget": 3}, {"budget": 0}, {"rounds": True},
    ]  # fmt: skip
    texts = {complete(served, seed=3, temperature=0.9, outrider=way)["choices"][0]["text"] for way in ways}
    assert len(texts) == 1
    plain = complete(served, outrider={"speculate": False})
    assert plain["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_rounds_contain_their_trees(served: Served) -> None:
    made = complete(served, max_tokens=24, outrider={"rounds": True})
    choice, rounds = made["choices"][0], made["choices"][0]["outrider"]["rounds"]
    assert "".join(text for r in rounds for text, _ in r["text"]) == choice["text"]
    trees = [r["tree"] for r in rounds if r["tree"]]
    assert len(trees) == made["metrics"]["speculative_decoding"]["num_spec_steps"]
    accepted = sum(r["accepted"] for r in rounds)
    assert accepted == made["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    for tree in trees:
        assert tree["path"][0] == 0
        assert all(tree["parents"][b] == a for a, b in zip(tree["path"], tree["path"][1:], strict=False))


def test_stop_strings_across_a_round(served: Served) -> None:
    text = complete(served, max_tokens=40)["choices"][0]["text"]
    stop = text[17:24]
    made = complete(served, max_tokens=40, stop=[stop])["choices"][0]
    assert made["text"] == text[: text.index(stop)]
    assert made["finish_reason"] == "stop"
    _, _, streamed = served.send(
        "POST", "/v1/completions",
        {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 40, "stop": stop, "stream": True},
    )  # fmt: skip
    events = [json.loads(line[6:]) for line in streamed.decode().split("\n\n") if line.startswith("data: {")]
    assert "".join(e["choices"][0]["text"] for e in events) == made["text"]
    assert streamed.endswith(b"data: [DONE]\n\n")


def test_stop_tokens_min_tokens_and_ignored_ends(served: Served) -> None:
    ids = complete(served, return_token_ids=True)["choices"][0]["token_ids"]
    made = complete(served, stop_token_ids=[ids[4]], return_token_ids=True)["choices"][0]
    first = ids.index(ids[4])
    assert made["token_ids"] == ids[: first + 1]
    assert made["finish_reason"] == "stop"
    longer = complete(served, stop_token_ids=[ids[4]], min_tokens=7, return_token_ids=True)["choices"][0]
    assert ids[4] not in longer["token_ids"][:7]
    assert len(longer["token_ids"]) >= 7
    assert len(complete(served, ignore_eos=True, max_tokens=60, return_token_ids=True)["choices"][0]["token_ids"]) == 60


def test_logprobs_are_the_models_own(served: Served, client: Any, llm: LLM) -> None:
    import torch

    made = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=10, temperature=0.8, seed=2, logprobs=True, top_logprobs=3,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    content, ids = made.choices[0].logprobs.content, made.choices[0].token_ids
    prompt = llm.encode(CHAT)
    with torch.no_grad():
        logits = llm.target.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]  # type: ignore[attr-defined]
    logs = logits.float().log_softmax(-1)
    assert len(content) == len(ids)
    for entry, token, row in zip(content, ids, logs, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(float(row.max()), abs=1e-3)
    text = b"".join(bytes(e.bytes) for e in content if e.token != "<|end|>").decode()
    assert text == made.choices[0].message.content
    old = complete(served, logprobs=2)["choices"][0]["logprobs"]
    assert len(old["tokens"]) == len(old["token_logprobs"]) == len(old["top_logprobs"]) == 12
    assert old["text_offset"][1] == len(old["tokens"][0])


def test_offsets_of_a_stream_equal_those_in_one_piece(served: Served) -> None:
    """They count the tokens' own texts, though a text may be held back while a stop string might begin in it."""
    more = {"max_tokens": 24, "logprobs": 0, "stop": [" zebra", ", and then the"], "echo": False}
    full = complete(served, **more)["choices"][0]["logprobs"]
    body = {"prompt": "Once upon a time", "temperature": 0, "stream": True, **more}
    streamed = served.send("POST", "/v1/completions", body)[2].decode()
    events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    pieces = [scored for e in events if (scored := e["choices"][0]["logprobs"])]
    assert len(pieces) > 2
    assert [offset for p in pieces for offset in p["text_offset"]] == full["text_offset"]
    assert [token for p in pieces for token in p["tokens"]] == full["tokens"]


def test_tokens_and_text(served: Served, llm: LLM) -> None:
    tokens = served.post("/tokenize", {"prompt": "Once upon"})["tokens"]
    assert tokens == llm.encode("Once upon")
    assert "Once upon" in served.post("/detokenize", {"tokens": tokens})["prompt"]
    assert served.post("/tokenize", {"messages": CHAT})["tokens"] == llm.encode(CHAT)


def test_the_endpoints_exist(served: Served, client: Any, llm: LLM) -> None:
    model = client.models.list().data[0]
    assert model.id == "demo"
    assert client.models.retrieve("demo").id == "demo"
    report = served.get("/v1/models")["data"][0]["outrider"]
    assert report["drafters"] == ["eagle", "lookup"]
    assert (report["exact"], report["precision"]) == (llm.target.exact, llm.target.arithmetic)
    for path in ("/health", "/ready", "/version", "/load", "/openapi.json"):
        assert served.get(path)
    _, headers, page = served.send("GET", "/metrics")
    assert b'vllm:generation_tokens_total{engine="0",model_name="demo"}' in page
    assert b"vllm:spec_decode_num_accepted_tokens_total" in page
    assert headers["content-type"].startswith("text/plain")


WRONG: list[tuple[dict[str, Any], str | None]] = [
    ({"audio": {"voice": "x"}}, "audio"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"suffix": "x"}, "suffix"),
    ({"store": True}, "store"),
    ({"best_of": 3}, "best_of"),
    ({"temprature": 1}, "temprature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 100}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 100000}, "max_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop_token_ids": [2, 999999]}, "stop_token_ids"),
    ({"stop_token_ids": [4096], "min_tokens": 1}, "stop_token_ids"),
    ({"verbosity": "low"}, "verbosity"),
    ({"stream_options": {"continuous_usage_stats": 2}}, "stream_options.continuous_usage_stats"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, None),
    ({"prompt": []}, "prompt"),
    ({"prompt": [999999]}, None),
    ({"prompt": None}, "prompt"),
    ({"min_tokens": 50}, "min_tokens"),
    ({"outrider": {"drafter": "ghost"}}, "outrider.drafter"),
    ({"outrider": {"speed": 9}}, "outrider.speed"),
]


@pytest.mark.parametrize(("more", "param"), WRONG, ids=lambda x: json.dumps(x)[:30])
def test_refused_by_name(served: Served, more: dict[str, Any], param: str | None) -> None:
    body = {"prompt": "Once", "max_tokens": 4, **more}
    error = served.post("/v1/completions", body, 400)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


def test_neutral_values_are_taken(served: Served) -> None:
    complete(served, store=False, best_of=1, user="me", metadata={"a": "b"}, suffix=None, logit_bias={}, stop=None)
    complete(served, prompt_cache_retention="24h", stream_interval=4, verbosity=None, stop_token_ids=[4095])
    complete(served, stream_options={"include_usage": False, "continuous_usage_stats": False})


def test_other_refusals(served: Served) -> None:
    assert served.post("/v1/completions", {"prompt": "x", "model": "gpt"}, 404)["error"]["code"] == "model_not_found"
    chat = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    assert "image_url" in served.post("/v1/chat/completions", chat, 400)["error"]["message"]
    system = {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}
    assert "template" in served.post("/v1/chat/completions", system, 400)["error"]["message"]
    long = {"prompt": [5] * 5000, "max_tokens": 4}
    assert served.post("/v1/completions", long, 400)["error"]["code"] == "context_length_exceeded"
    assert served.send("GET", "/v1/completions")[0] == 405
    assert served.get("/nothing", 404)["error"]["message"] == "Not Found"
    kwargs = {"messages": CHAT, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    assert "chat_template" in served.post("/v1/chat/completions", kwargs, 400)["error"]["message"]


def test_the_key(llm: LLM, loaded: Any, start: Serve) -> None:
    served = start(service_of(llm, loaded, "demo"), key="s3cret")
    assert served.send("GET", "/v1/models", headers={"authorization": "Bearer wrong"})[0] == 401
    assert served.send("GET", "/v1/models", headers={"authorization": ""})[0] == 401
    assert served.send("GET", "/v1/models")[0] == 200
    for path in ("/health", "/ready", "/"):
        assert served.send("GET", path, headers={"authorization": ""})[0] == 200
    assert served.send("GET", "/metrics", headers={"authorization": ""})[0] == 401


def test_no_other_sites_page_reaches_it(served: Served) -> None:
    assert served.send("GET", "/v1/models", headers={"host": "evil.example"})[0] == 403
    assert served.send("POST", "/v1/completions", b'{"prompt":"x"}', {"content-type": "text/plain"})[0] == 415


def test_the_dashboard_uses_metrics_that_exist(served: Served) -> None:
    import re
    from pathlib import Path

    complete(served)
    dashboard = (Path(__file__).resolve().parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8")
    asked = set(re.findall(r"(?:vllm|outrider):\w+", dashboard))
    page = served.send("GET", "/metrics")[2].decode()
    assert len(asked) > 12
    assert not {name for name in asked if f"\n{name}" not in page and f" {name.removesuffix('_bucket')} " not in page}
