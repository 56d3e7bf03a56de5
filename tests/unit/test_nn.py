"""The small decoder layer against one written with loops, and its cache against the layer over the whole text."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.backends.torch.padding import additive
from outrider.nets import layer as nn
from outrider.nets.kv_cache import KVCache
from outrider.nets.layer import Layer, LayerShape
from outrider.params import InputError
from outrider.schema import from_dict, to_dict

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def shape(**more: Any) -> LayerShape:
    sizes = {"hidden": 12, "heads": 4, "kv_heads": 2, "head_dim": 6, "intermediate": 10, "inputs": 12, "eps": 1e-5}
    return LayerShape(**{**sizes, **more})


def layer(made: LayerShape) -> Layer:
    torch.manual_seed(5)
    out = Layer(made).double()
    with torch.no_grad():
        for p in out.parameters():
            p.copy_(torch.randn_like(p) * 0.6)
    return out


def rotated(x: list[float], position: int, theta: float) -> list[float]:
    """One head's vector at a position, pair by pair."""
    half = len(x) // 2
    out = list(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


@torch.no_grad()
def slow(made: Layer, x: Tensor, residual: Tensor, positions: list[int], seen: list[list[int]]) -> Tensor:
    """One row, token by token and head by head; `seen[i]`: what token i looks at."""
    a, s, out = made.self_attn, made.shape, []
    theta = s.rope["rope_theta"]
    q, k, v = (p(x).view(len(x), -1, s.head_dim) for p in (a.q_proj, a.k_proj, a.v_proj))
    for i in range(len(x)):
        heads = []
        for h in range(s.heads):
            g = h // (s.heads // s.kv_heads)
            mine = rotated(q[i, h].tolist(), positions[i], theta)
            scores = [
                sum(m * o for m, o in zip(mine, rotated(k[j, g].tolist(), positions[j], theta), strict=True))
                for j in seen[i]
            ]
            weights = [math.exp(z / math.sqrt(s.head_dim)) for z in scores]
            heads.append(sum((w / sum(weights)) * v[j, g] for w, j in zip(weights, seen[i], strict=True)))
        h1 = residual[i] + a.o_proj.weight @ torch.cat(heads)
        n = h1 / torch.sqrt((h1 * h1).mean() + s.eps) * made.post_attention_layernorm.weight
        gate = made.mlp.gate_proj.weight @ n
        out.append(h1 + made.mlp.down_proj.weight @ (gate * torch.sigmoid(gate) * (made.mlp.up_proj.weight @ n)))
    return torch.stack(out)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"kv_heads": 4}, {"kv_heads": 1, "qkv_bias": True}, {"inputs": 24}, {"rope": {"rope_theta": 7.0}}]
)
def test_a_layer_is_the_slow_one(more: dict, fused: bool) -> None:
    more = {"rope": {"rope_type": "default", "rope_theta": 10000.0}, **more}
    made = layer(shape(**more))
    if fused:
        made.fuse()
    x, residual = torch.randn(2, 7, made.shape.inputs).double(), torch.randn(2, 7, 12).double()
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [3, 4, 4, 5, 9, 9, 30]])
    seen = [list(range(i + 1)) for i in range(7)]
    with torch.no_grad():
        out = made(x, residual, positions)
    for b in range(2):
        expected = slow(made, x[b], residual[b], positions[b].tolist(), seen)
        assert torch.allclose(out[b], expected, atol=1e-6)  # angles are made in float32, as transformers does
    tree = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [6]]
    mask = torch.zeros(1, 1, 7, 7, dtype=torch.bool)
    for i, js in enumerate(tree):
        mask[0, 0, i, js] = True
    with torch.no_grad():
        out = made(x, residual, positions, additive(mask, torch.float64))
    for b in range(2):
        expected = slow(made, x[b], residual[b], positions[b].tolist(), tree)
        assert torch.allclose(out[b], expected, atol=1e-6)


