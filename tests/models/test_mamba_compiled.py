"""A Mamba-2 in compiled code: its trees, states and logits are those of tensors."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bits import compiled, text_of
from compiled_code import FULL, needs_code, precisions
from grown_world import CASES, PROMPTS, Given, generate, harmless_nan, same
from transformers import Mamba2Config, Mamba2ForCausalLM

import outrider
from outrider.backends.native.mamba import Mamba
from outrider.backends.torch.tensors import array, tensor
from outrider.core.protocols import Drafter
from outrider.core.types import Budget, DraftTree, Rows
from outrider.drafters._compiled import code_for
from outrider.drafters._growth import Growth
from outrider.drafters._mamba import MambaDrafter, StateBuffer, TensorMambaDrafting
from outrider.drafters._words import Same
from outrider.drafters.mamba import CompiledMamba, CompiledMambaDrafting, Request, _sizes
from outrider.drafters.mamba import compiled as compiled_mamba
from outrider.nets import mamba as ssm

pytestmark = needs_code
NETS: dict[int, Any] = {}  # by the id of the drafter in compiled code
SIZES = {
    "one group": {},
    "two groups": {"n_groups": 2},
    "a group for each head": {"n_groups": 8},
    "no bias": {"use_conv_bias": False},
    "limits": {"time_step_limit": (0.05, 0.4)},
    "wide kernel": {"conv_kernel": 6},
}


def network(vocab: int, dtype: torch.dtype = FULL, **more: Any) -> Any:
    """Random weights, with decays and time steps that differ from head to head."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "head_dim": 16, "num_heads": 8, "n_groups": 1,
        "conv_kernel": 4, "expand": 2, "vocab_size": vocab, "chunk_size": 8,
    }  # fmt: skip
    net = Mamba2ForCausalLM(Mamba2Config(**{**sizes, **more}))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            scale = 0.5 if name.endswith(("dt_bias", "D", "A_log")) else 0.25
            parameter.add_(torch.randn(parameter.shape) * scale)
    return net.to(dtype).requires_grad_(False).eval()


def made(
    vocab: int,
    drafted: int,
    dtype: torch.dtype,
    growth: Growth | None = None,
    halves: bool = False,
    spoilt: bool = False,
    **more: Any,
) -> outrider.LLM:
    """A tiny random model with a random Mamba-2; `drafted`: of so many tokens."""
    target, net, names = compiled(vocab, dtype, halves), network(vocab, dtype, **more), None
    if spoilt:
        net.backbone.embeddings.weight.fill_(float("nan"))
    if drafted:
        names = torch.randperm(vocab)[:drafted].sort().values
    words = Same(vocab, vocab, None if names is None else names.numpy())
    drafter = read_by(net, words, target, growth or Growth(depth=6, top_k=4))
    assert isinstance(drafter, CompiledMamba)
    if drafted:
        few = torch.nn.Linear(64, drafted, bias=False).to(dtype)
        few.weight = torch.nn.Parameter(net.lm_head.weight[names].clone(), requires_grad=False)
        net.set_output_embeddings(few)
    NETS[id(drafter)] = net
    return outrider.LLM(target, None, drafter, "tiny", "mamba", frozenset({3}))


def read_by(net: Any, words: Same, target: Any, growth: Growth) -> Drafter | None:
    """The drafter of a network in compiled code; None where that does not know it."""
    weights = {name: array(x) for name, x in net.state_dict().items()}
    sizes, code = _sizes(json.loads(net.config.to_json_string(use_diff=False))), code_for(target, target.precision)
    assert code is not None
    return None if sizes is None else compiled_mamba(sizes, weights, code, words, Request(growth))


