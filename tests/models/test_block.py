"""The block drafter's network against plain loops: who sees whom, the lattice's best tree, a planted language."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import heads
import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.budgets.budgeter import FixedBudget
from outrider.checkpoints import native
from outrider.core.noise import GumbelNoise
from outrider.core.sampling import softmax
from outrider.core.tree import check
from outrider.drafters import block
from outrider.drafters._growth import Growth
from outrider.drafters._lattice import conditional, lattice
from outrider.engine import Engine, Request, generate
from outrider.nets.block import BlockConfig, BlockConv, BlockNet
from outrider.nets.layer import LayerShape
from outrider.params import InputError

SHAPE = LayerShape(16, heads=2, kv_heads=1, head_dim=8, intermediate=24, inputs=16)
CONFIG = BlockConfig(SHAPE, layers=2, vocab=19, draft_vocab=19, target_hidden=16, taps=(0, 2), block=4, pair_rank=5)


def network(config: BlockConfig = CONFIG, seed: int = 0) -> BlockNet:
    torch.manual_seed(seed)
    net = BlockNet(config).double().eval()
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return net.requires_grad_(False)


def run(net: BlockNet, features: Tensor, x: Tensor, at: int) -> Tensor:
    """One block after `at` positions of context, computed in one go."""
    size = net.config.block
    turn = net.rope.at(torch.arange(at + size)[None], features.dtype)
    keys, values = net.keys_values(net.context(features[:, :at]), turn[:, :at])
    seen = torch.ones(size, size, dtype=torch.bool)
    own = torch.zeros(size, size, dtype=features.dtype).masked_fill_(
        ~(seen.tril() if net.config.causal else seen), -math.inf
    )
    mask = torch.cat([torch.zeros(size, at, dtype=features.dtype), own], 1)[None, None]
    return net(x, turn[:, at:], keys, values, mask)


@pytest.mark.parametrize("conv", [0, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_a_slot_sees_the_slots_it_may_and_nothing_at_the_anchor(causal: bool, conv: int) -> None:
    net = network(replace(CONFIG, causal=causal, conv=conv, conv_group=4))
    features, x = torch.randn(1, 9, 32).double(), torch.randn(1, 4, 16).double()
    plain = run(net, features, x, 6)
    for j in range(4):
        moved = x.clone()
        moved[:, j] += 1
        same = (run(net, features, moved, 6) == plain).all(-1)[0].tolist()
        assert same == ([i < j for i in range(4)] if causal else [False] * 4)
    later = features.clone()
    later[:, 6:] += 1  # the anchor's feature and later ones do not exist yet
    assert torch.equal(run(net, later, x, 6), plain)
    earlier = features.clone()
    earlier[:, 2] += 1
    assert not torch.isclose(run(net, earlier, x, 6), plain).any(-1).any(), "every slot reads the context"


def test_a_convolution_begins_as_the_identity_and_keeps_blocks_apart() -> None:
    conv, x = BlockConv(6, taps=3, group=2, block=4).double().requires_grad_(False), torch.randn(2, 8, 6).double()
    with torch.no_grad():
        assert torch.equal(conv.around(torch.tanh, x), torch.tanh(x))
        torch.nn.init.normal_(conv.base_kernel)
        torch.nn.init.normal_(conv.kernel_projection.weight)
        apart = torch.cat([conv.around(torch.tanh, part) for part in x.split(4, 1)], 1)
        assert torch.equal(conv.around(torch.tanh, x), apart)
        torch.testing.assert_close(conv.around(torch.tanh, x), mixed(conv, x), rtol=0, atol=1e-12)


def mixed(conv: BlockConv, x: Tensor) -> Tensor:
    """The same by loops over rows, slots, taps and channels."""
    own = (x @ conv.kernel_projection.weight.T).view(*x.shape[:2], 2, 3, 3)

    def once(y: Tensor, side: int) -> Tensor:
        result = torch.zeros_like(y)
        for b, j, o, c in itertools.product(range(2), range(8), range(3), range(6)):
            if j % 4 >= o:
                result[b, j, c] += (conv.base_kernel[side, o, c] + own[b, j, side, o, c // 2]) * y[b, j - o, c]
        return result

    return once(torch.tanh(once(x, 0)), 1)


def test_a_selector_chooses_among_the_likeliest_by_what_stands_above_and_the_slot() -> None:
    """Chains against a walk through the block, slot by slot and candidate by candidate."""
    vocab, top = 19, 3
    net = network(replace(CONFIG, pair_head="selector", pair_top=top, taps=(0,), conv=2, conv_group=4))
    target, prompt, words = planted(vocab), [3, 8, 2], []
    drafter = Recorded(block.drafter(net, target, Growth("chain")))
    for piece in generate(Engine(target, drafter, FixedBudget(5, 4), GumbelNoise(vocab)), [Request(prompt, 1, 12)]):
        words = piece.row.output
    assert len(words) == 12
    assert len(drafter.seen) > 2
    changed = 0
    for hidden, tree in drafter.seen:
        above, *chain = tree.tokens[0].tolist()
        for state, drafted in zip(hidden, chain, strict=False):
            logits = target.head(state).detach()
            best, least = None, -math.inf
            for token in logits.topk(top).indices.tolist():
                gate = net.markov_w1.weight[above] * (net.pair_hidden.weight @ state)
                score = (logits[token] + net.markov_w2.weight[token] @ gate).item()
                best, least = (token, score) if score > least else (best, least)
            assert drafted == best
            changed += drafted != int(logits.argmax())
            above = drafted
    assert changed, "the selector changed nothing here"


class Recorded:
    """A block drafter, and the slots' hidden states and the tree of every draft."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.taps, self.seen = drafter, drafter.taps, list[tuple[Tensor, Any]]()

    def open(self, prompts: Any, capacity: int) -> Any:
        drafting = self.drafter.open(prompts, capacity)
        propose = drafting.propose

        def kept(rows: Any, budget: Any) -> Any:
            tree, hidden = propose(rows, budget), drafting._hidden(rows)[0]
            self.seen.append((hidden, tree))
            return tree

        drafting.propose = kept
        return drafting