def test_positions_are_transformers() -> None:
    """Scaled rotary positions come from the very class that the targets use."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    made = shape(head_dim=8, rope=LLAMA3)
    config = LlamaConfig(hidden_size=12, num_attention_heads=4, head_dim=8, rope_parameters=LLAMA3)
    x, positions = torch.randn(1, 5, 4, 8), torch.tensor([[0, 3, 40, 100, 511]])
    cos, sin = LlamaRotaryEmbedding(config)(x, positions)
    expected, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    rope = nn.Rope(made)
    assert torch.allclose(nn.apply_rotary(x, rope.at(positions, x.dtype)), expected.transpose(1, 2), atol=1e-5)
    table = rope.table(512, x.dtype, x.device)
    assert torch.equal(table[positions], rope.at(positions, x.dtype))
    assert rope.table(2000, x.dtype, x.device).shape[0] >= 2000
    assert not torch.allclose(nn.Rope(shape(head_dim=8)).at(positions, x.dtype), rope.at(positions, x.dtype))


def test_casting_rounds_no_frequency() -> None:
    made = layer(shape()).to(torch.bfloat16)
    assert made.rope.table(600, torch.float32, torch.device("cpu"))[500, 0, 0, 1] == pytest.approx(
        math.cos(500 * 10000 ** (-2 / 6)), abs=1e-4
    )
    assert not [name for name in made.state_dict() if "rope" in name]


def test_fusing_shares_and_freezes() -> None:
    made = layer(shape(qkv_bias=True))
    before = {k: v.clone() for k, v in made.state_dict().items()}
    made.fuse()
    assert made.fused is not None
    assert (
        made.self_attn.k_proj.weight.untyped_storage().data_ptr() == made.fused.qkv.weight.untyped_storage().data_ptr()
    )
    after = made.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items())


def test_training_reaches_every_parameter() -> None:
    """With a store that attends to more than its own keys, as training passes do."""
    made = layer(shape(qkv_bias=True))
    x = torch.randn(2, 5, 12).double()
    earlier: list[tuple[Tensor, Tensor]] = []

    def store(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        earlier.append((k, v))
        return torch.cat([e[0] for e in earlier], 2), torch.cat([e[1] for e in earlier], 2)

    positions = torch.arange(5)[None]
    lower = torch.ones(5, 5).tril().bool()
    first = made(x, x, positions, additive(lower[None, None], x.dtype), store)
    both = torch.cat([lower, torch.eye(5, dtype=torch.bool)], 1)
    made(first, x, positions, additive(both[None, None], x.dtype), store).sum().backward()
    missing = [name for name, p in made.named_parameters() if p.grad is None]
    # A bias of the keys shifts all scores alike, but for the rotation: its gradient may be small, not absent.
    assert not missing


@torch.no_grad()
def test_a_cache_fed_in_pieces_equals_one_pass() -> None:
    """Ragged rows: chunks, then a trial tree that leaves no trace, then more text; each row as if alone."""
    made = layer(shape())
    made.fuse()
    sizes = [[4, 3, 2], [1, 5, 0], [6, 0, 3]]
    texts = torch.randn(3, 9, 12).double()
    cache = KVCache(made.shape, 3, 4, torch.ones(1).double())
    got: list[list[Tensor]] = [[], [], []]
    for turn in range(3):
        counts = [s[turn] for s in sizes]
        m = max(counts)
        x = torch.zeros(3, m, 12).double()
        for b, n in enumerate(counts):
            x[b, :n] = texts[b, cache.host[b] : cache.host[b] + n]
        positions = cache.lengths[:, None] + torch.arange(m)
        mask = cache.mask(torch.ones(1, m, m).tril().bool(), x.dtype, made.groups)
        out = made(x, x, positions, mask, cache.place(m))
        for b, n in enumerate(counts):
            got[b].append(out[b, :n])
        cache.advance(counts)
        noise = torch.randn(3, 5, 12).double()
        own = torch.ones(1, 5, 5).tril().bool()
        made(noise, noise, cache.lengths[:, None] + torch.arange(5), cache.mask(own, x.dtype), cache.place(5))
    for b in range(3):
        n = sum(sizes[b])
        alone = made(texts[b : b + 1, :n], texts[b : b + 1, :n], torch.arange(n)[None])[0]
        assert torch.allclose(torch.cat(got[b]), alone, atol=1e-12)


@torch.no_grad()
def test_scratch_slots_behind_scratch_slots() -> None:
    """A tree fed in two steps equals the paths of it, level and ragged."""
    made = layer(shape())
    made.fuse()
    for host in ([3, 3], [4, 1]):
        texts, nodes = torch.randn(2, 4, 12).double(), torch.randn(2, 4, 12).double()
        cache = KVCache(made.shape, 2, 16, torch.ones(1).double())
        lower = torch.ones(1, 4, 4).tril().bool()
        made(texts, texts, torch.arange(4)[None].expand(2, 4), cache.mask(lower, texts.dtype), cache.place(4))
        cache.advance(host)
        own = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]).bool()[None]
        depth = torch.tensor([0, 0, 1, 1])
        out = []
        for first, end in ((0, 2), (2, 4)):
            at = cache.lengths[:, None] + depth[first:end]
            mask = cache.mask(own[:, first:end, :end], texts.dtype, made.groups)
            out.append(made(nodes[:, first:end], nodes[:, first:end], at, mask, cache.place(end - first, first)))
        tree = torch.cat(out, 1)
        for b in range(2):
            for path in ([0, 2], [1, 3]):
                x = torch.cat([texts[b, : host[b]], nodes[b, path]])[None]
                alone = made(x, x, torch.arange(x.shape[1])[None])[0, -2:]
                assert torch.allclose(tree[b, path], alone, atol=1e-12)


def test_rows_move() -> None:
    made = shape()
    a, b = (KVCache(made, 2, c, torch.ones(1).double()) for c in (3, 9))
    for cache, counts in ((a, [2, 3]), (b, [8, 1])):
        m = max(counts)
        k = torch.randn(2, 2, m, 6).double()
        cache.place(m)(k, -k)
        cache.advance(counts)
    kept = [a.keys[0, :2], a.keys[1, :3], b.keys[0, :8], b.keys[1, :1]]
    kept = [k.clone() for k in kept]
    a.join(b)
    assert a.host == [2, 3, 8, 1]
    a.select([2, 0, 0, 3])
    assert a.host == [8, 2, 2, 1] == a.lengths.tolist()
    for row, old in enumerate([2, 0, 0, 3]):
        assert torch.equal(a.keys[row, : a.host[row]], kept[old])
        assert torch.equal(a.values[row, : a.host[row]], -kept[old])
    a.place(1)(torch.ones(4, 2, 1, 6).double(), torch.ones(4, 2, 1, 6).double())
    assert torch.equal(a.keys[1, :2], kept[0])
    assert not a.level
    a.select([1, 2])
    assert a.level


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"heads": 3}, "cannot share 2 key heads"),
        ({"head_dim": 5}, "must be even"),
        ({"hidden": 0}, "needs hidden of at least 1"),
        ({"rope": {"rope_type": "longrope"}}, "not longrope"),
    ],
)
def test_shapes_that_make_no_layer(more: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        shape(**more)


def test_a_shape_comes_back_from_its_dict() -> None:
    assert from_dict(LayerShape, to_dict(shape(rope=LLAMA3))) == shape(rope=LLAMA3)
