"""Trees that compiled code grows in one call are those that tensors grow step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bits import compiled, text_of
from compiled_code import FULL, HALF, needs_code
from grown_world import CASES, PROMPTS, Given, checked, generate, harmless_nan, late_and_at_once, same

import outrider
from outrider.backends.native import drafts
from outrider.backends.native import library as native
from outrider.backends.native.abi import INTEGER, PLAIN
from outrider.backends.native.drafts import Pairs
from outrider.backends.native.weights import Q8_0, Matrix
from outrider.core.types import Budget, DraftTree, Rows
from outrider.drafters import _weights, eagle, eagle3
from outrider.drafters._compiled import CompiledEagle, EagleDrafting, code_for
from outrider.drafters._growth import Growth
from outrider.nets.layer import LayerShape

pytestmark = needs_code
SHAPE = LayerShape(64, 4, 2, 32, 96, 64)


def network(kind: str, vocab: int, drafted: int) -> eagle.EagleNet | eagle3.Eagle3Net:
    """Random weights. `narrow`: an EAGLE-3 that is not as wide as its target, with an embedding of its own."""
    torch.manual_seed(0)
    if kind == "eagle":
        net: Any = eagle.EagleNet(eagle.EagleConfig(vocab=vocab, target_hidden=64, layer=SHAPE, draft_vocab=drafted))
    else:
        shape = replace(SHAPE, inputs=128) if kind == "eagle3" else LayerShape(32, 2, 1, 32, 96, 64)
        net = eagle3.Eagle3Net(
            eagle3.Eagle3Config(shape, vocab, drafted or vocab, 64, (0, 1, 2), own_embedding=kind == "narrow")
        )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.6 if kind == "narrow" else 0.3))
        if drafted:
            ids = torch.randperm(vocab)[:drafted].sort().values
            net.d2t.copy_(ids - torch.arange(drafted))
            if kind != "eagle":
                net.t2d.zero_()[ids] = True
    return net


def made(
    vocab: int,
    drafted: int,
    dtype: torch.dtype,
    growth: Growth,
    kind: str = "eagle",
    halves: bool = False,
    spoilt: bool = False,
) -> outrider.LLM:
    """A tiny random model with an EAGLE or EAGLE-3 of random weights."""
    target = compiled(vocab, dtype, halves)
    method: Any = eagle if kind == "eagle" else eagle3
    net = network(kind, vocab, drafted).to(dtype)
    if spoilt:
        net.fc.weight.data.fill_(float("nan"))
    drafter = method.drafter(net, target, growth)
    return outrider.LLM(target, None, drafter, "tiny", kind, frozenset({3}))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[DraftTree]:
    """Every proposal is made both ways; those of the compiled code are kept."""

    def equal(self: EagleDrafting, tree: DraftTree, rows: Rows, budget: Budget) -> None:
        drafter = self.drafter
        assert drafter.growth.compiled(rows, budget) is not None
        names, vocab = drafter.compiled.names, drafter.vocab
        same(tree, drafter.growth.propose(rows, *self._start(rows), budget, names, vocab)[0])

    return checked(monkeypatch, EagleDrafting, equal)


@pytest.mark.parametrize(("budget", "temperature"), CASES)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "narrow"])
def test_trees_are_those_of_single_steps(kind: str, budget: str, temperature: float, compared: list[DraftTree]) -> None:
    """In a batch of texts of unequal length; both precisions, and floats beside a target's weights of 16 bits; small
    vocabularies, trimmed ones and large ones."""
    for vocab, drafted, dtype, halves in (
        (97, 0, FULL, False), (97, 50, HALF, False), (97, 50, FULL, True),
        (6000, 5000, FULL, False),
    ):  # fmt: skip
        llm = made(vocab, drafted, dtype, Growth(scale=1.5), kind, halves)
        generate(llm, budget, temperature, 6)
    assert len(compared) >= 8
    assert max(tree.nodes for tree in compared) > 1


@pytest.mark.usefixtures("avx2")
def test_a_float32_drafter_rounds_its_weights_beside_a_bfloat16_target() -> None:
    """On processors that only multiply floats; a target of floats has drafters of floats."""
    llm, exact = made(97, 50, FULL, Growth(), halves=True), made(97, 50, FULL, Growth())
    target: Any = llm.target
    assert code_for(target, "float32") is target.code
    assert code_for(target, "bfloat16") is native.library("bfloat16", "bfloat16")
    assert code_for(target, "float64") is None
    for made_, kind in ((llm, INTEGER + Q8_0), (exact, PLAIN)):
        drafter: Any = made_.drafter
        assert {one.kind for one in drafter.compiled.kept if isinstance(one, Matrix)} == {kind}
    prompts = [text_of(i, 20 + 9 * i) for i in range(3)]
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    plain = llm.generate(prompts, budget=Given(Budget(1, 0)), **options)
    drafted = llm.generate(prompts, budget=Given(Budget(16, 6)), **options)
    assert [o.tokens for o in drafted] == [o.tokens for o in plain]
    assert sum(o.usage.drafted for o in drafted) > 20


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_small_cache_grows_with_the_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows leave and join while it does; no slot is allocated for tokens that may never be written."""
    prompts = [text_of(i, 20 + 9 * i) for i in range(5)]
    options: dict[str, Any] = {"max_new_tokens": 14, "temperature": 1.0, "seed": 3, "batch_size": 2}
    counts, slots = [], []
    for first in (drafts.FIRST, 8):
        monkeypatch.setattr(drafts, "FIRST", first)
        llm: Any = made(97, 50, FULL, Growth(scale=1.5), kind)
        results = llm.generate(prompts, budget=Given(Budget(16, 6)), **options)
        counts.append([(o.tokens, o.usage.drafted, o.usage.accepted, o.usage.rounds) for o in results])
        slots.append(llm.drafter.open([()], 1 << 20).cache.keys.shape[1])
    assert counts[0] == counts[1]
    assert slots == [1024, 8]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "narrow"])
