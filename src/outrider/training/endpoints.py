"""Requests to OpenAI-compatible servers for training data, and their responses.

Token ids are requested, since tokenising the text again need not give the same tokens (docs/training.md lists servers
that return them).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from ..params import InputError
from .questions import Asked, Opening, by

KEY = "OUTRIDER_API_KEY"  # environment variable with the servers' key


class Refused(Exception):
    """A server refuses this question permanently."""


@dataclass(eq=False)
class Failed(Exception):
    """A temporary failure. wait: seconds that the server requests; spoilt: its answer was incomplete."""

    reason: str
    wait: float | None = None
    spoilt: bool = False


@dataclass(frozen=True)
class Wish:
    """Settings of requests; question i uses `seed` + i. Of a text its first `opening` words are sent, since words can
    be counted without a tokenizer."""

    model: str
    max_new_tokens: int = 256
    temperature: float = 1.0
    seed: int = 0
    opening: int = 64


def body(what: Asked, wish: Wish, number: int) -> dict[str, Any]:
    """The request of question `number`: for /v1/chat/completions if it has messages, else for /v1/completions."""
    if isinstance(what, Opening):
        start = re.match(rf"\s*(?:\S+\s+){{0,{wish.opening - 1}}}\S+", what.text)
        request: dict[str, Any] = {"prompt": start[0] if start else what.text}
    else:
        request = {"prompt" if isinstance(what, str) else "messages": what}
    sampling = {"max_tokens": wish.max_new_tokens, "temperature": wish.temperature, "seed": wish.seed + number}
    return {"model": wish.model, **request, **sampling, "return_token_ids": True}


def line(key: str, body: dict[str, Any], answer: Any) -> dict[str, Any]:
    """A response as a line of training data, with token ids if it has both the prompt's and its own.

    Args:
        key: the line's id.
        body: the request.
        answer: the response, as JSON.

    Raises:
        Failed: the response has no answer, or an incomplete one.
    """
    try:
        choice = answer["choices"][0]
        text = (choice["message"]["content"] if "messages" in body else choice["text"]) or ""
        finish = choice["finish_reason"]
        ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids"), choice.get("token_ids")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Failed("its answers have no text", spoilt=True) from None
    if finish not in ("stop", "length"):
        raise Failed(f"an answer ended by {finish!r}", spoilt=True)
    if "messages" in body:
        made = {"id": key, "messages": [*body["messages"], {"role": "assistant", "content": text}]}
    else:
        made = {"id": key, "prompt": body["prompt"], "completion": text}
    if all(isinstance(part, list) and part and all(type(token) is int for token in part) for part in ids):
        made |= dict(zip(("prompt_token_ids", "token_ids"), ids, strict=True))
    return {**made, "ends": finish == "stop", "by": by(body["model"], body["temperature"])}


def connect(urls: Sequence[str], model: str | None = None) -> tuple[list[str], str]:
    """The servers' addresses without /v1, and the model that all of them serve: `model`, or their first.

    Raises:
        InputError: a server does not answer or does not serve the model, or two serve different ones.
    """
    served: dict[str, str] = {}
    with httpx2.Client(timeout=10, headers=headers()) as client:
        for given in urls:
            url = given.rstrip("/").removesuffix("/v1")
            try:
                response = client.get(f"{url}/v1/models")
                names = [str(model["id"]) for model in response.raise_for_status().json()["data"]]
            except httpx2.HTTPStatusError as error:
                raise InputError(f"{url} does not say which models it serves ({_said(error.response)})") from None
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                raise InputError(f"{url} {_reason(error)}; start the server, or correct the address") from None
            except (ValueError, KeyError, TypeError):
                names = []
            if not names or (model is not None and model not in names):
                raise InputError(f"{url} serves {', '.join(names) or 'no model'}" + (f", not {model}" if model else ""))
            served[url] = model or names[0]
    if len(set(served.values())) > 1:
        raise InputError(f"{' and '.join(f'{u} serves {m}' for u, m in served.items())}; name the MODEL to use")
    return list(served), next(iter(served.values()))


async def ask(client: httpx2.AsyncClient, url: str, body: dict[str, Any]) -> Any:
    """A server's response to a request, as JSON.

    Raises:
        Failed: temporarily. Refused: for this question. InputError: the server denies access.
    """
    path = "chat/completions" if "messages" in body else "completions"
    try:
        response = await client.post(f"{url}/v1/{path}", json=body)
    except httpx2.HTTPError as error:
        spoilt = not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
        raise Failed(_reason(error), spoilt=spoilt) from None
    status = response.status_code
    if status in (401, 403, 404):
        raise InputError(f"{url} refuses every question ({_said(response)}); keys are read from {KEY}")
    if status in (408, 425, 429) or status >= 500:
        busy = status in (429, 503)
        raise Failed(f"answers {_said(response)}", _retry_after(response) if busy else None, spoilt=not busy)
    if status >= 300:
        raise Refused(f"{url} answers {_said(response)}")
    try:
        return response.json()
    except ValueError:
        raise Failed("answers with something that is not JSON", spoilt=True) from None


def headers() -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}


def _reason(error: Exception) -> str:
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return "cannot be reached"
    if isinstance(error, httpx2.TimeoutException):
        return "does not answer in time"
    if isinstance(error, httpx2.UnsupportedProtocol | httpx2.InvalidURL):
        return "is not an address such as http://localhost:8000"
    return "closes the connection"


def _said(response: httpx2.Response) -> str:
    """A status with the server's message, in one short line."""
    try:
        content = response.json()
        words = content.get("error", content)
        words = words.get("message", "") if isinstance(words, dict) else words
    except (ValueError, AttributeError):
        words = ""
    return f"{response.status_code}{': ' if words else ''}{' '.join(str(words).split())[:200]}"


def _retry_after(response: httpx2.Response) -> float | None:
    """Seconds of Retry-After, a number or a date; at most ten minutes."""
    given = response.headers.get("retry-after", "")
    try:
        wait = float(given) if given.strip().isdigit() else parsedate_to_datetime(given).timestamp() - time.time()
    except (ValueError, TypeError):
        return None
    return min(max(wait, 0.0), 600.0)
