"""Several drafters at once: their trees merged into one, each told of its own nodes.

Where all trees carry confidences, all nodes compete for the budget by their values (`graft`): a retrieved continuation
takes the place of what a network thinks unlikely, at the same number of nodes. Confidences of networks are fitted
(`calibration.py`). Those that are counts speak for what the networks' children leave over, and it is learnt how often
they are right there; under `coupled` alone, where the text does not depend on the tree. Where a tree has none, the
drafters' order decides.

Asked for by naming more than one drafter (`--drafter lookup --drafter model`), never alone. Drafters whose trees are
sampled (they carry q) cannot be mixed: merging would change the law of the siblings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..budgets.calibration import LEAST, Calibrated, Family, Rates, calibrated, inside
from ..core.tree import best, from_lists, prune, root_only
from ..types import Budget, Drafter, Drafting, DraftTree, InputError, Round, Rows


@dataclass(frozen=True)
class MixDrafter:
    """Drafters in order of trust. `rates`: of those whose confidences are not fitted, shared by all generations."""

    parts: tuple[Drafter, ...]
    rates: tuple[Rates | None, ...]

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(sorted({tap for part in self.parts for tap in part.taps}))

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> MixDrafting:
        parts = [part.open(prompts, capacity) for part in self.parts]
        return MixDrafting(parts, [bool(p.taps) for p in self.parts], self.rates)


@dataclass
class MixDrafting:
    """The states of the drafters of a mix; each is told of its own nodes of the common tree."""

    parts: list[Drafting]
    reads: list[bool]  # does the drafter read features? It needs those of every accepted node, whoever proposed it
    rates: Sequence[Rates | None]
    trees: list[DraftTree] | None = None  # the last proposals, and where their nodes went
    maps: list[Tensor] | None = None

    def observe(self, round: Round) -> None:
        if self.trees is not None and round.rows.rule == "coupled":
            learn(self.trees, self.rates, round.tokens)
        for i, part in enumerate(self.parts):
            if self.maps is None or self.trees is None or self.reads[i]:
                part.observe(round)
            else:
                part.observe(translated(round, self.trees[i], self.maps[i]))
        self.trees = self.maps = None

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        self.trees = [part.propose(rows, budget) for part in self.parts]
        if any(tree.q is not None for tree in self.trees):
            raise InputError("drafters that sample their trees cannot be mixed; use one of them alone, or rule coupled")
        if all(tree.values is not None or tree.nodes == 1 for tree in self.trees):
            fixed = rows.rule != "coupled"
            tree, self.maps = graft(self.trees, [Rates() if r and fixed else r for r in self.rates], budget)
        else:
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


def graft(trees: Sequence[DraftTree], rates: Sequence[Rates | None], budget: Budget) -> tuple[DraftTree, list[Tensor]]:
    """The most valuable nodes of all trees as one, and for each tree where its nodes went (-1: cut).

    A node's chance, given its parent, is its confidence in the first tree that has it, those without rates before the
    others. With rates it is their share of what the children from the trees before leave over. A node's value is the
    product along its path: none is worth more than its parent, so what is kept is connected.
    """
    all_tokens, all_parents, all_values = [], [], []
    host = [_read(tree) for tree in trees]
    maps = [torch.full(t.tokens.shape, -1, dtype=torch.long) for t in trees]
    for r in range(len(trees[0].tokens)):
        tokens, parents, values, used = [host[0][r][0][0]], [0], [0.0], [0.0]
        child: dict[tuple[int, int], int] = {}
        for k in _order(rates):
            names, ups, logs = host[k][r]
            ids, before, rate = [0], list(used), rates[k]
            for i in range(1, len(names)):
                up = ids[ups[i]]
                node = child.setdefault((up, names[i]), len(tokens))
                if node == len(tokens):
                    chance = math.exp(min(0.0, logs[i] - logs[ups[i]]))
                    if rate is not None:
                        chance = rate.of(chance) * (1 - (before[up] if up < len(before) else 0.0))
                    chance = min(1.0, max(LEAST, chance))
                    tokens.append(names[i])
                    parents.append(up)
                    values.append(values[up] + math.log(chance))
                    used.append(0.0)
                    used[up] = min(1.0, used[up] + chance)
                ids.append(node)
            maps[k][r, : len(ids)] = torch.tensor(ids)
        all_tokens.append(tokens)
        all_parents.append(parents)
        all_values.append(values)
    device = trees[0].tokens.device
    whole = from_lists(all_tokens, all_parents, all_values, device)
    assert whole.values is not None
    kept, count = best(whole.values, budget.nodes, budget.floor, budget.price)
    places = torch.arange(kept.shape[1], device=device).expand_as(kept)
    real = places < count[:, None]
    back = torch.full((len(kept), whole.nodes + 1), -1, device=device)
    back.scatter_(1, kept.masked_fill(~real, whole.nodes), places.masked_fill(~real, -1))
    maps = [m.masked_fill(m < 0, whole.nodes).to(device) for m in maps]
    return prune(whole, kept, count), [back.gather(1, m) for m in maps]


def learn(trees: Sequence[DraftTree], rates: Sequence[Rates | None], chosen: Sequence[Sequence[int]]) -> None:
    """Tell every rate of the children that it spoke for along the target's tokens, where no tree before was right."""
    host = [_read(tree) for tree in trees]
    for r, added in enumerate(chosen):
        at: list[int | None] = [0] * len(trees)
        for token in added:
            known: set[int] = set()
            for k in _order(rates):
                names, ups, logs = host[k][r]
                node, rate = at[k], rates[k]
                children = {names[i]: i for i in range(1, len(names)) if ups[i] == node}
                mine = [x for x in children if x not in known]
                if rate is not None and mine and token not in known:
                    confidences = tuple(min(0.0, logs[children[x]] - logs[ups[children[x]]]) for x in mine)
                    rate.learn(Family(confidences, mine.index(token) if token in mine else -1))
                known |= children.keys()
                at[k] = children.get(token)


