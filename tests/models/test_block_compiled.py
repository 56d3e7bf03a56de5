"""The block drafter's pass in compiled code is its network's, and its trees are those of Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from bits import compiled
from compiled_code import FULL, HALF, needs_code, precisions
from grown_world import CASES, PROMPTS, Given, checked, generate, harmless_nan, late_and_at_once, same

import outrider
from outrider.core.types import Budget, DraftTree, Rows
from outrider.drafters import _weights, block
from outrider.drafters._growth import Growth
from outrider.drafters.block import BlockTrees, CompiledBlock, CompiledBlockDrafting
from outrider.nets.block import BlockNet
from outrider.nets.configs import OUT, BlockConfig, LayerShape
from outrider.params import InputError

pytestmark = needs_code
SHAPE = LayerShape(64, 4, 2, 32, 96, 64)
KINDS: dict[str, dict[str, Any]] = {
    "seeded": {"seeded": True, "pair_rank": 7},
    "plain": {"layers": 2, "pair_head": "none", "mask_token": 5},
    "shifted": {"layers": 2, "sample_from_anchor": False, "seeded": True, "taps": (0, 1, -1)},
    "selector": {"pair_head": "selector", "pair_top": 9},
}


def made(
    vocab: int,
    drafted: int,
    dtype: torch.dtype,
    growth: Growth,
    halves: bool = False,
    spoilt: bool = False,
    **more: Any,
) -> outrider.LLM:
    """A tiny random model with a block drafter of random weights."""
    target = compiled(vocab, dtype, halves)
    torch.manual_seed(0)
    fields = {"layers": 1, "taps": (0, -1), "block": 5, **more}
    net = BlockNet(BlockConfig(SHAPE, vocab=vocab, draft_vocab=drafted or vocab, target_hidden=64, **fields))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.dim() > 1 else 0.5) + ("norm" in name))
        if spoilt:
            net.fc.weight.fill_(float("nan"))
        if drafted:
            net.d2t.copy_(torch.randperm(vocab)[:drafted].sort().values - torch.arange(drafted))
    return outrider.LLM(target, None, block.drafter(net.to(dtype), target, growth), "tiny", "block", frozenset({3}))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[DraftTree]:
    """Every proposal is made both ways, from the same pass; those of the compiled code are kept."""

    def equal(self: CompiledBlockDrafting, tree: DraftTree, rows: Rows, budget: Budget) -> None:
        expected = BlockTrees.propose(self, rows, budget)
        assert np.array_equal(tree.ancestors, expected.ancestors)
        same(tree, expected)

    return checked(monkeypatch, CompiledBlockDrafting, equal)


@pytest.mark.parametrize(("budget", "temperature"), [case for case in CASES if case[0] != "chain"])
def test_trees_are_the_best_of_the_lattice(budget: str, temperature: float, compared: list[DraftTree]) -> None:
    """In a batch of texts of unequal length; both precisions, and floats beside a target's weights of 16 bits; small
    vocabularies, trimmed ones and large ones."""
    for vocab, drafted, dtype, halves, kind in (
        (97, 0, FULL, False, "plain"), (97, 50, HALF, False, "seeded"), (97, 50, FULL, True, "seeded"),
        (6000, 5000, FULL, False, "shifted"),
    ):  # fmt: skip
        llm = made(vocab, drafted, dtype, Growth(scale=1.5), halves, **KINDS[kind])
        generate(llm, budget, temperature, 8)
    assert len(compared) >= 10
    assert all(tree.values is not None for tree in compared)
    assert max(tree.nodes for tree in compared) > 1


def test_rejection_ranks_without_noise(compared: list[DraftTree]) -> None:
    llm = made(97, 50, FULL, Growth(), **KINDS["seeded"])
    llm.generate(PROMPTS[:1], max_new_tokens=8, temperature=1.0, rule="rejection", budget=Given(Budget(16, 4)))
    assert compared


@precisions
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_pass_is_that_of_the_network(
    kind: str, dtype: torch.dtype, halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slots' hidden states and logits, in a batch of unequal texts, against tensors that saw the same rounds."""
    llm = made(97, 0 if kind == "plain" else 50, dtype, Growth(), halves, **KINDS[kind])
    drafter: Any = llm.drafter
    with monkeypatch.context() as patch:
        patch.setattr(_weights, "compiled", lambda *_: None)
        slow: Any = made(97, 0 if kind == "plain" else 50, dtype, Growth(), halves, **KINDS[kind]).drafter
    shadows: dict[int, BlockTrees] = {}
    worst, dice = list[float](), np.random.default_rng(0)
    opening, propose = type(drafter).open, CompiledBlockDrafting.propose

    def opened(self: Any, prompts: Any, capacity: int) -> BlockTrees:
        drafting = opening(self, prompts, capacity)
        shadows[id(drafting)] = slow.open(prompts, capacity)
        return drafting

    def twice(name: str) -> None:
        full = getattr(CompiledBlockDrafting, name)

        def done(self: CompiledBlockDrafting, given: Any) -> None:
            full(self, given)
            getattr(shadows[id(self)], name)(shadows[id(given)] if name == "join" else given)

        monkeypatch.setattr(CompiledBlockDrafting, name, done)

    def proposed(self: CompiledBlockDrafting, rows: Rows, budget: Budget) -> DraftTree:
        depth = min(budget.depth, drafter.config.drafts)
        shadow = shadows[id(self)]
        result, right = self.seen(rows, depth), shadow.seen(rows, depth)
        some, at = dice.integers(97, size=(len(rows), 3)), dice.integers(depth, size=(len(rows), 3))
        pick = np.arange(len(rows))[:, None], at
        below = (
            self.corrected(result[0], result[1][pick], some, at),
            shadow.corrected(right[0], right[1][pick], some, at),
        )
        names = np.arange(97) if drafter.names is None else drafter.names
        candidates = names[dice.integers(len(names), size=(len(rows), depth, 4))]
        scores = self.scores(rows, result[0], candidates), shadow.scores(rows, right[0], candidates)
        assert (scores[0] is None) == (scores[1] is None) == (kind == "plain")
        pairs = [*zip(result, right, strict=True), *([scores] if scores[0] is not None else [])]
        for one, other in pairs if drafter.config.pair_top else [*pairs, below]:
            assert one.shape == other.shape
            worst.append(float(np.abs(one - other.float().numpy()).max() / other.float().abs().max()))
        chosen = below[0] > OUT  # with `pair_top`, of which the last may differ where logits are rounded
        assert np.mean(chosen == (below[1] > OUT).numpy()) > 0.9
        return propose(self, rows, budget)

    monkeypatch.setattr(type(drafter), "open", opened)
    for name in ("observe", "select", "join"):
        twice(name)
    monkeypatch.setattr(CompiledBlockDrafting, "propose", proposed)
    llm.generate(PROMPTS, max_new_tokens=6, temperature=0.0, batch_size=3, budget=Given(Budget(12, 3)))
    assert len(worst) >= 4
    assert max(worst) < (1e-4 if dtype == FULL and not halves else 0.1)  # weights of eight bits, activations of 16


