"""Drafters with another tokenizer: draft text, and write it in the target's tokens.

The drafter reads the committed text in its own tokens and grows a tree of them, without noise; every path of the tree
is text, which the target's tokenizer divides (`_words.py`), and the paths make a tree of the target's tokens. That tree
is a function of the past alone, so it is judged as any deterministic tree is, and nothing is lost under any rule.

How a tokenizer divides a text's last word may change with what follows. So the drafter's own state goes up to the last
word border that is some way back, and the words after it are read anew in every round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..backends.native.text_tokenizer import load_tokenizer
from ..core.protocols import Drafter, Drafting, Round, Target
from ..core.tree import from_lists, from_paths
from ..core.types import Budget, DraftTree, HostRow, Rows
from ..names import find
from ..params import InputError, Sampling
from ._common import useful
from ._words import WAYS, WINDOW, Same, Shared, Spelling, Words

ROOM = 16  # tokens of the drafter's that a token of the target's may take
LOOSE = 12  # bytes at the end that may still be divided otherwise
MUCH = 40  # bytes that are read anew at most, where there is a word border


@runtime_checkable
class ContextDrafting(Protocol):
    """Proposes from a given context, without `observe`."""

    def propose_after(self, settled: list[list[int]], tails: list[list[int]], rows: Rows, budget: Budget) -> DraftTree:
        """Read `settled` for good and `tails`, each of 1 token or more, for this once; a tree below them."""

    def select(self, index: Sequence[int]) -> None: ...
    def join(self, other: Any) -> None: ...


@runtime_checkable
class ContextDrafter(Protocol):
    """A drafter that proposes tokens from text alone."""

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> ContextDrafting: ...


@dataclass(frozen=True)
class TextDrafter(Drafter):
    """`here` is the target's spelling, `there` the drafter's. `vocab`: the target's tokens."""

    inner: ContextDrafter
    here: Spelling
    there: Spelling
    vocab: int
    costly: bool = field(default=True, init=False)

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> TextDrafting:
        there = self.there
        begin = there.tokenizer.bos_token_id
        blank = there.cover(b"\n") or there.cover(b" ") or [0]
        lines, heads = [Line(blank[:1] if begin is None else [begin]) for _ in prompts], []
        for line, prompt in zip(lines, prompts, strict=True):
            both = begin is not None and there.mark(self.here, prompt[0]) == begin
            line.add(prompt[1:] if both else prompt, self.here, there)
            heads.append(line.settle())
            if not heads[-1]:  # the beginning alone: it is read now, and text or a second one stands behind it
                heads[-1], line.unread = line.unread, [] if line.tail else line.unread
        return TextDrafting(self, self.inner.open(heads, ROOM * capacity), lines)


@dataclass
class Line:
    """The text of a row: tokens of the drafter's that are settled and not read, and bytes after them."""

    unread: list[int] = field(default_factory=list)
    before: bytes = b""  # the last bytes of what is settled, up to the last special token
    tail: bytes = b""

    def add(self, tokens: Sequence[int], here: Spelling, there: Spelling) -> None:
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
class TextDrafting(Drafting):
    """A drafting with words of another tokenizer: it translates what it reads and what it proposes."""

    drafter: TextDrafter
    inner: ContextDrafting
    lines: list[Line]

    def observe(self, round: Round) -> None:
        for line, tokens in zip(self.lines, round.tokens, strict=True):
            line.add(tokens, self.drafter.here, self.drafter.there)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        depths = useful(rows, budget)
        settled = [line.settle() for line in self.lines]
        tails = [line.unread + self.drafter.there.write(line.before, line.tail) or [0] for line in self.lines]
        roots = tuple(t[-1] for t in tails)
        plain = replace(rows, root=roots, sampling=(Sampling(temperature=0.0),) * len(rows), rule="coupled")
        tree_of_words = self.inner.propose_after(settled, tails, plain, budget)
        paths, worth = [], []
        for line, depth, (tokens, parents, values) in zip(self.lines, depths, tree_of_words.host, strict=True):
            options = [self._written(tokens, values, path, line) for path in _paths(parents)]
            options.sort(key=lambda f: -max(f[1], default=-math.inf))
            paths.append([written[:depth] for written, _ in options])
            worth.append([each[:depth] for _, each in options])
        tree, places = from_paths(rows.root, paths, max(1, budget.nodes))
        return tree if tree_of_words.values is None else _valued(tree, places, worth)

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
        logs, place = [], 0
        for token in written:
            place += len(here.bytes_of(token) or b"")
            logs.append(next((v for end, v in ends if end >= place), ends[-1][1] if ends else 0.0))
        if close is not None and close < vocab and place >= len(text):
            return [*written, close], [*logs, last]
        return written, logs

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
    paths = []
    for leaf in sorted(leaves):
        path, node = [], leaf
        while node:
            path.append(node)
            node = parents[node]
        paths.append(path[::-1])
    return paths


def _valued(tree: DraftTree, places: list[list[list[int]]], worth: list[list[list[float]]]) -> DraftTree:
    """The tree with values: of a token that several paths have, the best; never more than its parent's."""
    rows = list[HostRow]()
    for (tokens, parents, _), ids, values in zip(tree.host, places, worth, strict=True):
        logs = [0.0] + [-math.inf] * (len(tokens) - 1)
        for path, known in zip(ids, values, strict=True):
            for node, value in zip(path, known, strict=False):
                logs[node] = max(logs[node], value)
        rows.append((tokens, parents, logs))
    return from_lists(rows)


def tokenizer_of(where: str) -> Any:
    """The tokenizer of a model by its name; None: it has none."""
    place = find(where)
    own = Path(place.where) / (place.gguf or "tokenizer.json")
    if own.is_file():
        return load_tokenizer(own if place.gguf else own.parent)
    from ..backends.torch import load_tokenizer as by_transformers

    return by_transformers(where)


def across(way: str, where: str, rows: int, target: Target, tokenizer: Any, build: Callable[[Words], Any]) -> Any:
    """A drafter of `rows` tokens whose tokenizer is another than the target's: `build` makes it for its words."""
    theirs = tokenizer_of(where)
    if tokenizer is None or theirs is None:
        raise InputError(f"vocab={way} needs the tokenizers of the target and of {where}")
    here, there = Spelling.of(tokenizer, "the target"), Spelling.of(theirs, where)
    if way == "text":
        return TextDrafter(build(Same(rows, rows)), here, there, target.vocab)
    return build(Shared.of(here, there, rows, target.vocab, where))


def check_way(way: str) -> None:
    """Raise InputError for a way of translating vocabularies that there is not."""
    if way not in WAYS:
        raise InputError(f"vocab is {', '.join(WAYS)}, not {way!r}")


def check_tokenizer(where: str, target: Any, draft: Any) -> None:
    """Refuse a draft model whose tokens mean something else than the target's."""
    if target is None or draft is None:
        return
    a, b = target.get_vocab(), draft.get_vocab()
    same = all(b.get(token, index) == index for token, index in a.items())
    if not same or len(set(a) & set(b)) < 0.99 * min(len(a), len(b)):
        raise InputError(
            f"the tokenizer of {where} differs from the target's; give the same one, or say how to draft across: "
            "vocab=shared or vocab=text"
        )
