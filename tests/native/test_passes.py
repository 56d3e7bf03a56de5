"""Native passes: the stock model's logits up to rounding, and the same bits with drafts as without."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import mixed, opened, plain, text_of, trees_differ
from compiled_code import needs_code
from small import build, tree_of
from torch import Tensor

import outrider
from outrider.backends.native import eagle as compiled
from outrider.backends.native import library as native
from outrider.backends.native import passes
from outrider.backends.native.drafts import Pairs
from outrider.backends.native.target import NativeTarget
from outrider.backends.native.weights import Table
from outrider.backends.torch import HFTarget, load
from outrider.backends.torch.module import ModuleTarget
from outrider.backends.torch.tensors import array, tensor
from outrider.backends.torch.validate import validate
from outrider.core.tree import chain
from outrider.core.types import Array
from outrider.drafters import _eagle as eagle
from outrider.nets.kv_cache import KVCache
from outrider.nets.layer import LayerShape

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 2048}
KINDS = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 40, "head_dim": 64},
    "qwen2": {},
    "qwen2-sliding": {"sliding_window": 70},
    "qwen3": {"num_key_value_heads": 4},
    "smollm3": {"num_key_value_heads": 1, "head_dim": 128},
}  # fmt: skip
HALF, WHOLE = torch.bfloat16, torch.float32

pytestmark = needs_code


def made(name: str = "llama", dtype: torch.dtype = HALF, **more: Any) -> NativeTarget:
    """A tiny random model."""
    sizes = {**SIZES, **KINDS[name], **more}
    if not name.startswith(("qwen3", "mistral", "llama", "smollm3")):
        sizes.pop("head_dim")
        sizes["hidden_size"] = 128
    return ModuleTarget(build(name, dtype, **sizes))


@pytest.mark.parametrize("dtype", [HALF, WHOLE])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_every_family_equals_its_stock_forward_and_keeps_its_bits(name: str, dtype: torch.dtype) -> None:
    """Trees in a ragged batch, across the borders of blocks and windows; logits and features."""
    target = made(name, dtype)
    assert validate(target).verdict == "PASS bits"
    texts = [text_of(1, 168), text_of(2, 76), text_of(3, 100)]
    assert trees_differ(target, texts, [126, 34, 58], deep=6, taps=(0, 1, -1)) == 0


@pytest.mark.parametrize(("heads", "groups", "width"), [(20, 1, 96), (72, 1, 32), (8, 2, 256)])
@torch.no_grad()
def test_many_queries_of_one_key_head(heads: int, groups: int, width: int) -> None:
    """More than tiles take at once, and more than one go takes; other widths."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": width, "hidden_size": 16 * heads}
    target = ModuleTarget(build("llama", HALF, **{**SIZES, **sizes}))
    assert trees_differ(target, [text_of(1, 108), text_of(2, 46)], [76, 14], deep=6) == 0


@pytest.mark.usefixtures("avx2")
@torch.no_grad()
def test_the_same_on_processors_without_avx512() -> None:
    for dtype in (HALF, WHOLE):
        target = made("qwen3", dtype)
        assert validate(target).verdict == "PASS bits", dtype
        assert trees_differ(target, [text_of(1, 108), text_of(2, 46)], [76, 14], deep=6) == 0
    test_weights_of_16_bits_beside_float32()


@torch.no_grad()
def test_weights_of_16_bits_beside_float32() -> None:
    """As on processors without products of bfloat16."""
    target = mixed(build("llama", HALF, **SIZES))
    assert (target.precision, target.halves) == ("float32", True)
    assert validate(target).verdict == "PASS bits"
    assert trees_differ(target, [text_of(1, 108), text_of(2, 46)], [76, 14], deep=6) == 0


@torch.no_grad()
def test_a_pass_is_as_near_to_the_truth_as_the_stock_forward() -> None:
    model = build("llama", HALF, **SIZES)
    truth = copy.deepcopy(model).double()
    ids = torch.tensor([text_of(5, 90)])
    right = truth(ids).logits[0, -1]
    stock = (model(ids).logits[0, -1] - right).abs().mean()
    ours = (opened(ModuleTarget(model), ids.tolist())[1][0] - right).abs().mean()
    assert ours < stock


