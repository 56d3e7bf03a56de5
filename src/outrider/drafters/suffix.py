"""Suffix decoding (after SuffixDecoding, Oliaro et al. 2024): what followed the longest suffix, counted.

A suffix automaton over the prompt and output of each row, another over an optional corpus file, and, with
`persist=true`, another over the outputs of earlier requests. The longest suffix of the text (at most `context` tokens)
that occurs in one of them predicts the next token by counts; each draft node is matched again with its own path, so a
draft continues across sources and beyond the text's end. The tree grows best first by the estimated probability

    p(x | context of length l) = count(x) / n * (1 - 1 / (n + l + 1)),    n = the context's occurrences with a successor

and the mass left over goes to the next shorter context (as in PPM). Values are logs of products of p.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from heapq import heappop, heappush
from threading import Lock
from typing import Any

from ..core.protocols import Drafter, Drafting, Round, Target
from ..core.tree import from_lists, priced
from ..core.types import Budget, DraftTree, HostRow, Rows
from ..params import integer
from ._common import corpus, selected, useful

TOP_K = 8  # successors of one context that are looked at, the most frequent first


@dataclass
class Automaton:
    """Online suffix automaton of one or more token strings, with the number of occurrences of each state.

    Exact for substrings of up to `span` tokens; longer ones may be forgotten, which bounds the work per token to
    `span` steps on repetitive texts too. State 0 is the empty string; state s holds the strings of lengths
    length[link[s]] + 1 to length[s] that share their end positions. A token takes about 0.4 kB.
    """

    span: int
    successors: list[dict[int, int]] = field(default_factory=lambda: [{}])
    link: list[int] = field(default_factory=lambda: [-1])
    length: list[int] = field(default_factory=lambda: [0])
    count: list[int] = field(default_factory=lambda: [0])

    def extend(self, last: int, tokens: Iterable[int]) -> int:
        """Write tokens after the string that state `last` stands for (0: begin a new one); its new state."""
        link, length, count = self.link, self.length, self.count
        for token in tokens:
            known = self.successors[last].get(token)
            if known is None:
                last = self._append(last, token)
            else:
                last = known if length[known] == length[last] + 1 else self._split(last, known, token)
            state = last
            while state > 0:
                count[state] += 1
                state = link[state]
            while length[link[last]] >= self.span:
                last = link[last]
        return last

    def _append(self, last: int, token: int) -> int:
        state = self._new({}, 0, self.length[last] + 1, 0)
        while last >= 0 and token not in self.successors[last]:
            self.successors[last][token] = state
            last = self.link[last]
        if last >= 0:
            known = self.successors[last][token]
            exact = self.length[known] == self.length[last] + 1
            self.link[state] = known if exact else self._split(last, known, token)
        return state

    def _split(self, last: int, known: int, token: int) -> int:
        """A state of its own for the shorter strings of `known`, which have gained an end position."""
        state = self._new(dict(self.successors[known]), self.link[known], self.length[last] + 1, self.count[known])
        self.link[known] = state
        while last >= 0 and self.successors[last].get(token) == known:
            self.successors[last][token] = state
            last = self.link[last]
        return state

    def _new(self, successors: dict[int, int], link: int, length: int, count: int) -> int:
        self.successors.append(successors)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.link) - 1

    def step(self, state: int, length: int, token: int, context: int) -> tuple[int, int]:
        """From the longest known suffix of a text to that of the text and one more token; at most `context` long."""
        successors, link = self.successors, self.link
        while token not in successors[state]:
            state = link[state]
            if state < 0:
                return 0, 0
            length = self.length[state]
        state, length = successors[state][token], min(length + 1, context)
        while self.length[link[state]] >= length:
            state = link[state]
        return state, length

    def fork(self) -> Automaton:
        successors = [dict(s) for s in self.successors]
        return Automaton(self.span, successors, list(self.link), list(self.length), list(self.count))


Match = tuple[Automaton, int, int]  # where a text's longest known suffix stands: automaton, state, its length


@dataclass
class Memory:
    """What `persist=true` keeps: the outputs of all generations of one loaded drafter, in two halves.

    When the young half holds `half` tokens it becomes the old one, and the old one is forgotten.
    """

    half: int
    young: Automaton
    old: Automaton
    written: int = 0
    epoch: int = 0
    lock: AbstractContextManager[Any] = field(default_factory=Lock)

    def write(self, place: tuple[int, int], tokens: Sequence[int]) -> tuple[int, int]:
        """Write tokens after a place (epoch, state) in the memory; the new place."""
        if self.written >= self.half:
            self.old, self.young, self.written, self.epoch = self.young, Automaton(self.old.span), 0, self.epoch + 1
        self.written += len(tokens)
        return self.epoch, self.young.extend(place[1] if place[0] == self.epoch else 0, tokens)

    def clear(self) -> None:
        """Forget everything."""
        span = self.old.span
        self.young, self.old, self.written, self.epoch = Automaton(span), Automaton(span), 0, self.epoch + 1


@dataclass(frozen=True)
class SuffixDrafter(Drafter):
    """Suffix decoding over the text, a corpus, and earlier outputs."""

    context: int = 16
    corpus: Automaton | None = None  # read-only
    memory: Memory | None = None
    reads_tree: bool = False
    counts: bool = True

    @property
    def reopens(self) -> bool:  # type: ignore[override]
        """With a memory, proposals depend on other requests too."""
        return not self.remembers

    @property
    def remembers(self) -> bool:
        return self.memory is not None

    def forget(self) -> None:
        if self.memory is not None:
            with self.memory.lock:
                self.memory.clear()

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> SuffixDrafting:
        return SuffixDrafting(self, [Text(Automaton(2 * self.context), self.context).extend(p) for p in prompts])


@dataclass
class Text:
    """One row: its automaton and its last tokens. Tokens are added to them before the next draft."""

    automaton: Automaton
    context: int
    tail: list[int] = field(default_factory=list)
    state: int = 0
    place: tuple[int, int] = (0, 0)  # in the memory
    waiting: list[int] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> Text:
        self.waiting += tokens
        return self

    def read(self) -> Text:
        """Itself, with all waiting tokens added."""
        if self.waiting:
            self.state = self.automaton.extend(self.state, self.waiting)
            self.tail, self.waiting = [*self.tail, *self.waiting][-self.context :], []
        return self

    def fork(self) -> Text:
        return Text(self.automaton.fork(), self.context, self.tail, self.state, self.place, list(self.waiting))


def grow(text: Text, sources: Sequence[Automaton], nodes: int, depth: int, floor: float) -> HostRow:
    """The best `nodes` nodes (root included) in order of value: their tokens, parents and values (log).

    `sources` come in order of trust: it decides between contexts that are equally long.
    """
    tokens, parents, values, depths = [text.tail[-1]], [0], [0.0], [0]
    child: set[tuple[int, int | None]] = set()
    bound = math.log(floor) if floor > 0 else -math.inf
    root = [(a, 0, 0) for a in sources] if depth else []
    for past in text.tail:
        root = advance(root, past, text.context)
    # (-value, order of discovery, node, token or None, matches): None tries the node's next shorter context.
    heap: list[tuple[float, int, int, int | None, list[Match]]] = [(0.0, 0, 0, None, root)]
    order = 0
    while heap and len(tokens) < nodes:
        cost, _, node, token, matches = heappop(heap)
        if token is not None:
            if (node, token) in child:
                continue
            child.add((node, token))
            tokens.append(token)
            parents.append(node)
            values.append(-cost)
            depths.append(depths[node] + 1)
            if depths[-1] == depth or len(tokens) == nodes:
                continue
            node, matches = len(tokens) - 1, advance(matches, token, text.context)
        chances, shorter = successors(matches)
        for following, chance in chances:
            order += 1
            if chance - cost >= bound and (node, following) not in child:
                heappush(heap, (cost - chance, order, node, following, matches if following is not None else shorter))
    return tokens, parents, values


def advance(matches: list[Match], token: int, context: int) -> list[Match]:
    """The matches after one more token."""
    return [(automaton, *automaton.step(state, length, token, context)) for automaton, state, length in matches]


def successors(matches: list[Match]) -> tuple[list[tuple[int | None, float]], list[Match]]:
    """Log-probabilities of the longest context's successors and, as None, of an escape; the matches after it."""
    which = max(range(len(matches)), key=lambda i: (matches[i][2], -i), default=-1)
    if which < 0 or matches[which][2] == 0:
        return [], []
    automaton, state, length = matches[which]
    link = automaton.link[state]
    shorter = [*matches]
    shorter[which] = (automaton, link, automaton.length[link])
    counts = [(automaton.count[s], s, token) for token, s in automaton.successors[state].items()]
    n = sum(c for c, _, _ in counts)
    if n == 0:
        return [(None, 0.0)], shorter
    if len(counts) > 1:
        counts = sorted(counts, reverse=True)[:TOP_K]  # of two seen once, the younger state is the later one
    trust = math.log((n + length) / (n + length + 1) / n)
    return [*((token, trust + math.log(c)) for c, _, token in counts), (None, -math.log(n + length + 1))], shorter


