"""The same bits with and without drafts, in 16 bits: what the probe finds, and what passes do with it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from bits import opened, plain, scattered, text_of, trees_differ
from small import ZOO, build, tree_of
from torch import Tensor

import outrider
from outrider import machine
from outrider.backends.torch import HFTarget, aligned, exact, kernels, load_target, probe
from outrider.backends.torch.families import TABLE
from outrider.backends.torch.session import Pass
from outrider.backends.torch.tensors import TensorTree
from outrider.backends.torch.validate import validate
from outrider.core.tree import chain
from outrider.core.types import DraftTree
from outrider.params import InputError

HONEST = probe.kernels._steady
CAN = [name for name in ZOO if TABLE[build(name).config.model_type].bits]
CONTEXT = {"max_position_embeddings": 2048}
DRAFTED: dict[float, list[tuple[Any, int]]] = {
    0.0: [("lookup", 8), (["lookup", "suffix", "ngram"], 4)],
    0.7: [("lookahead", 4)],
    1.0: [("none", 8), ("suffix", 1)],
}


@cache
def steady(*shape: Any) -> tuple[int, ...]:
    """The probe's answer for a shape of attention, whichever family asks first."""
    torch.manual_seed(0)
    return HONEST(*shape)


@pytest.fixture(autouse=True)
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many families have the same attention, which is asked once for each shape."""
    monkeypatch.setattr(probe.kernels, "_steady", steady)


def exactly(name: str = "llama", **more: Any) -> HFTarget:
    """A tiny random model in bfloat16 whose passes keep their bits."""
    model = build(name, torch.bfloat16, **{**CONTEXT, **more})
    try:
        target = load_target(model, exact="bits")
    except InputError as error:
        if torch.backends.cpu.get_cpu_capability() == "AVX2" or "amx_bf16" in machine.processor():
            raise  # seen to keep their bits
        pytest.skip(f"on this processor {error}")
    assert isinstance(target, HFTarget)
    assert target.exact == "bits"
    return target


@pytest.mark.parametrize("name", CAN)
@torch.no_grad()
def test_trees_in_a_ragged_batch_have_the_bits_of_plain_decoding(name: str) -> None:
    """Across the borders of blocks and windows, for three rows of unequal lengths; logits and features."""
    texts = [text_of(1, 108), text_of(2, 46), text_of(3, 70)]
    assert trees_differ(exactly(name), texts, [76, 14, 38], deep=6, taps=(1, -1)) == 0


@torch.no_grad()
def test_one_row_and_deep_trees() -> None:
    """A tree deeper than a block reads its head along each node's own path."""
    target = exactly()
    assert trees_differ(target, [text_of(4, 150)], [50], deep=9) == 0
    assert trees_differ(target, [text_of(5, 190), text_of(6, 150)], [60, 20], deep=60) == 0


@torch.no_grad()
def test_recorded_passes_keep_the_bits() -> None:
    target = exactly("qwen2-sliding")
    right = plain(target, text_of(1, 108), 76)
    target.compile()
    assert trees_differ(target, [text_of(1, 108), text_of(2, 46)], [76, 14], deep=6, taps=(1,)) == 0
    assert all(torch.equal(a[0], b[0]) for a, b in zip(plain(target, text_of(1, 108), 76), right, strict=True))
    assert target.graphs is not None
    assert target.graphs.made
    assert None not in target.graphs.made.values(), "every kind of pass was recorded and none was dropped"


@torch.no_grad()
def test_prompts_are_read_alike_alone_and_beside_others() -> None:
    """Prompts of over 1,024 tokens, in chunks, beside shorter ones; and reading is decoding."""
    target = exactly()
    prompts = [text_of(7, 1100), text_of(8, 30), text_of(9, 600)]
    together = opened(target, prompts)[1]
    for prompt, after in zip(prompts, together, strict=True):
        assert torch.equal(opened(target, [prompt])[1][0], after)
    decoded = plain(target, prompts[1], 3)
    assert torch.equal(decoded[-1][0], together[1])
    assert trees_differ(target, [prompts[0] + text_of(1, 30)], [1100], deep=8) == 0


