"""Hydra and Hydra++: networks against slow references, oracle heads, every tree, families of targets, bad input."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heads import cyclic, rank_tree, run, stock
from safetensors.torch import load_file, save_file
from small import PROMPTS, VOCAB, build, sequential
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from outrider import drafters
from outrider.backends.torch import load_target
from outrider.checkpoints import native
from outrider.core import tree
from outrider.core.types import Budget
from outrider.drafters import hydra
from outrider.nets.layer import LayerShape
from outrider.params import InputError

FAMILIES = ("llama", "qwen3", "gpt_neox", "gemma3", "mixtral")
SHAPE = LayerShape(32, heads=4, kv_heads=2, head_dim=8, intermediate=40, inputs=32)


def shaken(net: hydra.HydraNet, seed: int = 0, size: float = 0.25) -> hydra.HydraNet:
    torch.manual_seed(seed)
    net = net.double()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p) * size)
    return net


def random_net(layers: int = 1, prefix: bool = False, vocab: int = VOCAB, heads: int = 4) -> hydra.HydraNet:
    config = hydra.HydraConfig(vocab, 32, heads, layers, prefix, SHAPE if prefix else None)
    return shaken(hydra.HydraNet(config))


def reference(net: hydra.HydraNet, head: int, feature: Tensor, embeds: list[Tensor]) -> Tensor:
    """One head at one node, out of the checkpoint's own tensors."""
    t = {k.removeprefix(f"heads.{head}."): v for k, v in net.state_dict().items() if k.startswith(f"heads.{head}.")}
    x = torch.cat([feature, *embeds])
    for i in range(net.config.layers):
        z = t[f"blocks.{i}.linear.weight"] @ x + t[f"blocks.{i}.linear.bias"]
        kept = t["blocks.0.res_connection.weight"] @ x + t["blocks.0.res_connection.bias"] if i == 0 else x
        x = kept + z / (1 + torch.exp(-z))
    return t["lm_head.weight"] @ x + t["lm_head.bias"]


