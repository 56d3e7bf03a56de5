"""Medusa's heads in compiled code: their logits are those of tensors, their trees those of the lattice in Python."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bits import compiled
from grown_world import (
    BUDGETS,
    CASES,
    PROMPTS,
    Given,
    harmless_without_numbers,
    nearly,
)

import outrider
from outrider.backends.native import library as native
from outrider.backends.torch.tensors import array
from outrider.core.tree import check
from outrider.core.types import Budget, DraftTree, Rows
from outrider.drafters import _heads, medusa
from outrider.drafters.medusa import CompiledMedusa, CompiledMedusaDrafting, MedusaDrafting

pytestmark = pytest.mark.skipif(
    native.library("float32", "float32") is None,
    reason="native passes need AVX2 or NEON, and a compiler",
)
HALF, WHOLE = torch.bfloat16, torch.float32
OWN: dict[str, Any] = {"share_head": False, "bias": True}  # LM heads


def network(vocab: int, drafted: int, spoilt: bool = False, **more: Any) -> Any:
    """Heads of random weights."""
    torch.manual_seed(0)
    net = medusa.MedusaNet(medusa.MedusaConfig(vocab, 64, 4, draft_vocab=drafted, **{"share_head": True, **more}))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.full_like(parameter, float("nan")) if spoilt else torch.randn(parameter.shape) * 0.3)
        if drafted:
            net.d2t.copy_(torch.randperm(vocab)[:drafted].sort().values - torch.arange(drafted))
    return net


def made(vocab: int, drafted: int, dtype: torch.dtype, halves: bool = False, **more: Any) -> outrider.LLM:
    """A tiny random model with heads of random weights."""
    target, net = compiled(vocab, dtype, halves), network(vocab, drafted, **more)
    drafter = medusa.drafter(net.to(dtype), target, medusa.MedusaOptions(scale=1.5))
    return outrider.LLM(target, None, drafter, "tiny", "medusa", frozenset({3}))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[DraftTree]:
    """Every proposal is made both ways; those of the compiled code are kept."""
    trees: list[DraftTree] = []
    whole = CompiledMedusaDrafting.propose

    def both(self: CompiledMedusaDrafting, rows: Rows, budget: Budget) -> DraftTree:
        tree = whole(self, rows, budget)
        right = MedusaDrafting.propose(self, rows, budget)
        check(tree)
        if min(rows.remaining) <= min(budget.depth, self.drafter.config.heads):
            return tree  # in Python a row near its end drafts as deep as the others
        for row in range(len(rows)):
            nearly(tree, right, row)
        trees.append(tree)
        return tree

    monkeypatch.setattr(CompiledMedusaDrafting, "propose", both)
    return trees


@pytest.mark.parametrize(("budget", "temperature"), [case for case in CASES if case[0] != "chain"])
def test_trees_are_the_best_of_the_lattice(budget: str, temperature: float, compared: list[DraftTree]) -> None:
    """In a batch of texts of unequal length; small vocabularies, trimmed ones and large ones."""
    for vocab, drafted, more in ((97, 0, OWN), (97, 50, {}), (6000, 5000, {})):
        llm = made(vocab, drafted, WHOLE, **more)
        llm.generate(
            PROMPTS, max_new_tokens=14, temperature=temperature, seed=4, batch_size=3, budget=Given(BUDGETS[budget])
        )
    assert len(compared) >= 10
    assert max(tree.nodes for tree in compared) > 1


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "halves"), [(HALF, False), (WHOLE, False), (WHOLE, True)])
@pytest.mark.parametrize("more", [{}, OWN, {"share_head": False}], ids=str)
def test_logits_are_those_of_the_network(more: dict[str, Any], dtype: torch.dtype, halves: bool) -> None:
    target, net = compiled(97, dtype, halves), network(97, 50, **more).to(dtype)
    drafter = medusa.drafter(copy.deepcopy(net), target, medusa.MedusaOptions())
    assert isinstance(drafter, CompiledMedusa)
    features = torch.randn(3, 64).to(dtype)
    right = torch.stack(net(features, _heads.rows(target, net.ids())), 1).float().numpy()
    for depth in (4, 1, 3):
        found = drafter.compiled.logits(array(features), depth)
        assert found.shape == (3, depth, 50)
        apart = abs(found - right[:, :depth]).max() / abs(right).max()
        assert apart < (1e-5 if dtype == WHOLE and not halves else 0.05), "weights of eight bits, activations of 16"


def test_what_the_code_does_not_know_stays_in_tensors() -> None:
    assert not isinstance(made(97, 50, WHOLE, layers=2).drafter, CompiledMedusa)


@pytest.mark.parametrize("more", [{}, OWN], ids=str)
def test_a_drafter_whose_numbers_are_none_harms_no_text(more: dict[str, Any]) -> None:
    harmless_without_numbers(made(97, 0, WHOLE, spoilt=True, **more))