@torch.no_grad()
def test_layers_read_in_blocks_where_their_class_ends() -> None:
    """As on processors whose kernels change beyond 32 rows: larger passes are cut, and recorded ones too."""
    target = exactly()
    assert target.exactness is not None
    rows = target.exactness.rows
    blocks = dict.fromkeys(target.exactness.blocks, max(16, 2 * rows))
    target.use(replace(target.exactness, blocks=blocks))
    target.blocks = kernels.layers_of(target, blocks)
    texts, lengths = [text_of(1, 108), text_of(2, 76), text_of(3, 90)], [76, 44, 58]
    assert trees_differ(target, texts, lengths, deep=8) == 0
    target.compile()
    assert trees_differ(target, texts, lengths, deep=8) == 0
    assert all("forward" not in vars(m) for m in target.model.modules()), "the model's layers are its own again"


@pytest.mark.parametrize("temperature", DRAFTED)
def test_texts_with_drafts_are_those_without(temperature: float) -> None:
    """Batches of 1, 4 and 8 whose rows end at their own time and are followed by others; every cheap drafter."""
    model = build("llama", torch.bfloat16, **CONTEXT)
    prompts = [[5, 6, 7, 8] * (1 + i % 3) + text_of(i, 3 + 7 * i) for i in range(10)]
    law: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_new_tokens": 32}
    right = [o.tokens for o in outrider.load(model, "none", exact="bits").generate(prompts, batch_size=1, **law)]
    for drafter, batch in DRAFTED[temperature]:
        llm = outrider.load(model, drafter, exact="bits", budget="16x6")
        found = llm.generate(prompts, batch_size=batch, **law)
        assert [o.tokens for o in found] == right, (drafter, batch)
        assert {o.exact for o in found} == {"bits"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAN)
def test_texts_of_every_family_with_drafts_are_those_without(name: str) -> None:
    exactly(name)  # skips where this processor's kernels cannot
    model = build(name, torch.bfloat16, **CONTEXT)
    prompts = [[5, 6, 7, 8] * (1 + i % 3) + text_of(i, 3 + 9 * i) for i in range(5)]
    for temperature in (0.0, 0.7, 1.0):
        law: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_new_tokens": 24}
        right = [o.tokens for o in outrider.load(model, "none", exact="bits").generate(prompts, batch_size=1, **law)]
        llm = outrider.load(model, "lookup + suffix", exact="bits", budget="16x6")
        assert [o.tokens for o in llm.generate(prompts, batch_size=3, **law)] == right, temperature


@torch.no_grad()
def test_a_prompt_is_read_alike_beside_a_longer_one() -> None:
    """The attention's kernel cuts rows into groups; those that are left over at a prompt's end are others beside it."""
    target = exactly()
    longer = text_of(5, 300)
    for n in (31, 33, 65, 97, 161, 193, 225, 257):
        text = text_of(n, n)
        alone, beside = opened(target, [text])[1], opened(target, [longer, text])[1]
        assert torch.equal(alone[0], beside[1]), n


