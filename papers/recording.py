"""Recorded answers of a model, from JSONL: one greedy answer a line, as text or as token ids.

    {"prompt": "text" or [{"role": "user", "content": "text"}], "answer": "text"}
    {"prompt_tokens": [1, 403, 407], "answer_tokens": [261, 378, 2]}

with "id", "task", "model" where there are some, and "finish_reason": an answer of "length" was cut off, any other ended
by itself (without one, a text ended, and ids did if their last is the tokenizer's end of text).

Ids are taken as they are. A text prompt is what the model read; messages go through the tokenizer's chat template. Text
is tokenised afresh and may split a word otherwise than its writer did; one that ended gets the end of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.encoding import has_template
from outrider.params import InputError
from outrider.prompts import rows


@dataclass(frozen=True)
class Record:
    """One answer, its end of text included where it wrote one. `ended`: by itself, not cut off at a length."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    ended: bool = True
    id: str = ""
    task: str = "replay"
    model: str = ""


def read(path: str | Path, tokenizer: Any = None) -> list[Record]:
    """The answers of a recording. `tokenizer` (transformers) is needed where they are text."""
    records = [_record(where, value, tokenizer) for where, value in rows(path, "recording")]
    if not records:
        raise InputError(f"{path} is empty; write one recorded answer a line, as JSON")
    return records


def _record(where: str, value: Any, tokenizer: Any) -> Record:
    if not isinstance(value, dict):
        raise InputError(f'{where}: give an object with "prompt" and "answer", or "prompt_tokens" and "answer_tokens"')
    ends = getattr(tokenizer, "eos_token_id", None)
    finish = value.get("finish_reason")
    if "answer_tokens" in value:
        prompt, answer = (_ids(where, name, value.get(name)) for name in ("prompt_tokens", "answer_tokens"))
        ended = answer[-1] == ends if finish is None else finish != "length"
    else:
        prompt, answer = _encoded(where, value.get("prompt"), value.get("answer"), tokenizer)
        ended = finish != "length"
        if ended and ends is not None and answer[-1] != ends:
            answer = [*answer, ends]
    about = {name: str(value[name]) for name in ("id", "task", "model") if value.get(name) is not None}
    return Record(tuple(prompt), tuple(answer), ended, **about)


def _ids(where: str, name: str, value: Any) -> list[int]:
    good = isinstance(value, list) and bool(value)
    if not good or not all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in value):
        raise InputError(f'{where}: "{name}" must be a list of one token id or more')
    return list(value)


def _encoded(where: str, prompt: Any, answer: Any, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of a prompt and of the answer after it: tokenised as one text, if that leaves the prompt's tokens alone."""
    if not isinstance(answer, str) or not answer:
        raise InputError(f'{where}: "answer" must be a text that is not empty')
    if tokenizer is None:
        raise InputError(f"{where}: the answer is text; name the folder of its model's tokenizer")
    chat = isinstance(prompt, list)
    text = _written(where, prompt, tokenizer) if chat else prompt
    if not isinstance(text, str) or not text:
        raise InputError(f'{where}: "prompt" must be a text that is not empty, or a list of messages')

    def encode(text: str, special: bool = not chat) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    head, whole = encode(text), encode(text + answer)
    tail = whole[len(head) :] if whole[: len(head)] == head else encode(answer, False)
    if not head or not tail:
        raise InputError(f"{where}: the tokenizer makes no tokens of this prompt or answer; leave the line out")
    return head, tail


def _written(where: str, messages: list[Any], tokenizer: Any) -> str:
    """Chat messages as the model read them."""
    from jinja2 import TemplateError

    keys = ("role", "content")
    if not messages or not all(
        isinstance(m, Mapping) and all(isinstance(m.get(k), str) for k in keys) for m in messages
    ):
        raise InputError(f'{where}: messages are a list of {{"role": text, "content": text}}')
    if not has_template(tokenizer):
        raise InputError(
            f"{where}: this tokenizer has no chat template; give the prompt as the text that the model read"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except TemplateError as error:
        raise InputError(f"{where}: the tokenizer's chat template refuses these messages ({error})") from None


def vocabulary(records: Sequence[Record], tokenizer: Any = None) -> int:
    """Token ids that the model knows: its tokenizer's, at least all that were recorded."""
    return max(len(tokenizer or ()), 1 + max(max((*r.prompt, *r.answer)) for r in records))
