"""Paths of trees, read off by hand, and a mask that is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outrider.core.types import DraftTree


def paths_to_leaves(parents: list[int]) -> list[list[int]]:
    """Node ids of every path from the root to a leaf, read off the parent list by hand."""
    leaves, paths = set(range(len(parents))) - set(parents[1:]), []
    for leaf in sorted(leaves):
        path = [leaf]
        while path[0]:
            path.insert(0, parents[path[0]])
        paths.append(path)
    return paths


def seeing_siblings(tree: DraftTree) -> DraftTree:
    assert tree.ancestors is not None
    return replace(tree, ancestors=np.tril(np.ones_like(tree.ancestors)))
