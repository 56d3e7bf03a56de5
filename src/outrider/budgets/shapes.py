"""Budgets as people write them, and the shapes of trees. No torch: a command line is checked before it is imported."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..params import InputError

Shape = tuple[int, ...]  # children of every node of a depth; (): do not speculate
Play = Shape | tuple[int, Shape]  # a shape, or that of one of several drafters, the first of which is 0
MOST = 256  # nodes of a tree, the root included: what a cache has room for beyond the context
SPELLINGS = "auto, none, NODESxDEPTH as in 16x6, a shape as in 3,2,1, or several shapes for a bandit as in '3,2,1 none'"


class Spelling(NamedTuple):
    """A budget as it was written. All fields empty: `auto`."""

    nodes: int = 0  # of a fixed budget, the root included
    depth: int = 0
    arms: tuple[Play, ...] = ()  # one: a fixed shape; several: a bandit's


def read(text: str) -> Spelling:
    """What a budget says; `parse` makes it. Raises InputError, also for what could never be drafted.

    >>> read("16x6"), read("3,2,1")
    (Spelling(nodes=16, depth=6, arms=()), Spelling(nodes=16, depth=3, arms=((3, 2, 1),)))
    """
    text = text.strip()
    if text == "auto":
        return Spelling()
    if text == "none":
        return Spelling(1)
    if text == "adaptive":
        raise InputError("the adaptive budget is written auto")
    if size := re.fullmatch(r"(\d+)x(\d+)", text):
        count, depth = map(int, size.groups())
        if not 2 <= count <= MOST or depth < 1:
            why = "drafts nothing" if count < 2 or depth < 1 else "is too large"
            raise InputError(f"a budget of {text} {why}; NODES are 2 to {MOST}, DEPTH 1 or more")
        return Spelling(count, depth)
    arms = tuple(map(_arm, text.split()))
    if not arms:
        raise InputError(f"a budget is {SPELLINGS}, not {text!r}")
    check_shapes(tuple(map(shape_of, arms)))
    if len(set(arms)) < len(arms):
        raise InputError(f"the budget {text!r} names a shape twice; a bandit needs each arm once")
    if len(arms) > 1:
        return Spelling(arms=arms)
    if part_of(arms[0]):
        raise InputError(f"the budget {text!r} names a second drafter; a choice needs a shape for each of them")
    shape = shape_of(arms[0])
    return Spelling(nodes(shape), len(shape), (shape,))


def _arm(word: str) -> Play:
    """`3,2,1`, `none`, or `2:3,2,1` for the second drafter."""
    found = re.fullmatch(r"(?:(\d+):)?(none|\d+(?:,\d+)*)", word)
    if found is None:
        raise InputError(f"a budget is {SPELLINGS}, not {word!r}")
    part = int(found[1] or 1) - 1
    if part < 0:
        raise InputError(f"drafters are counted from 1, not {word!r}")
    shape = () if found[2] == "none" else tuple(map(int, found[2].split(",")))
    return (part, shape) if part and shape else shape


def check_shapes(shapes: tuple[Shape, ...]) -> None:
    """Raise InputError where a tree of one of these shapes could not be drafted."""
    for shape in shapes:
        if any(width < 1 for width in shape) or nodes(shape) > MOST:
            raise InputError(f"a shape has 1 or more children at every depth and at most {MOST} nodes, not {shape}")


def nodes(shape: Shape) -> int:
    """Nodes of the tree, the root included."""
    count, layer = 1, 1
    for width in shape:
        layer *= width
        count += layer
    return count


def shape_of(play: Play) -> Shape:
    """The shape of an arm, whether or not it names a drafter."""
    return play[1] if _paired(play) else play  # type: ignore[return-value]


def part_of(play: Play) -> int:
    """The drafter that an arm names, counted from 0; 0 where it names none."""
    return play[0] if _paired(play) else 0


def _paired(play: Play) -> bool:
    return len(play) == 2 and isinstance(play[1], tuple)
