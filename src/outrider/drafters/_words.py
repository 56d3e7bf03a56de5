"""What tokens spell, and how a drafter's tokens stand to the target's.

Three ways: the same tokenizer (`Same`), the tokens that both tokenizers have (`Shared`; Timor et al. 2025, token-level
intersection), or nothing but the text (`_text.py`), for which a `Spelling` writes one tokenizer's text in the other's
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..core.text import TokenBytes, detokenizer
from ..core.types import Array
from ..params import InputError

WINDOW = 48  # bytes of the text before that are looked at when text is written in tokens
WAYS = ("same", "shared", "text")
ENOUGH = 0.1  # share of the target's tokens that the drafter must have as well


@dataclass(frozen=True)
class Spelling:
    """The bytes of every token of a tokenizer; None for special tokens, which spell nothing."""

    tokenizer: Any = field(repr=False)
    spelt: tuple[bytes | None, ...] = field(repr=False)
    special: dict[str, int] = field(repr=False)

    @classmethod
    def of(cls, tokenizer: Any, where: str) -> Spelling:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InputError(
                f"{where} has no fast tokenizer, whose tokens' bytes are needed; give one (tokenizer.json)"
            )
        table = detokenizer(tokenizer)
        if not isinstance(table, TokenBytes) or table.spaced:
            raise InputError(
                f"the tokens of {where} are neither of bytes nor of sentencepiece; their text is not known"
            )
        special = {backend.id_to_token(i): i for i in sorted(table.special)}
        spelt = tuple(None if i in table.special else table.name(i) or None for i in range(len(tokenizer)))
        return cls(tokenizer, spelt, special)

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """Bytes -> lowest token id of that spelling."""
        return {text: i for i, text in reversed(list(enumerate(self.spelt))) if text}

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.ids))

    def bytes_of(self, token: int) -> bytes | None:
        return self.spelt[token] if token < len(self.spelt) else None

    def mark(self, other: Spelling, token: int) -> int | None:
        """Of another tokenizer's special token, the one of the same name here, or of the same use."""
        own = self.special.get(other.tokenizer.convert_ids_to_tokens(token))
        if own is not None:
            return own
        uses = ("eos_token_id", "bos_token_id")
        return next((getattr(self.tokenizer, u) for u in uses if getattr(other.tokenizer, u) == token), None)

    def write(self, before: bytes, text: bytes) -> list[int]:
        """Tokens that spell `text` after `before`: the tokenizer's own division where it has a border there.

        Where its token runs across the border, the part after it is spelt by the longest tokens that fit; so is a
        character of which only some bytes are there. What no token spells is left out.
        """
        cut = max(0, len(before) - WINDOW)
        context = before[cut:]
        while context and context[0] & 0xC0 == 0x80:  # not in the middle of a character
            context = context[1:]
        complete, rest = _complete(context + text)
        if len(complete) <= len(context):
            return self.cover(text)
        tokens, line = self._divided(complete)
        if line == b" " + complete and complete.startswith(b" "):  # sentencepiece puts a space before any text
            tokens, line = self._divided(complete[1:])
        place = -len(context)
        if line == b" " + complete:
            place -= 1 if context else 0  # at the very beginning that space is its own
        elif line != complete:
            return self.cover(text)
        written: list[int] = []
        for token in tokens:
            end = place + len(self.bytes_of(token) or b"")
            if place >= 0:
                written.append(token)
            elif end > 0:
                written += self.cover(text[:end])
            place = end
        return written + self.cover(rest)

    def _divided(self, text: bytes) -> tuple[list[int], bytes]:
        tokens = self.tokenizer(text.decode(), add_special_tokens=False, verbose=False)["input_ids"]
        return tokens, b"".join(self.bytes_of(t) or b"" for t in tokens)

    def cover(self, text: bytes) -> list[int]:
        """The longest tokens that fit, from the left; what no token spells is left out."""
        covered, at = [], 0
        while at < len(text):
            for size in range(min(self.longest, len(text) - at), 0, -1):
                token = self.ids.get(text[at : at + size])
                if token is not None:
                    covered.append(token)
                    break
            else:
                size = 1
            at += size
        return covered


