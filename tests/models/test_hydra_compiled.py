"""Hydra's heads in compiled code: their logits are those of tensors, their trees those of single steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bits import compiled
from compiled_code import FULL, needs_code, precisions
from grown_world import CASES, PROMPTS, Given, checked, generate, harmless_nan, same, shuffled, valued

import outrider
from outrider.backends.native.drafts import Pairs, float32
from outrider.backends.torch.tensors import array, embed
from outrider.core.types import Budget, DraftTree, Rows
from outrider.drafters import _weights, hydra
from outrider.drafters._growth import Growth
from outrider.drafters.hydra import CompiledHydra, HydraTrees
from outrider.nets.configs import LayerShape

pytestmark = needs_code
PREFIX: dict[str, Any] = {"prefix": True, "layer": LayerShape(64, 4, 2, 32, 96, 64)}  # of Hydra++


def network(vocab: int, drafted: int, spoilt: bool = False, **more: Any) -> Any:
    """Heads of random weights."""
    torch.manual_seed(0)
    return shuffled(
        hydra.HydraNet(hydra.HydraConfig(vocab, 64, 4, draft_vocab=drafted, **more)), vocab, drafted, spoilt
    )


def made(
    vocab: int, drafted: int, dtype: torch.dtype, growth: Growth | None = None, halves: bool = False, **more: Any
) -> outrider.LLM:
    """A tiny random model with heads of random weights."""
    target, net = compiled(vocab, dtype, halves), network(vocab, drafted, **more)
    drafter = hydra.drafter(net.to(dtype), target, growth or Growth(depth=4, top_k=4, scale=1.5))
    return outrider.LLM(target, None, drafter, "tiny", "hydra", frozenset({3}))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[DraftTree]:
    """Every proposal is made both ways; those of the compiled code are kept."""

    def equal(self: HydraTrees, tree: DraftTree, rows: Rows, budget: Budget) -> None:
        drafter = self.drafter
        assert drafter.growth.compiled(rows, budget) is not None
        names, vocab = drafter.compiled.names, drafter.vocab
        same(tree, drafter.growth.propose(rows, *self.steps(rows), budget, names, vocab)[0])

    return checked(monkeypatch, HydraTrees, equal)


@pytest.mark.parametrize(("budget", "temperature"), CASES)
def test_trees_are_those_of_single_steps(budget: str, temperature: float, compared: list[DraftTree]) -> None:
    """In a batch of texts of unequal length; small vocabularies, trimmed ones and large ones; Hydra++."""
    for vocab, drafted, more in ((97, 0, {}), (97, 50, PREFIX), (6000, 5000, {})):
        llm = made(vocab, drafted, FULL, **more)
        generate(llm, budget, temperature)
    assert len(compared) >= 10
    assert max(tree.nodes for tree in compared) > 1
    if budget in ("fixed", "wide", "chain"):
        assert max(int(tree.depths.max()) for tree in compared) > 1


def test_a_path_is_read_in_its_order(compared: list[DraftTree]) -> None:
    """Wide layers, in which neighbours have different parents."""
    llm = made(97, 0, FULL, Growth(depth=4, width=8, top_k=6, scale=4.0))
    llm.generate(PROMPTS, max_new_tokens=14, batch_size=3, budget=Given(Budget(48, 4)))
    paths = {path for tree in compared for row in range(len(tree.host)) for path in valued(tree, row)}
    assert max(map(len, paths)) == 5, "a root and four heads"


@torch.no_grad()
@precisions
def test_logits_are_those_of_the_network(dtype: torch.dtype, halves: bool) -> None:
    """Of the roots, and of nodes with different parents."""
    target, net = compiled(97, dtype, halves), network(97, 50).to(dtype)
    drafter = hydra.drafter(copy.deepcopy(net), target, Growth())
    assert isinstance(drafter, CompiledHydra)
    features, tokens = torch.randn(2, 64).to(dtype), torch.randint(97, (2, 6))
    parents = torch.tensor([[0, 0, 0, 2, 1, 2], [0, 0, 0, 1, 1, 2]])
    for layer, since, nodes in ((0, 0, 1), (1, 1, 3), (2, 3, 6)):
        given = array(features), tokens[:, :nodes].numpy(), parents[:, :nodes].numpy()
        result = drafter.compiled.step(*given, since, layer)
        for row in range(2):
            for i, node in enumerate(range(since, nodes)):
                path = [node]
                while path[0]:
                    path.insert(0, int(parents[row, path[0]]))
                right = net(layer, features[row], embed(target, tokens[row, path])).float().numpy()
                apart = abs(result[row, i] - right).max() / abs(right).max()
                assert apart < (1e-5 if dtype == FULL and not halves else 0.05), "weights of eight bits"


@torch.no_grad()
@precisions
def test_features_are_read_as_by_tensors(dtype: torch.dtype, halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Hydra++'s layer: many at once and few, of rows of unequal length and of some that have none."""
    target, nets = compiled(97, dtype, halves), [network(97, 50, **PREFIX).to(dtype) for _ in range(2)]
    fast = hydra.drafter(nets[0], target, Growth())
    assert isinstance(fast, CompiledHydra)
    monkeypatch.setattr(_weights, "compiled", lambda *_: None)
    slow: Any = hydra.drafter(nets[1], target, Growth())
    result: Any = fast.open([()] * 3, 100)
    right: Any = slow.open([()] * 3, 100)
    for counts in ((600, 7, 31), (3, 0, 16), (0, 17, 1)):
        features = torch.randn(3, max(counts), 64).to(dtype)
        nodes = [range(n) for n in counts]
        result.pairs.append(Pairs([array(features)], nodes, [[0] * n for n in counts], range(3)))
        right.waiting.append((features, torch.zeros(3, max(counts), dtype=torch.long), list(counts)))
        right._read()
        seen = torch.from_numpy(float32(result.seen()))
        near = 1e-3 if dtype == FULL and not halves else 0.1 * float(right.feature.abs().max())
        torch.testing.assert_close(seen, right.feature.float(), rtol=near, atol=near)
        assert result.cache.host == right.prefix.host


def test_unsupported_networks_stay_in_tensors() -> None:
    for more in ({"layers": 2}, {"prefix": True, "layer": LayerShape(64, 4, 2, 16, 96, 64)}):
        assert not isinstance(made(97, 50, FULL, **more).drafter, CompiledHydra)


def test_nan_weights_change_no_text() -> None:
    harmless_nan(made(97, 0, FULL, spoilt=True))
