"""OpenAI's own client where it does more than send a body: it retries, it makes schemas, it scores prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from serve_world import Reader, Serve, Served

from outrider.llm import LLM
from outrider.serve.job import Job
from outrider.serve.scheduler import Closed
from outrider.serve.start import service_of

pytestmark = pytest.mark.trained
openai = pytest.importorskip("openai", reason="the openai package is not installed")
CHAT = [{"role": "user", "content": "Tell me a story about a dog."}]
ASKED = {"model": "demo", "messages": CHAT, "max_tokens": 8, "temperature": 0}
Client = Callable[..., Any]
LONG = {"prompt": "Once upon a time", "temperature": 0.9, "max_tokens": 1500, "ignore_eos": True, "seed": 1}


@pytest.fixture
def client_of() -> Iterator[Callable[..., Any]]:
    """Clients of a server; they are closed with the test."""
    made: list[Any] = []

    def client(served: Served, retries: int = 2) -> Any:
        made.append(openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=retries))
        return made[-1]

    yield client
    for one in made:
        one.close()


def in_waits(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> list[float]:
    """What the client sleeps between two tries; instead of sleeping, `do` is done."""
    real, waits = time.sleep, list[float]()

    def sleep(seconds: float) -> None:
        if seconds < 0.25:  # not the client's
            real(seconds)
            return
        waits.append(seconds)
        do()

    monkeypatch.setattr(time, "sleep", sleep)
    return waits


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_client_retries_a_full_server(
    llm: LLM, loaded: Any, start: Serve, client_of: Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """429: the client waits as long as Retry-After says. In that time the place gets free, and it is answered."""
    served = start(service_of(llm, loaded, "demo", rows=1, queue=0))
    wanted = llm.generate(CHAT, max_new_tokens=8)[0].text
    occupant = Reader(served.port, "/v1/completions", LONG)
    with pytest.raises(openai.RateLimitError) as refused:
        client_of(served, retries=0).chat.completions.create(**ASKED)
    retry_after = float(refused.value.response.headers["retry-after"])

    def leave() -> None:
        occupant.sock.close()
        assert served.idle()

    waits = in_waits(monkeypatch, leave)
    made = client_of(served).chat.completions.create(**ASKED, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in made)
    else:
        text = made.choices[0].message.content
    assert text == wanted
    assert waits == [retry_after], "one try more, after what the server said"


def test_the_client_retries_a_server_that_shuts_down(
    served: Served, llm: LLM, client_of: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503: another server may stand at the address a little later."""
    scheduler, closed = served.service.scheduler, [True]
    submit = scheduler.submit

    def refuse(jobs: Sequence[Job]) -> None:
        if closed[0]:
            raise Closed("the server is shutting down")
        submit(jobs)

    monkeypatch.setattr(scheduler, "submit", refuse)
    with pytest.raises(openai.InternalServerError) as refused:
        client_of(served, retries=0).chat.completions.create(**ASKED)
    assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "5")
    waits = in_waits(monkeypatch, lambda: closed.__setitem__(0, False))
    made = client_of(served).chat.completions.create(**ASKED)
    assert made.choices[0].message.content == llm.generate(CHAT, max_new_tokens=8)[0].text
    assert waits == [5.0]


class Person(BaseModel):
    """What the answer has to be."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Ann", "Bo"]
    age: int = Field(ge=0, le=99)
    likes: list[Literal["dogs", "cats"]] = Field(min_length=1, max_length=2)


@pytest.fixture(scope="module")
def spaces(llm: LLM) -> dict[str, int]:
    """A bias against white space, of which JSON allows any amount and the demo model is fond."""
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'outrider[serve]'")
    return {str(i): -100 for i in range(llm.target.vocab) if llm.tokenizer.decode([i]).isspace()}


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_by_create(served: Served, client_of: Client, spaces: dict[str, int], seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
    options = {"model": "demo", "messages": CHAT, "max_tokens": 80, "seed": seed, "logit_bias": spaces}
    free = client_of(served).chat.completions.create(**options).choices[0].message.content
    with pytest.raises(ValueError, match="JSON"):
        Person.model_validate_json(free)
    made = client_of(served).chat.completions.create(**options, response_format=form).choices[0]
    assert made.finish_reason == "stop"
    assert Person.model_validate_json(made.message.content)
    chunks = client_of(served).chat.completions.create(**options, response_format=form, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == made.message.content


def test_a_schema_by_parse(served: Served, client_of: Client, spaces: dict[str, int]) -> None:
    """The client makes the schema out of the class, and an object of the class out of the text."""
    client = client_of(served)
    chats = client.chat.completions if hasattr(client.chat.completions, "parse") else client.beta.chat.completions
    options = {"model": "demo", "messages": CHAT, "max_tokens": 80, "seed": 1, "logit_bias": spaces}
    made = chats.parse(**options, response_format=Person).choices[0].message
    assert isinstance(made.parsed, Person)
    assert made.parsed.model_dump() == json.loads(made.content)
    with chats.stream(**options, response_format=Person) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == made.parsed


def test_a_prompt_that_is_scored(served: Served, client_of: Client, llm: LLM) -> None:
    made = client_of(served).completions.create(
        model="demo", prompt="The dog was big.", max_tokens=0, echo=True, logprobs=2
    )
    scores = made.choices[0].logprobs
    assert made.choices[0].text == "The dog was big."
    assert (scores.token_logprobs[0], scores.top_logprobs[0]) == (None, None)
    assert len(scores.tokens) == len(scores.token_logprobs) == len(llm.encode("The dog was big."))
    assert all(log < 0 for log in scores.token_logprobs[1:])
    assert made.usage.completion_tokens == 0
