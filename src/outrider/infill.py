"""Filling in the middle: the prompt that asks for what is missing between two texts, as code models learned it."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any

from .params import InputError

# What stands before the text, before what follows the gap, and before what fills it.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
NEXT = "<|file_separator|>", "<|file_sep|>", "<file_sep>", "<|repo_name|>", "<|fim_pad|>"  # what models write after it


@dataclass(frozen=True)
class Infill:
    """How a model fills gaps.

    Attributes:
        words: its tokenizer (of `tokenizers`), which takes marks in a text for text.
        begin: the tokens that every text begins with.
        marks: those before the text, before what follows the gap, and before what fills it.
        ends: those that end what fills it, besides the model's own.
    """

    words: Any = field(repr=False)
    begin: tuple[int, ...]
    marks: tuple[int, int, int]
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any, name: str) -> Infill:
        """That of a model.

        Args:
            tokenizer: ours or one of transformers'; None for a model without.
            name: what errors call the model.

        Raises:
            InputError: the model's vocabulary has no marks for gaps.
        """
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        for three in MARKS if backend is not None else ():
            first, second, last = map(backend.token_to_id, three)
            if None not in (first, second, last):
                words = copy(backend)
                words.no_padding()
                words.no_truncation()
                words.encode_special_tokens = True
                bare, whole = (words.encode("a", add_special_tokens=added).ids for added in (False, True))
                begin = tuple(whole[: next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)])
                others = (backend.token_to_id(token) for token in NEXT)
                ends = frozenset(token for token in (first, second, last, *others) if token is not None)
                return cls(words, begin, (first, second, last), ends)
        raise InputError(f"{name} has no tokens for a gap in a text, as code models have; leave suffix out")

    def prompt(self, before: str, after: str) -> list[int]:
        """Token ids of the prompt for what is missing between two texts."""
        first, second, last = self.marks
        read = (self.words.encode(text, add_special_tokens=False).ids for text in (before, after))
        return [*self.begin, first, *next(read), second, *next(read), last]
