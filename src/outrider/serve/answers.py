"""Response bodies: complete, or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from .call import Call
from .protocol import ChatRequest, Refusal
from .service import Service
from .texts import Delta, Voice, chat_logprobs, echoed, figures, text_logprobs, usage_of
from .tools import Caller

DONE = b"data: [DONE]\n\n"


async def complete(service: Service, call: Call) -> dict[str, Any]:
    """The response after its last text has ended."""
    deltas = [Delta() for _ in call.voices]
    while any(voice.end is None for voice in call.voices):
        for index, events in (await call.channel.take()).items():
            seen = call.voices[index].hear(events)
            deltas[index].segments += seen.segments
            deltas[index].scores += seen.scores
            deltas[index].rounds += seen.rounds
            if seen.heading is not None:
                deltas[index].heading = seen.heading
            if failed := failure(call.voices[index]):
                raise failed
    chat = isinstance(call.request, ChatRequest)
    choices = [
        (chat_choice if chat else text_choice)(service, call, i, voice, deltas[i])
        for i, voice in enumerate(call.voices)
    ]
    kind = "chat.completion" if chat else "text_completion"
    read = prompt_ids(call, call.voices[0]) if chat else {}
    return {**head(service, call, kind), **read, "choices": choices, "usage": usage(call), **extras(call)}


def failure(voice: Voice) -> Refusal | None:
    """The error of a text that failed, by the request's grammar or by a fault of the server; else None."""
    if voice.end is None or voice.end.finish != "error":
        return None
    watch = voice.job.watch
    if watch is not None and watch.guide is not None and watch.broken:
        return Refusal(watch.broken, watch.guide.source)
    return Refusal(voice.end.error, status=500)


def chat_choice(service: Service, call: Call, index: int, voice: Voice, delta: Delta) -> dict[str, Any]:
    """One choice of a chat completion, in OpenAI's format."""
    message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
    finish = voice.finish
    if call.caller is not None:
        message["content"], calls = call.caller.split(delta.text)
        if calls:
            message["tool_calls"] = calls
            finish = called(finish)
    logprobs = {"content": chat_logprobs(delta.scores), "refusal": None} if call.request.logprobs else None
    return {
        "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish,
        **of_choice(service, call, voice, delta),
    }  # fmt: skip


def called(finish: str | None) -> str | None:
    """The finish reason of a text with tool calls: `length` and `abort` mean that it is incomplete."""
    return "tool_calls" if finish == "stop" else finish


def text_choice(service: Service, call: Call, index: int, voice: Voice, delta: Delta) -> dict[str, Any]:
    """One choice of a completion."""
    before = call.echoes[index] if call.echoes else ""
    logprobs = None
    if call.request.logprobs is not None:
        logprobs = text_logprobs(delta.scores, len(before))
        if (first := heading(service, call, index, delta)) is not None:
            logprobs = {name: first[name] + logprobs[name] for name in logprobs}
    return {
        **prompt_ids(call, voice), "index": index, "text": before + delta.text, "finish_reason": voice.finish,
        "logprobs": logprobs, **of_choice(service, call, voice, delta),
    }  # fmt: skip


def heading(service: Service, call: Call, index: int, delta: Delta) -> dict[str, Any] | None:
    """The logprobs of an echoed prompt, if they are computed."""
    if delta.heading is None:
        return None
    prompt = call.voices[index].job.request.prompt
    return echoed(service.llm.detokenizer, call.echoes[index], prompt, delta.heading)


def prompt_ids(call: Call, voice: Voice) -> dict[str, list[int]]:
    """The prompt's tokens, if token ids were requested."""
    return {"prompt_token_ids": list(voice.job.request.prompt)} if call.request.return_token_ids else {}


def of_choice(service: Service, call: Call, voice: Voice, delta: Delta) -> dict[str, Any]:
    """Optional fields that were requested."""
    more: dict[str, Any] = {}
    if call.request.return_token_ids:
        more["token_ids"] = voice.tokens
    if call.ours is not None and call.ours.rounds:
        more["outrider"] = {"rounds": rounds(service, delta)}
    return more


def rounds(service: Service, delta: Delta) -> list[dict[str, Any]]:
    """The rounds: their text in segments (drafted or not), and their trees with the text of the nodes. Prefill and the
    end of a text have no tree."""
    return [
        {
            "text": segments,
            "accepted": accepted,
            "tree": None
            if shown is None
            else {
                "tokens": [service.name_of(token) for token in shown.tokens],
                "parents": shown.parents,
                "path": shown.path,
            },
        }
        for segments, accepted, shown in delta.rounds
    ]


def head(service: Service, call: Call, kind: str) -> dict[str, Any]:
    """The common fields of responses and chunks."""
    return {
        "id": call.id, "object": kind, "created": call.created, "model": service.name,
        "system_fingerprint": service.fingerprint,
    }  # fmt: skip


