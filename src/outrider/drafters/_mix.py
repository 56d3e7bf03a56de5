"""Several drafters at once: their trees merged into one, of which each observes its own nodes.

Where all trees carry confidences, all nodes compete for the budget by their values (`graft`): a retrieved continuation
replaces a network's unlikely nodes, at the same number of nodes. Confidences of networks are calibrated
(`_calibrated.py`). Those that are counts share what the networks' children leave over, by their acceptance rates there
(`Rates`); these are learned under `coupled` alone, where the text does not depend on the tree. Where a tree has no
confidences, the drafters' order decides.

Made by naming more than one drafter (`--drafter lookup --drafter model`). A single drafter whose confidences are counts
is a mix of one, so that its rates are learned too. Drafters whose trees are sampled (they carry q) cannot be mixed:
merging would change the siblings' distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from ..budgets.adaptive import LATE
from ..core.protocols import Drafter, Drafting, Round, TargetOutput
from ..core.tree import best_of, from_lists, padded, root_only
from ..core.types import Budget, DraftTree, HostRow, Rows
from ..params import InputError
from ._calibrated import LEAST, Calibrated, Family, Rates, calibrated
from ._gate import Gate

Places = list[list[int]]  # [row][node]: where a tree's nodes went in the tree of the mix; -1: cut

Host = Sequence[HostRow]  # a tree's own nodes, row by row


@dataclass(frozen=True)
class Proposal:
    """The proposal of one part."""

    host: Host
    valued: bool  # do its nodes, if there are any, carry confidences?
    tree: DraftTree | None = None  # None: the part made lists alone

    @classmethod
    def of(cls, tree: DraftTree) -> Proposal:
        """From a tree."""
        return cls(tree.host, tree.values is not None or tree.nodes == 1, tree)


@dataclass(frozen=True)
class Learnt:
    """How often children of drafters whose confidences are counts were right (None: a network), in all generations:
    `rates` of those beside the networks', `alone` of all, as if no network had drafted."""

    rates: tuple[Rates | None, ...]
    alone: tuple[Rates | None, ...]

    @classmethod
    def of(cls, networks: Sequence[bool]) -> Learnt:
        """Nothing yet."""
        rates, alone = (tuple(None if network else Rates() for network in networks) for _ in range(2))
        return cls(rates, alone)


@dataclass(frozen=True)
class MixDrafter(Drafter):
    """Drafters in order of trust, and what all generations share. `learnt` [sampled?]: batches with a sampled row
    (T > 0) have rates of their own."""

    parts: tuple[Drafter, ...] = field()
    learnt: tuple[Learnt, Learnt]
    gate: Gate = field(default_factory=Gate)
    clock: Callable[[], float] = perf_counter

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(sorted({tap for part in self.parts for tap in part.taps}))

    @property
    def reopens(self) -> bool:  # type: ignore[override]
        """Only if all parts do."""
        return all(part.reopens for part in self.parts)

    @property
    def learners(self) -> list[Any]:
        """The parts that are kept between runs (`budgets/memory.py`)."""
        rates = [rate for own in self.learnt for rate in (*own.rates, *own.alone) if rate is not None]
        return [*rates, self.gate, *super().learners]

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> MixDrafting:
        return MixDrafting(self, [part.open(prompts, capacity) for part in self.parts])


@dataclass
class Proposed:
    """A round's proposals of all parts, and where their nodes went in the tree of the mix."""

    trees: list[Proposal]
    maps: list[Places]
    budget: Budget
    networks: bool  # did the networks draft, if there are any?
    beside: bool  # did drafters of both kinds draft, with confidences?
    chances: Sequence[float] = ()  # [row]: how likely a cheap draft has the next token, where the gate decided
    cheap: Host | None = None  # what would have been verified without networks, where the gate decided


