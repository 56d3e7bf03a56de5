"""Recorded passes: the stock forward's logits for every shape of tree, and never trusted without proof."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import build
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import outrider
from outrider.backends.torch import HFTarget, exact, graphs, hf, load, load_target
from outrider.core.protocols import TargetOutput
from outrider.core.tree import chain, from_paths
from outrider.core.types import Array
from outrider.params import InputError

FAMILIES = [
    "llama", "qwen2", "qwen2-sliding", "qwen3", "mistral", "mixtral", "gpt_neox", "gpt2", "gemma2", "gemma3", "phi3",
    "opt", "olmo2", "deepseek_v3",
]  # fmt: skip
EXACT = {"gpt2": 1e-13, "deepseek_v3": 1e-13}  # float64; the others are equal bit for bit
TREES = [
    [[[5, 6], [5, 7], [8]], [[1], [2, 3]]],
    [[[9]], [[4, 4, 4]]],
    [[], []],
    [[[1, 2, 3, 4, 5], [1, 2, 9], [7, 8], [6]], [[3]]],
]


def rounds(target: HFTarget, prompts: list[list[int]], taps: tuple[int, ...] = ()) -> list[TargetOutput]:
    """A few rounds on ragged rows, keeping a path off the first chain each time."""
    session = target.open(64)
    for _ in session.prefill(prompts, taps):
        pass
    looks = []
    for paths in TREES:
        tree, _ = from_paths([3] * len(prompts), paths[: len(prompts)])
        looks.append(session.forward(tree, taps))
        session.keep([[0, n - 1][:n] for n in tree.size.tolist()])
    return looks


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recording_equals_the_stock_forward(family: str) -> None:
    """Rows alone, ragged and level, with and without hidden states; two families meet every pair of these."""
    model = build(family)
    plain, recorded = HFTarget(model), HFTarget(model)
    recorded.compile()
    alone, ragged, level = [[1, 2, 3, 4]], [[1, 2, 3, 4, 5, 6], [7, 8]], [[1, 2], [3, 4]]
    cases = [(alone, ()), (ragged, (1, -1)), (level, ())]
    cases += [(alone, (1, -1)), (ragged, ()), (level, (1, -1))] if family in ("llama", "gemma2") else []
    for prompts, taps in cases:
        for a, b in zip(rounds(plain, prompts, taps), rounds(recorded, prompts, taps), strict=True):
            np.testing.assert_allclose(a.logits, b.logits, rtol=0, atol=EXACT.get(family, 0.0))
            for t in taps:
                np.testing.assert_allclose(a.features[t], b.features[t], rtol=0, atol=EXACT.get(family, 0.0))
    assert recorded.graphs is not None
    assert None not in recorded.graphs.made.values(), "every kind of pass was recorded and none was dropped"


def test_prompts_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's later chunks ask for the logits of their last token alone, which a recorded pass does not know of."""
    monkeypatch.setattr(hf, "CHUNK", 4)
    model = build("llama")
    plain, recorded = HFTarget(model), HFTarget(model)
    recorded.compile()
    recorded.warm()
    for prompts in ([list(range(1, 12))], [list(range(1, 12)), [3, 4, 5, 6, 7]]):
        for a, b in zip(chunks(plain, prompts), chunks(recorded, prompts), strict=True):
            assert np.array_equal(a, b)
        for a, b in zip(rounds(plain, prompts), rounds(recorded, prompts), strict=True):
            assert np.array_equal(a.logits, b.logits)


def test_a_closed_target_records_nothing_more() -> None:
    """What a server meets is recorded beforehand; a pass of another kind takes the model's own forward."""
    model = build("llama")
    plain, recorded = HFTarget(model), HFTarget(model)
    recorded.compile(patience=100)
    recorded.record((-1,))
    assert recorded.graphs is not None
    known = set(recorded.graphs.made)
    assert known
    for prompts in ([[1, 2, 3, 4]], [[1, 2, 3], [4]], [[1, 2], [3, 4]]):
        for taps in ((-1,), (1,)):
            for a, b in zip(rounds(plain, prompts, taps), rounds(recorded, prompts, taps), strict=True):
                assert np.array_equal(a.logits, b.logits)
                assert np.array_equal(a.features[taps[0]], b.features[taps[0]])
    assert set(recorded.graphs.made) == known
    plain.record()  # never recorded: nothing happens
    assert plain.graphs is None


def test_once_it_pays_every_kind_is_recorded_soon() -> None:
    """A drafter that rests while plain passes are recorded must not be judged by tree passes that are not."""
    target = HFTarget(build("llama"))
    target.compile(patience=6)
    assert target.graphs is not None
    session = target.open(64)
    for _ in session.prefill([[1, 2, 3]]):
        pass

    def passes(nodes: int, times: int) -> int:
        for _ in range(times):
            session.forward(chain([list(range(1, nodes + 1))]))
            session.keep([[0]])
        assert target.graphs is not None
        return len(target.graphs.made)

    assert passes(1, 6) == 0
    assert passes(1, 1) == 1
    assert passes(4, graphs.SOON) == 1
    assert passes(4, 1) == 2


