"""The instrument measures what is known: a target of known distribution and cost, a drafter of known alpha."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from instrument import VOCAB, Clock, Lab

import outrider.bench.runner
import outrider.core.clock
from outrider.bench.runner import Runner
from outrider.bench.types import Method
from outrider.core.protocols import Prefill, TargetOutput
from outrider.core.types import Budget, DraftTree, Rows
from outrider.testing import TableSession, TableTarget, plain
from papers import formulas as theory
from papers.oracles import OracleDrafter, OracleDrafting

PASS = 0.010  # seconds


@dataclass(frozen=True)
class Slow(TableTarget):
    """A table whose passes take PASS seconds of the clock, whatever they hold."""

    clock: Clock = field(default_factory=Clock, compare=False)

    def open(self, capacity: int) -> TableSession:
        return SlowSession(self, capacity)


class SlowSession(TableSession):
    def prefill(self, prompts: Sequence[Sequence[int]], taps: tuple[int, ...] = ()) -> Iterator[Prefill]:
        self.target.clock.sleep(PASS)  # type: ignore[attr-defined]
        yield from super().prefill(prompts, taps)

    def forward(self, tree: DraftTree, taps: Any = (), since: int = 0, embeds: Any = None) -> TargetOutput:
        self.target.clock.sleep(PASS)  # type: ignore[attr-defined]
        return super().forward(tree, taps, since, embeds)


@dataclass(frozen=True)
class SlowOracle(OracleDrafter):
    """Right with probability alpha, independently; a token takes c passes."""

    clock: Clock = field(default_factory=Clock)
    c: float = 0.1

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> SlowOracleDrafting:
        made = super().open(prompts, capacity)
        return SlowOracleDrafting(self, made.texts, random.Random(repr(prompts)))


class SlowOracleDrafting(OracleDrafting):
    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        tree = super().propose(rows, budget)
        self.drafter.clock.sleep(self.drafter.c * PASS * tree.deepest)  # type: ignore[attr-defined]
        return tree


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(outrider.bench.runner, "perf_counter", made)
    monkeypatch.setattr(outrider.core.clock, "perf_counter", made)
    return made


@pytest.mark.parametrize(("alpha", "gamma", "c"), [(0.8, 4, 0.1), (0.5, 2, 0.3)])
def test_known_alpha_and_cost(tmp_path: Path, clock: Clock, alpha: float, gamma: int, c: float) -> None:
    """tau is (1 - a^(g+1)) / (1 - a), alpha is a, and the speed-up is Theorem 3.8's, within the intervals stated."""
    target = Slow(VOCAB, order=2, seed=3, context=1024, scale=1.0, clock=clock)
    lab = Lab(tmp_path, target, tokens=200, turns=(1,) * 8)
    runner = lab.runner()
    ids = [runner.ids(lab.task, p, []) for p in lab.task.prompts]
    answers = {tuple(i): plain(target, i, lab.tokens + gamma + 1) for i in ids}
    lab.drafter("oracle", SlowOracle(answers, alpha, VOCAB, clock=clock, c=c))
    method = Method("oracle", budget=f"{gamma + 1}x{gamma}")
    cells = lab.measure([Method("none"), method])
    cell, none = cells[method.name], cells["none"]
    assert cell["state"] == none["state"] == "done", cell["reason"]
    assert cell["same_text"] == cell["compared"] == 8
    assert inside(cell["tau"], theory.expected_tokens(alpha, gamma))
    assert inside(cell["alpha"], alpha)
    assert inside(cell["speedup"], theory.speedup(alpha, gamma, c))
    assert cell["speedup"][2] - cell["speedup"][1] < 0.35 * cell["speedup"][0]
    assert none["tokens_per_second"][0] == pytest.approx(1 / PASS, rel=1e-3)
    assert cell["prefill_ms"][0] == pytest.approx(1e3 * PASS, rel=1e-3)
    assert cell["round_ms"]["verify"] == pytest.approx(1e3 * PASS, rel=1e-3)
    for d in cell["depths"]:
        assert d["rate"][0] == pytest.approx(alpha, abs=0.1)


def test_a_wrong_alpha_is_outside(tmp_path: Path, clock: Clock) -> None:
    """The intervals are narrow enough to tell alpha 0.8 from 0.7."""
    target = Slow(VOCAB, order=2, seed=3, context=1024, scale=1.0, clock=clock)
    lab = Lab(tmp_path, target, tokens=200, turns=(1,) * 8)
    runner = lab.runner()
    ids = [runner.ids(lab.task, p, []) for p in lab.task.prompts]
    answers = {tuple(i): plain(target, i, lab.tokens + 5) for i in ids}
    lab.drafter("oracle", SlowOracle(answers, 0.7, VOCAB, clock=clock))
    cell = lab.measure([Method("none"), Method("oracle", budget="5x4")])["oracle, 5x4"]
    assert not inside(cell["alpha"], 0.8)
    assert not inside(cell["tau"], theory.expected_tokens(0.8, 4))
    assert not inside(cell["speedup"], theory.speedup(0.8, 4, 0.1))


def test_a_drift_of_the_machine_meets_all_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that becomes slower and slower changes no ratio: methods take turns."""
    made = Drifting()
    monkeypatch.setattr(outrider.bench.runner, "perf_counter", made)
    monkeypatch.setattr(outrider.core.clock, "perf_counter", made)
    lab = Lab(tmp_path, Slow(VOCAB, order=2, seed=3, context=1024, clock=made), turns=(1,) * 8)
    twin = Method("none", label="twin")
    cells = lab.measure([Method("none"), twin], repeats=2, peers={})
    assert cells["twin"]["speedup"][0] == pytest.approx(1.0, abs=0.02)
    first, last = (sum(t.seconds for t in s.turns) for s in (lab_samples(tmp_path)[0], lab_samples(tmp_path)[-1]))
    assert last > 2 * first


class Drifting(Clock):
    def sleep(self, seconds: float) -> None:
        self.now += seconds * (1 + self.now)


def lab_samples(folder: Path) -> list[Any]:
    from outrider.bench.store import read_samples

    return list(read_samples(folder))


def inside(interval: Sequence[float], value: float) -> bool:
    return interval[1] <= value <= interval[2]


def test_the_order_is_turned_round(tmp_path: Path) -> None:
    """A B, B A, A B, ...: each method is first as often as the other."""
    lab = Lab(tmp_path, turns=(1,) * 4)
    seen: list[str] = []

    class Noted:
        def __init__(self, name: str, inner: Any):
            self.name, self.inner = name, inner

        def run(self, prompts: Any, ask: Any) -> Any:
            if ask.limit > 1:  # a call for one token measures the prompt's time
                seen.append(self.name)
            return self.inner.run(prompts, ask)

    methods = [Method("none"), Method("none", label="twin")]
    runner: Runner = lab.runner()
    runner.open(methods)
    runner.peers = {name: Noted(name[0], peer) for name, peer in runner.peers.items()}
    assert runner.run(lab.group(methods, repeats=2))
    assert "".join(seen) == "nt" + "nttnnttn" + "tnnttnnt"
