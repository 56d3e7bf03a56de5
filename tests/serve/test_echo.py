"""`echo` with `logprobs`: the prompt's own tokens, scored by the distribution that generates text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from serve_world import Serve, Served
from transformers import T5Config, T5ForConditionalGeneration

from outrider.backends.torch import SeqTarget
from outrider.llm import LLM
from outrider.serve.scoring import STEP, Scoring
from outrider.serve.service import Limits
from outrider.serve.start import service_of
from outrider.serve.texts import label, places

pytestmark = pytest.mark.trained
STORY = (
    "Once upon a time there was a little girl who lived in a house by the sea. Every day she went down to the shore "
    "and looked for shells. One day she found a big one."
)
ASKED = {"prompt": STORY, "temperature": 0, "max_tokens": 8, "echo": True, "logprobs": 3}


def complete(served: Served, status: int = 200, **more: Any) -> Any:
    return served.post("/v1/completions", {**ASKED, **more}, status)


def stock(llm: LLM, ids: list[int]) -> torch.Tensor:
    """The distribution of every token but the first, [n - 1, v], by one pass of the stock model."""
    with torch.no_grad():
        logits = llm.target.model(torch.tensor([ids])).logits[0, :-1]  # type: ignore[attr-defined]
    return logits.float().log_softmax(-1)


def names(served: Served, ids: list[int]) -> list[str]:
    return [label(served.service.llm.detokenizer.name(token)) for token in ids]


def test_logprobs_are_those_of_the_stock_model(served: Served, llm: LLM) -> None:
    """Prompt and text, in float32; several passes' worth of tokens."""
    assert llm.target.precision == "float32"
    made = complete(served, return_token_ids=True)["choices"][0]
    prompt, written, scores = made["prompt_token_ids"], made["token_ids"], made["logprobs"]
    ids = prompt + written
    assert len(prompt) > STEP + 1, "one pass would do: this test proves less than it says"
    assert made["text"] == STORY + llm.decode(written)
    assert scores["tokens"] == names(served, ids)
    assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
    distributions = stock(llm, ids)
    wanted = distributions.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert scores["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-3)
    assert min(wanted) < -1, "all of it was certain: nothing is compared"
    for top, distribution in zip(scores["top_logprobs"][1:], distributions, strict=True):
        best = distribution.topk(3)
        assert list(top.values())[:3] == pytest.approx(best.values.tolist(), abs=1e-3)
        if float(best.values[0] - best.values[1]) > 1e-2:
            assert next(iter(top)) == names(served, [int(best.indices[0])])[0]


def test_a_token_has_the_logprob_that_it_had_when_it_was_written(served: Served, llm: LLM) -> None:
    """Bit for bit where the target's passes are exact: scoring a text that was written here gives its logprobs."""
    prompt = llm.encode(STORY)
    made = complete(served, echo=False, max_tokens=50, temperature=0.8, seed=3, ignore_eos=True, return_token_ids=True)
    written = made["choices"][0]
    again = complete(served, prompt=prompt + written["token_ids"], max_tokens=0)["choices"][0]["logprobs"]
    then, now = written["logprobs"]["token_logprobs"], again["token_logprobs"][len(prompt) :]
    if llm.target.exact == "bits":
        assert now == then
    assert now == pytest.approx(then, abs=1e-3)


def test_only_the_prompt(served: Served, llm: LLM) -> None:
    full = complete(served, max_tokens=8)["choices"][0]
    made = complete(served, max_tokens=0, n=2)
    n = len(llm.encode(STORY))
    assert [c["text"] for c in made["choices"]] == [STORY] * 2
    assert [c["finish_reason"] for c in made["choices"]] == ["length"] * 2
    for choice in made["choices"]:
        assert choice["logprobs"] == {name: values[:n] for name, values in full["logprobs"].items()}
    assert made["usage"]["prompt_tokens"] == made["usage"]["total_tokens"] == n
    assert made["usage"]["completion_tokens"] == 0
    bare = complete(served, max_tokens=0, logprobs=None)["choices"][0]
    assert (bare["text"], bare["logprobs"]) == (STORY, None)
    one = complete(served, max_tokens=0, prompt=[5])["choices"][0]["logprobs"]
    assert (len(one["tokens"]), one["token_logprobs"], one["top_logprobs"]) == (1, [None], [None])
    assert served.idle()


def test_no_text_changes_and_copied_beginnings_stay(llm: LLM, loaded: Any, start: Serve) -> None:
    """Scores need every token of the prompt; the text may still go on from what another has read."""
    served = start(service_of(llm, loaded, "demo", rows=2))
    distribution = {"temperature": 0.9, "seed": 6, "max_tokens": 24, "logprobs": 1}
    plain = complete(served, **distribution, echo=False)["choices"][0]
    made = complete(served, **distribution)
    assert made["choices"][0]["text"] == STORY + plain["text"]
    assert made["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    fresh = start(service_of(llm, loaded, "demo", rows=2, prefix_cache=0))
    same(complete(fresh, **distribution)["choices"][0]["logprobs"], made["choices"][0]["logprobs"])


def same(results: dict[str, list[Any]], other: dict[str, list[Any]]) -> None:
    """The same tokens at the same places, and logprobs that are equal up to rounding: how much is drafted depends on
    the clock, and a pass over more nodes rounds otherwise where bits are not promised."""
    assert results.keys() == other.keys()
    for name, values in results.items():
        if name == "token_logprobs":
            assert values == pytest.approx(other[name], abs=1e-4, nan_ok=False)
        elif name == "top_logprobs":
            for mine, theirs in zip(values, other[name], strict=True):
                assert mine == (theirs if theirs is None else pytest.approx(theirs, abs=1e-4))
        else:
            assert values == other[name]


def streamed(served: Served, **more: Any) -> list[dict[str, Any]]:
    raw = served.send("POST", "/v1/completions", {**ASKED, **more, "stream": True})[2].decode()
    assert raw.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in raw.split("\n\n") if line.startswith("data: {")]


@pytest.mark.parametrize("limit", [0, 12])
def test_streams_say_the_same_of_several_prompts_and_samples(served: Served, llm: LLM, limit: int) -> None:
    prompts = [STORY, "The cat", "Ünïcödé 🐕 dogs"]
    more = {"prompt": prompts, "n": 2, "max_tokens": limit, "temperature": 0.9, "seed": 8}
    full = complete(served, **more)["choices"]
    events = streamed(served, **more)
    assert [c["index"] for c in full] == list(range(6))
    for choice in full:
        own = [e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert own[0]["text"] == prompts[choice["index"] // 2]
        assert own[0]["logprobs"]["token_logprobs"][0] is None
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        parts = [c["logprobs"] for c in own if c["logprobs"]]
        same({name: [v for p in parts for v in p[name]] for name in choice["logprobs"]}, choice["logprobs"])
        assert None not in choice["logprobs"]["token_logprobs"][1:]
    assert served.idle()


def test_offsets_are_places_in_the_text(served: Served, llm: LLM) -> None:
    text = "The dog 🐕 said: ünder."
    made = complete(served, prompt=text, max_tokens=3, logprobs=0)["choices"][0]
    ids, offsets = llm.encode(text), made["logprobs"]["text_offset"]
    n = len(ids)
    full = [i for i in range(1, n) if (name := made["logprobs"]["tokens"][i]) and not name.startswith("bytes:")]
    assert len(full) > 5
    for i in full:
        assert made["text"].startswith(made["logprobs"]["tokens"][i], offsets[i])
    assert offsets[0] == offsets[1] == 0, "the begin-of-text token has no width"
    assert offsets == sorted(offsets)
    assert offsets[n] == len(text), "what is written begins where the prompt ends"
    assert max(offsets[:n]) < len(text)


def test_places() -> None:
    def offsets(text: str, *tokens: bytes) -> list[int]:
        return places(text, tokens)

    assert offsets("ab cd", b"<s>", b"ab", b" cd") == [0, 0, 2]
    assert offsets("ab cd", b"<s>", b" ab", b" cd") == [0, 0, 2], "sentencepiece puts a space first"
    assert offsets("a<s>b", b"<s>", b"a", b"<s>", b"b") == [0, 0, 1, 4], "a mark that somebody wrote is text"
    assert offsets("cafe\u0301 is good", b"ca", "f\u00e9".encode(), b" is", b" good") == [0, 2, 5, 8], "another form"
    assert offsets("<u>\nHi.", b"<u>", b"Hi", b".") == [0, 4, 6], "a mark takes the line's end after it"
    dog = "🐕".encode()
    assert offsets("a🐕b", b"a", dog[:2], dog[2:], b"b") == [0, 1, 1, 2]


def test_samples_share_one_scoring(llm: LLM, loaded: Any, start: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, read = [], Scoring.read

    def counted(self: Scoring, target: Any) -> Any:
        for step in read(self, target):
            passes.append(self)
            yield step

    monkeypatch.setattr(Scoring, "read", counted)
    served = start(service_of(llm, loaded, "demo", rows=2))
    made = complete(served, n=4, max_tokens=1, temperature=1, seed=1)["choices"]
    n = len(llm.encode(STORY))
    assert len(passes) == 1 + math.ceil((n - 2) / STEP)
    assert len({json.dumps(c["logprobs"]["token_logprobs"][:n]) for c in made}) == 1


def test_nan_logits_fail_their_row_alone(llm: LLM, loaded: Any, start: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that cannot be scored fails alone, with a reason."""
    served = start(service_of(llm, loaded, "demo", rows=2))
    open_ = llm.target.open

    def spoilt(capacity: int) -> Any:
        session = open_(capacity)
        forward = session.forward
        session.forward = lambda tree, *rest: (
            replace(out, logits=out.logits * float("nan")) if (out := forward(tree, *rest)) and tree.nodes > 20 else out
        )
        return session

    monkeypatch.setattr(llm.target, "open", spoilt)
    assert "NaN or infinite" in complete(served, 500)["error"]["message"]
    assert "NaN or infinite" in streamed(served)[-1]["error"]["message"]
    assert complete(served, echo=False)["choices"][0]["finish_reason"] == "length"


def test_a_late_request_gives_its_prompt_back_unscored(llm: LLM, loaded: Any, start: Serve) -> None:
    """It ends in line, before anything was read."""
    served = start(service_of(llm, loaded, "demo", rows=1, limits=Limits(seconds=0.0)))
    made = complete(served)["choices"][0]
    assert (made["text"], made["finish_reason"], made["logprobs"]["tokens"]) == (STORY, "abort", [])
    assert "".join(e["choices"][0]["text"] for e in streamed(served)) == STORY


def test_what_an_encoder_reads_has_no_logprobs(llm: LLM, start: Serve) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    target = SeqTarget(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)))
    served = start(service_of(replace(llm, target=target, tokenizer=None, kept_as=""), {}, "t5", rows=2))
    error = complete(served, 400, prompt=[5, 6, 7])["error"]
    assert (error["param"], error["type"]) == ("echo", "invalid_request_error")
    assert "encoder" in error["message"]
    made = complete(served, prompt=[5, 6, 7], echo=False, ignore_eos=True)["choices"][0]
    assert len(made["logprobs"]["tokens"]) == 8
