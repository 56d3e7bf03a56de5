"""Bytes that a state keeps: every tensor once, weights left out; on the demo target, what grows and what does not."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from outrider.backends.torch.session import TreeSession
from outrider.bench import methods, peers
from outrider.bench.models import Models
from outrider.bench.runner import Group, Runner
from outrider.bench.store import Store
from outrider.bench.types import Ask, Method, Prompt, Task
from outrider.core.protocols import TargetOutput
from outrider.drafters._hybrid import Memory
from outrider.drafters.mamba import MambaDrafting
from outrider.engine import Batch, Request, Row
from outrider.nets.mamba import State
from outrider.testing import TableTarget
from papers.measure import weigh
from papers.memory import held, peak

LENGTHS = (40, 300, 900)


# -- what is counted ---------------------------------------------------------------------------------------------------


def test_a_tensor_counts_by_its_storage() -> None:
    assert held(torch.zeros(3, 5)) == 60
    assert held(torch.zeros(3, 5, dtype=torch.float64)) == 120
    assert held(torch.zeros(3, dtype=torch.bool)) == 3
    assert held(torch.zeros(0)) == 0
    assert held(torch.zeros(100)[:1]) == 400, "what a view keeps alive is all of it"
    assert held(torch.zeros(1).expand(1000)) == 4


def test_views_of_one_storage_count_once() -> None:
    base = torch.zeros(4, 8)
    assert held([base, base, base[1:], base.T, base.view(-1)[3:7]]) == 128
    assert held([base[0], base[3]]) == 128
    assert held([base, base.clone()]) == 256


def test_nested_states() -> None:
    a, b, c = torch.zeros(2, 3, 4), torch.zeros(2, 3, 5), torch.zeros(7, dtype=torch.int64)
    output = TargetOutput(a, {-1: b})
    assert held(output) == 96 + 120
    assert held({"x": [output, (c, None, 3, "text")], "y": {b}}) == 96 + 120 + 56
    assert held([State(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 3, 3))] * 2) == 16 + 36
    assert held(None) == held("text") == held([]) == held(7) == 0


def test_a_ring_ends() -> None:
    ring: list[Any] = [torch.zeros(2)]
    ring.append(ring)
    assert held(ring) == 8


def test_the_peak_begins_anew_with_each_look() -> None:
    peak()
    before = peak()
    taken = torch.ones(2**25)  # 128 MiB, let go before the look
    del taken
    assert peak() - before > 100 * 2**20
    assert peak() - before < 60 * 2**20


def test_weights_are_no_state() -> None:
    table = TableTarget(5, order=1)
    assert held([torch.nn.Linear(9, 9), table, torch.zeros(1)]) == 4
    assert held({"drafter": Models(compile=False).with_drafter("plain", "eagle:demo/hass").drafter}) == 0


def test_caches_of_transformers_count() -> None:
    """Recurrent drafters of other families keep stock caches."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert held(Memory(cache, 3)) == 2 * 96


# -- the demo target ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(device="cpu", compile=False)


@pytest.fixture(scope="module")
def text(models: Models) -> list[int]:
    file = files("outrider") / "demo" / "heldout.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:30]]
    return [i for row in rows for i in models.llm().encode(row.get("messages") or row["text"])]


def running(models: Models, spec: str, prompts: list[list[int]], rounds: int = 4, limit: int = 64) -> Batch:
    """A batch after some rounds, all of its rows still there."""
    engine = models.with_drafter("plain", spec).engine("coupled", methods.budget_of("16x4"))
    with torch.no_grad():
        batch, _ = Batch.start(engine, [Row(Request(p, i, limit), i) for i, p in enumerate(prompts)])
        assert batch is not None
        for _ in range(rounds):
            batch.round()
    return batch


def test_a_session_holds_its_keys_and_values(models: Models, text: list[int]) -> None:
    sizes = []
    for n in LENGTHS:
        session = running(models, "none", [text[:n]]).session
        assert isinstance(session, TreeSession)
        slots = n + 64 + 64  # prompt, new tokens, slots of a tree
        assert session.cache.bytes == 24 * 2 * 64 * 4 * min(1024, slots), "layers, keys and values, width, float32"
        assert session.cache.bytes <= held(session) <= session.cache.bytes + 4096, "and a few numbers"
        sizes.append(held(session))
    assert sizes == sorted(set(sizes))
    both = running(models, "none", [text[:40], text[40:80]]).session
    assert held(both) == pytest.approx(2 * sizes[0], rel=1e-3)


