"""What the tests of Medusa and Hydra share: a cyclic target for oracles, and short ways to run an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.budgets.budgeter import FixedBudget
from outrider.core.noise import GumbelNoise
from outrider.core.types import DraftTree
from outrider.engine import Batch, Engine, Request, Row, generate
from outrider.params import Sampling
from outrider.testing import TableTarget


def cyclic(vocab: int = 13) -> tuple[TableTarget, list[int]]:
    """A target that cycles through all tokens: order[t] follows t. Its feature after t, 100 at order[t],
    marks the token to come."""
    target, order = TableTarget(vocab, order=1), [(5 * t + 3) % vocab for t in range(vocab)]
    target.table[:] = 0
    for token, following in enumerate([*order, 0]):
        target.table[token, following] = 100.0
    return target, order


def engine(target: Any, drafter: Any, rule: str = "coupled", budget: Any = None) -> Engine:
    return Engine(target, drafter, budget or FixedBudget(12, 4), GumbelNoise(target.vocab), rule)


def run(
    target: Any, drafter: Any, prompts: Sequence[Sequence[int]], new: int, temperature: float, budget: Any = None,
    rule: str = "coupled",
) -> list[Row]:  # fmt: skip
    rows: dict[int, Row] = {}
    requests = [Request(p, 5 + i, new, Sampling(temperature)) for i, p in enumerate(prompts)]
    for piece in generate(engine(target, drafter, rule, budget), requests):
        rows[piece.row.index] = piece.row
    return [rows[i] for i in range(len(prompts))]


def written(
    target: Any, drafter: Any, prompts: Sequence[Sequence[int]], new: int, temperature: float, rule: str = "coupled",
    budget: Any = None,
) -> list[list[int]]:  # fmt: skip
    return [row.output for row in run(target, drafter, prompts, new, temperature, budget, rule)]


def stock(
    target: Any, drafter: Any, prompts: Sequence[Sequence[int]], rule: str = "coupled", temperature: float = 0.0,
    seed: int = 5,
) -> Batch:  # fmt: skip
    """A batch that has read its prompts."""
    rows = [Row(Request(p, seed + i, 40, Sampling(temperature)), i) for i, p in enumerate(prompts)]
    with torch.no_grad():
        batch, _ = Batch.start(engine(target, drafter, rule), rows)
    assert batch is not None
    return batch


def rank_tree(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    """A row's tree as the set of its nodes' paths of tokens."""
    tokens, parents, size = tree.tokens[row].tolist(), tree.parents[row].tolist(), int(tree.size[row])
    paths: list[tuple[int, ...]] = [()]
    for i in range(1, size):
        paths.append((*paths[parents[i]], tokens[i]))
    return set(paths[1:])