@dataclass
class SuffixDrafting(Drafting):
    """Each row's suffix automaton and its matches."""

    drafter: SuffixDrafter
    rows: list[Text]

    def expect(self, row: int, tokens: Sequence[int]) -> None:
        self.rows[row].automaton.extend(0, tokens)

    def observe(self, round: Round) -> None:
        memory = self.drafter.memory
        for row, tokens in zip(self.rows, round.tokens, strict=True):
            row.extend(tokens)
            if memory is not None and tokens:
                with memory.lock:
                    row.place = memory.write(row.place, tokens)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        return from_lists(self.sketch(rows, budget))

    def sketch(self, rows: Rows, budget: Budget) -> list[HostRow]:
        nodes = max(1, budget.nodes)
        memory, shared = self.drafter.memory, [self.drafter.corpus] if self.drafter.corpus else []
        with memory.lock if memory else nullcontext():
            shared = [memory.young, memory.old, *shared] if memory else shared
            grown = [
                grow(row.read(), [row.automaton, *shared], nodes, depth, budget.floor)
                for row, depth in zip(self.rows, useful(rows, budget), strict=True)
            ]
        return priced(grown, budget.price)

    def select(self, index: Sequence[int]) -> None:
        self.rows = selected(self.rows, index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, SuffixDrafting)
        self.rows += other.rows


def load(
    target: Target | None, tokenizer: Any = None, path: str | None = None,
    context: int = 16, persist: bool = False, keep: int = 65536,
) -> SuffixDrafter:  # fmt: skip
    """Suffix decoding over the text, a corpus file (`path`) and, with `persist`, the last `keep` tokens written."""
    context = integer("context", context, most=256)
    half = (integer("keep", keep) + 1) // 2
    memory = Memory(half, Automaton(2 * context), Automaton(2 * context)) if persist else None
    shared = None if path is None else Automaton(2 * context)
    if path is not None and shared is not None:
        shared.extend(0, corpus("suffix", path, tokenizer))
    return SuffixDrafter(context, shared, memory)
