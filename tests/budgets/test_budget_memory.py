"""What the budget has learnt comes back in the next run, and a file that cannot be read or written harms nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from play import rows_of
from small import build

import outrider
from outrider.budgets import memory
from outrider.budgets.adaptive import LEARN, AdaptiveBudget
from outrider.budgets.budgeter import Report
from outrider.budgets.memory import Memory, file_of
from outrider.core.price import Price
from outrider.core.types import Budget
from outrider.drafters._calibrated import Family, Fit, Rates
from outrider.drafters._gate import Gate


def learnt(rounds: int = 40) -> AdaptiveBudget:
    budget = AdaptiveBudget()
    for i in range(rounds):
        depth = 0 if i % 4 == 1 else 3
        hits = [1, 1, 0][:depth]
        budget.learn(Report(1, depth, 1 + depth, 0.01 * depth, 1 + 0.1 * depth, 0.001, hits, 0.5 * depth))
    return budget


def test_it_comes_back(tmp_path: Path) -> None:
    """Costs and rates as they were; a depth's record weighs no more than a prior; nothing is tried anew."""
    budget, fit = learnt(), Fit(0.4)
    Memory(tmp_path / "folder" / "f.json", budget, [fit]).keep()
    again, other = AdaptiveBudget(), Fit()
    assert Memory(tmp_path / "folder" / "f.json", again, [other]).recall()
    assert other.scale == 0.4
    assert again.cost.rounds_by_depth(1, 8) == pytest.approx(budget.cost.rounds_by_depth(1, 8))
    assert (again.cost, again.acceptance) == (budget.cost, budget.acceptance)
    assert not again.measuring


def replaced(state: dict[str, Any], part: int, **fields: Any) -> dict[str, Any]:
    """The content of a file with other values of a part, and the checksum that a program would write."""
    state["parts"][part] |= fields
    return state | {"sha256": memory._digest(state["parts"])}


@pytest.mark.parametrize(
    "damaged",
    [
        lambda state: "{",
        lambda state: "[]",
        lambda state: json.dumps(state)[:-9],
        lambda state: json.dumps(state).replace("0.4", "0.5", 1),
        lambda state: json.dumps(state | {"parts": []}),
        lambda state: json.dumps(state | {"format": 6}),
        lambda state: json.dumps(replaced(state, 2, more=1)),
        lambda state: json.dumps(replaced(state, 2, scale=float("nan"))),
        lambda state: json.dumps(replaced(state, 0, verify=3)),
    ],
)  # fmt: skip
def test_unreadable_statistics_are_dropped(tmp_path: Path, damaged: Callable[[dict[str, Any]], str]) -> None:
    """Damaged, edited, or written by another version of the program."""
    file = tmp_path / "f.json"
    Memory(file, learnt(), [Fit(0.4)]).keep()
    file.write_text(damaged(json.loads(file.read_text())))
    budget, fit = AdaptiveBudget(), Fit()
    assert not Memory(file, budget, [fit]).recall()
    assert (budget, fit) == (AdaptiveBudget(), Fit())


def test_a_file_of_other_learners_is_forgotten(tmp_path: Path) -> None:
    file, budget = tmp_path / "f.json", AdaptiveBudget()
    Memory(file, learnt(), [Fit(0.4)]).keep()
    for learners in ([], [Fit(), Fit()], [Rates()]):
        assert not Memory(file, budget, learners).recall()
    assert budget == AdaptiveBudget()


def mixed() -> tuple[Rates, Gate]:
    """What a mix learns, after fifty rounds."""
    rates, gate = Rates(), Gate()
    for i in range(50):
        rates.learn(Family((-0.1, -2.0), 0 if i % 5 else -1))
        gate.seconds.learn(1, 0.01 * (1 + i % 3))
        gate.learn(rows_of(1), [0.1 if i % 2 else 0.9], [3 if i % 2 else 0], 3.0)
    return rates, gate


def test_a_mixs_statistics_are_restored(tmp_path: Path) -> None:
    """Rates and times as they were: the next run need not learn them anew."""
    (rates, gate), (others, again) = mixed(), (Rates(), Gate())
    Memory(tmp_path / "f.json", learnt(), (rates, gate)).keep()
    assert Memory(tmp_path / "f.json", AdaptiveBudget(), (others, again)).recall()
    assert (others, again.seconds, again.gains) == (rates, gate.seconds, gate.gains)
    budget = Budget(8, 3, price=Price((0.02, 0.021, 0.022, 0.023)), rate=20.0)
    assert again.allows(rows_of(1), [0.1], 1, budget)
    assert gate.allows(rows_of(1), [0.1], 1, budget)
    assert again.gain(rows_of(1), 0.9) < 1 < again.gain(rows_of(1), 0.1)


def test_a_mix_whose_networks_were_never_timed_comes_back(tmp_path: Path) -> None:
    """Lookup alone, which is such a mix, has none."""
    rates = mixed()[0]
    Memory(tmp_path / "f.json", learnt(), (rates, Gate())).keep()
    others, again = Rates(), Gate()
    assert Memory(tmp_path / "f.json", AdaptiveBudget(), (others, again)).recall()
    assert others.of(0.9) == pytest.approx(rates.of(0.9), abs=0.1)
    assert again.allows(rows_of(1), [0.1], 1, Budget(8, 3, rate=20.0))


def test_it_is_written_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, budget = tmp_path / "f.json", learnt(LEARN - 1)
    held = Memory(file, budget)
    held.keep()
    assert not file.exists()  # too little was seen
    budget.learn(Report(1, 0, 1, 0.0, 1.0, 0.0, []))
    held.keep()
    first = file.read_text()
    for _ in range(20):
        budget.learn(Report(1, 0, 1, 0.0, 9.0, 0.0, []))
    held.keep()
    assert file.read_text() == first  # a moment ago
    monkeypatch.setattr(memory, "EVERY", 0.0)
    held.keep()
    assert file.read_text() != first


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    held = Memory(tmp_path / "file" / "f.json", learnt())
    held.keep()
    held.keep()
    assert not held.recall()


def test_every_case_has_a_file_of_its_own() -> None:
    assert len({file_of("cpu", *about) for about in (("a", "b"), ("ab", ""), ("a", "c"), ("a",))}) == 4


@pytest.mark.trained
def test_the_next_run_begins_with_it() -> None:
    first = outrider.load("demo")
    options = {"max_new_tokens": 60, "seed": 1, "ignore_eos": True}
    text = first.generate("Once upon a time", **options)[0]  # type: ignore[arg-type]
    (file,) = {held.file for held in first.memories}
    assert file.is_file()
    second = outrider.load("demo")
    budget = second.engine().budget
    assert isinstance(budget, AdaptiveBudget)
    assert not budget.measuring
    fits = [part for llm in (first, second) for part in llm.memories[0].learners if isinstance(part, Fit)]
    assert fits[0].scale == fits[1].scale != 1.0
    assert second.generate("Once upon a time", **options)[0].tokens == text.tokens  # type: ignore[arg-type]
    in_memory = outrider.load(build("llama", torch.float32), "lookup")
    in_memory.engine()
    assert not in_memory.memories  # its weights may change from one run to the next
