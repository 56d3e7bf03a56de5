"""Medusa: the network against a slow reference, oracle heads, every tree, families of targets, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heads import cyclic, rank_tree, run, stock, written
from safetensors.torch import load_file, save_file
from small import PROMPTS, VOCAB, build, sequential

from outrider import drafters
from outrider.backends.torch import load_target
from outrider.budgets.budgeter import FixedBudget
from outrider.checkpoints import native
from outrider.core import tree
from outrider.core.types import Budget
from outrider.drafters import medusa
from outrider.params import InputError, Sampling

FAMILIES = ("llama", "qwen3", "gpt_neox", "gemma3", "mixtral")


def random_net(config: medusa.MedusaConfig, seed: int = 0) -> medusa.MedusaNet:
    torch.manual_seed(seed)
    net = medusa.MedusaNet(config).double()
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(0, 0.3)
    return net


def reference(net: medusa.MedusaNet, x: torch.Tensor, head: Any) -> list[torch.Tensor]:
    """Every head, row by row, out of the checkpoint's own tensors."""
    tensors, config, made = net.state_dict(), net.config, []
    for i in range(config.heads):
        rows = []
        for row in x:
            for layer in range(config.layers):
                w, b = (tensors[f"heads.{i}.blocks.{layer}.linear.{n}"] for n in ("weight", "bias"))
                z = w @ row + b
                row = row + z * torch.sigmoid(z)
            if config.share_head:
                rows.append(head(row))
            else:
                bias = tensors[f"heads.{i}.lm_head.bias"] if config.bias else 0.0
                rows.append(tensors[f"heads.{i}.lm_head.weight"] @ row + bias)
        made.append(torch.stack(rows))
    return made


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("share", "bias"), [(False, False), (False, True), (True, False)])
@torch.no_grad()
def test_network(layers: int, share: bool, bias: bool) -> None:
    net = random_net(medusa.MedusaConfig(11, 6, 3, layers, share, bias))
    x, own = torch.randn(4, 6).double(), torch.randn(11, 6).double()

    def head(features: torch.Tensor) -> torch.Tensor:
        return features @ own.T

    right = reference(net, x, head)
    for a, b in zip(net(x, head), right, strict=True):
        assert (a - b).abs().max() < 1e-12
    before = {k: v.clone() for k, v in net.state_dict().items()}
    net.fuse()
    for k in (1, 3):
        made = net.fast(x, k, head)
        assert made.shape == (4, k, 11)
        assert (made - torch.stack(right[:k], 1)).abs().max() < 1e-12
    after = net.state_dict()
    assert list(after) == list(before), "fusing leaves the parameters as they are"
    assert all(torch.equal(after[k], before[k]) for k in before)


@pytest.mark.parametrize("name", [*FAMILIES, "phi", "cohere", "granite"])
@torch.no_grad()
def test_heads_begin_as_the_targets_own(name: str) -> None:
    target = load_target(build(name))
    net = medusa.fresh(target, heads=2, layers=2)
    x = torch.randn(5, net.config.hidden).double()
    for logits in net(x):
        assert (logits - target.head(x)).abs().max() < 1e-10
    shared = medusa.fresh(target, heads=2, share_head=True)
    assert not [k for k in shared.state_dict() if "lm_head" in k]
    assert all(torch.equal(logits, target.head(x)) for logits in shared(x, target.head))


@torch.no_grad()
def test_a_soft_cap_is_left_out() -> None:
    target = load_target(build("gemma2"))
    net = medusa.fresh(target, heads=1)
    x = torch.randn(5, net.config.hidden).double()
    assert (torch.tanh(net(x)[0] / 5) * 5 - target.head(x)).abs().max() < 1e-6


def saved(folder: Path, net: medusa.MedusaNet, target: Any, options: str = "") -> medusa.MedusaDrafter:
    native.save(folder, "medusa", net)
    return drafters.load(f"medusa:{folder}{options}", target).uncalibrated  # type: ignore[return-value]


