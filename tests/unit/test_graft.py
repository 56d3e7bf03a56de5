"""Grafts: trees whose nodes compete by value. By hand, against all paths, by enumeration, and a biased mutant."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace
from typing import Any, cast

import heads
import numpy as np
import oracle
import pytest
from enumerating import EVERY_FORM, EXACT, Branches, Draft, Form, Text, World, bias, repeat, sampled, world
from play import Play

from outrider import drafters
from outrider.budgets.acceptance import Ratio
from outrider.budgets.budgeter import FixedBudget
from outrider.core.price import Price
from outrider.core.tree import check, from_lists
from outrider.core.types import Budget, DraftTree
from outrider.drafters import _mix, eagle
from outrider.drafters._calibrated import Family, Rates
from outrider.drafters._growth import Growth
from outrider.params import InputError
from outrider.testing import TableTarget, plain

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [2, 7, 2, 7, 2], [1, 3, 5]]
Paths = dict[tuple[int, ...], float]  # of nodes without the root: the chance of each, given its parent


def tree(*rows: Paths, root: int = 9) -> DraftTree:
    """A tree per row from its paths, parents first."""
    made = []
    for paths in rows:
        place: dict[tuple[int, ...], int] = {(): 0}
        names, ups, logs = [root], [0], [0.0]
        for path, chance in paths.items():
            place[path] = len(names)
            names.append(path[-1])
            ups.append(place[path[:-1]])
            logs.append(logs[ups[-1]] + math.log(chance))
        made.append((names, ups, logs))
    return from_lists(made)


def paths_of(made: DraftTree, row: int = 0) -> list[tuple[int, ...]]:
    results: list[tuple[int, ...]] = [()]
    for i in range(1, int(made.size[row])):
        results.append((*results[int(made.parents[row, i])], int(made.tokens[row, i])))
    return results


class Known(Rates):
    """Rates that have learnt that the confidences are right."""

    def of(self, confidence: float) -> float:
        return confidence


def graft(
    trees: list[DraftTree], budget: Budget, rates: Any = None, alone: Any = None
) -> tuple[DraftTree, list[_mix.Places]]:
    rates = rates or [None, *[Known()] * (len(trees) - 1)]
    made, maps = _mix.graft([tree.host for tree in trees], rates, alone or rates, budget)
    check(made)
    return made, maps


def test_by_hand() -> None:
    """The network is sure of 4 and not of what follows; the text once went on as 4 5 6, or as 8."""
    network = tree({(4,): 0.8, (7,): 0.1, (4, 1): 0.3, (4, 2): 0.2})
    text = tree({(4,): 0.1, (4, 5): 0.5, (4, 5, 6): 0.9, (8,): 0.3})
    made, maps = graft([network, text], Budget(5, 4))
    # 4: .8, 4 1: .24, 4 5: half of what 1 and 2 leave, .2, 4 5 6: .18; 4 2: .16, 7: .1, 8: .3 of .1
    assert set(paths_of(made)) == {(), (4,), (4, 1), (4, 5), (4, 5, 6)}
    assert made.values is not None
    assert sorted(np.exp(made.values[0]).tolist()) == pytest.approx([0.18, 0.2, 0.24, 0.8, 1.0])
    for given, where in zip((network, text), maps, strict=True):
        for path, place in zip(paths_of(given), where[0], strict=True):
            assert (place >= 0) == (path in paths_of(made))
            assert place < 0 or paths_of(made)[place] == path


class Halved(Rates):
    """Rates that have learnt that half of the confidence comes true."""

    def of(self, confidence: float) -> float:
        return confidence / 2


def test_who_is_asked_about_a_node_of_the_text() -> None:
    """Beside the network's children its share of the rest, where it agrees the greater chance, and below all that the
    network has drafted what it says alone."""
    network = tree({(4,): 0.5, (4, 1): 0.4})
    text = tree({(4,): 0.9, (4, 1): 0.2, (4, 1, 6): 0.9, (8,): 0.8})
    made, _ = graft([network, text], Budget(9, 4), [None, Halved()], [None, Known()])
    assert made.values is not None
    chances = dict(zip(paths_of(made), np.exp(made.values[0]).tolist(), strict=True))
    path = 0.9 * 0.4
    expected = {(): 1.0, (4,): 0.9, (4, 1): path, (4, 1, 6): path * 0.9, (8,): 0.4 * (1 - 0.5)}
    assert chances == pytest.approx(expected)


def test_rates_beside_a_network_are_learnt_beside_it() -> None:
    """The text is right where the network has drafted nothing, and wrong where it knows better."""
    network, text = tree({(4,): 0.5, (4, 1): 0.4}), tree({(4,): 0.9, (4, 2): 0.6, (4, 2, 6): 0.9, (4, 2, 6, 3): 0.9})
    hosts, chosen = [network.host, text.host], [[4, 2, 6, 3]]
    beside, everywhere = Rates(), Rates()
    _mix.learn(hosts, [None, beside], chosen, beside=True)
    _mix.learn(hosts, [None, everywhere], chosen)
    assert sum(one.bottom for one in beside.bins) == pytest.approx(1, abs=0.01), "2 beside 1"
    assert sum(one.bottom for one in everywhere.bins) == pytest.approx(3, abs=0.01)


def test_networks_come_first_whatever_their_place() -> None:
    network, text = tree({(1,): 0.9, (1, 1): 0.8}), tree({(2,): 0.6, (1,): 0.3})
    one, two = graft([network, text], Budget(9, 4)), graft([text, network], Budget(9, 4), [Known(), None])
    assert sorted(paths_of(one[0])) == sorted(paths_of(two[0])) == [(), (1,), (1, 1), (2,)]
    assert one[0].values is not None
    assert np.exp(one[0].values[0]).tolist() == pytest.approx([1.0, 0.9, 0.72, 0.06])


@pytest.mark.parametrize("seed", range(5))
def test_the_best_nodes_of_all_trees(seed: int) -> None:
    """Ragged rows, three trees, against sorted paths."""
    dice = random.Random(seed)

    def some() -> Paths:
        result: Paths = {}
        for _ in range(8):
            path = (*dice.choice([(), *result]), dice.randrange(4))
            result.setdefault(path, dice.uniform(0.05, 0.95))
        return result

    given = [[some(), some()] for _ in range(3)]
    made, maps = graft([tree(*rows) for rows in given], Budget(7, 9))
    for row in range(2):
        chance: Paths = {}
        first: Paths = {}  # as they were when the node was added
        for k, rows in enumerate(given):
            before: Paths = {}
            for path, c in first.items():
                before[path[:-1]] = before.get(path[:-1], 0.0) + c
            for path, c in rows[row].items():
                if path in chance:
                    chance[path] = max(c, chance[path])
                else:
                    share = c * (1 - min(1.0, before.get(path[:-1], 0.0)) if k else 1.0)
                    chance[path] = first[path] = max(1e-4, share)

        def value(path: tuple[int, ...], chance: Paths = chance) -> float:
            return math.prod(chance[path[:i]] for i in range(1, len(path) + 1))

        best = sorted(chance, key=value, reverse=True)[:6]
        assert set(paths_of(made, row)) == {(), *best}
        for rows, where in zip(given, maps, strict=True):
            spelled = [(), *rows[row]]
            for path, place in zip(spelled, where[row], strict=True):
                assert (paths_of(made, row)[place] == path) if place >= 0 else path not in paths_of(made, row)


def test_floor_and_price_cut_them_all() -> None:
    trees = [tree({(1,): 0.6, (1, 1): 0.5}), tree({(2,): 0.75, (2, 2): 0.95})]
    assert len(paths_of(graft(trees, Budget(9, 4, floor=0.29))[0])) == 4
    assert paths_of(graft(trees, Budget(9, 4, price=Price((1.0, 1.1, 2.0, 3.0, 4.0))))[0]) == [(), (1,)]


# --- exactness


def guessed(seed: int, nodes: int) -> Draft:
    """Two trees whose shape, tokens and chances depend on the text alone, grafted by the real code."""

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        dice, copied = random.Random(seed + 97 * w.code(text) + len(text)), random.Random(seed)
        q = w.q(np.array([w.code(text)]), len(text))[0].tolist()
        likely = sorted(range(w.v), key=q.__getitem__, reverse=True)[:2]
        first = {(token,): min(0.9, max(0.05, q[token])) for token in likely}
        second: Paths = {}
        path: tuple[int, ...] = ()
        for _ in range(dice.randint(1, 3)):
            path = (*path, copied.randrange(w.v))
            second[path] = dice.uniform(0.1, 0.9)
        root = text[-1] if text else 0
        both = [tree(paths, root=root).host for paths in (first, second)]
        made, _ = _mix.graft(both, [None, Rates()], [None, Rates()], Budget(nodes, 3))
        return repeat(made, len(chance))

    return draft


@EVERY_FORM
@pytest.mark.parametrize("kind", ["random", "zeros", "near", "opposed"])
def test_grafts_are_exact_under_rejection(form: Form, kind: str) -> None:
    for seed in range(3):
        assert bias(form.rejection, guessed(seed, 4), world(kind, seed=seed, length=2)) < EXACT
        assert bias(form.block, guessed(seed, 4), world(kind, seed=seed, length=2)) < EXACT


@EVERY_FORM
def test_a_graft_beside_drawn_children_would_be_biased(form: Form) -> None:
    """The mutant: a retrieved child among children drawn from q, judged as if it had been drawn."""
    drawn = sampled((1,))

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        made = drawn(chance, w, text)
        root, children = text[-1] if text else 0, made.tokens[:, 1].tolist()
        rows = [[root, 0, x] if x else [root, 0] for x in children]
        zeros = [[0] * len(row) for row in rows]
        lists = [(row, up, [0.0] * len(row)) for row, up in zip(rows, zeros, strict=True)]
        return replace(from_lists(lists, values=False), q=made.q)

    assert bias(form.rejection, draft, world(seed=5, length=1)) > 0.03
    target, net = oracle.of_eagle()
    mixed = _mix.of([eagle.drafter(net, target, Growth("chain")), drafters.load_one("lookup")])
    with pytest.raises(InputError, match="cannot be mixed"):
        heads.run(target, mixed, PROMPTS[:1], 9, 1.0, FixedBudget(6, 3), "rejection")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_plain_decoding_and_rates_are_learnt(temperature: float) -> None:
    target = TableTarget(12, order=1, seed=5, scale=2.0)
    mixed = drafters.load(["lookup", "suffix"], target)
    before = copy.deepcopy(mixed.learnt)  # type: ignore[attr-defined]
    result = heads.written(target, mixed, PROMPTS, 60, temperature, budget=FixedBudget(8, 4))
    assert result == [plain(target, p, 60, temperature, seed=5 + i) for i, p in enumerate(PROMPTS)]
    after = mixed.learnt  # type: ignore[attr-defined]
    changed = [old.rates != new.rates for old, new in zip(before, after, strict=True)]
    assert changed == [temperature == 0, temperature > 0], "what one kind of text taught is not used for the other"


def test_under_rejection_no_rate_is_learnt_or_used() -> None:
    target = TableTarget(12, order=1, seed=5, scale=2.0)
    texts = []
    for spoiled in (False, True):
        mixed = drafters.load(["lookup", "suffix"], target)
        rates = mixed.learnt[True].rates  # type: ignore[attr-defined]
        if spoiled:
            rates[0].bins[10:] = [Ratio(1.0, 500.0) for _ in range(10)]
        kept = copy.deepcopy(rates)
        texts.append(heads.written(target, mixed, PROMPTS, 40, 1.0, "rejection", FixedBudget(5, 3)))
        assert rates == kept
    assert texts[0] == texts[1]


def test_counts_that_never_come_true_are_cut_where_a_drafter_is_alone() -> None:
    """Lookup is as sure of a wrong guess each time; alone too it is learnt that it is wrong, and nothing is drafted."""
    drafter, other = (cast("_mix.MixDrafter", drafters.load("lookup")) for _ in range(2))
    rate, unused = drafter.learnt[False].rates[0], other.learnt[False].rates[0]
    assert rate is not None
    assert unused is not None
    play = Play(drafter, [[1, 2, 3, 1, 2, 4, 1]], first=[[2]])
    budget = Budget(16, 1, price=Price((1.0, *(1.1,) * 15)))
    first = play.propose(budget)
    assert paths_of(first)[1:] == [(4,), (3,)]
    wrong = Family((math.log(0.75), math.log(0.1875)), -1)
    for _ in range(40):
        rate.learn(wrong)
    assert play.propose(budget).nodes == 1
    assert unused == Rates(), "another drafter has learnt nothing"


@pytest.mark.parametrize("name", ["lookup", "suffix"])
def test_alone_counts_are_learnt_and_kept(name: str) -> None:
    target = TableTarget(12, order=1, seed=5, scale=2.0)
    drafter = cast("_mix.MixDrafter", drafters.load(name, target))
    result = heads.written(target, drafter, PROMPTS, 60, 1.0, budget=FixedBudget(8, 4))
    assert result == [plain(target, p, 60, 1.0, seed=5 + i) for i, p in enumerate(PROMPTS)]
    rate = drafter.learnt[True].rates[0]
    assert rate is not None
    assert any(learner is rate for learner in drafter.learners)
    tested = sum(ratio.bottom for ratio in rate.bins)
    assert tested > 20
    assert 0 < sum(ratio.top for ratio in rate.bins) < tested


def test_an_oracle_keeps_its_depth_beside_lookup() -> None:
    """A network that knows the target is fitted to be sure, so that what lookup guesses displaces nothing of its."""
    target, net = oracle.of_eagle()
    mixed = _mix.of([eagle.drafter(net, target, Growth(width=3, top_k=3, scale=0.01)), drafters.load_one("lookup")])
    for temperature in (0.0, 1.0):
        for row in heads.run(target, mixed, PROMPTS, 31, temperature, FixedBudget(14, 4)):
            assert row.usage.accepted_at == [6, 6, 6, 6]


def test_rates() -> None:
    rates = Rates()
    assert rates.of(0.62) == pytest.approx(0.31)
    for i in range(2000):
        rates.learn(Family((math.log(0.62), math.log(0.31)), -1 if i % 4 else 0))
    assert rates.of(0.63) == pytest.approx(0.25, abs=0.05)
    assert rates.of(0.31) < 0.05
    assert rates.of(0.9) == pytest.approx(0.45)


def test_a_rate_is_learnt_where_no_tree_before_was_right() -> None:
    network, text = tree({(1,): 0.7, (1, 2): 0.5, (3,): 0.1}), tree({(3,): 0.62, (4,): 0.22, (1,): 0.12, (1, 5): 0.92})
    for chosen, tested in (
        ([3], {}),  # the network had it
        ([4], {0.22: 1}),  # 3 is the network's, 4 was spoken for, and right
        ([8], {0.22: 0}),
        ([1, 5, 7], {0.92: 1}),  # below 1, where the network had 2
        ([1, 2], {}),
        ([1, 6], {0.92: 0}),
    ):
        rates = Rates()
        _mix.learn([network.host, text.host], [None, rates], [chosen])
        results = {i: hits for i, (hits, n) in enumerate((r.top, r.bottom) for r in rates.bins) if n}
        assert results == {int(20 * c): hit for c, hit in tested.items()}, chosen
