"""Text, offsets and logprobs of a model whose tokenizer writes rare characters in bytes and drops a leading space."""

from __future__ import annotations

import json
from typing import Any

import pytest
from made_tokenizers import FALLBACK, made
from serve_world import Serve, Served

from outrider import drafters
from outrider.llm import LLM
from outrider.serve.job import Scored
from outrider.serve.start import service_of
from outrider.serve.texts import Placed, label
from outrider.testing import TableTarget

WRITES = "carriage🚀字 follows\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return made(FALLBACK)


@pytest.fixture(scope="module")
def ids(tokenizer: Any) -> list[int]:
    results = [t for text in ("the", WRITES) for t in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert len(set(results)) == len(results), "the last token alone must say what follows"
    return results


@pytest.fixture(scope="module")
def tiny(tokenizer: Any, ids: list[int], start: Serve) -> Served:
    """A server whose model writes "the", WRITES, "the" and so on, and holds bytes for the second likeliest."""
    target = following(tokenizer, ids)
    llm = LLM(target, tokenizer, drafters.load("lookup", target, tokenizer), budget="16x6")
    return start(service_of(llm, {"lookup": llm.drafter}, "tiny", rows=4, queue=8))


def following(tokenizer: Any, ids: list[int]) -> TableTarget:
    target = TableTarget(len(tokenizer), order=1, seed=3, context=512)
    for token, after in zip(ids, ids[1:] + ids[:1], strict=True):
        target.table[token, after] += 30
        for byte in range(0x80, 0xC0):  # what else may follow is bytes
            target.table[token, tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>")] += 10
    return target


def complete(served: Served, **more: Any) -> Any:
    asked = {"prompt": "the", "temperature": 0, "max_tokens": 24, "return_token_ids": True, **more}
    return served.post("/v1/completions", asked)["choices"][0]


def streamed(served: Served, **more: Any) -> list[Any]:
    body = {"prompt": "the", "temperature": 0, "max_tokens": 24, "stream": True, **more}
    raw = served.send("POST", "/v1/completions", body)[2].decode()
    return [json.loads(line[6:])["choices"][0] for line in raw.split("\n\n") if line.startswith("data: {")]


def test_prompt_and_text_are_one_text(tiny: Served, tokenizer: Any) -> None:
    made = complete(tiny)
    assert made["text"].startswith(" carriage🚀字 follows")
    assert complete(tiny, echo=True)["text"] == "the" + made["text"]
    prompt = tokenizer("the", add_special_tokens=False)["input_ids"]
    assert complete(tiny, prompt=prompt, echo=True)["text"] == "the" + made["text"]
    assert "the" + made["text"] == tokenizer.decode(prompt + made["token_ids"])
    assert "".join(c["text"] for c in streamed(tiny)) == made["text"]
    shown = tiny.post("/detokenize", {"tokens": [tokenizer.bos_token_id, *prompt, *made["token_ids"]]})["prompt"]
    assert shown == "<s> the" + made["text"]


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_do_not_drift_behind_characters_of_several_tokens(tiny: Served, echo: bool) -> None:
    made = complete(tiny, logprobs=0, echo=echo)
    scores = made["logprobs"]
    assert sum(token.startswith("bytes:") for token in scores["tokens"]) > 8, "no character has several tokens"
    for token, place in zip(scores["tokens"], scores["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert made["text"].startswith(token, place)
    pieces = [c["logprobs"] for c in streamed(tiny, logprobs=0, echo=echo) if c["logprobs"]]
    for name in ("tokens", "text_offset"):
        assert [value for p in pieces for value in p[name]] == scores[name]


def test_tokens_of_equal_text_are_distinguished(tiny: Served) -> None:
    """Halves of characters by their bytes; and the token that was written is always among them."""
    for k in (0, 1, 5):
        scores = complete(tiny, logprobs=k)["logprobs"]
        for token, logprob, report in zip(
            scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True
        ):
            assert report[token] == logprob
            assert max(k, 1) <= len(report) <= k + 1
            assert list(report.values())[:k] == sorted(list(report.values())[:k], reverse=True)
    assert any(sum(name.startswith("bytes:") for name in report) > 2 for report in scores["top_logprobs"])


def test_a_sampled_token_that_is_not_likely_is_there_too(tiny: Served) -> None:
    scores = complete(tiny, logprobs=1, temperature=5.0, seed=1)["logprobs"]
    assert any(len(report) == 2 for report in scores["top_logprobs"])
    for token, logprob, report in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True):
        assert report[token] == logprob


def test_names_of_tokens() -> None:
    assert label("é".encode()) == "é"
    assert label("é".encode()[:1]) == "bytes:\\xc3"
    assert label(b"") == ""
    same = Placed(Scored(7, -3.0, ((5, -0.5), (6, -1.0), (7, -3.0))), b"a", (b"a", b"a", b"a"), 0)
    assert same.alternatives == {"token_id:5": -0.5, "token_id:6": -1.0, "a": -3.0}
    other = Placed(Scored(9, -9.0, ((5, -0.5), (6, -1.0))), b"z", (b"a", b"a"), 0)
    assert other.alternatives == {"a": -0.5, "token_id:6": -1.0, "z": -9.0}


def test_bytes_of_a_chats_tokens_are_the_bytes_of_its_text(tiny: Served, tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}"
    body = {"messages": [{"role": "user", "content": "the"}], "temperature": 0, "max_tokens": 24, "logprobs": True}
    made = tiny.post("/v1/chat/completions", {**body, "top_logprobs": 2})["choices"][0]
    spelt = [bytes(entry["bytes"]) for entry in made["logprobs"]["content"]]
    assert b"".join(spelt).decode(errors="replace") == made["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in made["logprobs"]["content"])


@pytest.mark.parametrize("least", [0, 3, 8, 14, 20])
def test_a_stop_string_within_the_first_tokens_does_not_end_the_text(tiny: Served, least: int) -> None:
    """As in vLLM; drafted or not, streamed or not."""
    free = complete(tiny, max_tokens=60)
    stops = [" carriage", "🚀", "字", "follows"]
    more = {"stop": stops, "min_tokens": least, "max_tokens": 60}
    made = complete(tiny, **more)
    assert len(made["token_ids"]) > least
    assert made["token_ids"] == free["token_ids"][: len(made["token_ids"])]
    assert made["finish_reason"] == "stop"
    assert free["text"].startswith(tuple(made["text"] + s for s in stops))
    assert complete(tiny, **more, outrider={"speculate": False})["token_ids"] == made["token_ids"]
    assert "".join(c["text"] for c in streamed(tiny, **more)) == made["text"]
    assert (made["text"] == "") == (least == 0)