@torch.no_grad()
@pytest.mark.parametrize("mutant", ["by_slot", "backwards"])
def test_summing_by_slot_is_caught(mutant: str) -> None:
    """The mutants: a tail in the order of slots, other branches hidden, and one from its end. They give every key its
    weight, and other bits, unless hidden keys between the others change none on this processor.

    Values cancel out, so that an order of summation shows at once; in a model it takes thousands of tokens.
    """
    torch.manual_seed(0)
    length, dice, wrong, change = 70, random.Random(2), 0, {"by_slot": by_slot, "backwards": backwards}[mutant]
    for _ in range(60):
        text = text_of(dice.randrange(1000), length + 7)
        tokens, parents, path = scattered(dice, text, length, 6)
        tree = tree_of([tokens], [parents])
        states = torch.randn(2, length + 7, 2, 8)
        states[1, : exact.start(length + 6) + 1] = 0
        order = exact.start(length + 6) + 1 + torch.randperm(44).view(2, -1)
        states[1, order[0]] *= torch.randint(-8, 9, (22, 1, 1)).float().exp2()  # so that sums in float32 are rounded
        states[0, order[1]], states[1, order[1]] = states[0, order[0]], -states[1, order[0]]
        cache = torch.zeros(2, 128, 2, 8)
        cache[:, :length] = states[:, :length]
        cache[:, [length + node for node in path]] = states[:, length:]
        line = torch.zeros(2, 128, 2, 8)
        line[:, : length + 7] = states
        query = torch.randn(1, 4, 1, 8, dtype=torch.bfloat16)
        right = attended(query, line, chain([[0]]), length + 6)
        found = attended(query.expand(-1, -1, tree.nodes, -1), cache, tree, length)[:, path[-1]]
        assert torch.equal(found, right[:, 0])
        other = attended(query.expand(-1, -1, tree.nodes, -1), cache, tree, length, change)[:, path[-1]]
        assert torch.allclose(other, right[:, 0], atol=0.05)
        wrong += not torch.equal(other, right[:, 0])
    assert wrong > 3 or (mutant == "by_slot" and one_after_the_other())


def one_after_the_other() -> bool:
    """Do hidden keys between the others change no bit here? Then kernels add one key after the other."""
    query, keys, values = torch.randn(3, 20, 2, 64, 8, dtype=torch.bfloat16)
    values = values * torch.randint(-8, 9, (20, 2, 64, 1)).exp2().bfloat16()
    at = torch.randperm(128)[:64].sort().values
    wide = torch.zeros(2, 20, 2, 128, 8, dtype=torch.bfloat16)
    wide[0, :, :, at], wide[1, :, :, at] = keys, values
    hidden = torch.full((1, 1, 1, 128), -torch.inf, dtype=torch.bfloat16).index_fill_(3, at, 0.0)
    found = (
        aligned.kernel(query[:, :, :8], *wide, hidden, 0.3, None),
        aligned.kernel(query[:, :, :8], keys, values, None, 0.3, None),
    )
    return torch.equal(found[0][0], found[1][0])


def attended(query: Tensor, cache: Tensor, drafts: DraftTree, length: int, change: Any = None) -> Tensor:
    """What each node of a tree on a text of this length attends to, in keys and values [2, slots, g, d]."""
    lengths, tree = torch.tensor([length]), TensorTree.of(drafts)
    spots, bound = lengths[:, None] + tree.depths, length + tree.deepest
    given = Pass(None, None, spots, 0, lengths, length, True, length, bound, tree.ancestors)
    made = exact.plan(given, cache.shape[1], torch.bfloat16, exact.Exactness(queries=8))
    if change is not None:
        change(made, given)
    keys, values = cache.to(torch.bfloat16).transpose(1, 2)[:, None]
    return aligned.attend(query.contiguous(), keys, values, made, 0.3)


def by_slot(made: aligned.Plan, given: Pass) -> None:
    """Committed slots, then all nodes in the tree's order."""
    assert given.ancestors is not None
    first, length, n = exact.starts(given.places[0]), int(given.lengths[0]), given.n
    slots = first[:, None] + torch.arange(exact.WINDOW)
    node = (slots - length).clamp(0, n - 1)
    seen = (slots < length) | (given.ancestors[0].gather(1, node) & (slots < length + n))
    made.tail, made.order, made.back = slots, torch.arange(n), torch.arange(n)
    made.seen = torch.zeros(n, 1, 1, exact.WINDOW, dtype=torch.bfloat16).masked_fill_(~seen[:, None, None], -torch.inf)


def backwards(made: aligned.Plan, given: Pass) -> None:
    """The same keys, the last one first."""
    made.tail, made.seen = made.tail.flip(-1), made.seen.flip(-1)


class Uneven(torch.nn.Linear):
    """A layer whose sums are cut in two where the number of rows says so, as no honest kernel would be."""

    odd = 3

    def forward(self, x: Tensor) -> Tensor:
        rows, half = x[..., 0].numel(), self.in_features // 2
        if rows % self.odd:
            return super().forward(x)
        linear = torch.nn.functional.linear
        return linear(x[..., :half], self.weight[:, :half], self.bias) + linear(x[..., half:], self.weight[:, half:])


