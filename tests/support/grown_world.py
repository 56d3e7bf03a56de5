"""Trees that compiled code grows, beside those of tensors: budgets, texts, and what is asked of every such drafter."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
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


def valued(tree: DraftTree, row: int) -> dict[tuple[int, ...], float]:
    """The value of every path of a row."""
    tokens, parents, values = tree.host[row]
    paths: list[tuple[int, ...]] = []
    for i, token in enumerate(tokens):
        paths.append((*(paths[parents[i]] if i else ()), token))
    return dict(zip(paths, values, strict=True))


def nearly(tree: DraftTree, right: DraftTree, row: int) -> None:
    """The same nodes of a row, but that of nodes that are worth the same either may be the last."""
    found, wanted = valued(tree, row), valued(right, row)
    assert len(found) == len(wanted)
    assert all(math.isclose(found[path], wanted[path], abs_tol=1e-4) for path in found.keys() & wanted.keys())
    least = min(wanted.values())
    for path in found.keys() ^ wanted.keys():
        assert math.isclose({**found, **wanted}[path], least, abs_tol=1e-4), path


def late_and_at_once(llm: outrider.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are the same whether a text is read as it comes or only when something is drafted for it, while rows come
    and go."""
    prompts = [text_of(i, n) for i, n in enumerate((40, 7, 31, 150, 3, 12, 60, 5))]
    found = []
    for flush in (1, 512):
        monkeypatch.setattr(_compiled, "MOST", flush)
        outputs = llm.generate(
            prompts, max_new_tokens=40, temperature=1.0, seed=4, batch_size=3, budget=Seldom(Budget(8, 3))
        )
        found.append([(o.tokens, o.usage.drafted, o.usage.accepted) for o in outputs])
    assert found[0] == found[1]
    assert len({len(tokens) for tokens, _, _ in found[0]}) > 2, "rows end at different times"
    assert sum(accepted for _, _, accepted in found[0]) > 0


def harmless_without_numbers(llm: outrider.LLM) -> None:
    """This drafter, whose weights are no numbers, drafts nothing, and no text differs."""
    right = [o.tokens for o in llm.generate(PROMPTS, max_new_tokens=8, budget=Given(Budget(1, 0)))]
    found = llm.generate(PROMPTS, max_new_tokens=8, budget=Given(Budget(16, 6)))
    assert [o.tokens for o in found] == right
    assert sum(o.usage.drafted for o in found) == 0, "nothing is worth a node where no number is one"
