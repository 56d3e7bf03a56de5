"""How much to draft in each round: the adaptive budget, the bandit over shapes, calibrated confidences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .shapes import read, shape_of

if TYPE_CHECKING:
    from .budgeter import Budgeter


def parse(text: str) -> Budgeter:
    """A fresh budget as the command line, `outrider.load` and `LLM.generate` spell it.

    `auto` (adaptive), `16x6` (at most 16 nodes with the root, at most 6 deep), `3,2,1` (a static shape: children of
    every node of a depth), several shapes for a bandit as in `3,2,1 2,1 none`, with the drafter's number before a
    shape where it chooses among several (`1:3,2,1 2:1,1`), and `none` (plain decoding).

    Raises InputError. `outrider.budgets.shapes.read` only checks the text, and needs no torch.
    """
    written = read(text)
    from .adaptive import AdaptiveBudget
    from .bandit import BanditBudget
    from .budgeter import FixedBudget

    if not any(written):
        return AdaptiveBudget()
    if len(written.arms) > 1:
        return BanditBudget(written.arms)
    return FixedBudget(written.nodes, written.depth, shape_of(written.arms[0]) if written.arms else None)
