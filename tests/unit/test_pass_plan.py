"""Where a pass's keys lie, by position."""

from __future__ import annotations

import itertools
import random

import torch

from outrider.backends.torch import aligned, exact
from outrider.backends.torch.session import Pass
from outrider.backends.torch.tensors import TensorTree
from outrider.core.tree import from_lists


def test_a_part_that_is_empty_changes_no_bit() -> None:
    """As the head does of a row that is too short to have one, beside rows that have."""
    dice = torch.Generator().manual_seed(1)
    last, total = torch.randn(64, 1, 3, 2, 64, generator=dice), torch.randn(64, 1, 3, 2, generator=dice) * 9
    nothing, weight = torch.zeros_like(last), torch.full_like(total, float("-inf"))
    assert torch.equal(aligned._merged(nothing, weight, last, total, None), last)
    assert torch.equal(aligned._merged(last, total, nothing, weight, None), last)


def test_nodes_of_one_path_share_a_tail() -> None:
    """Every node finds the slots of its own path by position, in no more tails than there are leaves and starts."""
    dice = random.Random(3)
    for length in (3, 40, 60, 62, 91, 95):
        nodes = dice.randrange(2, 14)
        tree = TensorTree.of(
            from_lists(
                [([0] * nodes, [0, *(dice.randrange(i) for i in range(1, nodes))], [0.0] * nodes) for _ in range(2)]
            )
        )
        lengths = torch.tensor([length, length + 29])
        spots = lengths[:, None] + tree.depths
        given = Pass(
            None, None, spots, 0, lengths, length + 29, False, length, length + 29 + tree.deepest, tree.ancestors
        )
        given = exact.Exactness(rows=2 * nodes + 4).padded(given)
        made = exact.plan(given, 256, torch.bfloat16, exact.Exactness(queries=4))
        assert made.order is not None
        assert made.back is not None
        m, share = given.n, made.seen.shape[2]
        assert share >= 4
        assert torch.equal(made.order[made.back], torch.arange(2 * m))
        first = exact.starts(spots)
        leaves = {(b, int(first[b, i])) for b in range(2) for i in range(nodes)}
        count = sum(int((tree.ancestors[b].sum(0) == 1).sum()) for b in range(2))
        assert made.tail.shape[0] <= 2 * count + len(leaves)
        for b, i in itertools.product(range(2), range(nodes)):
            tail, at = divmod(int(made.back[b * m + i]), share)
            up = [j for j in range(nodes) if tree.ancestors[b, i, j]]
            path = {int(spots[b, j]): int(lengths[b]) + j for j in up}
            for place in range(exact.WINDOW):
                position = int(first[b, i]) + place
                visible = position <= int(spots[b, i])
                assert (made.seen[tail, 0, at, place] == 0) == visible
                if visible:
                    assert made.tail[tail, place] == 256 * b + path.get(position, position)
