"""Unigram and bigram drafters, the "negligible cost" models of Leviathan et al. 2023, table 3.

Counted on a corpus file (`ngram:corpus.txt`), or without one on each row's own prompt and output. The distributions:

    n = 1:  u(x)     = (c(x) + 1) / (N + V)                           add-one
    n = 2:  q(x | y) = (c(y, x) + b u(x)) / (c(y) + b),   b = 1       backoff to the unigram (Dirichlet)

Under `coupled` the tree is EAGLE-2's growth with the shared noise; under `rejection` at T > 0 a static shape (a chain
unless the budget names one) is sampled and keeps its distributions; elsewhere children are the most probable tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..core import sampling
from ..core.growth import grow
from ..core.protocols import Drafter, Drafting, Round, Target
from ..core.tree import append, from_lists, root_only, template
from ..core.types import Array, Budget, DraftTree, Rows
from ..params import InputError, integer
from ._common import corpus, selected, useful

BACKOFF = 1.0
STORE = 1 << 22  # values of distributions kept (32 MB)


@dataclass
class Counts:
    """Sparse counts of one token string over a vocabulary of `vocab`."""

    vocab: int
    tokens: Array  # float64 [v]: c(x)
    after: dict[int, dict[int, int]] = field(default_factory=dict)  # c(y, x)
    last: int | None = None
    known: dict[int, Array] = field(
        default_factory=dict
    )  # bigram distributions of these counts, as far as they were computed
    fixed: bool = False  # a corpus, counted once and shared by all rows: it learns nothing more

    @classmethod
    def of(cls, tokens: Sequence[int], vocab: int, fixed: bool = False) -> Counts:
        counts = cls(vocab, np.zeros(vocab))
        counts.extend(tokens)
        return replace(counts, fixed=fixed)

    def extend(self, tokens: Sequence[int]) -> None:
        if not tokens or self.fixed:
            return
        self.known.clear()
        np.add.at(self.tokens, list(tokens), 1)
        for token in tokens:
            if self.last is not None:
                following = self.after.setdefault(self.last, {})
                following[token] = following.get(token, 0) + 1
            self.last = token

    def unigram(self) -> Array:
        """The probabilities [v] of a token, whatever stands before it."""
        q: Array = (self.tokens + 1) / (self.tokens.sum() + self.vocab)
        return q

    def distribution(self, previous: Sequence[int], n: int) -> Array:
        """The probabilities [w, v] of the token after each of the tokens `previous`."""
        if n == 1:
            return np.tile(self.unigram(), (len(previous), 1))
        while len(self.known) > max(8, STORE // self.vocab):
            self.known.clear()
        for token in set(previous) - set(self.known):
            self.known[token] = self._bigram(token)
        return np.stack([self.known[token] for token in previous])

    def _bigram(self, previous: int) -> Array:
        following = self.after.get(previous, {})
        total = sum(following.values()) + BACKOFF
        q = self.unigram() * (BACKOFF / total)
        if following:
            q[list(following)] += np.array(list(following.values())) / total
        return q

    def fork(self) -> Counts:
        if self.fixed:
            return self
        return Counts(self.vocab, self.tokens.copy(), {y: dict(x) for y, x in self.after.items()}, self.last, {})


@dataclass(frozen=True)
class NgramDrafter(Drafter):
    """Draws from counts of `n`-grams, of the text itself or of a corpus; `width` tokens below each node."""

    vocab: int
    n: int = 2
    width: int = 2
    corpus: Counts | None = None  # None: count each row's own text
    samples: bool = True

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> NgramDrafting:
        if self.corpus is not None:
            return NgramDrafting(self, [self.corpus for _ in prompts])
        return NgramDrafting(self, [Counts.of(prompt, self.vocab) for prompt in prompts])


@dataclass
class NgramDrafting(Drafting):
    """Each row's counts."""

    drafter: NgramDrafter
    rows: list[Counts]

    def observe(self, round: Round) -> None:
        for row, tokens in zip(self.rows, round.tokens, strict=True):
            row.extend(tokens)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        depths = useful(rows, budget)
        if max(depths) == 0:
            return root_only(rows.root)
        sampled = rows.rule in ("rejection", "block") and rows.sampled
        if budget.shape is None and not sampled:
            tree = self._dynamic(rows, budget, max(depths))
        else:
            tree = self._static(rows, self._shape(budget, max(depths)), sampled)
        return shallow(tree, depths)

    def select(self, index: Sequence[int]) -> None:
        self.rows = selected(self.rows, index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, NgramDrafting)
        self.rows += other.rows

    def distribution(self, tokens: Array) -> Array:
        """The probabilities [b, w, v] after each token [b, w]."""
        return np.stack(
            [row.distribution(t, self.drafter.n) for row, t in zip(self.rows, tokens.tolist(), strict=True)]
        )

    def _shape(self, budget: Budget, depth: int) -> tuple[int, ...]:
        """The static shape of this round, fixed before anything is drawn."""
        shape = ((1,) * depth if budget.shape is None else budget.shape)[:depth]
        while shape and len(template(shape)) > budget.nodes:
            shape = shape[:-1]
        return shape

    def _dynamic(self, rows: Rows, budget: Budget, depth: int) -> DraftTree:
        width = self.drafter.width

        def expand(fed: DraftTree, since: int) -> tuple[Array, Array]:
            logits = np.log(self.distribution(fed.tokens[:, since:])).astype(np.float32)
            return sampling.rank(logits, rows, fed.deepest + 1, width)

        return grow(
            rows.root, expand, depth=depth, width=width, nodes=budget.nodes, floor=budget.floor, price=budget.price
        )[0]

    def _static(self, rows: Rows, shape: tuple[int, ...], sampled: bool) -> DraftTree:
        fed, since, q = root_only(rows.root), 0, list[Array]()
        for depth, n in enumerate(shape, 1):
            logits = np.log(self.distribution(fed.tokens[:, since:]))
            if sampled:
                rowwise = zip(logits, rows.sampling, strict=True)
                q.append(np.array([[sampling.distribution(z, s) for z in row] for row, s in rowwise]))
                children = sampling.sample(q[-1], n, rows, since)
            else:
                children = sampling.rank(logits.astype(np.float32), rows, depth, n, warp=n == 1)[0]
            parents = np.tile(np.repeat(np.arange(since, fed.nodes), n), (len(rows), 1))
            since = fed.nodes
            fed = append(fed, children.reshape(len(rows), -1), parents)
        return replace(fed, q=np.concatenate(q, 1)) if q else fed


