"""Hydra's heads in compiled code: their trees are those of tensors."""

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
    same,
    texts_are_plain,
    valued,
)

import outrider
from outrider.backends.native import library as native
from outrider.core.types import Budget, DraftTree, Rows
from outrider.drafters import hydra
from outrider.drafters._growth import Growth
from outrider.drafters.hydra import HydraDrafting
from outrider.nets.layer import LayerShape

pytestmark = pytest.mark.skipif(
    native.library("float32", "float32") is None, reason="the compiled pass wants gcc and an x86 processor with AVX2"
)
HALF, WHOLE = torch.bfloat16, torch.float32
LAYER = LayerShape(64, 4, 2, 16, 96, 64)  # of Hydra++


def made(
    vocab: int,
    drafted: int,
    dtype: torch.dtype,
    growth: Growth | None = None,
    halves: bool = False,
    spoilt: bool = False,
    **more: Any,
) -> outrider.LLM:
    """A tiny random model with heads of random weights."""
    target = compiled(vocab, dtype, halves)
    torch.manual_seed(0)
    net = hydra.HydraNet(hydra.HydraConfig(vocab, 64, 4, draft_vocab=drafted, **more))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.full_like(parameter, float("nan")) if spoilt else torch.randn(parameter.shape) * 0.3)
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
        same(tree, right)
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
    texts_are_plain(made(97, 50, dtype), temperature)


@pytest.mark.parametrize(("dtype", "halves"), [(HALF, False), (WHOLE, True)])
def test_rounded_weights_give_the_candidates_of_tensors_nearly(dtype: torch.dtype, halves: bool) -> None:
    def in_tensors(drafting: HydraDrafting) -> HydraDrafting:
        return HydraDrafting(replace(drafting.drafter, compiled=None), drafting.feature)

    candidates_are_alike(made(97, 50, dtype, halves=halves), HydraDrafting, in_tensors)


def test_heads_of_two_blocks_stay_in_tensors() -> None:
    drafter: Any = made(97, 50, WHOLE, layers=2).drafter
    assert drafter.compiled is None


def test_a_drafter_whose_numbers_are_none_harms_no_text() -> None:
    harmless_without_numbers(made(97, 0, WHOLE, spoilt=True))
