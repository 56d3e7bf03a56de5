"""The first difference of two texts, and by how much the target prefers its own token there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """The first token of a text that is not plain decoding's."""

    prompt: str  # its id, or its number from 1 on
    position: int  # in the output
    margin: float | None  # logits by which the target prefers plain decoding's token; None: a text ended
    within: bool = False  # explained by rounding
    turn: int = 0
    mine: int | None = None  # None: the text ended
    plain: int | None = None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The index of the first different token; the shorter text's length if it is a prefix of the other.

    >>> first_difference([1, 2, 3], [1, 5]), first_difference([1, 2], [1, 2, 3])
    (1, 2)
    """
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
