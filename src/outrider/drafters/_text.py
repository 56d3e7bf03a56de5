"""Drafters with another tokenizer: draft text, and write it in the target's tokens.

The drafter reads the committed text in its own tokens and grows a tree of them, without noise; every path of the tree
is text, which the target's tokenizer divides (`_words.py`), and the paths make a tree of the target's tokens. That tree
is a function of the past alone, so it is judged as any deterministic tree is, and nothing is lost under any rule.

How a tokenizer divides a text's last word may change with what follows. So the drafter's own state goes up to the last
word border that is some way back, and the words behind it are read anew in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core.protocols import Drafting, Round
from ..core.tree import from_paths
from ..core.types import Budget, DraftTree, Rows
from ..params import Sampling
from ._common import useful
from ._words import WINDOW, Spelling

ROOM = 16  # tokens of the drafter's that a token of the target's may take
LOOSE = 12  # bytes at the end that may still be divided otherwise
MUCH = 40  # bytes that are read anew at most, where there is a word border


@runtime_checkable
class Telling(Protocol):
    """Proposes from a given context, without `observe`."""

    def tell(self, settled: list[list[int]], tails: list[list[int]], rows: Rows, budget: Budget) -> DraftTree:
        """Read `settled` for good and `tails`, each of 1 token or more, for this once; a tree below them."""

    def select(self, index: Sequence[int]) -> None: ...
    def join(self, other: Any) -> None: ...


@runtime_checkable
class Teller(Protocol):
    """A drafter that proposes tokens from text alone."""

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> Telling: ...


@dataclass(frozen=True)
class TextDrafter:
    """`here` is the target's spelling, `there` the drafter's. `vocab`: the target's tokens."""

    inner: Teller
    here: Spelling
    there: Spelling
    vocab: int
    taps: tuple[int, ...] = ()

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> TextDrafting:
        there = self.there
        begin = there.tokenizer.bos_token_id
        blank = there.cover(b"\n") or there.cover(b" ") or [0]
        lines, heads = [Line(blank[:1] if begin is None else [begin]) for _ in prompts], []
        for line, prompt in zip(lines, prompts, strict=True):
            both = begin is not None and there.mark(self.here, prompt[0]) == begin
            line.hear(prompt[1:] if both else prompt, self.here, there)
            heads.append(line.settle())
            if not heads[-1]:  # the beginning alone: it is read now, and text or a second one stands behind it
                heads[-1], line.unread = line.unread, [] if line.tail else line.unread
        return TextDrafting(self, self.inner.open(heads, ROOM * capacity), lines)


@dataclass
class Line:
    """The text of a row: tokens of the drafter's that are settled and not read, and bytes behind them."""

    unread: list[int] = field(default_factory=list)
    before: bytes = b""  # the last bytes of what is settled, up to the last special token
    tail: bytes = b""

    def hear(self, tokens: Sequence[int], here: Spelling, there: Spelling) -> None:
        """The target's tokens, as they are committed."""
        for token in tokens:
            text = here.bytes_of(token)
            if text is not None:
                self.tail += text
                continue
            own = there.mark(here, token)
            self._move(len(self.tail), there)
            self.unread += there.cover(b"\n") if own is None else [own]
            self.before = b""
        if len(self.tail) > MUCH:
            end = len(self.tail) - LOOSE
            border = max(self.tail.rfind(b" ", 0, end), self.tail.rfind(b"\n", 0, end))
            if border <= 0 and len(self.tail) > 2 * MUCH:  # no spaces: between two characters
                border = next((i for i in range(end, 0, -1) if self.tail[i] & 0xC0 != 0x80), 0)
            self._move(max(border, 0), there)

    def _move(self, count: int, there: Spelling) -> None:
        if count:
            self.unread += there.write(self.before, self.tail[:count])
            self.before = (self.before + self.tail[:count])[-WINDOW:]
            self.tail = self.tail[count:]

    def settle(self) -> list[int]:
        """The tokens to be read for good: all but the last, which a tree must grow from. An empty text begins so."""
        settled, self.unread = self.unread[:-1], self.unread[-1:]
        return settled

    def fork(self) -> Line:
        return Line(list(self.unread), self.before, self.tail)


