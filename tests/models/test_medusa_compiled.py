"""Medusa's heads in compiled code: their logits are those of tensors, their trees those of the lattice in Python."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bits import compiled
from compiled_code import FULL, needs_code, precisions
from grown_world import CASES, checked, generate, harmless_nan, nearly, shuffled
from small import build

import outrider
from outrider.backends.torch.module import ModuleTarget
from outrider.backends.torch.tensors import array
from outrider.core.tree import check
from outrider.core.types import Budget, DraftTree, Rows
from outrider.drafters import _heads, medusa
from outrider.drafters.medusa import CompiledMedusa, CompiledMedusaDrafting, MedusaDrafting

pytestmark = needs_code
OWN: dict[str, Any] = {"share_head": False, "bias": True}  # LM heads


def network(vocab: int, drafted: int, spoilt: bool = False, **more: Any) -> Any:
    """Heads of random weights."""
    torch.manual_seed(0)
    config = medusa.MedusaConfig(vocab, 64, 4, draft_vocab=drafted, **{"share_head": True, **more})
    return shuffled(medusa.MedusaNet(config), vocab, drafted, spoilt)


def made(vocab: int, drafted: int, dtype: torch.dtype, halves: bool = False, **more: Any) -> outrider.LLM:
    """A tiny random model with heads of random weights."""
    target, net = compiled(vocab, dtype, halves), network(vocab, drafted, **more)
    drafter = medusa.drafter(net.to(dtype), target, medusa.MedusaOptions(scale=1.5))
    return outrider.LLM(target, None, drafter, "tiny", "medusa", frozenset({3}))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[DraftTree]:
    """Every proposal is made both ways; those of the compiled code are kept."""

    def equal(self: CompiledMedusaDrafting, tree: DraftTree, rows: Rows, budget: Budget) -> None:
        expected = MedusaDrafting.propose(self, rows, budget)
        check(tree)
        if min(rows.remaining) > min(budget.depth, self.drafter.config.heads):
            for row in range(len(rows)):  # in Python a row near its end drafts as deep as the others
                nearly(tree, expected, row)

    return checked(monkeypatch, CompiledMedusaDrafting, equal)


@pytest.mark.parametrize(("budget", "temperature"), [case for case in CASES if case[0] != "chain"])
def test_trees_are_the_best_of_the_lattice(budget: str, temperature: float, compared: list[DraftTree]) -> None:
    """In a batch of texts of unequal length; small vocabularies, trimmed ones and large ones."""
    for vocab, drafted, more in ((97, 0, OWN), (97, 50, {}), (6000, 5000, {})):
        llm = made(vocab, drafted, FULL, **more)
        generate(llm, budget, temperature)
    assert len(compared) >= 10
    assert max(tree.nodes for tree in compared) > 1


@torch.no_grad()
@precisions
@pytest.mark.parametrize("more", [{}, OWN, {"share_head": False}], ids=str)
def test_logits_are_those_of_the_network(more: dict[str, Any], dtype: torch.dtype, halves: bool) -> None:
    target, net = compiled(97, dtype, halves), network(97, 50, **more).to(dtype)
    drafter = medusa.drafter(copy.deepcopy(net), target, medusa.MedusaOptions())
    assert isinstance(drafter, CompiledMedusa)
    features = torch.randn(3, 64).to(dtype)
    right = torch.stack(net(features, _heads.rows(target, net.ids())), 1).float().numpy()
    for depth in (4, 1, 3):
        result = drafter.compiled.logits(array(features), depth)
        assert result.shape == (3, depth, 50)
        apart = abs(result - right[:, :depth]).max() / abs(right).max()
        assert apart < (1e-5 if dtype == FULL and not halves else 0.05), "weights of eight bits, activations of 16"


@torch.no_grad()
def test_the_targets_cap_holds_for_its_own_head_alone() -> None:
    """As the target's logits are capped, so are those of its drafts: noise races against them."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 256}
    target = ModuleTarget(build("gemma2", FULL, vocab_size=97, final_logit_softcapping=2.0, **sizes))
    assert target.logit_cap == 2.0
    features = torch.randn(3, 64)
    for more in ({}, OWN):
        drafter = medusa.drafter(network(97, 0, **more), target, medusa.MedusaOptions())
        assert isinstance(drafter, CompiledMedusa)
        net: Any = network(97, 0, **more)
        right = torch.stack(net(features, target.model.lm_head), 1)
        capped = right if more else 2.0 * torch.tanh(right / 2.0)
        assert right.abs().max() > 3.0
        torch.testing.assert_close(
            torch.tensor(drafter.compiled.logits(array(features), 4)), capped, atol=1e-4, rtol=1e-4
        )


@torch.no_grad()
def test_a_single_head_has_its_bias() -> None:
    torch.manual_seed(0)
    config = medusa.MedusaConfig(97, 64, 1, share_head=False, bias=True)
    net = shuffled(medusa.MedusaNet(config), 97, 0, False)
    drafter = medusa.drafter(copy.deepcopy(net), compiled(97, FULL), medusa.MedusaOptions())
    assert isinstance(drafter, CompiledMedusa)
    features = torch.randn(3, 64)
    right = torch.stack(net(features, None), 1)
    torch.testing.assert_close(torch.tensor(drafter.compiled.logits(array(features), 1)), right, atol=1e-4, rtol=1e-4)


def test_unsupported_networks_stay_in_tensors() -> None:
    assert not isinstance(made(97, 50, FULL, layers=2).drafter, CompiledMedusa)


@pytest.mark.parametrize("more", [{}, OWN], ids=str)
def test_nan_weights_change_no_text(more: dict[str, Any]) -> None:
    harmless_nan(made(97, 0, FULL, spoilt=True, **more))