def _complete(text: bytes) -> tuple[bytes, bytes]:
    """All but the bytes of a last, unfinished character (or everything from the first byte that is none), and those."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start], text[error.start :]
    return text, b""


@dataclass(frozen=True)
class Same:
    """One tokenizer; the drafter reads `rows` tokens and the target `vocab`, which differ by padding alone. `names`:
    the tokens [vd] of a trimmed draft vocabulary, of which alone it has logits."""

    rows: int
    vocab: int
    names: Array | None = None
    longest: int = 1  # of the drafter's tokens for one of the target's

    def read(self, tokens: Sequence[int]) -> list[int]:
        return [min(t, self.rows - 1) for t in tokens]

    def feed(self, tokens: Array) -> Array:
        """The drafter's ids of the target's."""
        return tokens if self.rows >= self.vocab else np.minimum(tokens, self.rows - 1)

    def restrict(self, logits: Any) -> Any:
        """Logits [.., vd] over `names`, or [.., v] over the target's vocabulary: a drafter's padding rows are cut,
        tokens that it lacks are impossible. An array or a tensor, as the drafter's logits [.., d] are."""
        if self.names is not None or logits.shape[-1] == self.vocab:
            return logits
        return extended(logits, self.vocab) if logits.shape[-1] < self.vocab else logits[..., : self.vocab]


def extended(logits: Any, vocab: int) -> Any:
    """Logits [.., d] with -inf after them up to `vocab`."""
    missing = vocab - logits.shape[-1]
    if isinstance(logits, np.ndarray):
        return np.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-np.inf)
    from torch.nn.functional import pad

    return pad(logits, (0, missing), value=float("-inf"))


@dataclass(frozen=True)
class Shared:
    """The k tokens that both have: `names` [k] are the target's ids, `columns` [k] the drafter's.

    The drafter's distribution is its own over these, renormalised, so q is proper under `rejection`, and under
    `coupled` the noise is that of the target's ids. The text it reads is spelt token by token: one of the drafter's
    where both have it, else several.
    """

    names: Array
    columns: Array
    into: Array  # [v]: the target's id -> the drafter's, for those that both have
    spelt: tuple[tuple[int, ...], ...] = field(repr=False)
    vocab: int

    @property
    def longest(self) -> int:
        return max(map(len, self.spelt))

    @classmethod
    def of(cls, here: Spelling, there: Spelling, rows: int, vocab: int, where: str) -> Shared:
        pairs = [(t, there.ids[s]) for t, s in enumerate(here.spelt[:vocab]) if s and s in there.ids]
        marks = {t: there.mark(here, t) for t in here.special.values()}
        pairs += [(t, d) for t, d in marks.items() if d is not None and t < vocab]
        first = {d: t for t, d in reversed(pairs) if d < rows}  # a token of the drafter's names one of the target's
        if len(first) < ENOUGH * vocab:
            raise InputError(
                f"{where} has {rows} tokens and the target {vocab}, of which both have {len(first)}: too few for "
                "vocab=shared; use vocab=text"
            )
        names, columns = sorted(first.values()), {t: d for d, t in first.items()}
        into = np.zeros(vocab, np.int64)
        into[names] = [columns[t] for t in names]
        blank = there.cover(b"\n") or there.cover(b" ") or [0]
        spelt = []
        for t in range(vocab):
            text = here.bytes_of(t)
            own = [columns[t]] if t in columns else there.cover(text) if text else []
            spelt.append(tuple(own or blank))  # what it cannot spell, a special token say, parts the text
        return cls(np.array(names), into[names], into, tuple(spelt), vocab)

    def read(self, tokens: Sequence[int]) -> list[int]:
        return [d for t in tokens for d in self.spelt[t]]

    def feed(self, tokens: Array) -> Array:
        """The drafter's ids of the target's."""
        fed: Array = self.into[tokens]
        return fed

    def restrict(self, logits: Any) -> Any:
        """Logits [.., k] over `names`, of the drafter's own [.., d]; an array or a tensor."""
        return logits[..., self.columns]


Words = Same | Shared


def check_names(names: Array | None, where: str, vocab: int, same: bool) -> None:
    """Refuse a draft vocabulary with tokens that the target lacks, or under another tokenizer: what it leaves out was
    never learned.

    Args:
        names: as of `ids_in`.
        where: the draft model.
        vocab: how many tokens the target has.
        same: has the draft model the target's tokenizer?
    """
    if names is None:
        return
    if not same:
        raise InputError(
            f"{where} learned to draft {len(names)} of its tokens, with its own tokenizer; leave vocab out"
        )
    if (most := int(names.max())) >= vocab:
        raise InputError(f"{where} drafts token {most} and the target has {vocab}; use its own target")