def in_tensors(drafting: CompiledMambaDrafting) -> TensorMambaDrafting:
    """The same drafting in tensors, which goes its own way."""
    drafter = drafting.drafter
    state = ssm.State(*(tensor(part[:, :, 0].copy()) for part in drafting.state.arrays))
    slow = MambaDrafter(NETS[id(drafter)], drafter.words, drafter.growth, drafter.batch)
    return TensorMambaDrafting(slow, state, copy.deepcopy(drafting.pending))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[DraftTree]:
    """Every proposal is made both ways, with the states of all nodes; those of the compiled code are kept."""
    trees: list[DraftTree] = []
    full = CompiledMambaDrafting.propose

    def both(self: CompiledMambaDrafting, rows: Rows, budget: Budget) -> DraftTree:
        other = in_tensors(self)
        tree, right = full(self, rows, budget), other.propose(rows, budget)
        same(tree, right)
        states = [_states(drafting, tree.size.tolist()) for drafting in (self, other)]
        assert len(states[0]) == len(states[1])
        for one, two in zip(*states, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
        trees.append(tree)
        return tree

    monkeypatch.setattr(CompiledMambaDrafting, "propose", both)
    return trees


def _states(drafting: Any, sizes: list[int]) -> list[torch.Tensor]:
    """What is remembered of every node that was fed, and of none else."""
    assert drafting.fed is not None
    assert drafting.buffer is not None
    results = []
    for row, (slots, size) in enumerate(zip(drafting.fed, sizes, strict=True)):
        for slot in slots[:size]:
            if slot >= 0:
                results += [torch.as_tensor(part[:, row, slot]) for part in (drafting.buffer.conv, drafting.buffer.ssm)]
    return results


@pytest.mark.parametrize(("budget", "temperature"), CASES)
def test_trees_and_states_are_those_of_tensors(budget: str, temperature: float, compared: list[DraftTree]) -> None:
    """In a batch of texts of unequal length; small vocabularies, trimmed ones and large ones."""
    for vocab, drafted in ((97, 0), (97, 50), (6000, 5000)):
        llm = made(vocab, drafted, FULL)
        generate(llm, budget, temperature)
    assert len(compared) >= 10
    assert max(tree.nodes for tree in compared) > 1


@pytest.mark.parametrize("shape", [(3, 2, 2, 1), (2, 1, 1)])
def test_static_trees_are_those_of_tensors(shape: tuple[int, ...], compared: list[DraftTree]) -> None:
    """As bandits have them: grown elsewhere, by single steps of the code."""
    llm = made(97, 50, FULL)
    llm.generate(
        PROMPTS, max_new_tokens=14, batch_size=3, seed=2, temperature=1.0, budget=Given(Budget(64, 8, shape=shape))
    )
    assert len(compared) > 2


@pytest.mark.parametrize("size", list(SIZES))
def test_every_kind_of_network_is_read(size: str, compared: list[DraftTree]) -> None:
    llm = made(97, 0, FULL, **SIZES[size])
    llm.generate(PROMPTS, max_new_tokens=14, batch_size=3, budget=Given(Budget(16, 4)))
    assert len(compared) > 2


@torch.no_grad()
@pytest.mark.parametrize("waits", [[[5]], [[5, 9, 11]], [[5], [9, 11, 7], [3, 4]]])
@precisions
def test_pending_tokens_are_read_as_tensors_read_them(waits: list[list[int]], dtype: torch.dtype, halves: bool) -> None:
    """Rows end together, however many tokens they have."""
    net, near = network(97, dtype), 1e-4 if dtype == FULL and not halves else 0.1  # weights of eight bits
    drafter = read_by(net, Same(97, 97), compiled(97, dtype, halves), Growth())
    assert isinstance(drafter, CompiledMamba)
    code = drafter.compiled
    start = ssm.read(net, [text_of(i, 9) for i in range(len(waits))])
    buffer = StateBuffer.like(start, 3)
    buffer.put(start, 0)
    logits = torch.from_numpy(code.read(array(buffer.conv), array(buffer.ssm), waits))
    for row, tokens in enumerate(waits):
        own = start.select(torch.tensor([row]))
        features, state = ssm.run(net, torch.tensor([tokens]), own)
        right = net.lm_head(features[0, -1]).float(), state.ssm[:, 0], state.conv[:, 0].float()
        for one, other in zip((logits[row], buffer.ssm[:, row, 0], buffer.conv[:, row, 0].float()), right, strict=True):
            torch.testing.assert_close(one, other, rtol=near, atol=near * float(other.abs().max()))


def test_a_temporary_tree_leaves_the_state_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where text is drafted: tokens that are not settled, few and many."""
    full, trees = CompiledMambaDrafting.propose, list[DraftTree]()

    def both(self: CompiledMambaDrafting, rows: Rows, budget: Budget) -> DraftTree:
        kept, pending = [part.copy() for part in self.state.arrays], self.pending
        self.pending = [[] for _ in pending]  # all that is settled was read
        for tail in ([7], [7, 8, 9, 10, 11, 12, 13]):
            other, nothing, tails = in_tensors(self), [[] for _ in pending], [[*tail] for _ in pending]
            result = self.propose_after(nothing, tails, rows, budget)
            wanted = other.propose_after(nothing, tails, rows, budget)
            assert np.array_equal(result.tokens, wanted.tokens)
            assert all(np.array_equal(*parts) for parts in zip(self.state.arrays, kept, strict=True))
            trees.append(result)
        self.pending = pending
        return full(self, rows, budget)

    monkeypatch.setattr(CompiledMambaDrafting, "propose", both)
    made(97, 0, FULL).generate(PROMPTS, max_new_tokens=6, batch_size=3, budget=Given(Budget(16, 4)))
    assert max(tree.nodes for tree in trees) > 1


def test_a_text_without_drafts_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("nobody asked for a draft")

    for name in ("read", "grow", "skip"):
        monkeypatch.setattr(Mamba, name, refused)
    llm, nothing, some = made(97, 0, FULL), Given(Budget(1, 0)), Given(Budget(8, 3))
    assert all(o.tokens for o in llm.generate(PROMPTS, max_new_tokens=6, batch_size=3, budget=nothing))
    with pytest.raises(AssertionError, match="nobody asked"):
        llm.generate(PROMPTS, max_new_tokens=6, batch_size=3, budget=some)


def test_a_tree_that_is_too_wide_is_refused() -> None:
    llm = made(97, 0, FULL, Growth(depth=4, top_k=8, width=8))
    drafter: Any = llm.drafter
    llm.drafter = replace(drafter, batch=16)
    with pytest.raises(outrider.InputError, match="at most 16 are allowed"):
        llm.generate(PROMPTS, max_new_tokens=8, batch_size=3, budget=Given(Budget(60, 4)))


@torch.no_grad()
def test_long_texts_are_read_as_tensors_read_them() -> None:
    """Many tokens at once, of rows of unequal length and of one that has none."""
    net = network(97)
    drafter = read_by(net, Same(97, 97), compiled(97, FULL), Growth())
    assert isinstance(drafter, CompiledMamba)
    texts, state = [text_of(1, 700), [], text_of(2, 31)], drafter.empty(3)
    drafter.compiled.skip(*state.arrays, texts)
    right = ssm.read(net, texts, ssm.empty(net, 3))
    torch.testing.assert_close(torch.from_numpy(state.ssm[:, :, 0]), right.ssm, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(state.conv[:, :, 0]), right.conv, rtol=1e-4, atol=1e-4)


def test_unsupported_networks_stay_in_tensors() -> None:
    for more in ({"use_bias": True}, {"state_size": 12}, {"conv_kernel": 1}):
        assert read_by(network(97, **more), Same(97, 97), compiled(97, FULL), Growth()) is None, more


def test_nan_weights_change_no_text() -> None:
    harmless_nan(made(97, 0, FULL, spoilt=True))