@dataclass
class MixDrafting(Drafting):
    """The states of the drafters of a mix; each observes its own nodes of the common tree."""

    mix: MixDrafter
    parts: list[Drafting]
    last: Proposed | None = None
    idle: int = LATE  # rounds since the networks drafted; their next draft reads the text since then first

    def expect(self, row: int, tokens: Sequence[int]) -> None:
        for part in self.parts:
            part.expect(row, tokens)

    def observe(self, round: Round) -> None:
        last, self.last, self.idle = self.last, None, self.idle + 1
        if last is not None and round.rows.rule == "coupled":
            self._learn(last, round)
        for i, part in enumerate(self.parts):
            # Drafters with taps need the features of every accepted node, whichever part proposed it.
            tree = None if last is None else last.trees[i].tree
            if last is None or self.mix.parts[i].taps or not self.mix.parts[i].reads_tree:
                part.observe(round)
            else:
                assert tree is not None, "drafters that read trees propose trees"
                part.observe(translated(round, tree, last.maps[i]))

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        mix, coupled = self.mix, rows.rule == "coupled"
        own = mix.learnt[rows.sampled]
        networks = [k for k, rate in enumerate(own.rates) if rate is None]
        nothing = Proposal.of(root_only(rows.root))
        made = [nothing if k in networks else _cheap(part, rows, budget) for k, part in enumerate(self.parts)]
        beside = coupled and 0 < len(networks) < len(made) and _valued(made)
        chances, cheap = list[float](), None
        if beside and budget.rate:
            tree, maps = self._joined(made, own, coupled, budget)
            chances, cheap = _chances(made, own.alone), tree.host
            if not mix.gate.allows(rows, chances, _size(cheap, budget), budget):
                self.last = Proposed(made, maps, budget, False, beside, chances, cheap)
                return tree
        began = mix.clock()
        for k in networks:
            made[k] = Proposal.of(self.parts[k].propose(rows, budget))
        tree, maps = self._joined(made, own, coupled, budget)
        if beside and self.idle < LATE:
            mix.gate.seconds.learn(len(rows), mix.clock() - began)
        self.idle = 0
        self.last = Proposed(made, maps, budget, True, beside, chances, cheap)
        return tree

    def _joined(
        self, made: Sequence[Proposal], own: Learnt, coupled: bool, budget: Budget
    ) -> tuple[DraftTree, list[Places]]:
        """One tree of all, and for each where its nodes went (-1: cut)."""
        if any(part.tree is not None and part.tree.q is not None for part in made):
            raise InputError("drafters that sample their trees cannot be mixed; use one of them alone, or rule coupled")
        hosts = [part.host for part in made]
        if not _valued(made):
            return merge(hosts, budget.nodes)
        rates = own.rates if coupled else [rate and Rates() for rate in own.rates]
        alone = own.alone if coupled else [rate and Rates() for rate in own.alone]
        return graft(hosts, rates, alone if None in rates else rates, budget)

    def _learn(self, last: Proposed, round: Round) -> None:
        """Learn how often the parts were right, and what the networks gained."""
        own, chosen = self.mix.learnt[round.rows.sampled], round.tokens
        counts = [k for k, rate in enumerate(own.rates) if rate is not None]
        if last.beside:
            learn([last.trees[k].host for k in counts], [own.alone[k] for k in counts], chosen)
        if last.networks:
            learn([made.host for made in last.trees], own.rates, chosen, beside=last.beside)
            if last.cheap is not None:
                gains = [len(new) - 1 - _followed(row, new) for new, row in zip(chosen, last.cheap, strict=True)]
                size = _size(round.tree.host, last.budget) if last.budget.price else None
                self.mix.gate.learn(round.rows, last.chances, gains, size)

    def select(self, index: Sequence[int]) -> None:
        for part in self.parts:
            part.select(index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, MixDrafting)
        self.idle = LATE
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.join(theirs)


def _cheap(part: Drafting, rows: Rows, budget: Budget) -> Proposal:
    """The proposal of a drafter that is no network, as lists alone where it has a `sketch`."""
    made = part.sketch(rows, budget)
    return Proposal.of(part.propose(rows, budget)) if made is None else Proposal(made, True)


