"""Hydra's heads in compiled code: their trees are those of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import compiled, text_of
from test_grown import BUDGETS, PROMPTS, Given
from test_medusa_compiled import valued

import outrider
from outrider.core.tree import check
from outrider.drafters import hydra
from outrider.drafters._growth import Growth
from outrider.drafters.hydra import HydraDrafting
from outrider.native import build as native
from outrider.nets.layer import LayerShape
from outrider.types import Budget, DraftTree, Rows

pytestmark = pytest.mark.skipif(
    native.library("float32", "float32") is None, reason="the compiled pass wants gcc and an x86 processor with AVX2"
)
HALF, WHOLE = torch.bfloat16, torch.float32
LAYER = LayerShape(64, 4, 2, 16, 96, 64)  # of Hydra++


def made(vocab: int, drafted: int, dtype: torch.dtype, growth: Growth | None = None, **more: Any) -> outrider.LLM:
    """A tiny random model with heads of random weights."""
    target = compiled(vocab, dtype)
    torch.manual_seed(0)
    net = hydra.HydraNet(hydra.HydraConfig(vocab, 64, 4, draft_vocab=drafted, **more))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
        if drafted:
            net.d2t.copy_(torch.randperm(vocab)[:drafted].sort().values - torch.arange(drafted))
    drafter = hydra.drafter(net.to(dtype), target, growth or Growth(depth=4, top_k=4, scale=1.5))
    return outrider.LLM(target, None, drafter, "tiny", "hydra", frozenset({3}))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[DraftTree]:
    """Every proposal is made both ways; those of the compiled code are kept."""
    trees: list[DraftTree] = []
    whole = HydraDrafting.propose

    def both(self: HydraDrafting, rows: Rows, budget: Budget) -> DraftTree:
        drafter = self.drafter
        assert drafter.compiled is not None
        tree = whole(self, rows, budget)
        self.drafter = replace(drafter, compiled=None)
        right = whole(self, rows, budget)
        self.drafter = drafter
        check(tree)
        assert tree.tokens.shape == right.tokens.shape
        for name in ("tokens", "parents", "depths", "size"):
            assert torch.equal(getattr(tree, name), getattr(right, name)), name
        real = torch.arange(tree.nodes) < tree.size[:, None]
        assert tree.values is not None
        assert right.values is not None
        assert torch.allclose(tree.values[real], right.values[real], atol=1e-4)
        trees.append(tree)
        return tree

    monkeypatch.setattr(HydraDrafting, "propose", both)
    return trees


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", list(BUDGETS))
def test_trees_are_those_of_tensors(budget: str, temperature: float, compared: list[DraftTree]) -> None:
    """In a batch of texts of unequal length; small vocabularies, trimmed ones and large ones; Hydra++."""
    for vocab, drafted, more in (
        (97, 0, {}), (97, 50, {"prefix": True, "layer": LAYER}), (6000, 5000, {}),
    ):  # fmt: skip
        llm = made(vocab, drafted, WHOLE, **more)
        llm.generate(
            PROMPTS, max_new_tokens=14, temperature=temperature, seed=4, batch_size=3, budget=Given(BUDGETS[budget])
        )
    assert len(compared) >= 10
    assert max(tree.nodes for tree in compared) > 1
    if budget in ("fixed", "wide", "chain"):
        assert max(int(tree.depths.max()) for tree in compared) > 1


def test_a_path_is_read_in_its_order(compared: list[DraftTree]) -> None:
    """Wide layers, in which neighbours have different parents."""
    llm = made(97, 0, WHOLE, Growth(depth=4, width=8, top_k=6, scale=4.0))
    llm.generate(PROMPTS, max_new_tokens=14, batch_size=3, budget=Given(Budget(48, 4)))
    paths = {path for tree in compared for row in range(len(tree.host)) for path in valued(tree, row)}
    assert max(map(len, paths)) == 5, "a root and four heads"


@pytest.mark.parametrize("dtype", [HALF, WHOLE])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_with_drafts_are_those_without(temperature: float, dtype: torch.dtype) -> None:
    """Rows that end at their own time and are followed by others; trees and chains."""
    llm = made(97, 50, dtype)
    prompts = [text_of(i, 3 + 19 * i) for i in range(7)]
    law: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_new_tokens": 12}
    right = [o.tokens for o in llm.generate(prompts, budget=Given(Budget(1, 0)), **law)]
    for batch, budget in ((1, Budget(16, 6)), (3, Budget(8, 4, floor=0.01)), (3, Budget(4, 8, shape=(1, 1, 1)))):
        found = llm.generate(prompts, batch_size=batch, budget=Given(budget), **law)
        assert [o.tokens for o in found] == right, (batch, budget)
        assert sum(o.usage.drafted for o in found) > 20


@torch.no_grad()
def test_in_sixteen_bits_candidates_are_those_of_tensors_up_to_rounding() -> None:
    llm = made(97, 50, HALF)
    hits = total = 0
    whole = HydraDrafting.propose

    def both(self: HydraDrafting, rows: Rows, budget: Budget) -> DraftTree:
        nonlocal hits, total
        assert self.drafter.compiled is not None
        tree = whole(self, rows, budget)
        right = whole(HydraDrafting(replace(self.drafter, compiled=None), self.feature), rows, budget)
        for row in range(len(rows)):
            found, wanted = valued(tree, row).keys(), valued(right, row).keys()
            hits, total = hits + len(found & wanted), total + len(wanted)
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HydraDrafting, "propose", both)
        llm.generate(PROMPTS, max_new_tokens=16, temperature=0.0, batch_size=3, budget=Given(Budget(16, 4)))
    assert total > 100
    assert hits >= 0.8 * total


def test_heads_of_two_blocks_stay_in_tensors() -> None:
    drafter: Any = made(97, 50, WHOLE, layers=2).drafter
    assert drafter.compiled is None


def test_a_drafter_whose_numbers_are_none_harms_no_text() -> None:
    llm = made(97, 0, WHOLE)
    right = [o.tokens for o in llm.generate(PROMPTS, max_new_tokens=8, budget=Given(Budget(1, 0)))]
    drafter: Any = llm.drafter
    for part in drafter.compiled.kept:
        if isinstance(part, torch.Tensor):
            part.fill_(float("nan"))
    found = llm.generate(PROMPTS, max_new_tokens=8, budget=Given(Budget(16, 4)))
    assert [o.tokens for o in found] == right
    assert sum(o.usage.drafted for o in found) == 0, "nothing is worth a node where no number is one"