def read_by_llama(net: hydra.HydraNet, features: Tensor) -> Tensor:
    """The prefix of Hydra++ by transformers' own decoder layer, over one whole text [n, h]."""
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=40,
        rms_norm_eps=SHAPE.eps, attn_implementation="eager",
    )  # fmt: skip
    layer, prefix = LlamaDecoderLayer(config, 0).double(), net.prefix
    assert prefix is not None
    state = {k.removeprefix("layer."): v for k, v in prefix.state_dict().items() if k != "norm.weight"}
    layer.load_state_dict(state)
    n = features.shape[0]
    turn = LlamaRotaryEmbedding(config)(features[None], torch.arange(n)[None])
    mask = torch.full((n, n), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    out = layer(features[None], attention_mask=mask, position_embeddings=turn)
    out = out[0] if isinstance(out, tuple) else out
    out = out.view(n, 32)
    return out / (out.pow(2).mean(-1, keepdim=True) + SHAPE.eps).sqrt() * prefix.norm.weight


@pytest.mark.parametrize("layers", [1, 3])
@torch.no_grad()
def test_network(layers: int) -> None:
    net = random_net(layers, vocab=11)
    features, embeds = torch.randn(2, 3, 32).double(), torch.randn(2, 3, 4, 32).double()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    for fused in (False, True):
        if fused:
            net.fuse()
        for i in range(4):
            made = net(i, features, embeds[:, :, : i + 1])
            for b in range(2):
                for m in range(3):
                    right = reference(net, i, features[b, m], list(embeds[b, m, : i + 1]))
                    assert (made[b, m] - right).abs().max() < 1e-12
    assert all(torch.equal(net.state_dict()[k], before[k]) for k in before), "fusing leaves the parameters as they are"


@torch.no_grad()
def test_prefix_is_a_llama_layer_between_norms() -> None:
    net, features = random_net(prefix=True), torch.randn(9, 32).double()
    assert net.prefix is not None
    made = net.prefix(features[None], torch.arange(9)[None])[0]
    # transformers norms in float32
    assert (made - read_by_llama(net, features)).abs().max() < 1e-5


@pytest.mark.parametrize("name", [*FAMILIES, "phi", "cohere"])
@torch.no_grad()
def test_heads_begin_as_the_targets_own(name: str) -> None:
    target = load_target(build(name))
    net = hydra.fresh(target, heads=3, layers=2)
    x, embeds = torch.randn(5, net.config.hidden).double(), torch.randn(5, 3, net.config.hidden).double()
    for i in range(3):
        assert (net(i, x, embeds[:, : i + 1]) - target.head(x)).abs().max() < 1e-10


def saved(folder: Path, net: hydra.HydraNet, target: Any, options: str = "") -> hydra.HydraDrafter:
    native.save(folder, "hydra", net)
    return drafters.load(f"hydra:{folder}{options}", target).uncalibrated  # type: ignore[return-value]


def oracle(slot: int = 0) -> hydra.HydraNet:
    """Heads for the cyclic target, whose embeddings are one-hot: each turns the last token of its path by one step
    (`slot` = 0), or the token before that, as if embeddings came one place too late."""
    target, order = cyclic()
    v = target.vocab
    net = hydra.HydraNet(hydra.HydraConfig(v, v)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        for i, part in enumerate(net.heads):
            block: Any = part.blocks[0]  # type: ignore[index, union-attr]
            place = v * (i + 1 - slot)
            for token in range(v):
                block.res_connection.weight[order[token], place + token] = 50.0
            part.lm_head.weight.fill_diagonal_(1.0)  # type: ignore[union-attr, operator]
    return net


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", ["?tree=chain", "?top_k=1&width=1", "?tree=static&shape=1,1,1,1"])
def test_an_oracle_is_fully_accepted(temperature: float, options: str, tmp_path: Path) -> None:
    target, _ = cyclic()
    for row in run(target, saved(tmp_path, oracle(), target, options), [[3], [1, 5, 2]], 21, temperature):
        assert row.usage.accepted_at == row.usage.tested_at == [4, 4, 4, 4]
        assert row.usage.tau == 5.0


def test_embeddings_off_by_one_are_not_accepted(tmp_path: Path) -> None:
    """The first head then reads the feature, which marks the root too; nothing below it is right."""
    target, _ = cyclic()
    for row in run(target, saved(tmp_path, oracle(1), target, "?tree=chain"), [[3], [1, 5, 2]], 21, 0.0):
        assert row.usage.accepted_at == [10]
        assert row.usage.tau == 2.0


@pytest.mark.parametrize("prefix", [False, True])
@torch.no_grad()
def test_proposals_are_the_heads_best(prefix: bool, tmp_path: Path) -> None:
    """After a few rounds, each row's tree holds what the heads say of the stock model's features, node by node."""
    model, shape = build("llama"), (3, 2, 2, 1)
    target, net = load_target(model), random_net(2, prefix)
    batch = stock(target, saved(tmp_path, net, target, "?tree=static&shape=3,2,2,1"), PROMPTS)
    for _ in range(4):
        made = batch.drafting.propose(batch.view(), Budget(64, 4))
        tree.check(made)
        for b, row in enumerate(batch.rows):
            text = [*row.request.prompt, *row.output]
            features = sequential(model, text[:-1], (-1,))[1][-1]
            feature = (read_by_llama(net, features) if prefix else features)[-1]
            right, layer = set(), [(text[-1],)]
            for depth, k in enumerate(shape):
                embeds = [[target.embed(torch.tensor(t)) for t in path] for path in layer]
                tops = [reference(net, depth, feature, e).topk(k).indices.tolist() for e in embeds]
                layer = [(*path, t) for path, top in zip(layer, tops, strict=True) for t in top]
                right |= {path[1:] for path in layer}
            assert rank_tree(made, b) == right
        batch.round()


@pytest.mark.parametrize("prefix", [False, True])
def test_a_mix_keeps_the_features_of_others_nodes(prefix: bool, tmp_path: Path) -> None:
    """In a mix another drafter's nodes are committed too. What Hydra proposes then is what it proposes alone."""
    target = load_target(build("llama"))
    drafter = saved(tmp_path, random_net(prefix=prefix), target)
    mixed = stock(target, drafters.load(["ngram", f"hydra:{tmp_path}?scale=1"], target), PROMPTS)
    alone = stock(target, drafter, PROMPTS)
    with torch.no_grad():
        for _ in range(5):
            mixed.round()
        for row, other in zip(mixed.rows, alone.rows, strict=True):
            other.request = row.request
        again = stock(target, drafter, [[*r.request.prompt, *r.output[:-1]] for r in mixed.rows])
        own = mixed.drafting.parts[1].propose(mixed.view(), Budget(9, 3))  # type: ignore[attr-defined]
        right = again.drafting.propose(again.view(), Budget(9, 3))
    for b in range(len(PROMPTS)):
        assert rank_tree(own, b) == rank_tree(right, b)


@pytest.mark.parametrize("tuned", [False, True])
def test_a_tree_of_ranks(tuned: bool, tmp_path: Path) -> None:
    target, net = load_target(build("llama")), random_net()
    paths = [[0], [0, 0], [1], [0, 0, 0], [0, 1], [2]]
    if tuned:
        (tmp_path / "tree.json").write_text(json.dumps({"paths": paths}))
        drafter = saved(tmp_path / "w", net, target, f"?tree={tmp_path}/tree.json")
    else:
        native.save(tmp_path, "hydra", net, replace(net.config, tree=tuple(map(tuple, paths))))
        drafter = drafters.load(f"hydra:{tmp_path}", target)  # type: ignore[assignment]
    batch = stock(target, drafter, PROMPTS)
    full = stock(target, saved(tmp_path / "all", net, target, "?tree=static&shape=3,2,1"), PROMPTS)
    free = full.drafting.propose(full.view(), Budget(64, 4))
    for nodes, depth, size in ((64, 4, 7), (5, 4, 5), (64, 1, 4), (1, 4, 1)):
        made = batch.drafting.propose(batch.view(), Budget(nodes, depth))
        tree.check(made)
        assert made.nodes == size
        assert all(rank_tree(made, b) <= rank_tree(free, b) for b in range(3))
    assert batch.drafting.propose(batch.view(), Budget(64, 4, shape=(2, 1))).parents[0].tolist() == [0, 0, 0, 1, 2]


@torch.no_grad()
def test_a_sampled_shape_keeps_its_q(tmp_path: Path) -> None:
    """Under rejection a static shape is drawn from q, which is kept; a dynamic tree is not."""
    target, net = load_target(build("llama")), random_net()
    for options, kept in (("?tree=static&shape=2,2", True), ("", False)):
        batch = stock(target, saved(tmp_path, net, target, options), PROMPTS, "rejection", 1.0)
        made = batch.drafting.propose(batch.view(), Budget(30, 2))
        assert (made.q is not None) == kept
        if made.q is not None:
            assert made.q.shape == (3, 3, VOCAB)
            feature = batch.drafting.feature  # type: ignore[attr-defined]
            for b in range(3):
                embeds = [target.embed(torch.tensor(batch.root[b]))]
                first = reference(net, 0, feature[b], embeds).softmax(-1)
                assert np.abs(made.q[b, 0] - first.numpy()).max() < 1e-12
                embeds.append(target.embed(torch.tensor(made.tokens[b, 1])))
                second = reference(net, 1, feature[b], embeds).softmax(-1)
                assert np.abs(made.q[b, 1] - second.numpy()).max() < 1e-12
        batch.round()


def test_bad_input(tmp_path: Path) -> None:
    target = load_target(build("llama"))
    native.save(tmp_path, "hydra", random_net())
    where = f"hydra:{tmp_path}"

    def refused(spec: str, sentence: str) -> None:
        with pytest.raises(InputError, match=sentence):
            drafters.load(spec, target)

    refused("hydra", "name their folder")
    refused(f"{where}?tree=best", "tree must be dynamic, static, chain, greedy63 or a file")
    refused(f"{where}?shape=0", "must be positive")
    refused(f"{where}?scale=-1", "scale must be")
    with pytest.raises(InputError, match="needs the target"):
        drafters.load(where)
    with pytest.raises(InputError, match="was trained for a target of width 32 and 97 tokens"):
        drafters.load(where, load_target(build("llama", vocab_size=50)))
    with pytest.raises(InputError, match="embeddings have width 16 and its features 32"):
        hydra.fresh(load_target(build("opt", word_embed_proj_dim=16)))
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    for change, sentence in (
        ({"heads": 0}, "heads in the config must be"),
        ({"heads": 5}, "lack heads.4"),
        ({"prefix": True}, "if and only if"),
        ({"prefix": True, "layer": asdict(SHAPE)}, "lack prefix"),
        ({"prefix": True, "layer": {**asdict(SHAPE), "inputs": 64}}, "both widths must be 32"),
        ({"tree": [[3]]}, "paths of ranks"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        refused(where, sentence)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({**tensors, "heads.1.lm_head.bias": torch.full((VOCAB,), float("nan"))}, tmp_path / "model.safetensors")
    refused(where, "heads.1.lm_head.bias")