def test_the_targets_cap_holds_for_its_own_head_alone() -> None:
    capped = compiled(97, FULL)
    capped.logit_cap = 2.0
    for drafted, cap in ((0, 2.0), (50, 0.0)):
        torch.manual_seed(0)
        net = BlockNet(
            BlockConfig(SHAPE, vocab=97, draft_vocab=drafted or 97, target_hidden=64, layers=1, taps=(0, -1), block=5)
        )
        drafter: Any = block.drafter(net, capped, Growth())
        assert isinstance(drafter, CompiledBlock)
        assert drafter.compiled.model.logit_cap == cap


def test_a_static_tree_needs_a_shape() -> None:
    with pytest.raises(InputError, match="tree=static of a block drafter needs a shape"):
        block.Request(tree="static")


def test_unsupported_networks_stay_in_tensors() -> None:
    for more in ({"causal": False}, {"conv": 2, "conv_group": 4}):
        assert not isinstance(made(97, 50, FULL, Growth(), **more).drafter, CompiledBlock)


def test_nan_weights_change_no_text() -> None:
    harmless_nan(made(97, 0, FULL, Growth(), spoilt=True, **KINDS["seeded"]))


def test_pending_pairs_are_read_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    late_and_at_once(made(97, 50, FULL, Growth(scale=1.5), **KINDS["seeded"]), monkeypatch)
