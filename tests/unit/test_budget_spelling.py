"""Budgets as people write them: one grammar for the command line, `load` and `generate`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outrider import InputError
from outrider.budgets import parse
from outrider.budgets.adaptive import AdaptiveBudget
from outrider.budgets.bandit import BanditBudget
from outrider.budgets.budgeter import FixedBudget


def test_what_each_spelling_makes() -> None:
    assert isinstance(parse("auto"), AdaptiveBudget)
    assert parse("auto") is not parse("auto"), "each learns for itself"
    assert parse("16x6") == FixedBudget(16, 6)
    assert parse("none") == FixedBudget(1, 0)
    assert parse("3,2,1") == FixedBudget(1 + 3 + 6 + 6, 3, shape=(3, 2, 1))
    assert parse("16") == FixedBudget(17, 1, shape=(16,)), "sixteen children of the root"
    bandit = parse("3,2,1 2,1 none")
    assert isinstance(bandit, BanditBudget)
    assert bandit.arms == ((0, (3, 2, 1)), (0, (2, 1)), (0, ()))
    assert parse("3,2,1 2,1 paper") == BanditBudget(((0, (3, 2, 1)), (0, (2, 1))), paper=True)


def test_shapes_of_several_drafters() -> None:
    bandit = parse("1:3,2 2:3,2 2:none 3:1,1")
    assert isinstance(bandit, BanditBudget)
    assert bandit.arms == ((0, (3, 2)), (1, (3, 2)), (0, ()), (2, (1, 1)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a budget is auto, none"), ("much", "a budget is auto, none"), ("3,b", "not '3,b'"), ("16x", "not '16x'"),
        ("3,2,1 2x2", "not '2x2'"), ("1x6", "2 to 256 nodes"), ("16x0", "depth of 1 or more"),
        ("999x6", "2 to 256 nodes"),
        ("3,0", "1 or more children"), ("300", "at most 256 nodes"), ("0:2 1", "counted from 1, not '0:2'"),
        ("2,1 2,1", "each of them once"), ("none 2:none", "each of them once"), ("2:3,2", "has one shape"),
        ("3,2 paper", "has one shape"), ("paper", "budget is auto"), ("3,2 paper 2", "not 'paper'"),
        ("3,2 2 a=1", "not 'a=1'"), ("9" * 5000 + "x6", "a budget is auto"), ("1" * 5000, "a budget is auto"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        parse(text)


@pytest.mark.process
def test_a_budget_is_checked_without_torch() -> None:
    code = "import sys, outrider.budgets as b; b.parse('16x6'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
