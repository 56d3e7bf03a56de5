"""`suffix` of /v1/completions: fill-in-the-middle by the FIM tokens of the vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from serve_world import Serve
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from outrider import infill
from outrider.llm import LLM
from outrider.params import InputError
from outrider.serve.start import service_of

ASKED = {"prompt": "Once upon", "suffix": " the end", "temperature": 0, "max_tokens": 12}
OURS = ("<|user|>", "<|assistant|>", "<|pad|>")  # tokens of the demo model, which has no FIM tokens


def with_tokens(*tokens: str) -> Any:
    """A tokenizer of words, with these tokens added."""
    made = Tokenizer(WordLevel({"x": 0, "a": 1, "b": 2}, unk_token="x"))
    made.pre_tokenizer = WhitespaceSplit()
    made.add_special_tokens(list(tokens))
    return SimpleNamespace(backend_tokenizer=made)


@pytest.mark.parametrize("three", infill.TOKENS)
def test_the_prompt_has_the_fim_tokens_of_the_vocabulary(three: tuple[str, str, str]) -> None:
    tokenizer = with_tokens(three[2], "<|file_sep|>", *three[:2])
    first, second, last = map(tokenizer.backend_tokenizer.token_to_id, three)
    made = infill.Infill.of(tokenizer, "m")
    assert made.prompt("a b", "b") == [first, 1, 2, second, 2, last]
    assert made.ends == {first, second, last, tokenizer.backend_tokenizer.token_to_id("<|file_sep|>")}
    inside = made.prompt(f"a {three[1]}", f"{three[2]} b")
    assert [token for token in inside if token in made.tokens] == [first, second, last], (
        "a FIM token within a text is text"
    )


def test_the_prompt_begins_as_texts_do_and_does_not_end_as_they_do() -> None:
    tokenizer = with_tokens("<s>", "</s>", *infill.TOKENS[1])
    backend = tokenizer.backend_tokenizer
    begin, end = map(backend.token_to_id, ("<s>", "</s>"))
    backend.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", end)])
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    made = infill.Infill.of(tokenizer, "m")
    assert made.prompt("a b a b", "") == [begin, made.tokens[0], 1, 2, 1, 2, *made.tokens[1:]]


@pytest.mark.parametrize("tokenizer", [None, with_tokens(), with_tokens("<|fim_prefix|>", "<|fim_suffix|>")])
def test_a_model_without_fim_tokens_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="m has no fill-in-the-middle tokens"):
        infill.Infill.of(tokenizer, "m")


def test_the_middle_ends_at_a_fim_token(llm: LLM, loaded: Any, start: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infill, "TOKENS", (OURS,))
    served = start(service_of(llm, loaded, "demo"))
    filled = served.post("/v1/completions", {**ASKED, "return_token_ids": True})
    prompt = "<|user|>Once upon<|assistant|> the end<|pad|>"
    same = served.post("/v1/completions", {**ASKED, "prompt": prompt, "suffix": "", "return_token_ids": True})
    assert filled["choices"][0]["prompt_token_ids"] == same["choices"][0]["prompt_token_ids"]
    assert filled["choices"][0]["text"] == same["choices"][0]["text"]
    for ignore, reason in ((False, "stop"), (True, "length")):  # its first token is one of them
        asked = {**ASKED, "logit_bias": {"3": 100}, "ignore_eos": ignore}
        assert served.post("/v1/completions", asked)["choices"][0]["finish_reason"] == reason
    two = served.post("/v1/completions", {**ASKED, "prompt": ["Once upon", "Once upon"]})["choices"]
    assert [choice["text"] for choice in two] == [filled["choices"][0]["text"]] * 2
    for wrong in ({"echo": True}, {"prompt": [5, 6]}):
        assert served.post("/v1/completions", {**ASKED, **wrong}, 400)["error"]["param"] == "suffix"
    assert served.get("/health"), "the lines of the log are written, which the next test may read"