def oracle(shift: int = 0) -> medusa.MedusaNet:
    """Heads for the cyclic target: head k turns the feature, which marks the root, by k more steps."""
    target, order = cyclic()
    net = medusa.MedusaNet(medusa.MedusaConfig(target.vocab, target.vocab)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        for k in range(4):
            for token in range(target.vocab):
                end = token
                for _ in range(k + 1 + shift):
                    end = order[end]
                net.parts[k].lm_head.weight[end, token] = 1.0  # type: ignore[union-attr]
    return net


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_oracle_is_fully_accepted(temperature: float, tmp_path: Path) -> None:
    target, _ = cyclic()
    drafter = saved(tmp_path, oracle(), target, "?tree=chain")
    for row in run(target, drafter, [[3], [1, 5, 2]], 21, temperature, FixedBudget(5, 4)):
        assert row.usage.accepted_at == row.usage.tested_at == [4, 4, 4, 4]
        assert row.usage.tau == 5.0


@pytest.mark.parametrize("shift", [-1, 1])
def test_heads_off_by_one_are_never_accepted(shift: int, tmp_path: Path) -> None:
    target, _ = cyclic()
    drafter = saved(tmp_path, oracle(shift), target, "?tree=chain")
    for row in run(target, drafter, [[3], [1, 5, 2]], 21, 0.0, FixedBudget(5, 4)):
        assert row.usage.accepted == 0


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@torch.no_grad()
def test_proposals_are_the_heads_best(rule: str, tmp_path: Path) -> None:
    """After a few rounds, each row's tree holds what the heads predict from the stock model's last feature."""
    model = build("llama")
    target = load_target(model)
    net = random_net(medusa.MedusaConfig(VOCAB, 32))
    batch = stock(target, saved(tmp_path, net, target, "?tree=static&shape=3,2,2,1"), PROMPTS, rule)
    for _ in range(4):
        made = batch.drafting.propose(batch.view(), Budget(64, 4))
        tree.check(made)
        assert made.q is None
        assert made.nodes == 1 + 3 + 6 + 12 + 12
        for b, row in enumerate(batch.rows):
            text = [*row.request.prompt, *row.output]
            feature = sequential(model, text[:-1], (-1,))[1][-1][-1:]
            tops = [z[0].topk(k).indices.tolist() for z, k in zip(reference(net, feature, None), (3, 2, 2, 1))]  # noqa: B905
            assert rank_tree(made, b) == {
                (x, y, z, w)[:d]
                for x in tops[0]
                for y in tops[1]
                for z in tops[2]
                for w in tops[3]
                for d in (1, 2, 3, 4)
            }
        batch.round()


@torch.no_grad()
def test_the_noise_of_their_own_position_ranks_candidates(tmp_path: Path) -> None:
    target = load_target(build("llama"))
    net = random_net(medusa.MedusaConfig(VOCAB, 32))
    batch = stock(target, saved(tmp_path, net, target, "?tree=chain"), PROMPTS, "coupled", 0.7)
    batch.round()
    view = batch.view()
    made = batch.drafting.propose(view, Budget(5, 4))
    logits = torch.stack(net.float()(batch.drafting.feature.float()), 1)  # type: ignore[attr-defined]
    for d in range(1, 5):
        right = (logits[:, d - 1].numpy() + np.float32(0.7) * view.noise(d)).argmax(-1)
        assert np.array_equal(made.tokens[:, d], right)


def test_a_mix_keeps_the_features_of_others_nodes(tmp_path: Path) -> None:
    """In a mix the last committed token may be another drafter's node: the feature is there all the same."""
    target, _ = cyclic()
    saved(tmp_path, oracle(), target)
    mixed = drafters.load(["lookup?tokens=6", f"medusa:{tmp_path}?tree=chain"], target)
    for row in run(target, mixed, [[3, 4], [1, 5, 2]], 41, 0.0, FixedBudget(12, 6)):
        assert min(a / t for a, t in zip(row.usage.accepted_at[:4], row.usage.tested_at[:4], strict=True)) == 1.0


@pytest.mark.parametrize("options", ["", "?tree=static&shape=3,3,2"])
def test_a_small_budget_takes_the_best_nodes(options: str, tmp_path: Path) -> None:
    target = load_target(build("llama"))
    batch = stock(target, saved(tmp_path, random_net(medusa.MedusaConfig(VOCAB, 32)), target, options), PROMPTS)
    full = batch.drafting.propose(batch.view(), Budget(400, 4))
    small = batch.drafting.propose(batch.view(), Budget(7, 4))
    assert full.values is not None
    assert small.values is not None
    best = -np.sort(-full.values, -1)[:, :7]
    assert np.allclose(-np.sort(-small.values, -1), best)


def test_a_tuned_tree_is_used_and_cut_to_its_best(tmp_path: Path) -> None:
    target = load_target(build("llama"))
    net = random_net(medusa.MedusaConfig(VOCAB, 32))
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"paths": [[0], [0, 0], [1], [0, 0, 0], [0, 1], [2]]}))
    native.save(tmp_path / "w", "medusa", net)
    kept = replace(net.config, tree=((0,), (0, 0), (1,), (0, 0, 0), (0, 1), (2,)))
    native.save(tmp_path / "k", "medusa", net, kept)
    for spec in (f"medusa:{tmp_path}/w?tree={file}", f"medusa:{tmp_path}/k"):
        batch = stock(target, drafters.load(spec, target), PROMPTS)
        full, part = (batch.drafting.propose(batch.view(), Budget(n, 4)) for n in (64, 5))
        assert full.parents[0].tolist() == [0, 0, 0, 0, 1, 1, 4]
        assert part.parents[0].tolist() == [0, 0, 0, 1, 3]
        assert batch.drafting.propose(batch.view(), Budget(64, 1)).nodes == 4
        shaped = batch.drafting.propose(batch.view(), Budget(64, 4, shape=(2, 1)))
        assert shaped.parents[0].tolist() == [0, 0, 0, 1, 2]


