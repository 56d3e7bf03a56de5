"""How much to draft in each round: the adaptive budget, fixed budgets, the bandit over shapes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ..params import InputError
from .adaptive import AdaptiveBudget
from .bandit import BanditBudget, Play
from .budgeter import MOST, Budgeter, FixedBudget, check_shape, nodes

SPELLINGS = "auto, none, NODESxDEPTH as in 16x6, a shape as in 3,2,1, or several shapes for a bandit as in '3,2,1 none'"
OF_A_BANDIT: dict[str, Callable[[str], Any]] = {"reward": str, "scope": str, "explore": float, "discount": float}


def parse(text: str) -> Budgeter:
    """A new budget as the command line, `outrider.load` and `LLM.generate` spell it.

    `auto` (adaptive), `16x6` (at most 16 nodes with the root, at most 6 deep), `3,2,1` (a static shape: children of
    every node of a depth), several shapes for a bandit as in `3,2,1 2,1 none`, with the drafter's number before a
    shape where it chooses among several (`1:3,2,1 2:1,1`), and `none` (plain decoding). Fields of `BanditBudget` may
    follow a bandit's shapes: `3,2,1 2,1 reward=paper scope=request explore=0.3 discount=1`.

    Raises InputError, also for a draft that is empty or too large.

    >>> parse("16x6"), parse("3,2,1")
    (FixedBudget(nodes=16, depth=6, shape=None), FixedBudget(nodes=16, depth=3, shape=(3, 2, 1)))
    """
    text = text.strip()
    if text == "auto":
        return AdaptiveBudget()
    if text == "none":
        return FixedBudget(1, 0)
    if size := re.fullmatch(r"(\d+)x(\d+)", text):
        count, depth = map(int, size.groups())
        if not 2 <= count <= MOST or depth < 1:
            raise InputError(f"a budget NODESxDEPTH has 2 to {MOST} nodes and a depth of 1 or more, not {text}")
        return FixedBudget(count, depth)
    words, options = [w for w in text.split() if "=" not in w], [w for w in text.split() if "=" in w]
    arms = tuple(map(_arm, words))
    if not arms:
        raise InputError(f"a budget is {SPELLINGS}, not {text!r}")
    if len(arms) > 1:
        return BanditBudget(arms, **_fields(options))
    if options:
        raise InputError(f"the budget {text!r} has {options[0]}, which only a bandit over several shapes has")
    part, shape = arms[0]
    if part:
        raise InputError(f"the budget {text!r} names a second drafter; a choice needs a shape for each of them")
    check_shape(shape)
    return FixedBudget(nodes(shape), len(shape), shape)


def _fields(words: list[str]) -> dict[str, Any]:
    """`reward=paper` and the like as keyword arguments of a bandit."""
    fields: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in OF_A_BANDIT or name in fields:
            raise InputError(f"a bandit has {', '.join(OF_A_BANDIT)}, each once, not {word!r}")
        try:
            fields[name] = OF_A_BANDIT[name](value)
        except ValueError:
            raise InputError(f"{name} is a number, as in {name}=0.3, not {word!r}") from None
    return fields


def _arm(word: str) -> Play:
    """`3,2,1`, `none`, or `2:3,2,1` for the second drafter."""
    match = re.fullmatch(r"(?:(\d+):)?(none|\d+(?:,\d+)*)", word)
    if match is None:
        raise InputError(f"a budget is {SPELLINGS}, not {word!r}")
    part = int(match[1] or 1) - 1
    if part < 0:
        raise InputError(f"drafters are counted from 1, not {word!r}")
    return (0, ()) if match[2] == "none" else (part, tuple(map(int, match[2].split(","))))
