"""Users of a server for locust: they chat, stream, leave in the middle, ask for samples and JSON, and make mistakes."""

from __future__ import annotations

import random
from typing import Any

from locust import HttpUser, between, task

OPENINGS = ["Tell me a story about a dog.", "Who are you?", "What do you like?", "Once upon a time there was a king."]


class User(HttpUser):
    wait_time = between(0.05, 0.4)

    def ask(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        with self.client.post(path, json=body, name=f"{path} {status}", catch_response=True) as answer:
            if answer.status_code == status:
                answer.success()
                return answer.json()
            answer.failure(f"{answer.status_code}: {answer.text[:200]}")
        return None

    @task(4)
    def chat(self) -> None:
        """Two turns: the second goes on from the first."""
        messages = [{"role": "user", "content": random.choice(OPENINGS)}]
        body = {"max_tokens": random.randint(1, 40), "seed": random.randrange(1 << 30)}
        made = self.ask("/v1/chat/completions", {**body, "messages": messages})
        if made:
            messages += [made["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            self.ask("/v1/chat/completions", {**body, "messages": messages})

    @task(2)
    def samples(self) -> None:
        way = random.choice([{"speculate": False}, {"rounds": True}, {"budget": 4}, {}])
        body = {"prompt": random.choice(OPENINGS), "n": 3, "max_tokens": 16, "logprobs": 2, "outrider": way}
        self.ask("/v1/completions", body)

    @task(1)
    def json(self) -> None:
        body = {"prompt": "x", "max_tokens": 20, "structured_outputs": {"regex": "[a-z]{3,9}"}}
        self.ask("/v1/completions", body)

    @task(2)
    def leave(self) -> None:
        """Ask for a long text and hang up after its first bytes."""
        body = {"prompt": random.choice(OPENINGS), "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with self.client.post(
            "/v1/completions",
            json=body,
            stream=True,
            name="leaves",
            catch_response=True,
            headers={"connection": "close"},
        ) as answer:
            for _ in answer.iter_content(64):
                break
            answer.close()
            answer.success()

    @task(1)
    def mistake(self) -> None:
        self.ask("/v1/completions", {"prompt": "x", "temperature": -1}, 400)