def shallow(tree: DraftTree, depths: Sequence[int]) -> DraftTree:
    """The tree cut to each row's depth. (The cut looks at no token, so sampled siblings keep their distribution.)"""
    if min(depths) >= tree.deepest:
        return tree
    rows = []
    for (tokens, parents, values), levels, deepest in zip(tree.host, tree.depths.tolist(), depths, strict=True):
        kept = [i for i in range(len(tokens)) if levels[i] <= deepest]
        new = {old: i for i, old in enumerate(kept)}
        rows.append(([tokens[i] for i in kept], [new[parents[i]] for i in kept], [values[i] for i in kept]))
    return replace(from_lists(rows, values=tree.values is not None), q=tree.q)


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    n: int = 2,
    width: int = 2,
) -> NgramDrafter:
    """A unigram (`n=1`) or bigram drafter of a corpus file, or of each row's own text; `width` children per node."""
    if target is None:
        raise InputError("the drafter ngram needs the target, whose vocabulary its distributions cover")
    n, width = integer("n", n, most=2), integer("width", width)
    if path is None:
        return NgramDrafter(target.vocab, n, width)
    tokens = corpus("ngram", path, tokenizer)
    if max(tokens) >= target.vocab:
        raise InputError(f"the corpus {path} has tokens outside the target's vocabulary of {target.vocab}")
    return NgramDrafter(target.vocab, n, width, Counts.of(tokens, target.vocab, fixed=True))