@torch.no_grad()
def test_prompts_are_read_alike_alone_beside_others_and_one_token_at_a_time() -> None:
    target = made()
    prompts = [text_of(7, 1100), text_of(8, 30), text_of(9, 600)]
    together = opened(target, prompts)[1]
    for prompt, after in zip(prompts, together, strict=True):
        assert torch.equal(opened(target, [prompt])[1][0], after)
    assert torch.equal(plain(target, prompts[2], 3)[-1][0], together[2])
    assert trees_differ(target, [prompts[0] + text_of(1, 30)], [1100], deep=8) == 0
    assert trees_differ(target, [text_of(5, 190), text_of(6, 150)], [60, 20], deep=60) == 0


@torch.no_grad()
def test_padding_is_not_computed() -> None:
    """Rows of one, five and three nodes: a pass counts nine."""
    target = made()
    tree = tree_of([[5], [6, 7, 8, 9, 10], [11, 12, 13]], [[0], [0, 0, 1, 1, 3], [0, 0, 0]])
    session = opened(target, [text_of(1, 70), text_of(2, 9), text_of(3, 40)])[0]
    logits = session.forward(tree).logits
    starts = target.forward.workspace.buffers["row starts"][:4].tolist()
    assert starts == [0, 1, 6, 9]
    for row, prompt in enumerate((text_of(1, 70), text_of(2, 9), text_of(3, 40))):
        size = int(tree.size[row])
        alone = opened(target, [prompt])[0].forward(
            tree_of([tree.tokens[row, :size].tolist()], [tree.parents[row, :size].tolist()])
        )
        assert np.array_equal(alone.logits[0], logits[row, :size])


