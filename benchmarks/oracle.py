"""A drafter that knows the answer and errs at a given rate: speed as a function of acceptance, nothing else varying."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.tree import chain
from outrider.types import Budget, Drafting, DraftTree, Round, Rows


@dataclass(frozen=True)
class OracleDrafter:
    """Proposes `answers[tuple(prompt)]`, each token replaced by a wrong one with probability 1 - alpha."""

    answers: dict[tuple[int, ...], list[int]]
    alpha: float
    vocab: int
    taps: tuple[int, ...] = ()

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> OracleDrafting:
        texts = [[*p, *self.answers[tuple(p)]] for p in prompts]
        return OracleDrafting(self, texts, random.Random(0))


@dataclass
class OracleDrafting:
    drafter: OracleDrafter
    texts: list[list[int]]
    dice: random.Random = field(repr=False)

    def observe(self, round: Round) -> None:
        del round

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        depth = min(budget.depth, budget.nodes - 1, max(rows.room) - 1)
        paths = []
        for text, start, root in zip(self.texts, rows.start, rows.root.tolist(), strict=True):
            path = [root]
            for token in text[start + 1 : start + 1 + depth]:
                hit = self.dice.random() < self.drafter.alpha
                path.append(token if hit else (token + 1) % self.drafter.vocab)
            paths.append(path)
        return chain(paths)

    def select(self, index: Sequence[int]) -> None:
        self.texts = [self.texts[i] for i in index]

    def join(self, other: Drafting) -> None:
        assert isinstance(other, OracleDrafting)
        self.texts += other.texts
