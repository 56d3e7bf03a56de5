"""Medusa's heads in compiled code: their trees are those of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import compiled
from grown_world import (
    BUDGETS,
    PROMPTS,
    Given,
    candidates_are_alike,
    harmless_without_numbers,
    nearly,
    texts_are_plain,
)

import outrider
from outrider.backends.native import library as native
from outrider.core.tree import check
from outrider.core.types import Budget, DraftTree, Rows
from outrider.drafters import medusa
from outrider.drafters.medusa import MedusaDrafting

pytestmark = pytest.mark.skipif(
    native.library("float32", "float32") is None, reason="the compiled pass wants gcc and an x86 processor with AVX2"
)
HALF, WHOLE = torch.bfloat16, torch.float32


def made(
    vocab: int, drafted: int, dtype: torch.dtype, halves: bool = False, spoilt: bool = False, **more: Any
) -> outrider.LLM:
    """A tiny random model with heads of random weights."""
    target = compiled(vocab, dtype, halves)
    torch.manual_seed(0)
    net = medusa.MedusaNet(medusa.MedusaConfig(vocab, 64, 4, draft_vocab=drafted, **{"share_head": True, **more}))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.full_like(parameter, float("nan")) if spoilt else torch.randn(parameter.shape) * 0.3)
        if drafted:
            net.d2t.copy_(torch.randperm(vocab)[:drafted].sort().values - torch.arange(drafted))
    drafter = medusa.drafter(net.to(dtype), target, medusa.MedusaOptions(scale=1.5))
    return outrider.LLM(target, None, drafter, "tiny", "medusa", frozenset({3}))


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
            nearly(tree, right, row)
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
    texts_are_plain(made(97, 50, dtype), temperature)


@pytest.mark.parametrize(("dtype", "halves"), [(HALF, False), (WHOLE, True)])
def test_rounded_weights_give_the_candidates_of_tensors_nearly(dtype: torch.dtype, halves: bool) -> None:
    def in_tensors(drafting: MedusaDrafting) -> MedusaDrafting:
        return MedusaDrafting(replace(drafting.drafter, compiled=None), drafting.feature)

    candidates_are_alike(made(97, 50, dtype, halves=halves), MedusaDrafting, in_tensors)


@pytest.mark.parametrize("more", [{"share_head": False}, {"layers": 2}])
def test_what_the_code_does_not_know_stays_in_tensors(more: dict[str, Any]) -> None:
    drafter: Any = made(97, 50, WHOLE, **more).drafter
    assert drafter.compiled is None


def test_a_drafter_whose_numbers_are_none_harms_no_text() -> None:
    harmless_without_numbers(made(97, 0, WHOLE, spoilt=True))