def usage(call: Call) -> dict[str, Any]:
    """Tokens of the call; each prompt counts once."""
    usages = [None if voice.end is None else voice.end.usage for voice in call.voices]
    cached = sum(usage.cached_tokens for usage in usages[:: call.request.n] if usage)  # each prompt once, as its tokens
    return usage_of([usage for usage in usages if usage], call.prompts, cached)


def so_far(call: Call) -> dict[str, int]:
    """Tokens so far of a streaming call."""
    written = sum(v.end.usage.new_tokens if v.end else len(v.tokens) for v in call.voices)
    return {"prompt_tokens": call.prompts, "completion_tokens": written, "total_tokens": call.prompts + written}


def extras(call: Call) -> dict[str, Any]:
    """Statistics of speculation, for requests with an `outrider` object and a single text."""
    if call.ours is None or len(call.voices) != 1 or call.voices[0].end is None:
        return {}
    return {"metrics": figures(call.voices[0].job, call.voices[0].end.usage)}


async def chunks(service: Service, call: Call) -> AsyncIterator[bytes]:
    """The streaming response: an event for each piece of new text."""
    chat = isinstance(call.request, ChatRequest)
    options = call.request.stream_options
    counted = options is not None and options.include_usage
    top = head(service, call, "chat.completion.chunk" if chat else "text_completion")
    always = options is not None and counted and options.continuous_usage_stats

    def event(choice: dict[str, Any], **more: Any) -> bytes:
        used = {"usage": so_far(call) if always else None} if counted else {}
        return spelled({**top, "choices": [choice], **used, **more})

    for index in range(len(call.voices)):
        if chat:
            yield event(chunk(index, delta={"role": "assistant", "content": ""}))
        elif call.echoes and not call.scored:
            yield event(chunk(index, text=call.echoes[index]))
    unheard = set(range(len(call.voices))) if call.scored else set()
    tails = [Tail(call.caller) for _ in call.voices]
    while any(voice.end is None for voice in call.voices):
        for index, events in sorted((await call.channel.take()).items()):
            voice = call.voices[index]
            delta = voice.hear(events)
            if failed := failure(voice):
                yield spelled(failed.body())
                yield DONE
                return
            finish = voice.finish
            if index in unheard and (delta.heading is not None or finish is not None):
                unheard.remove(index)
                first = {"text": call.echoes[index], "logprobs": heading(service, call, index, delta)}
                yield event({**chunk(index), **first})
            text, calls = tails[index].add(delta.text, finish is not None)
            if text or news(call, delta):
                yield event(piece(service, call, index, delta, text, chat))
            for number, made in enumerate(calls):
                yield event(chunk(index, delta={"tool_calls": [{"index": number, **made}]}))
            if finish is not None:
                finish = called(finish) if calls else finish
                rest: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
                yield event(chunk(index, finish, **rest), **extras(call))
    if counted:
        yield spelled({**top, "choices": [], "usage": usage(call)})
    yield DONE


@dataclass
class Tail:
    """Streamed text that is held back because it may be a tool call."""

    caller: Caller | None
    text: str = ""  # all of it
    sent: int = 0  # characters of its content

    def add(self, text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """Content that may be sent now; at the end, the calls."""
        if self.caller is None:
            return text, []
        self.text += text
        content, calls = self.caller.split(self.text) if ended else (self.caller.ready(self.text), [])
        ready = (content or "")[self.sent :]
        self.sent += len(ready)
        return ready, calls


def news(call: Call, delta: Delta) -> bool:
    """Whether there is anything besides text to send."""
    ids, rounds = call.request.return_token_ids, call.ours is not None and call.ours.rounds
    return bool(delta.scores or (ids and delta.tokens) or (rounds and delta.rounds))


def piece(service: Service, call: Call, index: int, delta: Delta, text: str, chat: bool) -> dict[str, Any]:
    """The new part of one text; `text` is what is sent of it."""
    made = chunk(index, **({"delta": {"content": text} if text else {}} if chat else {"text": text}))
    if delta.scores and chat:
        made["logprobs"] = {"content": chat_logprobs(delta.scores), "refusal": None}
    elif delta.scores:
        made["logprobs"] = text_logprobs(delta.scores, len(call.echoes[index]) if call.echoes else 0)
    if call.request.return_token_ids:
        made["token_ids"] = delta.tokens
    if call.ours is not None and call.ours.rounds:
        made["outrider"] = {"rounds": rounds(service, delta)}
    return made


def chunk(index: int, finish: str | None = None, **what: Any) -> dict[str, Any]:
    """One choice of a streamed chunk."""
    return {"index": index, **what, "logprobs": None, "finish_reason": finish}


def spelled(body: Any) -> bytes:
    """A body as a server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
