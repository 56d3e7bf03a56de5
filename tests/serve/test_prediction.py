"""`prediction` of a chat: what the answer may contain is drafted, and the answer is the same."""

from __future__ import annotations

from typing import Any

import pytest
from serve_world import Served

ASKED = {
    "messages": [{"role": "user", "content": "Once upon a time there was"}], "temperature": 0, "max_tokens": 40,
    "outrider": {"drafter": "lookup"},
}  # fmt: skip


def answer(served: Served, **more: Any) -> tuple[str, int]:
    """The text, and the drafted tokens in it."""
    made = served.post("/v1/chat/completions", {**ASKED, **more})
    used = made["usage"]["completion_tokens_details"]
    return made["choices"][0]["message"]["content"], used["accepted_prediction_tokens"]


def test_a_prediction_is_drafted(served: Served) -> None:
    text, drafted = answer(served)
    whole = {"type": "content", "content": text}
    parts = {"type": "content", "content": [{"type": "text", "text": text[:30]}, {"type": "text", "text": text[30:]}]}
    for prediction in (whole, parts):
        same, more = answer(served, prediction=prediction)
        assert same == text
        assert more > drafted + 5
    assert answer(served, prediction={"type": "content", "content": "no such thing"}) == (text, drafted)
    assert answer(served, prediction=None) == (text, drafted)
    assert answer(served, prediction=whole, outrider={"speculate": False}) == (text, 0)


@pytest.mark.parametrize(
    "wrong", ["text", {"type": "tokens", "content": "x"}, {"content": 5}, {"content": [{"type": "image_url"}]}]
)
def test_other_predictions_are_refused(served: Served, wrong: Any) -> None:
    error = served.post("/v1/chat/completions", {**ASKED, "prediction": wrong}, 400)["error"]
    assert error["param"].startswith("prediction")


def test_a_prediction_longer_than_the_context_is_refused(served: Served) -> None:
    shorter = {"type": "content", "content": "bear " * 100_000}
    error = served.post("/v1/chat/completions", {**ASKED, "prediction": shorter}, 400)["error"]
    assert error["code"] == "context_length_exceeded"