@dataclass
class TextDrafting:
    """A drafting with words of another tokenizer: it translates what it is told and what it proposes."""

    drafter: TextDrafter
    inner: Telling
    lines: list[Line]

    def observe(self, round: Round) -> None:
        for line, tokens in zip(self.lines, round.tokens, strict=True):
            line.hear(tokens, self.drafter.here, self.drafter.there)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        depths = useful(rows, budget)
        settled = [line.settle() for line in self.lines]
        tails = [line.unread + self.drafter.there.write(line.before, line.tail) or [0] for line in self.lines]
        roots = torch.tensor([t[-1] for t in tails], device=rows.root.device)
        plain = replace(rows, root=roots, sampling=(Sampling(temperature=0.0),) * len(rows), rule="coupled")
        told = self.inner.tell(settled, tails, plain, budget)
        known = torch.zeros(told.tokens.shape) if told.values is None else told.values
        paths, worth = [], []
        for line, depth, tokens, values, parents, size in zip(
            self.lines, depths, told.tokens.tolist(), known.tolist(), told.parents.tolist(), told.size.tolist(),
            strict=True,
        ):  # fmt: skip
            found = [self._written(tokens, values, path, line) for path in _paths(parents[:size])]
            found.sort(key=lambda f: -max(f[1], default=-torch.inf))
            paths.append([written[:depth] for written, _ in found])
            worth.append([each[:depth] for _, each in found])
        tree, places = from_paths(rows.root.tolist(), paths, max(1, budget.nodes), rows.root.device)
        return tree if told.values is None else replace(tree, values=_values(tree, places, worth))

    def _written(
        self, tokens: list[int], values: list[float], path: list[int], line: Line
    ) -> tuple[list[int], list[float]]:
        """A path of the drafter's as tokens of the target's, each with the log value of where it is complete."""
        here, there, vocab = self.drafter.here, self.drafter.there, self.drafter.vocab
        text, ends, last, close = b"", [], 0.0, None
        for node in path:
            part = there.bytes_of(tokens[node])
            if part is None:
                close = here.mark(there, tokens[node])
                last = values[node]
                break
            text += part
            ends.append((len(text), values[node]))
        written = here.write((line.before + line.tail)[-WINDOW:], text)
        written = written[: next((i for i, t in enumerate(written) if t >= vocab), len(written))]
        found, place = [], 0
        for token in written:
            place += len(here.bytes_of(token) or b"")
            found.append(next((v for end, v in ends if end >= place), ends[-1][1] if ends else 0.0))
        if close is not None and close < vocab and place >= len(text):
            return [*written, close], [*found, last]
        return written, found

    def select(self, index: Sequence[int]) -> None:
        self.inner.select(index)
        self.lines = [self.lines[i].fork() for i in index]

    def join(self, other: Drafting) -> None:
        assert isinstance(other, TextDrafting)
        self.inner.join(other.inner)
        self.lines += other.lines


def _paths(parents: list[int]) -> list[list[int]]:
    """The nodes from below the root to every leaf."""
    leaves = set(range(1, len(parents))) - set(parents)
    found = []
    for leaf in sorted(leaves):
        path, node = [], leaf
        while node:
            path.append(node)
            node = parents[node]
        found.append(path[::-1])
    return found


def _values(tree: DraftTree, places: list[list[list[int]]], worth: list[list[list[float]]]) -> Tensor:
    """Of a token that several paths have, the best; never more than its parent's."""
    rows = [[0.0] + [-torch.inf] * (tree.nodes - 1) for _ in places]
    for row, ids, values in zip(rows, places, worth, strict=True):
        for path, known in zip(ids, values, strict=True):
            for node, value in zip(path, known, strict=False):
                row[node] = max(row[node], value)
    return torch.tensor(rows, device=tree.tokens.device)