@torch.no_grad()
def test_threads_change_no_bit() -> None:
    target, before = made(), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(opened(target, [text_of(1, 200), text_of(2, 9)])[1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@torch.no_grad()
def test_nodes_that_were_read_before_and_embeddings_as_inputs() -> None:
    """`since`: the first nodes lie in the cache already. `embeds`: what the tokens would be looked up to."""
    target = made()
    tree = tree_of([[5, 6, 7, 8]], [[0, 0, 1, 1]])
    session = opened(target, [text_of(1, 70)])[0]
    full = session.forward(tree).logits
    assert np.array_equal(session.forward(tree, since=2).logits, full[:, 2:])
    assert np.array_equal(session.forward(tree, embeds=target.embed(tree.tokens)).logits, full)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_a_tree_may_reach_beyond_the_last_position(name: str) -> None:
    """gpt2 looks positions up in a table, which ends there."""
    target = made(max_position_embeddings=64) if name == "llama" else ModuleTarget(build("gpt2", HALF, n_positions=64))
    session = opened(target, [text_of(1, 62)])[0]
    assert np.isfinite(session.forward(chain([text_of(2, 6)])).logits).all()


def test_without_a_compiler_models_run_as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = build("llama", HALF, **SIZES)
    native.library.cache_clear()
    try:
        with monkeypatch.context() as without:
            without.setenv("CC", "no-such-compiler")
            assert isinstance(load.target_of(model), HFTarget)
        with monkeypatch.context() as broken:  # a compiler that fails says so, once
            broken.setenv("OUTRIDER_CACHE", str(tmp_path))
            broken.setattr(native, "FLAGS", ("-no-such-flag",))
            native.library.cache_clear()
            assert native.library("bfloat16", "bfloat16") is None
            assert all(file.suffix == ".lock" for file in tmp_path.rglob("*.*")), "nothing half-made is kept"
    finally:
        native.library.cache_clear()


@pytest.mark.parametrize(
    ("name", "more"), [("bloom", {}), ("llama", {"hidden_size": 40}), ("llama", {"head_dim": 258})]
)
def test_other_layers_are_left_to_their_own_code(name: str, more: dict[str, int]) -> None:
    assert isinstance(load.target_of(build(name, HALF, **more)), HFTarget)


def test_models_by_name_are_compiled_by_default() -> None:
    assert outrider.load("demo", "none").target.exact == "bits"
    assert outrider.load("demo", "none", compile=False).target.exact == "rounding"


@pytest.mark.parametrize("dtype", [HALF, WHOLE])
@torch.no_grad()
def test_a_drafter_steps_as_its_network_does(dtype: torch.dtype) -> None:
    """Chains and trees, after level rows and unequal ones."""
    shape = LayerShape(64, 4, 2, 32, 96, 64)
    net = eagle.EagleNet(eagle.EagleConfig(vocab=97, target_hidden=64, layer=shape)).to(dtype).eval()
    torch.manual_seed(0)
    for parameter in net.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.2)
    head = torch.randn(50, 64).to(dtype)
    table = torch.randn(97, 64).to(dtype)
    name = str(dtype).removeprefix("torch.")
    code = native.library(name, name)
    assert code is not None
    weights = {name: array(x) for name, x in net.state_dict().items()}
    own = Table.of(array(table), code)
    quick = compiled.eagle(code, compiled.EagleParts(weights, shape, "layers.0.", False, array(head), own, None))
    assert quick is not None
    features, tokens = torch.randn(2, 5, 64).to(dtype), [[5, 6, 7, 8, 9], [96, 0, 50, 1, 2]]
    pairs = torch.cat([table[torch.tensor(tokens)], features], -1)
    depths = torch.tensor([[0, 0, 1, 1]] * 2)
    own = torch.eye(4, dtype=torch.bool)[None].repeat(2, 1, 1)
    own[:, 2, 0] = own[:, 3, 1] = True
    for counts in ([5, 5], [5, 3]):
        slow, fast, last = KVCache(shape, 2, 64, head), quick.cache(2, 64), np.zeros((2, 64), np.float32)
        lower = torch.ones(1, 5, 5, dtype=torch.bool).tril_()

        def stepped(given: Tensor, cache: KVCache, seen: Tensor, places: Tensor, first: int = 0) -> Tensor:
            x = net.fc(given)
            mask = cache.mask(seen, dtype)
            return net.layer(x, x, cache.lengths[:, None] + places, mask, cache.place(given.shape[1], first))

        right = stepped(pairs, slow, lower, torch.arange(5)[None])
        nodes = [range(count) for count in counts]
        quick.read(
            fast,
            last,
            [Pairs([array(features)], nodes, [row[:n] for row, n in zip(tokens, counts, strict=True)], [0, 1])],
        )
        near(last, torch.stack([right[row, count - 1] for row, count in enumerate(counts)]), dtype)
        slow.advance(counts)
        right, four = stepped(pairs[:, :4], slow, own, depths), array(pairs[:, :4].float())
        result, logits = quick.step(fast, four, depths.numpy(), own.numpy())
        near(result, right, dtype)
        near(logits, right @ head.T, dtype)
        near(quick.logits(result[:, 1:3]), torch.from_numpy(logits)[:, 1:3], WHOLE)
        again, _ = quick.step(fast, four[:, 2:], depths.numpy(), own.numpy())  # the last two of the four
        near(again, right[:, 2:], dtype)


def near(result: Array, right: Tensor, dtype: torch.dtype) -> None:
    allowed = 1e-4 if dtype == WHOLE else 0.15  # by eight bits, of activations too; with all sixteen the worst is 0.03
    difference = torch.from_numpy(result).float() - right.float()
    assert float(difference.abs().max()) <= allowed * float(right.float().abs().max())


def test_features_of_padding_are_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach the caches of drafters, whose masks hide them, but would hide no NaN."""
    empty = passes.aligned

    def poisoned(shape: Any, dtype: Any = np.float32) -> Array:
        made = empty(shape, dtype)
        made.view(np.uint8).fill(0xFF)  # NaN in every precision
        return made

    target = made()
    monkeypatch.setattr(passes, "aligned", poisoned)
    session = target.open(64)
    (prompts,) = session.prefill([text_of(1, 20), text_of(2, 7)], (1, -1))
    drafts = tree_of([[5, 6, 7, 8], [9]], [[0, 0, 1, 1], [0]])
    for output in (prompts.output, session.forward(drafts, (1, -1))):
        for states in output.features.values():
            assert bool(tensor(states).isfinite().all())
