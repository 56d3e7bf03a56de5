"""How much to draft in each round: the adaptive budget, fixed budgets, the bandit over shapes."""

from __future__ import annotations

import re

from ..params import InputError
from .adaptive import AdaptiveBudget
from .bandit import BanditBudget, Play
from .budgeter import MOST, Budgeter, FixedBudget, check_shape, nodes

SPELLINGS = "auto, none, NODESxDEPTH as in 16x6, a shape as in 3,2,1, or several shapes for a bandit as in '3,2,1 none'"


def parse(text: str) -> Budgeter:
    """A new budget as the command line, `outrider.load` and `LLM.generate` spell it.

    `auto` (adaptive), `16x6` (at most 16 nodes with the root, at most 6 deep), `3,2,1` (a static shape: children of
    every node of a depth), several shapes for a bandit as in `3,2,1 2,1 none`, with the drafter's number before a
    shape where it chooses among several (`1:3,2,1 2:1,1`), and `none` (plain decoding). `paper` after a bandit's
    shapes makes it the paper's (`BanditBudget.paper`).

    Raises InputError, also for a draft that is empty or too large.

    >>> parse("16x6"), parse("3,2,1")
    (FixedBudget(nodes=16, depth=6, shape=None), FixedBudget(nodes=16, depth=3, shape=(3, 2, 1)))
    """
    if text.strip() == "auto":
        return AdaptiveBudget()
    if size := re.fullmatch(r"(\d{1,9})x(\d{1,9})", text.strip()):
        count, depth = map(int, size.groups())
        if not 2 <= count <= MOST or depth < 1:
            raise InputError(f"a budget NODESxDEPTH has 2 to {MOST} nodes and a depth of 1 or more, not {text}")
        return FixedBudget(count, depth)
    words = text.split()
    paper = words[-1:] == ["paper"]
    arms = tuple(map(_arm, words[:-1] if paper else words))
    if not arms:
        raise InputError(f"a budget is {SPELLINGS}, not {text!r}")
    if len(arms) > 1:
        return BanditBudget(arms, paper)
    part, shape = arms[0]
    if paper or part:
        raise InputError(f"the budget {text!r} has one shape; `paper` and drafters to choose from need several")
    check_shape(shape)
    return FixedBudget(nodes(shape), len(shape), shape or None)


def _arm(word: str) -> Play:
    """`3,2,1`, `none`, or `2:3,2,1` for the second drafter."""
    match = re.fullmatch(r"(?:(\d{1,9}):)?(none|\d{1,9}(?:,\d{1,9})*)", word)
    if match is None:
        raise InputError(f"a budget is {SPELLINGS}, not {word!r}")
    part = int(match[1] or 1) - 1
    if part < 0:
        raise InputError(f"drafters are counted from 1, not {word!r}")
    return (0, ()) if match[2] == "none" else (part, tuple(map(int, match[2].split(","))))
