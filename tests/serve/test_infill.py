"""`suffix` of /v1/completions: what is missing between two texts, by the marks of the model's vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from serve_world import Served
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from outrider import infill
from outrider.params import InputError

ASKED = {"prompt": "Once upon", "suffix": " the end", "temperature": 0, "max_tokens": 12}
OURS = ("<|user|>", "<|assistant|>", "<|pad|>")  # tokens of the demo model, which has no marks


def with_tokens(*tokens: str) -> Any:
    words = {token: i for i, token in enumerate(("x", *tokens))}
    return SimpleNamespace(backend_tokenizer=Tokenizer(WordLevel(words, unk_token="x")))


@pytest.mark.parametrize("marks", infill.MARKS)
def test_the_prompt_has_the_marks_that_the_vocabulary_has(marks: tuple[str, str, str]) -> None:
    tokenizer = with_tokens(marks[2], "<|file_sep|>", *marks[:2])
    assert infill.prompt("a", "b", tokenizer, "m") == f"{marks[0]}a{marks[1]}b{marks[2]}"
    assert infill.ends(tokenizer, "m") == {1, 2, 3, 4}


@pytest.mark.parametrize("tokenizer", [None, with_tokens(), with_tokens("<|fim_prefix|>", "<|fim_suffix|>")])
def test_a_model_without_marks_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="m has no tokens for a gap"):
        infill.prompt("a", "b", tokenizer, "m")


def test_a_gap_is_filled_and_ends_at_a_mark(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infill, "MARKS", (OURS,))
    filled = served.post("/v1/completions", {**ASKED, "return_token_ids": True})
    prompt = "<|user|>Once upon<|assistant|> the end<|pad|>"
    same = served.post("/v1/completions", {**ASKED, "prompt": prompt, "suffix": "", "return_token_ids": True})
    assert filled["choices"][0]["prompt_token_ids"] == same["choices"][0]["prompt_token_ids"]
    assert filled["choices"][0]["text"] == same["choices"][0]["text"]
    for ignore, reason in ((False, "stop"), (True, "length")):  # its first token is a mark
        asked = {**ASKED, "logit_bias": {"3": 100}, "ignore_eos": ignore}
        assert served.post("/v1/completions", asked)["choices"][0]["finish_reason"] == reason
    two = served.post("/v1/completions", {**ASKED, "prompt": ["Once upon", "Once upon"]})["choices"]
    assert [choice["text"] for choice in two] == [filled["choices"][0]["text"]] * 2
    for wrong in ({"echo": True}, {"prompt": [5, 6]}):
        assert served.post("/v1/completions", {**ASKED, **wrong}, 400)["error"]["param"] == "suffix"