def test_a_chain_under_rejection_has_the_q_of_slots_and_pair_head() -> None:
    vocab = 19
    net, target = network(replace(CONFIG, taps=(0,))), planted(vocab)
    drafter = Recorded(block.drafter(net, target, Growth("chain")))
    heads.run(target, drafter, [[3, 8, 2]], 12, 1.0, FixedBudget(5, 4), "rejection")
    assert len(drafter.seen) > 2
    for hidden, tree in drafter.seen:
        for i, above in enumerate(tree.tokens[0, :-1].tolist()):
            wanted = target.head(hidden[i]) + net.markov_w2.weight @ net.markov_w1.weight[above]
            assert np.allclose(tree.q[0, i], wanted.detach().softmax(-1).numpy(), rtol=0, atol=1e-9)


def test_a_tree_under_rejection_has_the_likeliest_children_and_no_q() -> None:
    """Nothing of it is drawn, so the rule takes each child as a point mass."""
    net, target = network(replace(CONFIG, taps=(0,))), planted(19)
    drafter = Recorded(block.drafter(net, target, Growth(top_k=3)))
    heads.run(target, drafter, [[3, 8, 2]], 12, 1.0, FixedBudget(9, 4), "rejection")
    assert len(drafter.seen) > 2
    for hidden, tree in drafter.seen[:-1]:
        assert tree.q is None
        likeliest = target.head(hidden[0]) + net.markov_w2.weight @ net.markov_w1.weight[int(tree.tokens[0, 0])]
        first = tree.tokens[0, 1:][tree.parents[0, 1:] == 0]
        assert set(first.tolist()) <= set(target.head(hidden[0]).topk(3).indices.tolist())
        assert int(first[0]) == max(target.head(hidden[0]).topk(3).indices.tolist(), key=lambda t: likeliest[t])