def test_pending_pairs_are_read_in_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    late_and_at_once(made(97, 50, FULL, Growth(scale=1.5), kind), monkeypatch)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "narrow"])
@torch.no_grad()
def test_texts_are_read_as_by_tensors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys and values of all pairs, and the vector after the last one: of many pairs at once, and of few."""
    drafter: Any = made(97, 50, FULL, Growth(), kind).drafter
    assert isinstance(drafter, CompiledEagle)
    monkeypatch.setattr(_weights, "compiled", lambda *_: None)
    full: Any = made(97, 50, FULL, Growth(), kind).drafter
    result, right = (one.open([()] * 4, 200) for one in (drafter, full))
    for counts in ((150, 7, 1, 31), (3, 0, 16, 1), (0, 17, 40, 0)):
        features = [torch.randn(4, max(counts), 64) for _ in drafter.taps]
        tokens = torch.randint(97, (4, max(counts)))
        spelled = [row[:n] for row, n in zip(tokens.tolist(), counts, strict=True)]
        result.pairs.append(Pairs([part.numpy() for part in features], [range(n) for n in counts], spelled, range(4)))
        right.waiting.put((torch.cat(features, -1), tokens, list(counts)))
        result.read()
        right._read()
        assert result.cache.host == right.cache.host
        assert np.allclose(result.last, right.last[:, 0], atol=1e-3, rtol=1e-3)
        for row, n in enumerate(result.cache.host):
            for name in ("keys", "values"):
                ours, theirs = (getattr(drafting.cache, name)[row, :n] for drafting in (result, right))
                assert np.allclose(ours, theirs, atol=1e-3, rtol=1e-3), (name, row)


def test_rejection_ranks_without_noise(compared: list[DraftTree]) -> None:
    llm = made(97, 50, FULL, Growth())
    llm.generate(PROMPTS[:1], max_new_tokens=8, temperature=1.0, seed=4, rule="rejection", budget=Given(Budget(16, 4)))
    assert compared


def test_nan_weights_change_no_text() -> None:
    harmless_nan(made(97, 0, FULL, Growth(), spoilt=True))