def _order(rates: Sequence[Rates | None]) -> list[int]:
    return sorted(range(len(rates)), key=lambda k: rates[k] is not None)


def _read(tree: DraftTree) -> list[tuple[list[int], list[int], list[float]]]:
    """Tokens, parents and values of every row's own nodes."""
    values = torch.zeros(tree.tokens.shape) if tree.values is None else tree.values
    host = zip(tree.tokens.tolist(), tree.parents.tolist(), values.tolist(), tree.size.tolist(), strict=True)
    return [(tokens[:n], parents[:n], logs[:n]) for tokens, parents, logs, n in host]


def translated(round: Round, tree: DraftTree, where: Tensor) -> Round:
    """The round in one drafter's own node ids; -1 for nodes that are not its own."""
    n = round.tree.nodes
    back = torch.full((where.shape[0], n + 1), -1, dtype=torch.long, device=where.device)
    index = torch.arange(where.shape[1], device=where.device).expand_as(where)
    back.scatter_(1, where.masked_fill(where < 0, n), index)
    back[:, n] = -1  # a round that was translated once knows nodes that are nobody's
    mine = where.clamp(min=0)

    def pick(x: Tensor) -> Tensor:
        return x.gather(1, mine[..., None].expand(*mine.shape, x.shape[-1]))

    output = replace(
        round.output, logits=pick(round.output.logits), features={t: pick(f) for t, f in round.output.features.items()}
    )
    return replace(round, tree=tree, output=output, path=back.gather(1, round.path.masked_fill(round.path < 0, n)))


def of(parts: Sequence[Drafter]) -> MixDrafter:
    """Mix drafters, in order of trust."""
    if len({type(inside(p)) for p in parts}) < len(parts):
        raise InputError("two drafters of the same method cannot be mixed; choose one")
    return MixDrafter(tuple(parts), tuple(None if isinstance(calibrated(p), Calibrated) else Rates() for p in parts))
