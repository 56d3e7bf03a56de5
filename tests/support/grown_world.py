"""Trees of compiled drafters beside those of tensors: budgets, prompts, and what holds for every such drafter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from bits import text_of

import outrider
from outrider.core.price import Price
from outrider.core.tree import check
from outrider.core.types import Budget, DraftTree, Rows
from outrider.drafters import _compiled

PROMPTS = [text_of(1, 150), text_of(2, 7), text_of(3, 31)]  # the first one is fed before anything is drafted
PRICE = Price(tuple(1 + 0.02 * n for n in range(24)), 0.9)
BUDGETS = {
    "fixed": Budget(16, 6),
    "wide": Budget(60, 3),
    "one": Budget(2, 1),
    "floor": Budget(40, 6, floor=0.003),
    "reach": Budget(40, 6, reach=0.05),
    "price": Budget(24, 5, floor=1e-4, reach=1e-3, price=PRICE),
    "summed": Budget(24, 5, floor=1e-4, reach=1e-3, price=replace(PRICE, summed=True)),
    "scale": Budget(16, 4, scale=2.5),
    "chain": Budget(4, 8, shape=(1, 1, 1)),
}
# Every budget is met with noise in the ranks, and some without.
CASES = [*((budget, 1.0) for budget in BUDGETS), *((budget, 0.0) for budget in ("fixed", "price", "chain"))]


@dataclass
class Given:
    """The same budget in every round."""

    budget: Budget

    def choose(self, rows: Rows) -> Budget:
        return self.budget

    def learn(self, report: Any) -> None: ...


@dataclass
class Seldom(Given):
    """The same budget in every fifth round, and nothing in the others."""

    rounds: int = 0

    def choose(self, rows: Rows) -> Budget:
        self.rounds += 1
        return Budget(1, 0) if self.rounds % 5 else self.budget


def same(tree: DraftTree, right: DraftTree) -> None:
    """The same tree, its values up to rounding where the other one has some."""
    check(tree)
    assert tree.tokens.shape == right.tokens.shape
    for name in ("tokens", "parents", "depths", "size"):
        assert np.array_equal(getattr(tree, name), getattr(right, name)), name
    real = np.arange(tree.nodes) < tree.size[:, None]
    assert tree.values is not None
    assert right.values is None or np.allclose(tree.values[real], right.values[real], atol=1e-4, rtol=1e-4)
    assert tree.deepest >= int(tree.depths.max())


def checked(monkeypatch: pytest.MonkeyPatch, drafting: type, check: Callable[..., None]) -> list[DraftTree]:
    """From now on `check(self, tree, rows, budget)` holds for every tree that a class of draftings proposes; the list
    of these trees grows."""
    trees: list[DraftTree] = []
    fast = drafting.propose  # type: ignore[attr-defined]

    def propose(self: Any, rows: Rows, budget: Budget) -> DraftTree:
        tree: DraftTree = fast(self, rows, budget)
        check(self, tree, rows, budget)
        trees.append(tree)
        return tree

    monkeypatch.setattr(drafting, "propose", propose)
    return trees


def generate(llm: outrider.LLM, budget: str, temperature: float, tokens: int = 14) -> None:
    """A batch of texts of unequal length."""
    given = Given(BUDGETS[budget])
    llm.generate(PROMPTS, max_new_tokens=tokens, temperature=temperature, seed=4, batch_size=3, budget=given)


def shuffled(net: Any, vocab: int, drafted: int, spoilt: bool = False) -> Any:
    """Heads of random weights, NaN where they are `spoilt`, that draft so many tokens of the vocabulary (0: all)."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.full_like(parameter, float("nan")) if spoilt else torch.randn(parameter.shape) * 0.3)
        if drafted:
            net.d2t.copy_(torch.randperm(vocab)[:drafted].sort().values - torch.arange(drafted))
    return net


def valued(tree: DraftTree, row: int) -> dict[tuple[int, ...], float]:
    """The value of every path of a row."""
    tokens, parents, values = tree.host[row]
    paths: list[tuple[int, ...]] = []
    for i, token in enumerate(tokens):
        paths.append((*(paths[parents[i]] if i else ()), token))
    return dict(zip(paths, values, strict=True))


def nearly(tree: DraftTree, right: DraftTree, row: int) -> None:
    """The same nodes of a row, except that of nodes of equal value either may be the last."""
    ours, expected = valued(tree, row), valued(right, row)
    assert len(ours) == len(expected)
    assert all(math.isclose(ours[path], expected[path], abs_tol=1e-4) for path in ours.keys() & expected.keys())
    least = min(expected.values())
    for path in ours.keys() ^ expected.keys():
        assert math.isclose({**ours, **expected}[path], least, abs_tol=1e-4), path


def late_and_at_once(llm: outrider.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are the same whether a text is read as it comes or only when something is drafted for it, while rows come
    and go."""
    prompts = [text_of(i, n) for i, n in enumerate((40, 7, 31, 150, 3, 12, 60, 5))]
    runs = []
    for flush in (1, 512):
        monkeypatch.setattr(_compiled, "MOST", flush)
        outputs = llm.generate(
            prompts, max_new_tokens=40, temperature=1.0, seed=4, batch_size=3, budget=Seldom(Budget(8, 3))
        )
        runs.append([(o.tokens, o.usage.drafted, o.usage.accepted) for o in outputs])
    assert runs[0] == runs[1]
    assert len({len(tokens) for tokens, _, _ in runs[0]}) > 2, "rows end at different times"
    assert sum(accepted for _, _, accepted in runs[0]) > 0


def harmless_nan(llm: outrider.LLM) -> None:
    """This drafter, whose weights are NaN, drafts nothing, and no text differs."""
    expected = [o.tokens for o in llm.generate(PROMPTS, max_new_tokens=8, budget=Given(Budget(1, 0)))]
    outputs = llm.generate(PROMPTS, max_new_tokens=8, budget=Given(Budget(16, 6)))
    assert [o.tokens for o in outputs] == expected
    assert sum(o.usage.drafted for o in outputs) == 0, "a value of NaN is worth no node"
