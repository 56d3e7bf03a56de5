"""Requests at the ends of every field's range and beyond: answered or refused, and no connection is dropped."""

from __future__ import annotations

import os
import random
import socket
import time
from typing import Any

import pytest
from serve_world import Served

pytestmark = pytest.mark.trained
NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logprobs",
)  # fmt: skip
ENDS: tuple[Any, ...] = (
    0, -1, 1, 2**31, 2**32 - 1, -(2**31), 2**53, 2**63 - 1, 2**63, 2**63 + 2**40, 2**64 - 1, -(2**63) - 1, 10**400,
    1e-300, 1e38, 1e300, -1e300, 0.5, -0.5, True, None, "", "1", [], {}, [1],
)  # fmt: skip
DESCRIPTORS = "/proc/self/fd"


@pytest.mark.parametrize("field", [*NUMBERS, "logit_bias", "stop", "stop_token_ids", "prompt"])
def test_an_extreme_value_is_answered_or_refused(served: Served, field: str) -> None:
    for value in ENDS:
        for given in (value, {"5": value}, {str(value): 1.0}) if field == "logit_bias" else (value, [value]):
            body = {"prompt": "Once", "max_tokens": 2, "temperature": 1.0, field: given}
            status, _, answer = served.send("POST", "/v1/completions", body)
            assert status == 200 or 400 <= status < 500, (given, answer)
    assert served.get("/health")["status"] == "ok"


def test_extremes_together_are_answered_or_refused(served: Served) -> None:
    dice = random.Random(0)
    answered = 0
    for _ in range(200):
        fields = {name: dice.choice(ENDS) for name in dice.sample(NUMBERS, 3)}
        status, _, answer = served.send("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 2, **fields})
        assert status == 200 or 400 <= status < 500, (fields, answer)
        answered += status == 200
    assert 0 < answered < 200
    assert served.idle(30)


@pytest.mark.skipif(not os.path.isdir(DESCRIPTORS), reason="descriptors are counted in /proc")
def test_clients_that_vanish_leave_no_row_and_no_descriptor(served: Served) -> None:
    before, dice = len(os.listdir(DESCRIPTORS)), random.Random(1)
    body = b'{"prompt": "Once", "max_tokens": 400, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as sock:
            sock.sendall(request[: dice.choice([1, 40, len(request) - 3, len(request)])])
            if dice.random() < 0.3:
                time.sleep(0.01)
    assert served.idle(60)
    end = time.monotonic() + 30
    while len(os.listdir(DESCRIPTORS)) > before + 1 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(os.listdir(DESCRIPTORS)) <= before + 1
