"""Unigram and bigram drafters, the "negligible cost" models of Leviathan et al. 2023, table 3.

Counted on a corpus file (`ngram:corpus.txt`), or without one on each row's own prompt and output. The laws:

    n = 1:  u(x)     = (c(x) + 1) / (N + V)                           add-one
    n = 2:  q(x | y) = (c(y, x) + b u(x)) / (c(y) + b),   b = 1       backoff to the unigram (Dirichlet)

Under `coupled` the tree is EAGLE-2's growth with the shared noise; under `rejection` at T > 0 a static shape (a chain
unless the budget names one) is sampled and keeps its laws; elsewhere children are the most probable tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core import sampling
from ..core.growth import grow
from ..core.protocols import Drafting, Round, Target
from ..core.tree import append, from_template, prune, root_only, template
from ..core.types import Budget, DraftTree, Rows
from ..params import InputError
from ._common import corpus, refuse, selected, useful, whole

BACKOFF = 1.0
STORE = 1 << 22  # values of laws kept (32 MB)


@dataclass
class Counts:
    """Sparse counts of one token string over a vocabulary of `vocab`."""

    vocab: int
    tokens: Float[Tensor, " v"]  # c(x), float64
    after: dict[int, dict[int, int]] = field(default_factory=dict)  # c(y, x)
    last: int | None = None
    known: dict[int, Tensor] = field(default_factory=dict)  # bigram laws of these counts, as far as they were asked for
    fixed: bool = False  # a corpus, counted once and shared by all rows: it learns nothing more

    @classmethod
    def of(cls, tokens: Sequence[int], vocab: int, fixed: bool = False) -> Counts:
        counts = cls(vocab, torch.zeros(vocab, dtype=torch.float64))
        counts.extend(tokens)
        return replace(counts, fixed=fixed)

    def extend(self, tokens: Sequence[int]) -> None:
        if not tokens or self.fixed:
            return
        self.known.clear()
        index = torch.tensor(tokens)
        self.tokens.index_add_(0, index, torch.ones(len(tokens), dtype=torch.float64))
        for token in tokens:
            if self.last is not None:
                following = self.after.setdefault(self.last, {})
                following[token] = following.get(token, 0) + 1
            self.last = token

    def unigram(self) -> Float[Tensor, " v"]:
        return (self.tokens + 1) / (self.tokens.sum() + self.vocab)

    def law(self, previous: Sequence[int], n: int) -> Float[Tensor, "w v"]:
        """The law of the token after each of the tokens `previous`."""
        if n == 1:
            return self.unigram().expand(len(previous), -1)
        while len(self.known) > max(8, STORE // self.vocab):
            self.known.clear()
        for token in set(previous) - set(self.known):
            self.known[token] = self._bigram(token)
        return torch.stack([self.known[token] for token in previous])

    def _bigram(self, previous: int) -> Float[Tensor, " v"]:
        following = self.after.get(previous, {})
        total = sum(following.values()) + BACKOFF
        law = self.unigram() * (BACKOFF / total)
        if following:
            law[list(following)] += torch.tensor(list(following.values()), dtype=torch.float64) / total
        return law

    def fork(self) -> Counts:
        if self.fixed:
            return self
        return Counts(self.vocab, self.tokens.clone(), {y: dict(x) for y, x in self.after.items()}, self.last, {})


@dataclass(frozen=True)
class NgramDrafter:
    """Draws from counts of `n`-grams, of the text itself or of a corpus; `width` tokens below each node."""

    vocab: int
    n: int = 2
    width: int = 2
    corpus: Counts | None = None  # None: count each row's own text
    taps: tuple[int, ...] = ()
    reopens: bool = True

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> NgramDrafting:
        if self.corpus is not None:
            return NgramDrafting(self, [self.corpus for _ in prompts])
        return NgramDrafting(self, [Counts.of(prompt, self.vocab) for prompt in prompts])


@dataclass
class NgramDrafting:
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
        sampled = rows.rule in ("rejection", "block") and rows.hot
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

    def law(self, tokens: Int[Tensor, "b w"]) -> Float[Tensor, "b w v"]:
        """The law after each token."""
        laws = [row.law(t, self.drafter.n) for row, t in zip(self.rows, tokens.tolist(), strict=True)]
        return torch.stack(laws).to(tokens.device)

    def _shape(self, budget: Budget, depth: int) -> tuple[int, ...]:
        """The static shape of this round, fixed before anything is drawn."""
        shape = ((1,) * depth if budget.shape is None else budget.shape)[:depth]
        while shape and len(template(shape)) > budget.nodes:
            shape = shape[:-1]
        return shape

    def _dynamic(self, rows: Rows, budget: Budget, depth: int) -> DraftTree:
        width = self.drafter.width

        def expand(fed: DraftTree, since: int) -> tuple[Tensor, Tensor]:
            logits = self.law(fed.tokens[:, since:]).log().float()
            return sampling.rank(logits, rows, fed.deepest + 1, width, 1.0)

        return grow(
            rows.root, expand, depth=depth, width=width, nodes=budget.nodes, floor=budget.floor, price=budget.price
        )[0]

    def _static(self, rows: Rows, shape: tuple[int, ...], sampled: bool) -> DraftTree:
        fed, since, laws = root_only(rows.root), 0, []
        for depth, n in enumerate(shape, 1):
            logits = self.law(fed.tokens[:, since:]).log()
            if sampled:
                laws.append(torch.stack([sampling.law(row, s) for row, s in zip(logits, rows.sampling, strict=True)]))
                children = sampling.sample(laws[-1], n, rows, since, False)
            else:
                children = sampling.rank(logits.float(), rows, depth, n, 1.0, warp=n == 1)[0]
            parents = torch.arange(since, fed.nodes, device=rows.root.device).repeat_interleave(n)
            since = fed.nodes
            fed = append(fed, children.flatten(1), parents.expand(len(rows), -1))
        q = torch.cat(laws, 1) if laws else None
        return from_template(rows.root, fed.tokens[:, 1:], template(shape), q=q)


def shallow(tree: DraftTree, depths: Sequence[int]) -> DraftTree:
    """The tree cut to each row's depth. (The cut looks at no token, so sampled siblings keep their law.)"""
    if min(depths) >= tree.deepest:
        return tree
    index = torch.arange(tree.nodes, device=tree.tokens.device)
    good = (tree.depths <= torch.tensor(depths, device=index.device)[:, None]) & (index < tree.size[:, None])
    keep = torch.where(good, index, tree.nodes).sort(-1).values
    return replace(prune(tree, torch.where(keep < tree.nodes, keep, 0), good.sum(-1)), q=tree.q)


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    n: int = 2,
    width: int = 2,
    **unknown: Any,
) -> NgramDrafter:
    """A unigram (`n=1`) or bigram drafter of a corpus file, or of each row's own text; `width` children per node."""
    refuse("ngram", unknown)
    if target is None:
        raise InputError("the drafter ngram needs the target, whose vocabulary its laws cover")
    n, width = whole("n", n, most=2), whole("width", width)
    if path is None:
        return NgramDrafter(target.vocab, n, width)
    tokens = corpus("ngram", path, tokenizer)
    if max(tokens) >= target.vocab:
        raise InputError(f"the corpus {path} has tokens outside the target's vocabulary of {target.vocab}")
    return NgramDrafter(target.vocab, n, width, Counts.of(tokens, target.vocab, fixed=True))
