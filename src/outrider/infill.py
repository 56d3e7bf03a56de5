"""Filling in the middle: the prompt that asks for what is missing between two texts, as code models learned it."""

from __future__ import annotations

from typing import Any

from .params import InputError

# What stands before the text, before what follows the gap, and before what fills it.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
NEXT = "<|file_separator|>", "<|file_sep|>", "<file_sep>", "<|repo_name|>", "<|fim_pad|>"  # what models write after it


def prompt(before: str, after: str, tokenizer: Any, name: str) -> str:
    """The prompt for what is missing between two texts.

    Args:
        before, after: the texts.
        tokenizer: ours or one of transformers'; None for a model without.
        name: what errors call the model.

    Raises:
        InputError: the model's vocabulary has no marks for it.
    """
    first, second, last = marks(tokenizer, name)
    return f"{first}{before}{second}{after}{last}"


def ends(tokenizer: Any, name: str) -> frozenset[int]:
    """The tokens that end what fills a gap, besides the model's own. Raises InputError as `prompt`."""
    ids = map(tokenizer.backend_tokenizer.token_to_id, (*marks(tokenizer, name), *NEXT))
    return frozenset(token for token in ids if token is not None)


def marks(tokenizer: Any, name: str) -> tuple[str, str, str]:
    """The marks that the model's vocabulary has. Raises InputError for none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        for three in MARKS:
            if all(backend.token_to_id(mark) is not None for mark in three):
                return three
    raise InputError(f"{name} has no tokens for a gap in a text, as code models have; leave suffix out")