def merge(trees: Sequence[Host], limit: int) -> tuple[DraftTree, list[Places]]:
    """One trie per row of all trees' paths, at most `limit` nodes; and for each tree where its nodes went (-1: cut).

    Chains [9 5 6] and [9 5 7] -> tokens [9 5 6 7], parents [0 0 1 1], maps [0 1 2] and [0 1 3].
    """
    tokens = [[ids[0]] for ids, _, _ in trees[0]]
    parents: list[list[int]] = [[0] for _ in tokens]
    maps: list[Places] = [[] for _ in trees]
    for r in range(len(tokens)):
        child: dict[tuple[int, int], int] = {}
        for tree, where in zip(trees, maps, strict=True):
            names, ups, _ = tree[r]
            ids = [0]
            for i in range(1, len(names)):
                up, token = ids[ups[i]], names[i]
                node = child.get((up, token), -1) if up >= 0 else -1
                if node < 0 <= up and len(tokens[r]) < limit:
                    node = child[up, token] = len(tokens[r])
                    tokens[r].append(token)
                    parents[r].append(up)
                ids.append(node)
            where.append(ids)
    rows = [(ids, ups, [0.0] * len(ids)) for ids, ups in zip(tokens, parents, strict=True)]
    return from_lists(rows, values=False), maps


def graft(
    trees: Sequence[Host], rates: Sequence[Rates | None], alone: Sequence[Rates | None], budget: Budget
) -> tuple[DraftTree, list[Places]]:
    """The most valuable nodes of all trees as one, and for each tree where its nodes went (-1: cut).

    Trees without rates come before the others. A node's chance, given its parent, is its confidence in the first tree
    that has it. With rates it is what they say of it `alone` where no earlier tree has children of its parent, else
    their share of what these children leave over. Where an earlier tree has the node too, its chance is the greater of
    both: two that agree are no less often right than either. A node's value is the product along its path: none is
    worth more than its parent, so what is kept is connected.
    """
    spelled, ups_of, logs_of = [], [], []
    places: list[Places] = [[] for _ in trees]  # of each tree's nodes among all nodes of the row
    for r in range(len(trees[0])):
        tokens, parents, chances, used = [trees[0][r][0][0]], [0], [1.0], [0.0]
        child: dict[tuple[int, int], int] = {}
        for k in _order(rates):
            names, ups, logs = trees[k][r]
            ids, before, rate, own = [0], list(used), rates[k], alone[k]
            for i in range(1, len(names)):
                up = ids[ups[i]]
                node = child.setdefault((up, names[i]), len(tokens))
                chance = math.exp(min(0.0, logs[i] - logs[ups[i]]))
                if node == len(tokens):
                    taken = before[up] if up < len(before) else 0.0
                    if rate is not None and own is not None:
                        chance = rate.of(chance) * (1 - taken) if taken else own.of(chance)
                    tokens.append(names[i])
                    parents.append(up)
                    chances.append(min(1.0, max(LEAST, chance)))
                    used.append(0.0)
                    used[up] = min(1.0, used[up] + chances[node])
                elif own is not None:
                    chances[node] = max(chances[node], min(1.0, own.of(chance)))
                ids.append(node)
            places[k].append(ids)
        values = [0.0]
        for node in range(1, len(tokens)):
            values.append(values[parents[node]] + math.log(chances[node]))
        spelled.append(tokens)
        ups_of.append(parents)
        logs_of.append(values)
    for r, ids in enumerate(best_of(logs_of, budget.nodes, budget.floor, budget.price)):
        new = {old: i for i, old in enumerate(ids)}
        spelled[r], logs_of[r] = [spelled[r][i] for i in ids], [logs_of[r][i] for i in ids]
        ups_of[r] = [new[ups_of[r][i]] for i in ids]
        for where in places:
            where[r] = [new.get(i, -1) for i in where[r]]
    return from_lists(list(zip(spelled, ups_of, logs_of, strict=True))), places


