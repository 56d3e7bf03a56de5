"""What finished rows have read, kept for prompts that begin like them.

A row's keys and values stay when it leaves, and so do the hidden states that drafters read. A newcomer copies what its
prompt has in common with one of them and reads the rest; its drafter is told of the copied part as if it were read now,
so its state is that of a fresh reading. Texts that were not used for the longest time go first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.protocols import Kept, Round

LEAST = 16  # tokens below which copying is not worth it


@dataclass
class Prefixes:
    """At most `rows` texts in at most `limit` bytes; the one that was used last stands last."""

    rows: int = 8
    limit: int = 512 << 20
    texts: list[tuple[str, Kept]] = field(default_factory=list)  # with the salt of those who may share it

    def find(self, prompt: Sequence[int], salt: str = "") -> tuple[Kept, int] | None:
        """The text with the longest beginning in common, and how many tokens that are: never the whole prompt, whose
        last token must be read for what follows it."""
        found = [(common(kept.tokens, prompt), i) for i, (own, kept) in enumerate(self.texts) if own == salt]
        same, i = max(found, default=(0, 0))
        same = min(same, len(prompt) - 1)
        if same < LEAST:
            return None
        self.texts.append(self.texts.pop(i))
        return self.texts[-1][1], same

    def add(self, tokens: Sequence[int], copy: Callable[[], Kept | None], salt: str = "") -> None:
        """Keep a text, unless one that goes on from it is there; `copy` makes it."""
        if len(tokens) <= LEAST or not self.limit:
            return
        for i, (own, kept) in enumerate(self.texts):
            if own == salt and common(kept.tokens, tokens) == len(tokens):
                self.texts.append(self.texts.pop(i))
                return
        self.texts = [t for t in self.texts if t[0] != salt or common(t[1].tokens, tokens) < len(t[1].tokens)]
        if (made := copy()) is not None:
            self.texts.append((salt, made))
        while len(self.texts) > self.rows or self.bytes > self.limit:
            del self.texts[0]

    def clear(self) -> None:
        self.texts = []

    @property
    def bytes(self) -> int:
        return sum(kept.bytes for _, kept in self.texts)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens are the same."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


@dataclass
class Seen:
    """The hidden states of every row's committed tokens, as rounds brought them."""

    taps: tuple[int, ...]
    rows: list[list[dict[int, Tensor]]]

    def add(self, round: Round) -> None:
        if not self.taps:
            return
        for i, (seen, count) in enumerate(zip(self.rows, round.count.tolist(), strict=True)):
            if count:
                path = round.path[i, :count]
                seen.append({tap: round.output.features[tap][i, path] for tap in self.taps})

    def select(self, index: Sequence[int]) -> None:
        self.rows = [self.rows[i] for i in index]

    def join(self, other: Seen) -> None:
        self.rows = self.rows + other.rows

    def of(self, i: int, length: int) -> dict[int, Tensor]:
        """By tap: those of row i's first `length` tokens, [length, h]."""
        return {tap: torch.cat([part[tap] for part in self.rows[i]])[:length] for tap in self.taps}
