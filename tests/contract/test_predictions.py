"""A caller's prediction: drafts are copied from it, and no text depends on it."""

from __future__ import annotations

from typing import Any

import pytest

import outrider
from outrider.params import InputError

PROMPTS = ["The bear walked into the forest and", "One day a girl named Lily"]
SPECS = ("suffix", "lookup", "suffix + eagle:demo/hass", "lookup + suffix")

pytestmark = pytest.mark.trained


@pytest.fixture(scope="module", params=SPECS)
def llm(request: Any) -> outrider.LLM:
    return outrider.load("demo", request.param, budget="16x6")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_predicted_is_drafted(llm: outrider.LLM, temperature: float) -> None:
    """From the first token on, in batches whose texts end at different times."""
    asked: dict[str, Any] = {"max_new_tokens": 48, "seed": 3, "temperature": temperature, "ignore_eos": True}
    plain = llm.generate(PROMPTS, **asked)
    for text, other in zip(plain, plain[::-1], strict=True):
        helped = llm.generate(PROMPTS, prediction=text.text, **asked)
        assert [o.tokens for o in helped] == [o.tokens for o in plain]
        before, after = (o[text.prompt].usage.rounds for o in (plain, helped))
        assert after < before, (before, after)
        assert after <= 12, "48 tokens, at most seven in a round"
        wrong = llm.generate([PROMPTS[text.prompt]], prediction=other.text[::-1], n=3, **asked)
        assert wrong[0].tokens == text.tokens
    assert "".join(llm.stream(PROMPTS[0], prediction=plain[0].text, **asked)) == plain[0].text


def test_what_is_no_text_is_refused(llm: outrider.LLM) -> None:
    with pytest.raises(InputError, match="a prediction is text, not list"):
        llm.generate(PROMPTS[0], prediction=[5, 6])  # type: ignore[arg-type]