def with_uneven(odd: int) -> Any:
    model = build("llama", torch.bfloat16, **CONTEXT)
    model.model.layers[1].mlp.down_proj.__class__ = type("Uneven", (Uneven,), {"odd": odd})
    return model


def test_a_kernel_that_is_not_row_invariant_is_found_out() -> None:
    assert load_target(with_uneven(3), exact="auto").exact == "rounding"
    with pytest.raises(InputError, match="Uneven 32x48 bfloat16 depend on how many rows"):
        load_target(with_uneven(3), exact="bits")


def test_a_kernel_that_changes_at_some_size_is_read_in_blocks() -> None:
    found = probe.find(HFTarget(with_uneven(47)))
    assert found.exactness is not None
    assert found.exactness.blocks["Uneven 32x48 bfloat16"] == 33


def test_attention_that_is_not_row_invariant_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = probe.kernels.aligned.kernel

    def uneven(rows: Tensor, key: Tensor, value: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        out, total = stock(rows, key, value, *more)
        return (out * (1 + 2**-7), total) if rows.shape[2] % 3 == 0 else (out, total)

    monkeypatch.setattr(probe.kernels.aligned, "kernel", uneven)
    monkeypatch.setattr(probe.kernels, "_steady", HONEST)
    found = probe.find(HFTarget(build("llama", torch.bfloat16, **CONTEXT)))
    assert found.exactness is None
    assert "fused attention" in found.reason


def test_validate_gives_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    target = exactly()
    found = validate(target)
    assert (found.verdict, found.bits) == ("PASS bits", True)
    assert validate(load_target(build("llama", torch.bfloat16))).verdict == "PASS rounding"
    stock = aligned.kernel

    def uneven(rows: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        out, total = stock(rows, *more)
        return (out * (1 + 2**-7), total) if rows.shape[0] > 1 else (out, total)

    monkeypatch.setattr(aligned, "kernel", uneven)
    assert validate(target).verdict == "FAIL"


def test_the_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", torch.bfloat16, **CONTEXT)
    first = probe.find(HFTarget(model))
    monkeypatch.setattr(probe, "probe", None)
    assert probe.find(HFTarget(model)) == first


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon-alibi", "gemma2"])
def test_families_that_cannot_say_so(name: str) -> None:
    model = build(name, torch.bfloat16)
    assert load_target(model, exact="auto").exact == "rounding"
    with pytest.raises(InputError, match="attention in code of its own"):
        load_target(model, exact="bits")


def test_float32_keeps_to_rounding_unless_asked() -> None:
    assert load_target(build("llama", torch.float32), exact="auto").exact == "rounding"
    with pytest.raises(InputError, match="exact is auto, bits or rounding"):
        load_target(build("llama"), exact="precise")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_no_further_from_the_truth_than_the_stock_forward(name: str) -> None:
    """Logits of single tokens, against the same weights in float64."""
    text = text_of(1, 300)
    stock, true = HFTarget(build(name, torch.bfloat16, **CONTEXT)), HFTarget(build(name, torch.bfloat16, **CONTEXT))
    true.model.double()
    true = HFTarget(true.model)
    errors = []
    for target in (exactly(name), stock):
        pairs = zip(plain(target, text, 180), plain(true, text, 180), strict=True)
        errors.append(torch.stack([(a[0].double() - b[0]).abs() for a, b in pairs]))
    assert errors[0].median() <= 1.1 * errors[1].median()
    assert errors[0].max() <= 1.5 * errors[1].max()


def test_trees_are_checked() -> None:
    """The helper's trees are trees: what it compares is what drafters propose."""
    tokens, parents, path = scattered(random.Random(1), text_of(1, 20), 3, 5)
    tree: DraftTree = tree_of([tokens], [parents])
    assert [tokens[i] for i in path] == text_of(1, 20)[3:9]
    assert all(parents[b] == a for a, b in itertools.pairwise(path))
    assert tree.deepest >= 5
