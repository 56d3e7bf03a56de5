"""`Play`: an engine in thirty lines with a table for a target, to play a drafter's rounds by hand."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Drafter, Drafting, Round, Session, Target, TargetOutput
from outrider.core.tree import check, root_only
from outrider.core.types import Array, Budget, DraftTree, Rows
from outrider.params import Rule, Sampling

VOCAB = 12
PROMPTS = [[1, 2, 3, 1, 2, 4, 1, 2], [5, 6, 5], [7]]
BUDGET = Budget(24, 8)


def rows_of(count: int, left: int = 5, temperature: float = 0.0) -> Rows:
    """A batch in which so many tokens of each text are left."""
    each = (Sampling(temperature),) * count
    return Rows(
        (0,) * count, (8,) * count, (0,) * count, (1,) * count, each, "coupled", (left,) * count, GumbelNoise(8)
    )


@dataclass(frozen=True)
class Table(Target):
    """A target: a fixed random distribution given the last two tokens."""

    vocab: int = VOCAB
    context: int = 4096
    peak: float = 3.0
    precision: str = "float32"
    hidden: int = 1
    layers: int = 0

    @property
    def config_dict(self) -> dict[str, object]:
        return {}

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def logits(self, text: list[int]) -> Array:
        made = np.random.default_rng(71 * text[-1] + (text[-2] if len(text) > 1 else 0))
        return made.standard_normal(self.vocab, np.float32) * np.float32(self.peak)

    def embed(self, tokens: Any) -> Any:
        raise NotImplementedError

    def head(self, features: Any) -> Any:
        raise NotImplementedError

    def open(self, capacity: int) -> Session:
        raise NotImplementedError


class Play:
    """Rounds by hand: prompts read in two chunks, then propose, accept along the tree, observe."""

    def __init__(
        self,
        drafter: Drafter,
        prompts: list[list[int]],
        temperature: float = 0.0,
        rule: Rule = "coupled",
        target: Table | None = None,
        length: int = 1 << 20,
        first: list[list[int]] | None = None,
    ) -> None:
        self.target, self.rule, self.length = target or Table(), rule, length
        self.gumbel = GumbelNoise(self.target.vocab)
        self.texts = [list(p) for p in prompts]
        self.seeds = [100 + b for b in range(len(prompts))]
        self.sampling = [Sampling(temperature)] * len(prompts)
        self.drafting: Drafting = drafter.open([list(p) for p in prompts], 1024)
        self.proposals: list[DraftTree] = []
        self.prefill(first)

    def prefill(self, first: list[list[int]] | None) -> None:
        empty = [[] for _ in self.texts]
        firsts = [[self.draw(b, [])] for b in range(len(self.texts))] if first is None else first
        root = root_only([t[-1] for t in self.texts])
        output = TargetOutput(np.zeros((len(self.texts), 1, self.target.vocab), np.float32))
        for tokens in (empty, firsts):
            self.drafting.observe(Round(self.rows(), root, output, empty, [0] * len(self.texts), tokens))
        for text, first in zip(self.texts, firsts, strict=True):
            text += first

    def rows(self) -> Rows:
        start = tuple(len(t) - 1 for t in self.texts)
        root, remaining = tuple(t[-1] for t in self.texts), tuple(self.length - len(t) for t in self.texts)
        serial, samplings = (0,) * len(start), tuple(self.sampling)
        return Rows(root, start, tuple(self.seeds), serial, samplings, self.rule, remaining, self.gumbel)

    def draw(self, b: int, path: list[int]) -> int:
        text = [*self.texts[b], *path]
        logits, t = self.target.logits(text), self.sampling[b].temperature
        noise = self.gumbel.at([self.seeds[b]], [len(text)])[0] if t else 0.0
        return int((logits + np.float32(t) * noise).argmax())

    def propose(self, budget: Budget) -> DraftTree:
        tree = self.drafting.propose(self.rows(), budget)
        check(tree)
        assert int(tree.size.max()) <= max(1, budget.nodes)
        assert tree.tokens[:, 0].tolist() == [t[-1] for t in self.texts]
        for depths, remaining in zip(tree.depths.tolist(), self.rows().remaining, strict=True):
            assert max(depths) <= max(0, min(budget.depth, remaining - 1))
        self.proposals.append(tree)
        return tree

    def round(self, budget: Budget) -> list[list[int]]:
        rows, tree = self.rows(), self.propose(budget)
        new, logits, ids = [], np.zeros((*tree.tokens.shape, self.target.vocab), np.float32), []
        for b, paths in enumerate(paths_of(tree)):
            for i, path in enumerate(paths):
                logits[b, i] = self.target.logits([*self.texts[b], *path])
            nodes, path = [0], list[int]()
            while True:
                path = [*path, self.draw(b, path)]
                if path not in paths:
                    break
                nodes.append(paths.index(path))
            new.append(path)
            ids.append(nodes)
        self.drafting.observe(Round(rows, tree, TargetOutput(logits), ids, [path[-1] for path in new], new))
        for text, path in zip(self.texts, new, strict=True):
            text += path
        return new

    def select(self, index: list[int]) -> None:
        self.drafting.select(index)
        self.texts = [list(self.texts[i]) for i in index]
        self.seeds = [self.seeds[i] for i in index]
        self.sampling = [self.sampling[i] for i in index]

    def join(self, other: Play) -> None:
        self.drafting.join(other.drafting)
        self.texts += other.texts
        self.seeds += other.seeds
        self.sampling += other.sampling


def paths_of(tree: DraftTree) -> list[list[list[int]]]:
    """Per row and node the tokens from the root, exclusive: the miniature of tree.py -> [[] [5] [5 6] [5 7] [8]]."""
    out = []
    for tokens, parents, size in zip(tree.tokens.tolist(), tree.parents.tolist(), tree.size.tolist(), strict=True):
        paths: list[list[int]] = [[]]
        for i in range(1, size):
            paths.append([*paths[parents[i]], tokens[i]])
        out.append(paths)
    return out


class Words:
    """A tokenizer: one token per word, a number."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [int(word) for word in text.split()]
