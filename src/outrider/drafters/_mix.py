"""Several drafters at once: their trees merged into one, each told of its own nodes.

Asked for by naming more than one drafter (`--drafter lookup --drafter model`), never alone. Drafters whose trees are
sampled (they carry q) cannot be mixed: merging would change the law of the siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..budgets.calibration import inside
from ..core.tree import from_lists, root_only
from ..types import Budget, Drafter, Drafting, DraftTree, InputError, Round, Rows


@dataclass(frozen=True)
class MixDrafter:
    """Drafters in order of trust: where the budget cuts, the first one's nodes stay."""

    parts: tuple[Drafter, ...]

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(sorted({tap for part in self.parts for tap in part.taps}))

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> MixDrafting:
        return MixDrafting([part.open(prompts, capacity) for part in self.parts], [bool(p.taps) for p in self.parts])


@dataclass
class MixDrafting:
    """The states of the drafters of a mix; each is told of its own nodes of the common tree."""

    parts: list[Drafting]
    reads: list[bool]  # does the drafter read features? It needs those of every accepted node, whoever proposed it
    trees: list[DraftTree] | None = None  # the last proposals, and where their nodes went
    maps: list[Tensor] | None = None

    def observe(self, round: Round) -> None:
        for i, part in enumerate(self.parts):
            if self.maps is None or self.trees is None or self.reads[i]:
                part.observe(round)
            else:
                part.observe(_translate(round, self.trees[i], self.maps[i]))
        self.trees = self.maps = None

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        self.trees = [part.propose(rows, budget) for part in self.parts]
        if any(tree.q is not None for tree in self.trees):
            raise InputError("drafters that sample their trees cannot be mixed; use one of them alone, or rule coupled")
        tree, self.maps = merge(self.trees, budget.nodes)
        return tree

    def select(self, index: Sequence[int]) -> None:
        for part in self.parts:
            part.select(index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, MixDrafting)
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.join(theirs)


def merge(trees: Sequence[DraftTree], limit: int) -> tuple[DraftTree, list[Tensor]]:
    """One trie per row of all trees' paths, at most `limit` nodes; and for each tree where its nodes went (-1: cut).

    Chains [9 5 6] and [9 5 7] -> tokens [9 5 6 7], parents [0 0 1 1], maps [0 1 2] and [0 1 3].
    """
    b, device = trees[0].tokens.shape[0], trees[0].tokens.device
    host = [(t.tokens.tolist(), t.parents.tolist(), t.size.tolist()) for t in trees]
    tokens = [[row[0]] for row in host[0][0]]
    parents: list[list[int]] = [[0] for _ in range(b)]
    maps = [torch.full(t.tokens.shape, -1, dtype=torch.long) for t in trees]
    for r in range(b):
        child: dict[tuple[int, int], int] = {}
        for (all_tokens, all_parents, sizes), where in zip(host, maps, strict=True):
            ids = [0]
            for i in range(1, sizes[r]):
                up, token = ids[all_parents[r][i]], all_tokens[r][i]
                node = child.get((up, token), -1) if up >= 0 else -1
                if node < 0 <= up and len(tokens[r]) < limit:
                    node = child[up, token] = len(tokens[r])
                    tokens[r].append(token)
                    parents[r].append(up)
                ids.append(node)
            where[r, : len(ids)] = torch.tensor(ids)
    if max(map(len, tokens)) == 1:
        return root_only(trees[0].tokens[:, 0]), [m.to(device) for m in maps]
    return from_lists(tokens, parents, device=device), [m.to(device) for m in maps]


def _translate(round: Round, tree: DraftTree, where: Tensor) -> Round:
    """The round in one drafter's own node ids; -1 for nodes that are not its own."""
    n = round.tree.nodes
    back = torch.full((where.shape[0], n + 1), -1, dtype=torch.long, device=where.device)
    index = torch.arange(where.shape[1], device=where.device).expand_as(where)
    back.scatter_(1, where.masked_fill(where < 0, n), index)
    mine = where.clamp(min=0)

    def pick(x: Tensor) -> Tensor:
        return x.gather(1, mine[..., None].expand(*mine.shape, x.shape[-1]))

    output = replace(
        round.output, logits=pick(round.output.logits), features={t: pick(f) for t, f in round.output.features.items()}
    )
    return replace(round, tree=tree, output=output, path=back.gather(1, round.path))


def of(parts: Sequence[Drafter]) -> MixDrafter:
    """Mix drafters, in order of trust."""
    if len({type(inside(p)) for p in parts}) < len(parts):
        raise InputError("two drafters of the same method cannot be mixed; choose one")
    return MixDrafter(tuple(parts))
