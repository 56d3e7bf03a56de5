"""A row's tokens as OpenAI's clients want them: text that is never cut inside a character, logprobs, usage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.stopping import Stop, TextStream
from ..types import Usage
from .job import End, Event, Heading, Job, Scored, Shown

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "abort": "abort", "error": "error"}


@dataclass(frozen=True)
class Spelled:
    """What tokens are called in answers; `names` gives a token's text and its bytes."""

    names: Callable[[int], tuple[str, list[int]]]

    def chat(self, scores: Sequence[Scored]) -> list[dict[str, Any]]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text, spelt = self.names(token)
            return {"token": text, "logprob": finite(logprob), "bytes": spelt}

        return [{**entry(s.token, s.logprob), "top_logprobs": [entry(t, p) for t, p in s.top]} for s in scores]

    def echoed(self, text: str, tokens: Sequence[int], scores: Sequence[Scored]) -> dict[str, Any]:
        """Of a prompt and the text that it is: nothing is known of its first token."""
        texts, spelt = zip(*map(self.names, tokens), strict=True)
        rest = self.completion(scores, 0)
        return {
            "tokens": list(texts),
            "token_logprobs": [None, *rest["token_logprobs"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
            "text_offset": places(text, spelt),
        }

    def completion(self, scores: Sequence[Scored], offset: int) -> dict[str, Any]:
        texts = [self.names(s.token)[0] for s in scores]
        offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [finite(s.logprob) for s in scores],
            "top_logprobs": [{self.names(t)[0]: finite(p) for t, p in s.top} for s in scores],
            "text_offset": offsets,
        }


def places(text: str, tokens: Sequence[Sequence[int]]) -> list[int]:
    """Where in a text each of its tokens begins; `tokens` are their bytes. What does not stand there has no width: a
    begin-of-text token, a space that the tokenizer puts first."""
    line, at, begun, found = text.encode(), 0, 0, []
    for spelt in map(bytes, tokens):
        found.append(begun - (at < len(line) and line[at] & 0xC0 == 0x80))  # inside a character: where that begins
        here = next((form for form in (spelt, spelt.removeprefix(b" ")) if line.startswith(form, at)), b"")
        at += len(here)
        begun += sum(byte & 0xC0 != 0x80 for byte in here)
    return found


def finite(logprob: float) -> float:
    """JSON has no infinity: what cannot be has a logprob of -9999, as vLLM says it."""
    return max(logprob, -9999.0)


@dataclass
class Delta:
    """What a reader has not seen yet of one text."""

    segments: list[tuple[str, bool]] = field(default_factory=list)  # text, and was it drafted?
    tokens: list[int] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)
    rounds: list[tuple[list[tuple[str, bool]], int, Shown | None]] = field(default_factory=list)  # see `hear`
    heading: list[Scored] | None = None  # scores of the prompt
    end: End | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)


@dataclass
class Voice:
    """One text of an answer, as it comes."""

    job: Job
    stops: Stop
    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    end: End | None = None

    def hear(self, events: Sequence[Event]) -> Delta:
        """Everything that has come since the reader last looked, as one piece. Its rounds: the segments that each made
        readable, how many drafted tokens were accepted, and the tree."""
        delta = Delta()
        for event in events:
            if isinstance(event, Heading):
                delta.heading = event.scores
                continue
            if isinstance(event, End):
                self.end = delta.end = event
                found, accepted, shown = [(self.stream.flush(), False)], 0, None
            else:
                seen, accepted, shown = self.stops.visible(event.tokens), event.drafted, event.shown
                found = [(self.stream.push(seen[:accepted]), True), (self.stream.push(seen[accepted:]), False)]
                self.tokens += event.tokens
                delta.tokens += event.tokens
                delta.scores += event.scores or []
            segments = [(text, drafted) for text, drafted in found if text]
            delta.segments += segments
            if segments or shown is not None:
                delta.rounds.append((segments, accepted, shown))
        return delta

    @property
    def finish(self) -> str | None:
        return None if self.end is None else FINISH[self.end.finish]


def usage_of(usages: Sequence[Usage], prompts: int, cached: int = 0) -> dict[str, Any]:
    """OpenAI's usage: its fields for predicted outputs tell what speculation did."""
    written = sum(u.new_tokens for u in usages)
    accepted = sum(u.accepted for u in usages)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": written,
        "total_tokens": prompts + written,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(0, sum(u.drafted for u in usages) - accepted),
        },
    }


def figures(job: Job, usage: Usage) -> dict[str, Any]:
    """What one text cost, in vLLM's words where it has them."""
    decode = max(0.0, job.last - job.first)
    more = usage.new_tokens - 1
    return {
        "seed": job.request.seed,
        "time_to_first_token_ms": 1000 * max(0.0, job.first - job.arrived),
        "queue_time_ms": 1000 * max(0.0, job.started - job.arrived),
        "mean_itl_ms": 1000 * decode / more if more > 0 else None,
        "tokens_per_second": more / decode if more > 0 and decode > 0 else None,
        "speculative_decoding": {
            "mean_acceptance_length": usage.tau,
            "draft_acceptance_rate": usage.accepted / usage.drafted if usage.drafted else None,
            "acceptance_histogram": histogram(usage),
            "num_spec_steps": usage.rounds,
            "num_accepted_draft_tokens": usage.accepted,
            "num_draft_tokens": usage.drafted,
            "num_spec_tokens": len(histogram(usage)) - 1,
        },
    }


def histogram(usage: Usage) -> list[int]:
    """[j]: rounds that accepted j drafted tokens, up to the greatest depth at which a draft was tested."""
    reached = [usage.rounds, *usage.accepted_at]  # [j]: rounds that accepted j or more
    reached += [0] * (max(len(usage.tested_at), len(usage.accepted_at)) + 2 - len(reached))
    return [more - deeper for more, deeper in itertools.pairwise(reached)]
