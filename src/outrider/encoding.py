"""Prompts as token ids: text, ids (lists, tensors, arrays) or chat messages; anything else is an InputError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from .params import InputError

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
EMPTY = "the prompt is empty; give some text"


def listed(prompts: Any) -> list[Any]:
    """One prompt or many, as a list of prompts. A tensor or array [l] of ids is one prompt, [b, l] are b."""
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    _check_kind(prompts)
    if not prompts:
        raise InputError(EMPTY)
    one = isinstance(prompts, str) or isinstance(prompts[0], Integral | Mapping)
    return [prompts] if one else list(prompts)


def encode(prompt: Any, tokenizer: Any, name: str) -> list[int]:
    """Token ids of one prompt: text as the tokenizer has it, messages through its chat template, ids as they are.

    `tokenizer` is transformers' own, None for a model without; `name` is what errors call the model.
    """
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    _check_kind(prompt)
    if not prompt:
        raise InputError(EMPTY)
    if isinstance(prompt, str):
        _check_text(prompt)
        if tokenizer is None:
            raise InputError("this model has no tokenizer; give the prompt as token ids")
        return list(tokenizer(prompt)["input_ids"])
    if any(isinstance(part, Mapping) for part in prompt):
        return _chat(list(prompt), tokenizer, name)
    if not all(isinstance(part, Integral) for part in prompt):
        raise InputError("a prompt of token ids holds integers alone; for several prompts give a list of prompts")
    return [int(token) for token in prompt]


def has_template(tokenizer: Any) -> bool:
    """Has it a chat template?"""
    return bool(getattr(tokenizer, "chat_template", None))


def _chat(messages: list[Any], tokenizer: Any, name: str) -> list[int]:
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise InputError('a chat message is {"role": "user", "content": "text"}; give a list of such messages')
        if isinstance(message["content"], str):
            _check_text(message["content"])
    if not has_template(tokenizer):
        raise InputError(f"{name} has no chat template; give the prompt as plain text")
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except Exception as error:  # a template may fail in any way
        raise InputError(f"the chat template of {name} refuses these messages: {error}") from None
    return list(ids["input_ids"])


def _check_kind(prompt: Any) -> None:
    if isinstance(prompt, bytes | bytearray):
        raise InputError("a prompt is text, not bytes; decode it first, as in prompt.decode()")
    if isinstance(prompt, Mapping):
        raise InputError('chat messages come as a list, as in [{"role": "user", "content": "text"}]; put it in a list')
    if not isinstance(prompt, str | Sequence):
        raise InputError(f"a prompt is text, token ids or a list of chat messages, not {type(prompt).__name__}")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {error.start + 1} of the prompt is half of a surrogate pair, which is no text; remove it"
        ) from None