def test_pairs_false_leaves_the_slots_alone(tmp_path: Path) -> None:
    """The same weights: values without the pair head are products of the slots' own confidences."""
    target = planted(19)
    native.save(tmp_path / "d", "block", network(replace(CONFIG, taps=(0,))))
    results = []
    for pairs in (False, True):
        drafter = Recorded(block.load(target, path=str(tmp_path / "d"), pairs=pairs))
        heads.run(target, drafter, [[3, 8, 2]], 12, 0.0, FixedBudget(9, 4))
        results.append(drafter.seen[0])
    hidden, tree = results[0]
    for i in range(1, tree.nodes):
        value, at = 0.0, i
        while at:
            slot = int(tree.depths[0, at]) - 1
            value += float(target.head(hidden[slot]).detach().log_softmax(-1)[tree.tokens[0, at]])
            at = int(tree.parents[0, at])
        assert float(tree.values[0, i]) == pytest.approx(value)
    assert not np.array_equal(tree.values, results[1][1].values)


@pytest.mark.parametrize("pairs", [False, True])
def test_expected_tokens_are_the_sum_of_values(pairs: bool) -> None:
    """Over all texts of four tokens, those that leave the candidates included, each with its probability."""
    g, d, k = np.random.default_rng(3), 4, 3
    tokens = np.arange(d * k).reshape(1, d, k)
    confidence = np.log(softmax(2 * g.standard_normal((1, d, k + 2))))[..., :k]
    logs = conditional(confidence, g.standard_normal((1, d, k, k)) if pairs else None)
    tree = lattice([99], tokens, logs, 9, [d])
    spelled = [()]
    for i in range(1, tree.nodes):
        spelled.append((*spelled[int(tree.parents[0, i])], int(tree.tokens[0, i]) % k))
    expected = full = 0.0
    for text in itertools.product(range(k + 1), repeat=d):  # k: some other token
        probability, above = 1.0, 0
        for depth, rank in enumerate(text):
            if rank == k or k in text[:depth]:
                inside = np.exp(logs[0, depth, above if pairs else 0]).sum() if k not in text[:depth] else 0.0
                probability *= float(1 - inside) if rank == k else 0.0
                continue
            probability *= math.exp(logs[0, depth, above if pairs else 0, rank])
            above = rank
        full += probability
        expected += probability * max(n for n in range(d + 1) if text[:n] in spelled)
    assert full == pytest.approx(1)
    assert tree.values is not None
    assert float(np.exp(tree.values[0, 1:]).sum()) == pytest.approx(expected)


def test_equal_values_are_taken_by_depth_parent_and_rank() -> None:
    tokens = np.arange(6).reshape(1, 3, 2)
    tree = lattice([9], tokens, np.zeros((1, 3, 1, 2)), 8, [3])
    assert tree.tokens.tolist() == [[9, 0, 1, 2, 3, 2, 3, 4]]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 1, 2, 2, 3]]


def test_context_in_pieces_is_context_at_once() -> None:
    net, features = network(), torch.randn(1, 11, 32).double()
    turn = net.rope.at(torch.arange(11)[None], features.dtype)
    full = net.keys_values(net.context(features), turn)
    cuts = [0, 1, 4, 5, 11]
    parts = [net.keys_values(net.context(features[:, a:b]), turn[:, a:b]) for a, b in itertools.pairwise(cuts)]
    for i in range(2):
        torch.testing.assert_close(torch.cat([p[i] for p in parts], 2), full[i], rtol=0, atol=1e-12)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_lattice_gives_the_best_tree(pairs: bool, seed: int) -> None:
    """Against all paths: D <= 4 depths, K = 3 candidates; the n best prefixes by value, as sets."""
    g = np.random.default_rng(seed)
    d, k, nodes = 4, 3, 9
    tokens = np.stack([g.permutation(50)[:k] for _ in range(d)])[None]
    confidence = np.log(softmax(2 * g.standard_normal((1, d, k + 2))))[..., :k]
    scores = g.standard_normal((1, d, k, k)) if pairs else None
    logs = conditional(confidence, scores)
    tree = lattice([7], tokens, logs, nodes, [d])
    check(tree)

    def value(path: tuple[int, ...]) -> float:
        total, above = 0.0, 0
        for depth, rank in enumerate(path):
            total += float(logs[0, depth, above if pairs else 0, rank])
            above = rank
        return total

    paths = [p for length in range(1, d + 1) for p in itertools.product(range(k), repeat=length)]
    best = sorted(paths, key=value, reverse=True)[: nodes - 1]
    wanted = {tuple(int(tokens[0, i, r]) for i, r in enumerate(p)): value(p) for p in best}
    result, spelled = {}, [()]
    assert tree.values is not None
    for i in range(1, tree.nodes):
        spelled.append((*spelled[int(tree.parents[0, i])], int(tree.tokens[0, i])))
        result[spelled[i]] = float(tree.values[0, i])
    assert result.keys() == wanted.keys()
    assert result == pytest.approx(wanted)


