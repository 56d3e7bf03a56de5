"""The bodies of answers: whole, or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from .protocol import ChatRequest, Refusal
from .service import Call, Service
from .texts import Delta, Voice, figures, usage_of

DONE = b"data: [DONE]\n\n"


async def whole(service: Service, call: Call) -> dict[str, Any]:
    """The answer once its last text has ended."""
    deltas = [Delta() for _ in call.voices]
    while any(voice.end is None for voice in call.voices):
        for index, events in (await call.channel.take()).items():
            seen = call.voices[index].hear(events)
            deltas[index].segments += seen.segments
            deltas[index].scores += seen.scores
            deltas[index].rounds += seen.rounds
    for voice in call.voices:
        if voice.end is not None and voice.end.finish == "error":
            raise Refusal(voice.end.error, status=500)
    chat = isinstance(call.request, ChatRequest)
    choices = [
        (chat_choice if chat else text_choice)(service, call, i, voice, deltas[i])
        for i, voice in enumerate(call.voices)
    ]
    kind = "chat.completion" if chat else "text_completion"
    read = prompt_ids(call, call.voices[0]) if chat else {}
    return {**head(service, call, kind), **read, "choices": choices, "usage": usage(call), **extras(call)}


def chat_choice(service: Service, call: Call, index: int, voice: Voice, delta: Delta) -> dict[str, Any]:
    """One choice of a chat's answer, as OpenAI's clients read it."""
    message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
    finish = voice.finish
    if call.caller is not None:
        message["content"], calls = call.caller.split(delta.text)
        if calls:
            message["tool_calls"], finish = calls, "tool_calls"
    logprobs = {"content": service.spelled.chat(delta.scores), "refusal": None} if call.request.logprobs else None
    return {
        "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish,
        **of_choice(service, call, voice, delta),
    }  # fmt: skip


def text_choice(service: Service, call: Call, index: int, voice: Voice, delta: Delta) -> dict[str, Any]:
    """One choice of a completion."""
    before = call.echoes[index] if call.echoes else ""
    asked = call.request.logprobs is not None
    return {
        **prompt_ids(call, voice), "index": index, "text": before + delta.text, "finish_reason": voice.finish,
        "logprobs": service.spelled.completion(delta.scores, len(before)) if asked else None,
        **of_choice(service, call, voice, delta),
    }  # fmt: skip


def prompt_ids(call: Call, voice: Voice) -> dict[str, list[int]]:
    """The prompt's tokens, where token ids were asked for."""
    return {"prompt_token_ids": list(voice.job.request.prompt)} if call.request.return_token_ids else {}


def of_choice(service: Service, call: Call, voice: Voice, delta: Delta) -> dict[str, Any]:
    """Fields that are there where they were asked for."""
    more: dict[str, Any] = {}
    if call.request.return_token_ids:
        more["token_ids"] = voice.tokens
    if call.ours is not None and call.ours.rounds:
        more["outrider"] = {"rounds": rounds(service, delta)}
    return more


def rounds(service: Service, delta: Delta) -> list[dict[str, Any]]:
    """The rounds: their text in segments (was it drafted?), and their trees with the words of the nodes. The prompt's
    own pass and the end of a text have no tree."""
    return [
        {
            "text": segments,
            "accepted": accepted,
            "tree": None
            if shown is None
            else {
                "tokens": [service.spelled.names(token)[0] for token in shown.tokens],
                "parents": shown.parents,
                "path": shown.path,
            },
        }
        for segments, accepted, shown in delta.rounds
    ]


def head(service: Service, call: Call, kind: str) -> dict[str, Any]:
    """What every answer and chunk begins with."""
    return {
        "id": call.id, "object": kind, "created": call.created, "model": service.name,
        "system_fingerprint": service.fingerprint,
    }  # fmt: skip


def usage(call: Call) -> dict[str, Any]:
    """Tokens of the whole call; those of a prompt count once."""
    cached = sum(voice.job.cached for voice in call.voices[:: call.request.n])  # each prompt once, as its tokens
    return usage_of([voice.end.usage for voice in call.voices if voice.end is not None], call.prompts, cached)


def extras(call: Call) -> dict[str, Any]:
    """Figures of speculation, for those who sent an `outrider` object and asked for one text."""
    if call.ours is None or len(call.voices) != 1 or call.voices[0].end is None:
        return {}
    return {"metrics": figures(call.voices[0].job, call.voices[0].end.usage)}


async def chunks(service: Service, call: Call) -> AsyncIterator[bytes]:
    """The answer as it comes: one event for whatever a text has gained since the last."""
    chat = isinstance(call.request, ChatRequest)
    options = call.request.stream_options
    counted = options is not None and options.include_usage
    top = head(service, call, "chat.completion.chunk" if chat else "text_completion")
    quiet = {"usage": None} if counted else {}

    def event(choice: dict[str, Any], **more: Any) -> bytes:
        return spelled({**top, "choices": [choice], **quiet, **more})

    for index in range(len(call.voices)):
        if chat:
            yield event(chunk(index, delta={"role": "assistant", "content": ""}))
        elif call.echoes:
            yield event(chunk(index, text=call.echoes[index]))
    held = [""] * len(call.voices)  # texts that may turn out to be tool calls are sent when they have ended
    offsets = [len(text) for text in call.echoes] or [0] * len(call.voices)
    while any(voice.end is None for voice in call.voices):
        for index, events in sorted((await call.channel.take()).items()):
            voice = call.voices[index]
            delta = voice.hear(events)
            if voice.end is not None and voice.end.finish == "error":
                yield spelled(Refusal(voice.end.error, status=500).body())
                yield DONE
                return
            finish = voice.finish
            if call.caller is not None:
                held[index] += delta.text
                if finish is None:
                    continue
                content, calls = call.caller.split(held[index])
                if content:
                    yield event(chunk(index, delta={"content": content}))
                for number, made in enumerate(calls):
                    yield event(chunk(index, delta={"tool_calls": [{"index": number, **made}]}))
                finish = "tool_calls" if calls else finish
            elif delta.text or delta.tokens:
                yield event(piece(service, call, index, delta, offsets, chat))
            if finish is not None:
                rest: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
                yield event(chunk(index, finish, **rest), **extras(call))
    if counted:
        yield spelled({**top, "choices": [], "usage": usage(call)})
    yield DONE


def piece(service: Service, call: Call, index: int, delta: Delta, offsets: list[int], chat: bool) -> dict[str, Any]:
    """What one text has gained."""
    made = chunk(index, **({"delta": {"content": delta.text}} if chat else {"text": delta.text}))
    if delta.scores:
        if chat:
            made["logprobs"] = {"content": service.spelled.chat(delta.scores), "refusal": None}
        else:
            made["logprobs"] = service.spelled.completion(delta.scores, offsets[index])
    offsets[index] += len(delta.text)
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
