"""A row's tokens in OpenAI's format: text that is never cut inside a character, logprobs, usage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.text import Detokenizer, Places, TextStream
from ..core.types import Usage
from ..engine.stopping import Stop
from .job import End, Event, Heading, Job, Scored, Shown

AHEAD = 16  # bytes that may be passed over between two tokens of a prompt
FINISH = {"eos": "stop", "stop": "stop", "length": "length", "abort": "abort", "error": "error"}


@dataclass(frozen=True)
class Placed:
    """A token's scores and its position in the text."""

    scored: Scored
    spelt: bytes  # its bytes in the text; of a special token the name
    top: tuple[bytes, ...]  # those of its alternatives
    place: int  # characters before it

    @classmethod
    def of(cls, scored: Scored, places: Places) -> Placed:
        """The text's next token; advances `places`."""
        spelt, *top = (places.decoding.peek(token) for token in (scored.token, *(t for t, _ in scored.top)))
        return cls(scored, spelt, tuple(top), places.push(scored.token))

    @property
    def alternatives(self) -> dict[str, float]:
        """Logprobs by name, most likely first, with this token added if it is not among them. Of two tokens with the
        same text, the less likely one is named by its id."""
        own, named = label(self.spelt), dict[str, float]()
        for (token, logprob), spelt in zip(self.scored.top, self.top, strict=True):
            name = label(spelt)
            if token != self.scored.token and (name == own or name in named):
                name = f"token_id:{token}"
            named[name] = finite(logprob)
        return named if own in named else {**named, own: finite(self.scored.logprob)}


def label(spelt: bytes) -> str:
    """A token in the logprobs of a completion: its text, or its bytes if they are not complete characters."""
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


def chat_logprobs(scores: Sequence[Placed]) -> list[dict[str, Any]]:
    """The logprobs of a chat's tokens."""

    def entry(spelt: bytes, logprob: float) -> dict[str, Any]:
        return {"token": spelt.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(spelt)}

    return [
        {
            **entry(s.spelt, s.scored.logprob),
            "top_logprobs": [entry(b, p) for (_, p), b in zip(s.scored.top, s.top, strict=True)],
        }
        for s in scores
    ]


def text_logprobs(scores: Sequence[Placed], offset: int) -> dict[str, Any]:
    """The logprobs of a completion's tokens; `offset`: characters before its text."""
    return {
        "tokens": [label(s.spelt) for s in scores],
        "token_logprobs": [finite(s.scored.logprob) for s in scores],
        "top_logprobs": [s.alternatives for s in scores],
        "text_offset": [offset + s.place for s in scores],
    }


def echoed(reader: Detokenizer, text: str, tokens: Sequence[int], scores: Sequence[Scored]) -> dict[str, Any]:
    """The same for a prompt, and its text; its first token has no scores."""
    reading = Places(reader.open())
    first = reading.decoding.peek(tokens[0])
    reading.push(tokens[0])
    placed = [Placed.of(s, reading) for s in scores]
    rest = text_logprobs(placed, 0)
    return {
        "tokens": [label(first), *rest["tokens"]],
        "token_logprobs": [None, *rest["token_logprobs"]],
        "top_logprobs": [None, *rest["top_logprobs"]],
        "text_offset": places(text, [first, *(s.spelt for s in placed)]),
    }


def places(text: str, tokens: Sequence[Sequence[int]]) -> list[int]:
    """The offset of each token in a text. tokens: their bytes. Those that are not in the text have no width: a
    begin-of-text token, a space that the tokenizer inserts, a character that it brings into another form. Text that no
    token spells is passed over."""
    line, at, begun, offsets = text.encode(), 0, 0, list[int]()

    def move(end: int) -> None:
        nonlocal at, begun
        begun += sum(byte & 0xC0 != 0x80 for byte in line[at:end])
        at = end

    for spelt in map(bytes, tokens):
        forms = spelt, spelt.removeprefix(b" ")
        if offsets and spelt.strip() and not any(line.startswith(form, at) for form in forms):
            move(max(at, line.find(spelt, at, at + AHEAD + len(spelt))))
        offsets.append(begun - (at < len(line) and line[at] & 0xC0 == 0x80))  # inside a character: its beginning
        move(at + len(next((form for form in forms if line.startswith(form, at)), b"")))
    return offsets


def finite(logprob: float) -> float:
    """A logprob for JSON, which has no infinity: -9999 for impossible tokens, as in vLLM."""
    return max(logprob, -9999.0)


@dataclass
class Delta:
    """The part of one text that its reader has not received yet."""

    segments: list[tuple[str, bool]] = field(default_factory=list)  # text, and whether it was drafted
    tokens: list[int] = field(default_factory=list)
    scores: list[Placed] = field(default_factory=list)
    rounds: list[tuple[list[tuple[str, bool]], int, Shown | None]] = field(default_factory=list)  # see `hear`
    heading: list[Scored] | None = None  # scores of the prompt
    end: End | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)


@dataclass
class Voice:
    """One text of a response, streamed."""

    job: Job
    stops: Stop
    stream: TextStream
    places: Places  # of tokens with logprobs
    tokens: list[int] = field(default_factory=list)
    end: End | None = None

    def hear(self, events: Sequence[Event]) -> Delta:
        """All events since the last call as one piece. Its rounds: the segments that each completed, the number of
        accepted drafted tokens, and the tree."""
        delta = Delta()
        for event in events:
            if isinstance(event, Heading):
                delta.heading = event.scores
                continue
            if isinstance(event, End):
                self.end = delta.end = event
                pieces, accepted, shown = [(self.stream.flush(), False)], 0, None
            else:
                seen, accepted, shown = self.stops.visible(event.tokens), event.drafted, event.shown
                pieces = [(self.stream.push(seen[:accepted]), True), (self.stream.push(seen[accepted:]), False)]
                self.tokens += event.tokens
                delta.tokens += event.tokens
                delta.scores += [Placed.of(score, self.places) for score in event.scores or ()]
            segments = [(text, drafted) for text, drafted in pieces if text]
            delta.segments += segments
            if segments or shown is not None:
                delta.rounds.append((segments, accepted, shown))
        return delta

    @property
    def finish(self) -> str | None:
        return None if self.end is None else FINISH[self.end.finish]


def usage_of(usages: Sequence[Usage], prompts: int, cached: int = 0) -> dict[str, Any]:
    """OpenAI's usage; its fields for predicted outputs have the counts of speculation."""
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
    """Counts and times of one text, under vLLM's names where it has them."""
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
    """[j]: rounds that accepted j drafted tokens, up to the greatest tested depth."""
    reached = [usage.rounds, *usage.accepted_at]  # [j]: rounds that accepted j or more
    reached += [0] * (max(len(usage.tested_at), len(usage.accepted_at)) + 2 - len(reached))
    return [more - deeper for more, deeper in itertools.pairwise(reached)]