def test_conditional_confidences_keep_the_mass_outside() -> None:
    """Against the softmax over the whole vocabulary, where pairs of tokens outside the candidates score nothing."""
    dice = np.random.default_rng(2)
    logits, scores = dice.standard_normal(12), dice.standard_normal((3, 3))
    confidence = np.log(softmax(logits))
    got = conditional(confidence[None, None, :3], scores[None, None])[0, 0]
    for parent in range(3):
        raised = logits.copy()
        raised[:3] += scores[parent]
        np.testing.assert_allclose(got[parent], np.log(softmax(raised))[:3])


def test_floor_and_remaining_length_end_a_tree() -> None:
    tokens = np.arange(6).reshape(1, 3, 2)
    logs = np.tile(np.log([0.6, 0.3]), (1, 3, 1, 1))
    assert lattice([9], tokens, logs, 30, [3]).nodes == 1 + 2 + 4 + 8
    assert lattice([9], tokens, logs, 30, [1]).nodes == 3
    assert lattice([9], tokens, logs, 30, [3], floor=0.2).tokens.tolist() == [[9, 0, 2, 1, 4]]
    assert lattice([9], tokens, logs, 30, [0]).nodes == 1


@pytest.mark.parametrize(("from_anchor", "tau"), [(True, 5), (False, 4)])
def test_a_planted_language_is_accepted_to_the_last_slot(from_anchor: bool, tau: int) -> None:
    """The pair head alone knows x + 1 below x: B slots draft B tokens, or B - 1, and all are right. A wrong shift of
    labels shows here as another tau."""
    vocab = 19
    config = replace(CONFIG, sample_from_anchor=from_anchor, pair_rank=vocab, taps=(0,), target_hidden=16)
    net = network(config)
    with torch.no_grad():
        net.norm.weight.zero_()  # the slots' own logits say nothing
        net.markov_w1.weight.copy_(torch.eye(vocab))
        net.markov_w2.weight.copy_(8 * torch.eye(vocab).roll(1, 0))
    target = planted(vocab)
    engine = Engine(target, block.drafter(net, target, Growth(top_k=vocab)), FixedBudget(12, 8), GumbelNoise(vocab))
    rows: dict[int, Any] = {}
    for piece in generate(engine, [Request([3], 1, 41), Request([5, 6], 2, 41)]):
        rows[piece.row.index] = piece.row
    assert rows[0].output == [(4 + i) % vocab for i in range(41)]
    assert rows[0].usage.tau == rows[1].usage.tau == tau


def planted(vocab: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from outrider.backends.torch import HFTarget

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=96, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        codes = torch.nn.functional.normalize(torch.randn(vocab, 16).double(), dim=-1)
        model.model.embed_tokens.weight.copy_(codes)
        model.lm_head.weight.copy_(20 * codes.roll(1, 0))
    return HFTarget(model)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block": 1}, "at least 2 slots"),
        ({"taps": (2, 2)}, "distinct layers"),
        ({"mask_token": 19}, "outside the vocabulary"),
        ({"target_hidden": 24}, "must be 24 wide"),
        ({"pair_head": "gru"}, "none, markov"),
        ({"pair_top": -1}, "0 meaning all"),
        ({"conv": 5}, "1 to 4 slots"),
        ({"conv": 2, "conv_group": 3}, "groups of 3"),
        ({"draft_vocab": 20}, "1 to 19 tokens"),
    ],
)
def test_bad_configurations_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        replace(CONFIG, **change)
