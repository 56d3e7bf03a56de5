"""The rejection rules by exact enumeration: all randomness of draft and verification, the real code, TV < 1e-12.

Everything runs over both forms of the rules, the reference in numpy and the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from enumerating import (
    EVERY_FORM,
    EXACT,
    Branches,
    Draft,
    Form,
    Text,
    World,
    bias,
    emitted,
    explore,
    joint,
    outcomes,
    plain,
    repeat,
    sampled,
    single,
    world,
)  # fmt: skip

from outrider.core import sampling
from outrider.core.tree import chain, from_lists, root_only
from outrider.core.types import DraftTree
from outrider.params import Sampling

KINDS = ("random", "zeros", "equal", "disjoint", "near", "opposed")
WARPS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.5),
    Sampling(temperature=1.7),
    Sampling(temperature=1.0, top_k=2),
    Sampling(temperature=0.8, top_p=0.7),
    Sampling(temperature=1.0, min_p=0.4),
    Sampling(temperature=1.3, top_k=3, top_p=0.9, min_p=0.1),
    Sampling(temperature=1.0, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(temperature=0.9, logit_bias={1: 1.5, 2: -1.0}),
)


def guessed(seed: int, nodes: int) -> Draft:
    """Deterministic trees, a different one after every text; sometimes only a root."""

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        g = torch.Generator().manual_seed(seed + 97 * w.code(text) + len(text))
        tokens, parents, taken = [text[-1] if text else 0], [0], set()
        for _ in range(int(torch.randint(nodes, (1,), generator=g))):
            parent = int(torch.randint(len(tokens), (1,), generator=g))
            token = int(torch.randint(w.v, (1,), generator=g))
            depth, at = 1, parent
            while at:
                at, depth = parents[at], depth + 1
            if (parent, token) not in taken and depth <= 3:
                taken.add((parent, token))
                tokens.append(token)
                parents.append(parent)
        return single(tokens, parents, rows=len(chance))

    return draft


@EVERY_FORM
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_chain(form: Form, kind: str, gamma: int) -> None:
    assert bias(form.rejection, sampled((1,) * gamma), world(kind, seed=3, length=(3, 2, 1)[gamma - 1])) < EXACT


@EVERY_FORM
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_block(form: Form, kind: str, gamma: int) -> None:
    assert bias(form.block, sampled((1,) * gamma), world(kind, seed=3, length=(3, 3, 2)[gamma - 1])) < EXACT


@EVERY_FORM
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("shape", [(2, 1), (3,), (1, 2)])
def test_tree(form: Form, kind: str, shape: tuple[int, ...], replacement: bool) -> None:
    assert bias(form.rejection, sampled(shape, replacement), world(kind, seed=5, length=2)) < EXACT


@EVERY_FORM
def test_larger_trees(form: Form) -> None:
    for draft in (sampled((2, 1, 1)), sampled((2, 2)), sampled((3, 1)), sampled((2, 2), replacement=True)):
        assert bias(form.rejection, draft, world(seed=5, length=1)) < EXACT
        assert bias(form.rejection, draft, world("zeros", seed=5, length=2)) < EXACT


@EVERY_FORM
@pytest.mark.parametrize("kind", KINDS)
def test_four_tokens(form: Form, kind: str) -> None:
    w = world(kind, v=4, seed=7, length=2)
    for draft in (sampled((2, 1)), sampled((2,), replacement=True), sampled((4,)), guessed(1, 9)):
        assert bias(form.rejection, draft, w) < EXACT
    assert bias(form.block, sampled((1, 1)), w) < EXACT


@EVERY_FORM
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_deterministic_trees(form: Form, kind: str, seed: int) -> None:
    assert bias(form.rejection, guessed(seed, 8), world(kind, seed=seed, length=2)) < EXACT


@EVERY_FORM
@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_chains_by_blocks(form: Form, kind: str) -> None:
    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        return repeat(chain([[0, len(text) % w.v, 1]]), len(chance))

    assert bias(form.block, draft, world(kind, seed=2)) < EXACT


@EVERY_FORM
@pytest.mark.parametrize("warp", WARPS, ids=range(len(WARPS)))
def test_warps_and_penalties(form: Form, warp: Sampling) -> None:
    """Target and drafter warped alike; penalties apply to the target alone, along each node's own path."""
    w = world("near", v=4, seed=11, length=2, sampling=warp)
    for draft in (sampled((1, 1)), sampled((2,)), sampled((2,), replacement=True), guessed(3, 6)):
        assert bias(form.rejection, draft, w) < EXACT
    assert bias(form.block, sampled((1, 1)), w) < EXACT


@EVERY_FORM
@pytest.mark.parametrize("warp", WARPS[1:6], ids=range(5))
def test_the_drafter_may_be_warped_otherwise(form: Form, warp: Sampling) -> None:
    w = world("near", v=3, seed=13, length=2, draft_sampling=warp)
    for draft in (sampled((1, 1)), sampled((2,)), sampled((2,), replacement=True)):
        assert bias(form.rejection, draft, w) < EXACT
    assert bias(form.block, sampled((1, 1)), w) < EXACT


