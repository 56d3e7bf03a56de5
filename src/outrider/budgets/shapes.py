"""Shapes of trees, and the arms of a bandit: a shape, or a drafter and its shape."""

from __future__ import annotations

from ..params import InputError

Shape = tuple[int, ...]  # children of every node of a depth; (): do not speculate
Play = Shape | tuple[int, Shape]  # a shape, or that of one of several drafters, the first of which is 0
MOST = 256  # nodes of a tree, the root included: what a cache holds beyond the context


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
