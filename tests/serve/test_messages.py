"""What a request's messages become, and what an answer's usage says."""

from __future__ import annotations

from outrider.core.types import Usage
from outrider.serve.protocol import Message
from outrider.serve.service import plain
from outrider.serve.texts import usage_of


def test_the_role_developer_is_the_templates_system() -> None:
    assert plain(Message(role="developer", content="x")) == {"role": "system", "content": "x"}
    assert plain(Message(role="user", content="x"))["role"] == "user"


def test_usage_counts_drafts_that_were_accepted_and_rejected() -> None:
    made = usage_of([Usage(new_tokens=5, drafted=7, accepted=3), Usage(new_tokens=2, drafted=1, accepted=1)], 4, 2)
    assert (made["prompt_tokens"], made["completion_tokens"], made["total_tokens"]) == (4, 7, 11)
    assert made["prompt_tokens_details"] == {"cached_tokens": 2}
    details = made["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (4, 4)