@EVERY_FORM
def test_the_first_token_is_exact_after_an_end_of_text(form: Form) -> None:
    """An absorbing EOS: its distribution is one-hot, so texts end with the right probability at every length."""
    w = world("random", v=3, seed=1, length=2)
    for table in w.target[1:]:
        for code in range(len(table)):
            if code % 3 == 2:
                table[code] = [-np.inf, -np.inf, 0.0]
    for draft in (sampled((1, 1)), sampled((2, 1)), sampled((2,), replacement=True)):
        assert bias(form.rejection, draft, w) < EXACT
    assert bias(form.block, sampled((1, 1)), w) < EXACT


@EVERY_FORM
def test_block_accepts_more_than_token_by_token(form: Form) -> None:
    """Sun et al. 2024, Theorem 2: optimal among chain rules, never behind."""

    def length(rule: object, w: World) -> float:
        return sum(len(t) * p for t, p in outcomes(rule, sampled((1, 1)), w, ()).items())  # type: ignore[arg-type]

    gains = [length(form.block, w) - length(form.rejection, w) for w in map(world, KINDS)]
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


@EVERY_FORM
def test_acceptance_of_a_chain_is_the_overlap(form: Form) -> None:
    """Leviathan et al. 2023, Theorem 3.5: beta = sum of min(p, q)."""
    w = world("random", seed=9)
    result = outcomes(form.rejection, sampled((1,)), w, ())
    beta = sum(p for tokens, p in result.items() if len(tokens) == 2)
    p, q = w.p(()), w.q(np.array([0]), 0)[0]
    assert beta == pytest.approx(float(np.minimum(p, q).sum()), abs=1e-12)


@EVERY_FORM
def test_no_draft_emits_from_the_target(form: Form) -> None:
    for rule in (form.rejection, form.block):
        assert bias(rule, lambda chance, w, text: root_only([0] * len(chance)), world()) < EXACT


@EVERY_FORM
def test_a_bound_on_the_depth_stays_exact(form: Form) -> None:
    for bound in (0, 1):
        for rule, draft in ((form.rejection, sampled((2, 1))), (form.block, sampled((1, 1)))):

            def bounded(tree, logits, warp, chance, depth, rule=rule, bound=bound):
                verdict = rule(tree, logits, warp, chance, min(bound, depth))
                assert max(map(len, verdict.paths)) <= bound + 1
                return verdict

            assert bias(bounded, draft, world("near", length=1)) < EXACT


@EVERY_FORM
def test_ragged_rows_in_one_batch(form: Form) -> None:
    """Rows of different shapes, judged together, give the distributions that they give alone."""
    w = world("random", seed=4)
    trees = [([0, 1, 2, 0], [0, 0, 0, 1]), ([0], [0]), ([0, 2, 1], [0, 0, 1]), ([0, 0, 0, 0], [0, 0, 1, 2])]

    def alone(which: int) -> dict[Text, float]:
        tokens, parents = trees[which]
        return outcomes(form.rejection, lambda c, w, t: single(tokens, parents, rows=len(c)), w, ())

    together = from_lists([(t, p, [0.0] * len(t)) for t, p in trees], values=False)

    def run(chance: Branches) -> list:
        # Row `which` follows the scripts; the others stand beside it and draw what they like.
        out = []
        for script_row in range(len(chance)):
            beside = Beside(chance, script_row, which)
            verdict = form.rejection(together, output, warp, beside, 3)
            out.append(emitted(together, verdict)[which])
        return out

    output = w.output(together, ())
    warp = lambda logits, d, path: w.warp(logits, (), path)  # noqa: E731
    for which in range(len(trees)):
        results: dict[Text, float] = {}
        for tokens, weight in explore(run):
            results[tokens] = results.get(tokens, 0.0) + weight
        assert results == pytest.approx(alone(which), abs=1e-12)


class Beside(Branches):
    """One row follows a script, its neighbours accept every second decision."""

    def __init__(self, chance: Branches, script_row: int, which: int):
        self.chance, self.script_row, self.which = chance, script_row, which

    def accept(self, row: int, probability: float, index: int) -> bool:
        if row != self.which:
            return probability > 0 and index % 2 == 1
        return self.chance.accept(self.script_row, probability, index)

    def choose(self, row: int, weights: Sequence[float]) -> int:
        return self.chance.choose(self.script_row, weights) if row == self.which else int(np.argmax(weights))


@EVERY_FORM
def test_rounded_distributions_stay_close(form: Form) -> None:
    """float32 distributions whose sums are off by rounding: the rules normalise and stay within rounding."""
    w = world("near", v=4, seed=2, length=2)

    def rule(tree, logits, warp, chance, depth):
        tree = replace(tree, q=None if tree.q is None else tree.q.astype(np.float32) * np.float32(1.0001))
        return form.rejection(
            tree, logits, lambda z, d, path: warp(z, d, path).astype(np.float32) * np.float32(0.9999), chance, depth
        )

    assert bias(rule, sampled((2, 1)), w) < 1e-6


@EVERY_FORM
def test_the_checker_covers_all_probability_mass(form: Form) -> None:
    w = world("zeros", seed=6)
    for draft in (sampled((2, 2)), guessed(0, 6)):
        assert sum(joint(form.rejection, draft, w).values()) == pytest.approx(1, abs=1e-12)
    assert sum(plain(w).values()) == pytest.approx(1, abs=1e-12)
    assert sampling.distribution(w.target[0][0], Sampling(temperature=0.0)).sum() == 1
