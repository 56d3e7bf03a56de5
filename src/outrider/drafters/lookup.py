"""Prompt lookup decoding (PLD; Saxena 2023): the text continues as after an earlier occurrence of its last tokens.

The last n tokens, n from `ngram` (3) down to 1, are looked up in prompt and output; what followed the most recent match
is the draft, up to `tokens` (10) of it. Beyond the original, which offers one match:

 * up to `matches` (3) different continuations become one tree, the best first: longer n-grams before shorter ones,
   then recent before old, so that a small budget keeps the best match;
 * a match so recent that its continuation runs into the end of the text continues periodically, as in LZ77.

A token's confidence is 1 - 1 / (l + 2), l being the length of the match that it continues, at most 16; a later
path has what earlier ones left. Its acceptance rates are learned online (`_mix.py`).

Matches come from an index, never from a scan: `last[n]` maps an n-gram to where it last ended, `before[n]`
maps every position to the previous end of the same n-gram. One round costs microseconds however long the text is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.protocols import Drafter, Drafting, Round, Target
from ..core.tree import from_lists
from ..core.types import Budget, DraftTree, HostRow, Rows
from ..params import integer
from ._common import no_file, selected, useful

LONG = 16  # tokens of a match that are looked at
TRIES = 8  # occurrences looked at per match wanted: bounds a round on repetitive texts


@dataclass(frozen=True)
class LookupDrafter(Drafter):
    """Prompt lookup: what followed the last `ngram` tokens earlier, `tokens` of it, of so many `matches`."""

    ngram: int = 3
    tokens: int = 10
    matches: int = 3
    reads_tree: bool = False
    counts: bool = True

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> LookupDrafting:
        return LookupDrafting(self, [Index.of(prompt, self.ngram) for prompt in prompts])


@dataclass
class Index:
    """One text and the ends of all its n-grams. [5 6 5 6 7]: last[1] = {(5,): 2, (6,): 3}, before[1] = [-1 -1 0 1].

    The n-grams that end at the text's last token are entered with the next one: they have no continuation yet.
    """

    text: list[int]
    last: list[dict[tuple[int, ...], int]]  # [n]: n-gram -> position of its last token, most recent occurrence
    before: list[list[int]]  # [n][end]: the previous end of the n-gram that ends here, -1 for none

    @classmethod
    def of(cls, tokens: Iterable[int], ngram: int) -> Index:
        index = cls([], [{} for _ in range(ngram + 1)], [[] for _ in range(ngram + 1)])
        index.extend(tokens)
        return index

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if self.text:
                self._enter()
            self.text.append(token)

    def _enter(self) -> None:
        end = len(self.text) - 1
        for n in range(1, len(self.last)):
            gram = tuple(self.text[-n:])
            self.before[n].append(self.last[n].get(gram, -1))
            self.last[n][gram] = end

    def occurrences(self) -> Iterator[int]:
        """Where the text's last tokens ended before: longest n-gram first, most recent first, each place once."""
        seen: set[int] = set()
        for n in range(min(len(self.last) - 1, len(self.text)), 0, -1):
            end = self.last[n].get(tuple(self.text[-n:]), -1)
            while end >= 0:
                if end not in seen:
                    seen.add(end)
                    yield end
                end = self.before[n][end]

    def paths(self, tokens: int, matches: int) -> list[tuple[list[int], int]]:
        """The best `matches` different continuations of `tokens` tokens, and how much text before them matches."""
        continuations: list[tuple[list[int], int]] = []
        for _, end in zip(range(TRIES * matches), self.occurrences(), strict=False):
            path = self.text[end + 1 : end + 1 + tokens]
            period = len(path)
            path += [path[i % period] for i in range(period, tokens)]
            if all(path != other for other, _ in continuations):
                continuations.append((path, self.match(end)))
                if len(continuations) == matches:
                    break
        return continuations

    def match(self, end: int) -> int:
        """How many tokens before `end`, itself included, are those at the text's end."""
        n, text = 0, self.text
        while n < LONG and n <= end and text[end - n] == text[-1 - n]:
            n += 1
        return n

    def fork(self) -> Index:
        return Index(list(self.text), [dict(d) for d in self.last], [list(b) for b in self.before])


@dataclass
class LookupDrafting(Drafting):
    """Each row's index of its own text."""

    drafter: LookupDrafter
    rows: list[Index] = field(default_factory=list)

    def expect(self, row: int, tokens: Sequence[int]) -> None:
        self.rows[row] = Index.of([*tokens, *self.rows[row].text], self.drafter.ngram)

    def observe(self, round: Round) -> None:
        for row, tokens in zip(self.rows, round.tokens, strict=True):
            row.extend(tokens)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        return from_lists(self.sketch(rows, budget))

    def sketch(self, rows: Rows, budget: Budget) -> list[HostRow]:
        depths = [min(depth, self.drafter.tokens) for depth in useful(rows, budget)]
        return [
            _tree(row.text[-1], row.paths(depth, self.drafter.matches) if depth else [], max(1, budget.nodes))
            for row, depth in zip(self.rows, depths, strict=True)
        ]  # fmt: skip

    def select(self, index: Sequence[int]) -> None:
        self.rows = selected(self.rows, index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, LookupDrafting)
        self.rows += other.rows


def _tree(root: int, paths: Sequence[tuple[Sequence[int], int]], limit: int) -> HostRow:
    """A trie of paths, each with how much text before it matches; at most `limit` nodes, root included, in order.

    Values are logs of products of confidences.
    """
    tokens, parents, values, left = [root], [0], [0.0], [1.0]  # left: of a node, what its children leave over
    child: dict[tuple[int, int], int] = {}
    for path, matched in paths:
        node = 0
        for depth, token in enumerate(path):
            following = child.get((node, token))
            if following is None:
                if len(tokens) >= limit:
                    break
                following = child[node, token] = len(tokens)
                confidence = left[node] * (1 - 1 / (matched + depth + 2))
                left[node] -= confidence
                tokens.append(token)
                parents.append(node)
                values.append(values[node] + math.log(confidence))
                left.append(1.0)
            node = following
    return tokens, parents, values


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    ngram: int = 3,
    tokens: int = 10,
    matches: int = 3,
) -> LookupDrafter:
    """Prompt lookup: n-grams of `ngram` down to 1, drafts of `tokens` tokens, up to `matches` of them as a tree."""
    no_file("lookup", path)
    return LookupDrafter(integer("ngram", ngram, most=16), integer("tokens", tokens), integer("matches", matches))
