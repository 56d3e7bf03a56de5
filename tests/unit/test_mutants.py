"""Every wrong rule of docs/methods.md, "Rules that only look right", and the proof that the checker of `test_verify`
fails it.

Each mutant differs from the real rule in one idea. Its bias, the total variation between its text and plain decoding's,
is computed exactly, so the bounds below are properties of the mutant on one small model and no accident of sampling.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from enumerating import (
    EXACT,
    FORMS,
    Branches,
    Draft,
    Form,
    Rule,
    Text,
    Warp,
    World,
    bias,
    cut,
    distance,
    emitted,
    joint,
    plain,
    sampled,
    single,
    world,
)  # fmt: skip

from outrider.core.sampling import softmax
from outrider.core.tree import best_of
from outrider.core.types import Array, DraftTree, Verdict
from outrider.params import Sampling


def chain(gamma: int) -> Draft:
    return sampled((1,) * gamma)


def top_k(k: int, judged: bool) -> Draft:
    """The k likeliest children of q, deterministic; `judged`: their q is handed to the rule as if it had drawn them."""

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        q = w.q(np.array([w.code(text)]), len(text))
        tokens = np.argsort(-q[0], kind="stable")[:k].tolist()
        return single([0, *tokens], [0] * (k + 1), q if judged else None, len(chance))

    return draft


# --- wrong drafts, judged by the real rule


def reranked(shape: tuple[int, ...], nodes: int) -> Draft:
    """A sampled tree, cut to its `nodes` likeliest nodes (EAGLE-2's re-ranking applied where it must not be)."""
    full = sampled(shape)

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        tree = full(chance, w, text)
        values = [[0.0] for _ in range(len(chance))]
        for (tokens, parents, _), q, row in zip(tree.host, tree.q, values, strict=True):
            for token, parent in zip(tokens[1:], parents[1:], strict=True):
                row.append(row[parent] + float(np.log(q[parent, token])))
        return cut(tree, best_of(values, nodes, 0.0, None))

    return draft


def confident(gamma: int, threshold: float) -> Draft:
    """A chain that ends before the first token whose own confidence is low."""
    full = chain(gamma)

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        tree = full(chance, w, text)
        own = np.take_along_axis(tree.q, tree.tokens[:, 1:, None], 2)[..., 0]
        kept = (own >= threshold).cumprod(1).sum(1)
        return cut(tree, [range(1 + n) for n in kept.tolist()])

    return draft


def without_duplicates(shape: tuple[int, ...]) -> Draft:
    """Siblings drawn with replacement, the second of two equals thrown away with all below it."""
    full = sampled(shape, replacement=True)

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        tree, chosen = full(chance, w, text), []
        for tokens, parents, _ in tree.host:
            kept, seen = [0], set[tuple[int, int]]()
            for node in range(1, len(tokens)):
                if parents[node] in kept and (parents[node], tokens[node]) not in seen:
                    kept.append(node)
                seen.add((parents[node], tokens[node]))
            chosen.append(kept)
        return cut(tree, chosen)

    return draft


def argmax_judged(gamma: int) -> Draft:
    """A chain of argmaxes that claims to have been drawn from the softmax."""

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        tokens, distributions, so_far = [text[-1] if text else 0], [], text
        for _ in range(gamma):
            q = w.q(np.array([w.code(so_far)]), len(so_far))[0]
            distributions.append(q)
            tokens.append(int(q.argmax()))
            so_far = (*so_far, tokens[-1])
        return single(tokens, [max(0, i - 1) for i in range(gamma + 1)], np.stack(distributions), len(chance))

    return draft


# --- wrong rules


def block_mutant(how: str) -> Rule:
    """Block verification of full chains with one line changed."""

    def rule(tree: DraftTree, logits: Array, warp: Warp, chance: Branches, depth: int) -> Verdict:
        b, gamma = len(chance), tree.nodes - 1
        if depth < gamma:  # at the end of the table
            return FORMS[0].block(tree, logits, warp, chance, depth)
        x, row = tree.tokens[:, 1:], np.arange(b)
        w, tau, going = np.ones(b), np.zeros(b, np.int64), np.ones(b, bool)
        final = np.zeros((b, logits.shape[2]))
        for i in range(gamma + 1):
            p = warp(logits[:, i], i + 1, x[:, :i])
            q = tree.q[:, i] if i < gamma else np.zeros_like(p)
            s = np.maximum(w[:, None] * p - q, 0).sum(1)
            h = w if i == gamma or how == "h = w" else np.where(s > 0, s / np.where(s > 0, s + 1 - w, 1.0), 0.0)
            taken = going
            if i:
                taken = np.array([chance.accept(r, float(h[r] * going[r]), i) for r in range(b)]) & going
            if i and how == "stops at the first failure":
                going = taken
            scale = 1.0 if how == "residual [p - q]+" else w[:, None]
            rest = np.maximum(scale * p - q, 0)
            rest = np.where(rest.sum(1, keepdims=True) > 0, rest, p)
            tau, final = np.where(taken, i, tau), np.where(taken[:, None], rest, final)
            if i < gamma:
                w = np.minimum(w * p[row, x[:, i]] / q[row, x[:, i]], 1)
        drawn = chance.draw(final).tolist()
        return Verdict([list(range(1 + n)) for n in tau.tolist()], drawn, [True] * b)

    return rule


def below_the_draw(form: Form) -> Rule:
    """Accepts where p / q lies below the uniform draw."""

    class Upside(Branches):
        def __init__(self, chance: Branches) -> None:
            self.chance = chance

        def accept(self, row: int, probability: float, index: int) -> bool:
            return not self.chance.accept(row, probability, index)

        def choose(self, row: int, weights: list[float]) -> int:  # type: ignore[override]
            return self.chance.choose(row, weights)

    def rule(tree: DraftTree, logits: Array, warp: Warp, chance: Branches, depth: int) -> Verdict:
        return form.rejection(tree, logits, warp, Upside(chance), depth)

    return rule


def raw_bonus(form: Form) -> Rule:
    """After a fully accepted chain the target's own token is drawn without temperature or filter."""

    def rule(tree: DraftTree, logits: Array, warp: Warp, chance: Branches, depth: int) -> Verdict:
        def raw(scores: Array, d: int, path: Array) -> Array:
            return softmax(scores) if d == tree.nodes else warp(scores, d, path)

        return form.rejection(tree, logits, raw, chance, depth)

    return rule


def own_draws(rows: int) -> Rule:
    """Medusa's nucleus: each of `rows` candidate paths draws a token of its own at the node that they share."""

    def rule(tree: DraftTree, logits: Array, warp: Warp, chance: Branches, depth: int) -> Verdict:
        b = len(chance)
        p = warp(logits[:, 0], 1, np.empty((b, 0), np.int64))
        x = tree.tokens[:, 1:2]
        hit = np.zeros(b, bool)
        for _ in range(rows):
            hit |= chance.draw(p) == x[:, 0]
        drawn = chance.draw(np.where(hit[:, None], warp(logits[:, 1], 2, x), p)).tolist()
        return Verdict([[0, 1] if yes else [0] for yes in hit.tolist()], drawn, [True] * b)

    return rule


def softmax_at_zero(form: Form) -> Rule:
    """At T = 0 the target's distribution as a softmax."""

    def rule(tree: DraftTree, logits: Array, warp: Warp, chance: Branches, depth: int) -> Verdict:
        return form.rejection(tree, logits, lambda z, d, path: softmax(z), chance, depth)

    return rule


# --- the table

SHARP = Sampling(temperature=0.6)
NUCLEUS = Sampling(temperature=1.0, top_p=0.7)
GREEDY = Sampling(temperature=0.0)


def table(p: list[float], q: list[float], **distributions: Sampling) -> World:
    """A world without memory, one token long."""
    v = len(p)
    target, drafter = ([np.tile(np.log(warp), (v**i, 1)) for i in range(3)] for warp in (p, q))
    return World(target, drafter, length=1, **distributions)


STOCK = table([0.68 / 1.01, 0.08 / 1.01, 0.01 / 1.01, 0.21 / 1.01, 0.03 / 1.01], [0.2, 0.1, 0.02, 0.63, 0.05])
COIN = table([0.5, 0.5], [0.5, 0.5])

# What is wrong, who is wrong (rule, draft), where, and the range its bias must lie in.
Mutant = tuple[Rule, Draft, World, float, float]


def mutants(form: Form) -> dict[str, Mutant]:
    return {
        "min(1, p/q) for top-k candidates as if sampled": (
            form.rejection, top_k(2, judged=True), world("random", seed=2, length=2), 0.40, 0.61),
        "a sampled tree re-ranked by its own scores": (
            form.rejection, reranked((2, 1), 4), world("random", length=2), 0.05, 0.10),
        "a sampled layer cut to its best": (
            form.rejection, reranked((2,), 2), world("random", length=2), 0.05, 0.10),
        "a drafted token dropped for its own confidence": (
            form.rejection, confident(1, 0.25), world("random", length=2), 0.04, 0.08),
        "block verification with h = w": (
            block_mutant("h = w"), chain(2), world("random", length=2), 0.05, 0.11),
        "block verification stopping at the first failure": (
            block_mutant("stops at the first failure"), chain(2), world("random", length=2), 0.14, 0.18),
        "block verification with the residual [p - q]+": (
            block_mutant("residual [p - q]+"), chain(2), world("near", seed=2, length=2), 0.001, 0.005),
        "the bonus token without temperature": (
            raw_bonus(form), chain(1), world("near", length=2, sampling=SHARP), 0.05, 1.0),
        "the bonus token without top-p": (
            raw_bonus(form), chain(2), world("near", length=3, sampling=NUCLEUS), 0.05, 1.0),
        "each candidate path draws its own token: one row": (
            own_draws(1), top_k(1, judged=False), COIN, 0.2499, 0.2501),
        "each candidate path draws its own token: three rows": (
            own_draws(3), top_k(1, judged=False), COIN, 0.437, 0.438),
        "accepts when p/q is below the draw": (below_the_draw(form), chain(1), world("random", length=1), 0.05, 1.0),
        "duplicates dropped among siblings drawn with replacement": (
            form.rejection, without_duplicates((3,)), world("random", v=4, seed=10, length=1), 0.10, 0.18),
        "a softmax where T = 0 wants a one-hot": (
            softmax_at_zero(form), top_k(1, judged=False), table([0.501, 0.499], [0.6, 0.4], sampling=GREEDY),
            0.49, 0.5),
        "argmax drafts judged by a softmax q": (form.rejection, argmax_judged(1), STOCK, 0.11, 0.13),
    }  # fmt: skip


MUTANTS = {(form, name): mutant for form in FORMS for name, mutant in mutants(form).items()}
EVERY = pytest.mark.parametrize(("form", "name"), MUTANTS, ids=lambda x: str(x))


@EVERY
def test_killed(form: Form, name: str) -> None:
    rule, draft, w, low, high = MUTANTS[form, name]
    measured = bias(rule, draft, w)
    assert measured > EXACT, "the checker of the real rules fails it"
    assert low <= measured <= high, f"bias {measured:.4f}"


@EVERY
def test_the_real_rules_pass_in_the_same_world(form: Form, name: str) -> None:
    w = MUTANTS[form, name][2]
    w = replace(w, length=min(2, w.length))
    for rule, draft in (
        (form.rejection, sampled((2,))),
        (form.rejection, sampled((2,), replacement=True)),
        (form.rejection, top_k(2, judged=False)),
        (form.block, chain(2)),
    ):
        assert bias(rule, draft, w) < EXACT


def test_the_mutated_block_without_a_mutation_passes() -> None:
    """So it is the one changed line that the bias comes from."""
    for kind in ("random", "near"):
        assert bias(block_mutant("in nothing"), chain(2), world(kind, seed=2, length=2)) < EXACT


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_argmax_drafts_judged_by_a_softmax_have_the_documented_bias(form: Form) -> None:
    result = joint(form.rejection, argmax_judged(1), STOCK)
    assert [result.get((x,), 0.0) for x in range(5)] == pytest.approx([0.67, 0, 0, 0.33, 0], abs=0.005)


# --- randomness that rounds share

Intervals = tuple[tuple[int, float, float], ...]  # per position: U lies in [low, high)


class Positional(Branches):
    """Acceptance by one uniform number per absolute position, which a later round meets again."""

    def __init__(self, scripts: list[tuple[int, ...]], length: int, known: Intervals, shared: bool):
        super().__init__(scripts)
        self.length, self.shared = length, shared
        self.known = [{position: (low, high) for position, low, high in known} for _ in scripts]

    def accept(self, row: int, probability: float, index: int) -> bool:
        position = self.length + index - 1
        low, high = self.known[row].get(position, (0.0, 1.0))
        p = min(max(probability, low), high)
        yes = self.choose(row, (high - p, p - low)) == 1
        if self.shared:
            self.known[row][position] = (low, p) if yes else (p, high)
        return yes


def joint_by_position(w: World, gamma: int, shared: bool) -> dict[Text, float]:
    """The text's distribution under block verification with acceptance keyed by position (not shared: right)."""
    states: list[dict[tuple[Text, Intervals], float]] = [defaultdict(float) for _ in range(w.length + 1)]
    states[0][(), ()] = 1.0
    done: dict[Text, float] = defaultdict(float)
    for layer in states[:-1]:
        for (text, known), weight in layer.items():
            for (longer, kept), p in explore_positions(w, gamma, text, known, shared):
                if len(longer) >= w.length:
                    done[longer[: w.length]] += weight * p
                else:
                    states[len(longer)][longer, kept] += weight * p
    return done


def explore_positions(w: World, gamma: int, text: Text, known: Intervals, shared: bool) -> list:
    scripts: list[tuple[int, ...]] = [()]
    results = []
    while scripts:
        chance = Positional(scripts, len(text), known, shared)
        tree = chain(gamma)(chance, w, text)
        warp: Warp = lambda logits, d, path: w.warp(logits, text, path)  # noqa: E731
        rows = emitted(tree, FORMS[0].block(tree, w.output(tree, text), warp, chance, gamma))
        for tokens, intervals, weight in zip(rows, chance.known, chance.weight, strict=True):
            longer = text + tokens
            kept = tuple((i, *u) for i, u in sorted(intervals.items()) if i >= len(longer))
            results.append(((longer, kept), weight))
        scripts = chance.untaken()
    return results


def test_randomness_keyed_by_position_biases_block_verification() -> None:
    w = world("random", v=2, seed=1, depth=8)
    right, wrong = (distance(joint_by_position(w, 3, shared), plain(w)) for shared in (False, True))
    assert right < EXACT
    assert 0.005 < wrong < 0.05, f"bias {wrong:.4f}"


def show() -> None:
    for (form, name), (rule, draft, w, low, high) in MUTANTS.items():
        print(f"{form!r:10s} {name:60s} {bias(rule, draft, w):.5f}  [{low}, {high}]")


if __name__ == "__main__":
    show()
