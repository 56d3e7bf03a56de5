"""Fill-in-the-middle (FIM): the prompt that asks a code model for what is missing between a prefix and a suffix."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any

from .params import InputError

TOKENS = (  # those before the prefix, before the suffix and before the middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
# What models write after the middle.
NEXT = "<|file_separator|>", "<|file_sep|>", "<file_sep>", "<|repo_name|>", "<|fim_pad|>"


@dataclass(frozen=True)
class Infill:
    """How a model is asked for the middle.

    Attributes:
        tokenizer: of `tokenizers`; it encodes special tokens in a text as plain text.
        begin: the tokens that every text begins with.
        tokens: the FIM tokens before the prefix, before the suffix and before the middle.
        ends: tokens that end the middle, besides the model's end of text.
    """

    tokenizer: Any = field(repr=False)
    begin: tuple[int, ...]
    tokens: tuple[int, int, int]
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any, name: str) -> Infill:
        """That of a model.

        Args:
            tokenizer: ours or one of transformers'; None for a model without.
            name: what errors call the model.

        Raises:
            InputError: the model's vocabulary has no FIM tokens.
        """
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        for three in TOKENS if backend is not None else ():
            prefix, suffix, middle = map(backend.token_to_id, three)
            if None not in (prefix, suffix, middle):
                plain = copy(backend)
                plain.no_padding()
                plain.no_truncation()
                plain.encode_special_tokens = True
                bare, whole = (plain.encode("a", add_special_tokens=added).ids for added in (False, True))
                begin = tuple(whole[: next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)])
                others = (backend.token_to_id(token) for token in NEXT)
                ends = frozenset(token for token in (prefix, suffix, middle, *others) if token is not None)
                return cls(plain, begin, (prefix, suffix, middle), ends)
        raise InputError(f"{name} has no fill-in-the-middle tokens, as code models have; leave suffix out")

    def prompt(self, prefix: str, suffix: str) -> list[int]:
        """Token ids of the prompt for what is missing between these texts."""
        before_prefix, before_suffix, before_middle = self.tokens
        first, last = (self.tokenizer.encode(text, add_special_tokens=False).ids for text in (prefix, suffix))
        return [*self.begin, before_prefix, *first, before_suffix, *last, before_middle]