def chunks(target: HFTarget, prompts: list[list[int]]) -> list[Array]:
    return [chunk.output.logits for chunk in target.open(64).prefill(prompts)]


def test_few_recordings_serve_a_text_that_keeps_its_bits() -> None:
    """Plain passes and drafts, in front of the first head and behind it. What few passes need is not recorded."""
    model = build("llama", torch.bfloat16, max_position_embeddings=2048)
    try:
        target = load_target(model, exact="bits")
    except InputError as error:
        pytest.skip(f"on this processor {error}")
    assert isinstance(target, HFTarget)
    assert target.exactness is not None
    target.use(replace(target.exactness, lengths=exact.LENGTHS), target.blocks)  # as many courses as there can be
    target.compile()
    assert target.graphs is not None
    text = [int(t) for t in torch.randint(1, 60, (300,), generator=torch.Generator().manual_seed(0))]
    for length in (40, 58, 62, 63, 80, 90, 95, 120, 127, 200, 255):
        session = target.open(300)
        for _ in session.prefill([text[:length]]):
            pass
        trees = [chain([text[length : length + 1]])]
        trees += [from_paths([text[length]], [paths])[0] for paths in ([[5, 6, 7], [8]], [[5, 6, 7, 8, 9, 10], [1, 2]])]
        for tree in trees:
            session.forward(tree)
    assert None not in target.graphs.made.values()
    assert len(target.graphs.made) in (2, 4)  # plain passes have recordings of their own where they are not padded


def test_a_wrong_recording_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """A model whose Python looks at the data cannot be recorded: the proof notices, and the text stays right."""
    model = build("llama")
    plain, recorded = HFTarget(model), HFTarget(model)
    recorded.compile()
    stock = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        out.logits = out.logits * (2.0 if kwargs["input_ids"].shape[1] > 3 else 1.0)  # a constant in a recording
        return out

    model.forward = forward
    for a, b in zip(rounds(plain, [[1, 2, 3]]), rounds(recorded, [[1, 2, 3]]), strict=True):
        assert np.array_equal(a.logits, b.logits)
    assert recorded.graphs is not None
    assert None in recorded.graphs.made.values()
    assert "differs" in caplog.text


def test_texts_are_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    stock = outrider.load(model, "lookup")
    recorded = outrider.load(model, "lookup", compile=True)
    law: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.8, "seed": [1, 2, 3]}
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5], [6, 7, 8]]
    calls = []
    replay = graphs.Graphs.run
    monkeypatch.setattr(graphs.Graphs, "run", lambda *a: calls.append(1) or replay(*a))
    assert [o.tokens for o in stock.generate(prompts, **law)] == [o.tokens for o in recorded.generate(prompts, **law)]
    assert calls


def folder(kind: str, where: Path) -> str:
    """A model with a tokenizer, as users have it."""
    build(kind).save_pretrained(where)
    words = Tokenizer(models.WordLevel({"<end>": 0, "the": 1}, unk_token="the"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(where)
    return str(where)


def test_models_loaded_by_name_are_recorded_after_some_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = folder("llama", tmp_path)
    monkeypatch.setattr(load, "PATIENCE", 3)
    found = outrider.load(where, "lookup", dtype="float64")
    never = outrider.load(where, "lookup", dtype="float64", compile=False)
    recordings = found.target.graphs  # type: ignore[attr-defined]
    assert never.target.graphs is None  # type: ignore[attr-defined]
    assert not recordings.made, "loading costs nothing"
    law: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.8, "seed": 1, "budget": "4x3"}
    short = found.generate([1, 2, 3, 1, 2, 3], **{**law, "max_new_tokens": 3})[0]
    assert short.usage.rounds < 3
    assert not recordings.made, "a short text does not pay for a recording"
    assert found.generate([1, 2, 3, 1, 2, 3], **law)[0].tokens == never.generate([1, 2, 3, 1, 2, 3], **law)[0].tokens
    assert recordings.made
    assert None not in recordings.made.values()
    assert outrider.load(build("llama"), "none").target.graphs is None, "a model in memory may change"  # type: ignore[attr-defined]


def test_a_family_that_cannot_be_recorded_is_loaded_without_a_word(tmp_path: Path) -> None:
    assert outrider.load(folder("bloom", tmp_path), "none").target.graphs is None  # type: ignore[attr-defined]


def test_what_cannot_be_recorded_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="bloom reads positions off its cache"):
        outrider.load(build("bloom"), "none", compile=True)