def test_plain_decoding_drafts_with_nothing(models: Models, text: list[int]) -> None:
    assert held(running(models, "none", [text[:40]]).drafting) == 0
    assert held(running(models, "lookup", [text[:40]]).drafting) == 0


def test_the_memory_of_eagle_grows_with_the_text(models: Models, text: list[int]) -> None:
    sizes = [held(running(models, "eagle:demo/hass", [text[:n]]).drafting) for n in LENGTHS]
    slots = [n + 128 for n in LENGTHS]
    a, b, c = sizes
    assert a < b < c
    assert (b - a) / (slots[1] - slots[0]) == pytest.approx((c - b) / (slots[2] - slots[1]), rel=0.1), "as a line"


def test_the_memory_of_a_draft_model_holds_its_cache_and_not_its_weights(models: Models, text: list[int]) -> None:
    batch: Any = running(models, "model:demo", [text[:40]])
    cache = batch.drafting.inner.session.cache.bytes
    assert cache <= held(batch.drafting) <= cache + 4096


def test_the_memory_of_a_mamba_is_constant(models: Models, text: list[int]) -> None:
    sizes = []
    for n in LENGTHS:
        drafting: Any = running(models, "mamba:demo", [text[:n]]).drafting.inner  # type: ignore[attr-defined]
        assert isinstance(drafting, MambaDrafting)
        state, buffer = drafting.state, drafting.buffer
        assert buffer is not None
        sizes.append(held(drafting))
        assert sizes[-1] == state.bytes + buffer.conv.nbytes + buffer.ssm.nbytes
    assert len(set(sizes)) == 1


def test_samples_report_the_memory_in_use(models: Models, text: list[int], tmp_path: Path) -> None:
    llm = models.llm()
    prompts = tuple(Prompt(str(n), (llm.decode(text[:n]),)) for n in (30, 200))
    runner = Runner(models, Store.open(tmp_path, {"arguments": {}, "started": ""}), tokens=6, weigh=weigh)
    rows = (Method("none"), Method("eagle:demo/hass", budget="16x4"), Method("mamba:demo", budget="16x4"))
    runner.open(rows)
    assert runner.run(Group(Task("two", prompts, raw=True), 0.0, 1, rows, 1))
    report = {(s.method.partition(",")[0], s.chunk): s.turns[0].memory for s in runner.store.samples}
    assert len(report) == 6
    assert all(set(m) == {"cache", "drafter", "peak"} for m in report.values())
    slot = 24 * 2 * 64 * 4
    for (_, chunk), memory in report.items():
        n = next(s.lengths[0] for s in runner.store.samples if s.chunk == chunk)
        assert memory["cache"] == pytest.approx(slot * (n + 6 + 64), rel=1e-3)
    assert report["none", 0]["drafter"] == report["none", 1]["drafter"] == 0
    assert 0 < report["eagle:demo/hass", 0]["drafter"] < report["eagle:demo/hass", 1]["drafter"]
    assert report["mamba:demo", 0]["drafter"] == report["mamba:demo", 1]["drafter"] > 0


def test_a_batch_is_measured_completely_or_not_at_all(models: Models, text: list[int]) -> None:
    """Rows that ended before the others have left their states."""
    prompts = [text[:30], text[30:60], text[60:90]]
    ask = Ask(20, 0.0, (1, 2, 3), frozenset())
    first = peers.load(Method("none"), models).run(prompts, ask)
    end = next(t for t in first.tokens[0][2:8] if t not in first.tokens[1] + first.tokens[2])
    early = Ask(20, 0.0, (1, 2, 3), frozenset({end}))
    for spec in ("none", "eagle:demo/hass", "mamba:demo"):
        made, peer = running(models, spec, prompts, 4, 20), peers.load(Method(spec, budget="16x4"), models)
        answer = peer.run(prompts, early)
        assert len(answer.tokens[0]) < len(answer.tokens[1]) == 20
        assert weigh(answer, 3) == {}, spec
        alone = weigh(peer.run(prompts[:1], replace(ask, seeds=(1,))), 1)
        assert held(made.session) == pytest.approx(3 * alone["cache"], rel=0.01)
        assert held(made.drafting) == pytest.approx(3 * alone["drafter"], rel=0.1)
        if spec == "none":
            report = weigh(first, 3)
            assert (report["cache"], report["drafter"]) == (held(made.session), 0)
