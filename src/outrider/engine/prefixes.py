"""The prefix cache: the KV cache of finished rows, for prompts with a common prefix, such as the next turn of a chat.

A row's keys and values are kept when it leaves, and so are the hidden states that drafters read. A new row copies the
prefix that its prompt shares with one of them and prefills the rest; its drafter observes the copied part as if it had
just been computed, so its state is that of a full prefill. The least recently used texts are evicted first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.protocols import Kept, Round

LEAST = 16  # tokens below which copying does not pay


@dataclass
class Prefixes:
    """At most `rows` texts in at most `limit` bytes, the most recently used last."""

    rows: int = 8
    limit: int = 512 << 20
    texts: list[tuple[str, Kept]] = field(default_factory=list)  # with the salt of the prompts that may share it

    def find(self, prompt: Sequence[int], salt: str = "", taps: Collection[int] = ()) -> tuple[Kept, int] | None:
        """The text with the longest common prefix, and that prefix's length: at most the prompt without its last token,
        whose logits are needed. Texts that lack the hidden states of some of the `taps` are passed over."""
        shared = [(common(kept.tokens, prompt), i) for i, kept in self.fitting(salt, taps)]
        same, i = max(shared, default=(0, 0))
        same = min(same, len(prompt) - 1)
        if same < LEAST:
            return None
        self.texts.append(self.texts.pop(i))
        return self.texts[-1][1], same

    def fitting(self, salt: str, taps: Collection[int]) -> list[tuple[int, Kept]]:
        """The texts with this salt and the hidden states of these taps, by their index."""
        return [
            (i, kept) for i, (own, kept) in enumerate(self.texts) if own == salt and kept.features.keys() >= {*taps}
        ]

    def add(
        self, tokens: Sequence[int], copy: Callable[[], Kept | None], salt: str = "", taps: Collection[int] = ()
    ) -> None:
        """Keep a text with the hidden states of its taps, made by `copy`, unless a text that continues it is kept."""
        if len(tokens) <= LEAST or not self.limit:
            return
        for i, kept in self.fitting(salt, taps):
            if common(kept.tokens, tokens) == len(tokens):
                self.texts.append(self.texts.pop(i))
                return
        made = copy()
        if made is None or made.bytes > self.limit:
            return  # what is there still has the beginning of such a text
        self.texts = [t for t in self.texts if t[0] != salt or common(t[1].tokens, tokens) < len(t[1].tokens)]
        self.texts.append((salt, made))
        while len(self.texts) > self.rows or self.bytes > self.limit:
            del self.texts[0]

    def clear(self) -> None:
        self.texts = []

    @property
    def bytes(self) -> int:
        return sum(kept.bytes for _, kept in self.texts)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


@dataclass
class Seen:
    """The hidden states of every row's committed tokens, as collected round by round."""

    taps: tuple[int, ...] = ()  # none: nothing is collected
    rows: list[list[dict[int, Any]]] = field(default_factory=list)

    def add(self, round: Round) -> None:
        if not self.taps:
            return
        for i, (seen, path) in enumerate(zip(self.rows, round.paths, strict=True)):
            if path:
                seen.append({tap: round.output.features[tap][i, path] for tap in self.taps})

    def select(self, index: Sequence[int]) -> None:
        if self.taps:
            self.rows = [self.rows[i] for i in index]

    def join(self, other: Seen) -> None:
        if self.taps:
            self.rows = self.rows + other.rows

    def of(self, i: int, length: int) -> dict[int, Any]:
        """By tap: hidden states [length, h] of row i's first `length` tokens."""
        return {tap: _joined([part[tap] for part in self.rows[i]])[:length] for tap in self.taps}


def _joined(parts: Sequence[Any]) -> Any:
    """Concatenated arrays or tensors."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    return torch.cat(list(parts))