def learn(
    trees: Sequence[Host], rates: Sequence[Rates | None], chosen: Sequence[Sequence[int]], beside: bool = False
) -> None:
    """Add to every rate the children that it spoke for along the target's tokens, where no earlier tree was right.

    beside: only those that stand beside an earlier tree's children.
    """
    for r, added in enumerate(chosen):
        at: list[int | None] = [0] * len(trees)
        for token in added:
            known: set[int] = set()
            for k in _order(rates):
                names, ups, logs = trees[k][r]
                node, rate = at[k], rates[k]
                children = {names[i]: i for i in range(1, len(names)) if ups[i] == node}
                mine = [x for x in children if x not in known]
                if rate is not None and mine and token not in known and (known or not beside):
                    confidences = tuple(min(0.0, logs[children[x]] - logs[ups[children[x]]]) for x in mine)
                    rate.learn(Family(confidences, mine.index(token) if token in mine else -1))
                known |= children.keys()
                at[k] = children.get(token)


def _valued(trees: Iterable[Proposal]) -> bool:
    """Do all carry confidences that have nodes?"""
    return all(tree.valued for tree in trees)


def _chances(trees: Sequence[Proposal], rates: Sequence[Rates | None]) -> list[float]:
    """[row]: the chance that a tree has the next token."""
    chances = [0.0] * len(trees[0].host)
    for tree, rate in zip(trees, rates, strict=True):
        for r, (_, parents, values) in enumerate(tree.host):
            first = [math.exp(min(0.0, v)) for up, v in zip(parents[1:], values[1:], strict=True) if up == 0]
            chances[r] += (1 - chances[r]) * min(1.0, sum(rate.of(c) for c in first) if rate else sum(first))
    return chances


def _size(tree: Host, budget: Budget) -> float:
    """Nodes of a row that a pass over the tree takes time for: those of the widest, or all rows' mean where padding
    costs nothing."""
    sizes = [len(tokens) for tokens, _, _ in tree]
    return sum(sizes) / len(sizes) if budget.price and budget.price.summed else max(sizes)


def _followed(row: HostRow, tokens: Sequence[int]) -> int:
    """How deep these tokens go in a row's tree."""
    names, parents, _ = row
    child = {(parents[i], names[i]): i for i in range(1, len(names))}
    node = depth = 0
    for token in tokens:
        if (node, token) not in child:
            break
        node, depth = child[node, token], depth + 1
    return depth


def _order(rates: Sequence[Rates | None]) -> list[int]:
    return sorted(range(len(rates)), key=lambda k: rates[k] is not None)


def translated(round: Round, tree: DraftTree, where: Places) -> Round:
    """The round in one drafter's own node ids; -1 for nodes that are not its own.

    Args:
        tree: the drafter's own.
        where: where its nodes went in the round's tree, -1: nowhere.
    """
    paths = []
    for path, places in zip(round.paths, where, strict=True):
        mine = {node: i for i, node in reversed(list(enumerate(places))) if node >= 0}
        paths.append([mine.get(node, -1) for node in path])
    index = np.maximum(padded(where, tree.nodes, fill=-1), 0)
    rows, output = np.arange(len(where))[:, None], round.output
    features = {tap: states[rows, index] for tap, states in output.features.items()}
    made = TargetOutput(output.logits[rows, index], features)
    unseen = [{i for i, place in enumerate(places) if place < 0} for places in where]
    return replace(round, tree=tree, output=made, paths=paths, unseen=unseen)


def of(parts: Sequence[Drafter]) -> MixDrafter:
    """Mix drafters, in order of trust."""
    networks = [p.costly or isinstance(calibrated(p), Calibrated) for p in parts]
    return MixDrafter(tuple(parts), (Learnt.of(networks), Learnt.of(networks)))