def test_bad_input(tmp_path: Path) -> None:
    target = load_target(build("llama"))
    net = random_net(medusa.MedusaConfig(VOCAB, 32))
    native.save(tmp_path, "medusa", net)
    where = f"medusa:{tmp_path}"

    def refused(spec: str, sentence: str) -> None:
        with pytest.raises(InputError, match=sentence):
            drafters.load(spec, target)

    refused("medusa", "name their folder")
    refused(f"{where}?tree=nothing", "tree must be dynamic, static, chain, greedy63 or a file")
    refused(f"{where}?shape=0", "must be positive")
    refused(f"{where}?top_k=0", "top_k must be at least 1")
    refused(f"{where}?scale=-1", "must be positive")
    refused(f"hydra:{tmp_path}", "holds medusa, not hydra")
    with pytest.raises(InputError, match="needs the target"):
        drafters.load(where)
    with pytest.raises(InputError, match="was trained for a target of width 32 and 97 tokens"):
        drafters.load(where, load_target(build("llama", vocab_size=50)))
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    for change, sentence in (
        ({"heads": 0}, "heads in the config must be"),
        ({"colour": 1}, "colour"),
        ({"heads": 5}, "lack heads.4"),
        ({"heads": 3}, "hold heads.3"),
        ({"tree": [[3]]}, "paths of ranks"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        refused(where, sentence)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {**tensors, "heads.1.lm_head.weight": torch.full((VOCAB, 32), float("nan"))}, tmp_path / "model.safetensors"
    )
    refused(where, "heads.1.lm_head.weight")


def test_a_hot_text_under_rejection_has_deterministic_drafts(tmp_path: Path) -> None:
    target = load_target(build("llama"))
    drafter = saved(tmp_path, random_net(medusa.MedusaConfig(VOCAB, 32)), target)
    proposals = []
    for seed in (1, 2):
        batch = stock(target, drafter, PROMPTS, "rejection", 1.0, seed=seed)
        made = batch.propose(batch.view(), Budget(12, 4, floor=0.4))
        assert made.q is None
        assert made.nodes == 12, "the floor is for coupled alone"
        proposals.append(made.tokens[:, 1:].tolist())
    assert proposals[0] == proposals[1]
    assert [len(o) for o in written(target, drafter, PROMPTS, 20, 1.0, "rejection")] == [20] * 3
    assert Sampling(1.0).temperature == 1.0
