"""Medusa's heads in compiled code: their trees are those of tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import compiled, text_of
from test_grown import BUDGETS, PROMPTS, Given

import outrider
from outrider.core.tree import check
from outrider.drafters import medusa
from outrider.drafters.medusa import MedusaDrafting
from outrider.native import build as native
from outrider.types import Budget, DraftTree, Rows

pytestmark = pytest.mark.skipif(
    native.library("float32", "float32") is None, reason="the compiled pass wants gcc and an x86 processor with AVX2"
)
HALF, WHOLE = torch.bfloat16, torch.float32


def made(vocab: int, drafted: int, dtype: torch.dtype, **more: Any) -> outrider.LLM:
    """A tiny random model with heads of random weights."""
    target = compiled(vocab, dtype)
    torch.manual_seed(0)
    net = medusa.MedusaNet(medusa.MedusaConfig(vocab, 64, 4, draft_vocab=drafted, **{"share_head": True, **more}))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
        if drafted:
            net.d2t.copy_(torch.randperm(vocab)[:drafted].sort().values - torch.arange(drafted))
    drafter = medusa.drafter(net.to(dtype), target, medusa.MedusaOptions(scale=1.5))
    return outrider.LLM(target, None, drafter, "tiny", "medusa", frozenset({3}))


def valued(tree: DraftTree, row: int) -> dict[tuple[int, ...], float]:
    """The value of every path of a row."""
    tokens, parents, values = tree.host[row]
    paths: list[tuple[int, ...]] = []
    for i, token in enumerate(tokens):
        paths.append((*(paths[parents[i]] if i else ()), token))
    return dict(zip(paths, values, strict=True))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[DraftTree]:
    """Every proposal is made both ways; those of the compiled code are kept."""
    trees: list[DraftTree] = []
    whole = MedusaDrafting.propose

    def both(self: MedusaDrafting, rows: Rows, budget: Budget) -> DraftTree:
        drafter = self.drafter
        assert drafter.compiled is not None
        tree = whole(self, rows, budget)
        self.drafter = replace(drafter, compiled=None)
        right = whole(self, rows, budget)
        self.drafter = drafter
        check(tree)
        if min(rows.remaining) <= min(budget.depth, drafter.config.heads):
            return tree  # in tensors a row near its end drafts as deep as the others
        for row in range(len(rows)):
            found, wanted = valued(tree, row), valued(right, row)
            assert len(found) == len(wanted)
            assert all(math.isclose(found[path], wanted[path], abs_tol=1e-4) for path in found.keys() & wanted.keys())
            least = min(wanted.values())
            for path in found.keys() ^ wanted.keys():  # of nodes that are worth the same either may be the last
                assert math.isclose({**found, **wanted}[path], least, abs_tol=1e-4), path
        trees.append(tree)
        return tree

    monkeypatch.setattr(MedusaDrafting, "propose", both)
    return trees


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", [budget for budget in BUDGETS if budget != "chain"])
def test_trees_are_those_of_tensors(budget: str, temperature: float, compared: list[DraftTree]) -> None:
    """In a batch of texts of unequal length; small vocabularies, trimmed ones and large ones."""
    for vocab, drafted in ((97, 0), (97, 50), (6000, 5000)):
        llm = made(vocab, drafted, WHOLE)
        llm.generate(
            PROMPTS, max_new_tokens=14, temperature=temperature, seed=4, batch_size=3, budget=Given(BUDGETS[budget])
        )
    assert len(compared) >= 10
    assert max(tree.nodes for tree in compared) > 1


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
    drafter: Any = llm.drafter
    assert drafter.compiled is not None
    hits = total = 0
    whole = MedusaDrafting.propose

    def both(self: MedusaDrafting, rows: Rows, budget: Budget) -> DraftTree:
        nonlocal hits, total
        tree = whole(self, rows, budget)
        right = whole(MedusaDrafting(replace(self.drafter, compiled=None), self.feature), rows, budget)
        for row in range(len(rows)):
            found, wanted = valued(tree, row).keys(), valued(right, row).keys()
            hits, total = hits + len(found & wanted), total + len(wanted)
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MedusaDrafting, "propose", both)
        llm.generate(PROMPTS, max_new_tokens=16, temperature=0.0, batch_size=3, budget=Given(Budget(16, 4)))
    assert total > 100
    assert hits >= 0.8 * total


@pytest.mark.parametrize("more", [{"share_head": False}, {"layers": 2}])
def test_what_the_code_does_not_know_stays_in_tensors(more: dict[str, Any]) -> None:
    drafter: Any = made(97, 50, WHOLE, **more).drafter
    assert drafter.compiled is None


def test_a_drafter_whose_numbers_are_none_harms_no_text() -> None:
    llm = made(97, 0, WHOLE)
    right = [o.tokens for o in llm.generate(PROMPTS, max_new_tokens=8, budget=Given(Budget(1, 0)))]
    drafter: Any = llm.drafter
    drafter.compiled.kept[0].fill_(float("nan"))
    found = llm.generate(PROMPTS, max_new_tokens=8, budget=Given(Budget(16, 4)))
    assert [o.tokens for o in found] == right
    assert sum(o.usage.drafted for o in found) == 0, "nothing is worth a node where no number is one"
