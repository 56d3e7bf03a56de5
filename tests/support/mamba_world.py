"""What the tests of state-space drafters share: texts, a tiny target, and a node's path."""

from __future__ import annotations

from small import tiny_llama

from outrider.backends.torch import load_target
from outrider.core.protocols import Target
from outrider.core.types import DraftTree

VOCAB = 47
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5]]


def small_target() -> Target:
    return load_target(tiny_llama(VOCAB, 1, max_position_embeddings=256))


def path(tree: DraftTree, row: int, node: int) -> list[int]:
    """The tokens from below the root down to a node."""
    out: list[int] = []
    while node:
        out.insert(0, int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return out
