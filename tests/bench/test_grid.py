"""How the automatic budget is held to the best fixed one: who is measured again, and what is made of it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks")]

import grid  # noqa: E402


def test_the_best_is_measured_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that was lucky once is chosen, but what it was chosen by does not count. What has no chance is not
    measured again, nor what is longer."""
    asked: list[str] = []
    fixed = {"none": 10.0, "1,1": 12.0, "1,1,1": 13.0, "1,1,1,1": 6.0, "4x3": 5.0, "auto": 11.0}

    def speed(model: Any, prompts: Any, budget: str, *rest: Any) -> float:
        asked.append(budget)
        return 15.0 if budget == "1,1" and asked.count(budget) == 1 else fixed[budget]

    monkeypatch.setattr(grid, "speed", speed)
    result = grid.cell(None, [], 4, 0.0, 48)
    assert result["best"] == "1,1"  # 13.5 in the mean
    assert result["turns"] == {"auto": [11.0] * 6, "1,1": [12.0] * 6, "none": [10.0] * 6}
    assert (asked.count("1,1,1"), asked.count("1,1,1,1"), asked.count("4x3")) == (2, 1, 1)
    assert "1,1,1,1,1" not in asked


def test_where_none_is_the_best_two_are_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        grid, "speed", lambda model, prompts, budget, *rest: 10.0 if budget in ("none", "auto") else 1.0
    )
    result = grid.cell(None, [], 4, 0.0, 48)
    assert result["best"] == "none"
    assert list(result["turns"]) == ["auto", "none"]


def test_a_factor_has_an_error() -> None:
    assert grid.factor([2.0, 4.0], [1.0, 2.0]) == pytest.approx((2.0, 0.0))
    mean, error = grid.factor([2.0, 8.0], [1.0, 1.0])
    assert (mean, error) == pytest.approx((4.0, 4.0 * math.log(2)))


def test_the_table_counts_significant_losses(capsys: pytest.CaptureFixture[str]) -> None:
    """0.9 of the best and 0.9 of plain, once surely and once within two standard errors of the bar."""
    cells = [([90.0] * 6, [100.0] * 6), ([90.0, 60.0, 135.0] * 2, [100.0] * 6)]
    lines = [
        {
            "drafter": "lookup",
            "temperature": 0.0,
            "batch": 4,
            "task": "a",
            "best": "none",
            "turns": {"auto": a, "none": n},
        }
        for a, n in cells
    ]
    grid.table(lines)
    messages = capsys.readouterr().out
    assert messages.count("| lookup | 0 | 4 | a | 100 | 100 (none) | 90 | 0.90 ± ") == 2
    assert "of plain: worst 0.90, median 0.90; 0.97 and more in 0 of 2 cells" in messages
    assert messages.count("by more than two standard errors in 1") == 2


def test_cells_of_an_earlier_version_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.jsonl"
    file.write_text(json.dumps({"drafter": "lookup", "temperature": 0, "batch": 1, "task": "a", "speeds": {}}) + "\n")
    monkeypatch.setattr(sys, "argv", ["grid.py", "demo", "--table", "--out", str(file)])
    with pytest.raises(SystemExit) as end:
        grid.main()
    assert end.value.code == 2
    assert "earlier version" in capsys.readouterr().err
