"""Features of packed rows are those of each document alone, whatever the family's masks; the cache keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_code import needs_code
from small import build
from training_world import documents

from outrider.backends.choose import load
from outrider.backends.native.library import library
from outrider.backends.native.target import NativeTarget
from outrider.backends.torch import HFTarget, load_target
from outrider.backends.torch.module import ModuleTarget
from outrider.backends.torch.tensors import embed
from outrider.drafters import _heads
from outrider.params import InputError
from outrider.training.data import Batch, Document, pack
from outrider.training.features import FeatureCache, fingerprint, hidden, see

FAMILIES = ["llama", "mistral", "gemma3", "qwen2-sliding", "qwen3", "gpt_neox", "gpt2", "mixtral", "phi3", "opt"]


def batch(length: int = 48, share: bool = True) -> Batch:
    return pack(documents(9, 1, 5, 90), length, share=share)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_sees_only_itself(family: str) -> None:
    """Against the stock forward of each document by itself; windows are smaller than the documents."""
    target, rows = HFTarget(build(family)), batch()
    assert int(rows.documents.max()) > 0, "documents share rows"
    result = see(target, rows, (1, -1))
    for r in range(len(rows.keys)):
        for number in range(int(rows.documents[r].max()) + 1):
            here = (rows.documents[r] == number).nonzero()[:, 0]
            with torch.no_grad():
                out = target.model(rows.tokens[r, here][None], output_hidden_states=True, use_cache=False)
            for tap in (1, -1):
                torch.testing.assert_close(result.features[tap][r, here], out.hidden_states[tap][0], rtol=0, atol=1e-9)


@needs_code
@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "qwen3"])
def test_compiled_passes_give_the_features_of_the_stock_forward(family: str) -> None:
    """Documents that share rows, rows of several lengths, padding, and more tokens than one chunk of a prompt has."""
    size = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 2048}
    model = build(family, torch.float32, **size)
    for rows in (batch(), pack([Document((5, 7) * 300, (True,) * 600, "a"), *documents(5, 1, 5, 90)], 700)):
        result, true = see(ModuleTarget(model), rows, (1, -1)), see(HFTarget(model), rows, (1, -1))
        there = rows.documents >= 0
        assert not bool(there.all()), "some places are padding"
        for tap in (1, -1):
            torch.testing.assert_close(result.features[tap][there], true.features[tap][there], rtol=1e-4, atol=1e-4)
            assert bool((result.features[tap][~there] == 0).all())


def test_families_that_cannot_share_rows_are_refused() -> None:
    target = HFTarget(build("bloom"))
    with pytest.raises(InputError, match="pack one to a row"):
        see(target, batch(), (-1,))
    rows = batch(share=False)
    result = see(target, rows, (-1,)).features[-1]
    n = int((rows.documents[0] >= 0).sum())
    with torch.no_grad():
        alone = target.model(rows.tokens[:1, :n], output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(result[0, :n], alone[0], rtol=0, atol=1e-9)


def test_gradients_flow_only_where_they_are_wanted() -> None:
    target = HFTarget(build("llama"))
    assert not see(target, batch(), (-1,)).features[-1].requires_grad
    assert hidden(target, batch())[-1].requires_grad


@pytest.mark.parametrize("half", [False, True])
def test_the_cache_gives_back_what_it_was_given(tmp_path: Path, half: bool) -> None:
    """Also to rows that are packed otherwise, of which some documents are new."""
    target, rows = HFTarget(build("llama", torch.float32)), batch()
    cache = FeatureCache(tmp_path, (1, -1), half, "target")
    part = rows.rows([0, 2])
    first, again = cache.see(target, part), cache.see(target, part)
    true = see(target, part, (1, -1), half)
    assert first.read == int((part.documents >= 0).sum())
    assert again.read == 0
    there = part.documents >= 0
    for tap in (1, -1):
        assert torch.equal(first.features[tap], again.features[tap])
        bounds = {"rtol": 0.01, "atol": 0.0} if half else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(first.features[tap][there], true.features[tap][there], **bounds)
    reopened, other = FeatureCache(tmp_path, (1, -1), half, "target"), pack(documents(9, 1, 5, 90), 60)
    result, true = reopened.see(target, other), see(target, other, (1, -1), half)
    assert result.read == int((other.documents >= 0).sum()) - first.read
    there = other.documents >= 0
    torch.testing.assert_close(result.features[-1][there], true.features[-1][there], rtol=0.05, atol=0.05)


def test_precisions_have_fingerprints_of_their_own() -> None:
    whole, half = (HFTarget(build("llama", dtype)) for dtype in (torch.float32, torch.bfloat16))
    again = HFTarget(half.model.to(torch.float32))  # the same numbers
    every = {fingerprint(target, autocast) for target in (half, whole) for autocast in (False, True)}
    assert len(every) == 4
    assert fingerprint(again) != fingerprint(HFTarget(build("llama", torch.bfloat16)))


def test_processes_share_the_space_of_a_cache_and_a_full_disk_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rows = HFTarget(build("llama", torch.float32)), batch()
    alone, shared = (FeatureCache(tmp_path, (-1,), False, "target", 20_000, sharing) for sharing in (1, 4))
    assert shared.free == alone.free // 4 > 0

    def full(*given: Any) -> None:
        raise InputError("the disk is full")

    monkeypatch.setattr("outrider.training.features.files.write", full)
    expected = see(target, rows, (-1,))
    there = rows.documents >= 0
    for _ in range(2):
        assert torch.equal(alone.see(target, rows).features[-1][there], expected.features[-1][there])
    assert alone.free == 0


def test_a_cache_is_bounded(tmp_path: Path) -> None:
    target, rows = HFTarget(build("llama", torch.float32)), batch()
    cache = FeatureCache(tmp_path, (-1,), False, "target", limit=20_000)
    first = cache.see(target, rows)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert 10_000 < size <= 20_000
    again = cache.see(target, rows)
    assert 0 < again.read < first.read
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == size


def test_another_process_may_write_into_the_folder(tmp_path: Path) -> None:
    """Its unfinished files may vanish between their listing and their measuring, as a link without a target has."""
    (tmp_path / ".partial-other").symlink_to(tmp_path / "renamed")
    (tmp_path / "kept").write_bytes(bytes(100))
    mark = len('{"target": "target"}')
    assert FeatureCache(tmp_path, (-1,), False, "target", limit=1000).free == 900 - mark


@pytest.mark.skipif(library("bfloat16", "float32") is None, reason="native passes need AVX2 or NEON, and a compiler")
@pytest.mark.parametrize("name", ["demo"])
def test_native_targets_give_the_features_of_the_stock_model(name: str) -> None:
    """Hidden states, and what a drafter is given of embeddings and head; documents share rows."""
    native, stock = load(name, dtype="float32").target, load_target(name, dtype="float32")
    assert isinstance(native, NativeTarget)
    assert isinstance(stock, HFTarget)
    rows, taps = batch(), (2, -1)
    result, true, there = see(native, rows, taps), see(stock, rows, taps), rows.documents >= 0
    for tap in taps:
        torch.testing.assert_close(result.features[tap][there], true.features[tap][there], rtol=1e-4, atol=1e-4)
        assert bool((result.features[tap][~there] == 0).all())
    ids = torch.tensor([3, 5, 80])
    x = true.features[-1][there]
    logits = [_heads.rows(of, ids)(x) for of in (native, stock)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(embed(native, rows.tokens), embed(stock, rows.tokens))
