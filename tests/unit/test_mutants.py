"""Every wrong rule of docs/methods.md, "Rules that only look right", and the proof that the checker of `test_verify`
fails it.

Each mutant differs from the real rule in one idea. Its bias, the total variation between its text and plain decoding's,
is computed exactly, so the bounds below are properties of the mutant on one small model and no accident of sampling.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from enumerating import (
    Branches,
    Draft,
    Rule,
    Text,
    World,
    bias,
    distance,
    emitted,
    joint,
    plain,
    repeat,
    sampled,
    world,
)  # fmt: skip
from torch import Tensor

from outrider.core import verify
from outrider.core.tree import best, from_lists, prune
from outrider.core.types import DraftTree, Verdict
from outrider.params import Sampling

EXACT = 1e-12


def chain(gamma: int) -> Draft:
    return sampled((1,) * gamma)


def top_k(k: int, judged: bool) -> Draft:
    """The k likeliest children of q, deterministic; `judged`: their q is handed to the rule as if it had drawn them."""

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        q = w.q(torch.tensor([w.code(text)]), len(text))
        tokens = q.topk(k).indices[0].tolist()
        tree = from_lists([[0, *tokens]], [[0] * (k + 1)])
        return repeat(replace(tree, q=q[:, None] if judged else None), len(chance))

    return draft


# --- wrong drafts, judged by the real rule


def reranked(shape: tuple[int, ...], nodes: int) -> Draft:
    """A sampled tree, cut to its `nodes` likeliest nodes (EAGLE-2's re-ranking applied where it must not be)."""
    whole = sampled(shape)

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        tree = whole(chance, w, text)
        assert tree.q is not None
        values = [torch.zeros(len(chance), dtype=torch.float64)]
        for i in range(1, tree.nodes):
            parent = tree.parents[0, i]
            values.append(values[parent] + tree.q[:, parent].gather(1, tree.tokens[:, i : i + 1])[:, 0].log())
        ids, count = best(torch.stack(values, 1), nodes)
        cut = prune(tree, ids, count)
        # Every kept node's law goes with it; leaves get any.
        laws = tree.q.gather(1, ids.clamp(max=tree.q.shape[1] - 1)[..., None].expand(-1, -1, w.v))
        return replace(cut, q=laws)

    return draft


def confident(gamma: int, threshold: float) -> Draft:
    """A chain that ends before the first token whose own confidence is low."""
    whole = chain(gamma)

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        tree = whole(chance, w, text)
        assert tree.q is not None
        own = tree.q.gather(2, tree.tokens[:, 1:, None])[..., 0]
        keep = (own >= threshold).long().cumprod(1).sum(1)
        ids = torch.arange(tree.nodes).expand(len(chance), -1)
        return replace(prune(tree, ids, keep + 1), q=tree.q)

    return draft


def without_duplicates(shape: tuple[int, ...]) -> Draft:
    """Siblings drawn with replacement, the second of two equals thrown away."""
    whole = sampled(shape, replacement=True)

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        tree = whole(chance, w, text)
        n = tree.nodes
        same = (tree.parents[:, :, None] == tree.parents[:, None]) & (tree.tokens[:, :, None] == tree.tokens[:, None])
        earlier = torch.ones(n, n, dtype=torch.bool).tril(-1)
        earlier[:, 0] = False
        double = (same & earlier).any(-1)
        double[:, 0] = False
        assert tree.ancestors is not None
        keep = ~(tree.ancestors & double[:, None]).any(-1)
        ids = torch.where(keep, torch.arange(n), n).sort(-1).values
        cut = prune(tree, torch.where(ids < n, ids, 0), keep.sum(-1))
        assert tree.q is not None
        laws = tree.q.gather(1, ids.clamp(max=tree.q.shape[1] - 1)[..., None].expand(-1, -1, w.v))
        return replace(cut, q=laws, replacement=True)

    return draft


def argmax_judged(gamma: int) -> Draft:
    """A chain of argmaxes that claims to have been drawn from the softmax."""

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        tokens, laws, so_far = [text[-1] if text else 0], [], text
        for _ in range(gamma):
            q = w.q(torch.tensor([w.code(so_far)]), len(so_far))
            laws.append(q)
            tokens.append(int(q.argmax()))
            so_far = (*so_far, tokens[-1])
        tree = from_lists([tokens], [[max(0, i - 1) for i in range(gamma + 1)]])
        return repeat(replace(tree, q=torch.stack(laws, 1)), len(chance))

    return draft


# --- wrong rules


def block_mutant(how: str) -> Rule:
    """Block verification of full chains with one line changed."""

    def rule(tree: DraftTree, logits: Tensor, law: Callable, chance: Branches, depth: int) -> Verdict:
        assert tree.q is not None
        b, gamma = len(chance), tree.nodes - 1
        if depth < gamma:  # at the end of the table
            return verify.block(tree, logits, law, chance, depth)
        x = tree.tokens[:, 1:]
        w, tau, going = torch.ones(b, dtype=torch.float64), torch.zeros(b, dtype=torch.long), torch.ones(b).bool()
        final = torch.zeros(b, logits.shape[2], dtype=torch.float64)
        for i in range(gamma + 1):
            p = law(logits[:, i], i + 1, x[:, :i])
            q = tree.q[:, i] if i < gamma else torch.zeros_like(p)
            s = (w[:, None] * p - q).clamp(min=0).sum(1)
            h = w if i == gamma or how == "h = w" else torch.where(s > 0, s / (s + 1 - w), 0.0)
            taken = going if i == 0 else chance.accept(h * going, torch.full((b,), i), gamma + 1) & going
            if i and how == "stops at the first failure":
                going = taken
            scale = 1.0 if how == "residual [p - q]+" else w[:, None]
            rest = (scale * p - q).clamp(min=0)
            rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p)
            tau, final = torch.where(taken, i, tau), torch.where(taken[:, None], rest, final)
            if i < gamma:
                token = x[:, i : i + 1]
                w = (w * (p.gather(1, token) / q.gather(1, token))[:, 0]).clamp(max=1)
        path = torch.arange(gamma + 1).expand(b, -1)
        return Verdict(torch.where(path <= tau[:, None], path, 0), tau + 1, chance.draw(final))

    return rule


def below_the_draw(tree: DraftTree, logits: Tensor, law: Callable, chance: Branches, depth: int) -> Verdict:
    """Accepts where p / q lies below the uniform draw."""

    class Upside(Branches):
        def __init__(self) -> None: ...

        def accept(self, prob: Tensor, index: Tensor, of: int) -> Tensor:
            return ~chance.accept(prob, index, of)

        def draw(self, weights: Tensor) -> Tensor:
            return chance.draw(weights)

    return verify.rejection(tree, logits, law, Upside(), depth)


def raw_bonus(tree: DraftTree, logits: Tensor, law: Callable, chance: Branches, depth: int) -> Verdict:
    """After a fully accepted chain the target's own token is drawn without temperature or filter."""

    def raw(scores: Tensor, d: int, path: Tensor) -> Tensor:
        return scores.double().softmax(-1) if d == tree.nodes else law(scores, d, path)

    return verify.rejection(tree, logits, raw, chance, depth)


def own_draws(rows: int) -> Rule:
    """Medusa's nucleus: each of `rows` candidate paths draws a token of its own at the node that they share."""

    def rule(tree: DraftTree, logits: Tensor, law: Callable, chance: Branches, depth: int) -> Verdict:
        b = len(chance)
        none = torch.empty(b, 0, dtype=torch.long)
        p = law(logits[:, 0], 1, none)
        x = tree.tokens[:, 1:2]
        hit = torch.zeros(b, dtype=torch.bool)
        for _ in range(rows):
            hit |= chance.draw(p) == x[:, 0]
        after = torch.where(hit[:, None], law(logits[:, 1], 2, x), p)
        path = torch.stack([torch.zeros(b, dtype=torch.long), hit.long()], 1)
        return Verdict(path, hit.long() + 1, chance.draw(after))

    return rule


def softmax_at_zero(tree: DraftTree, logits: Tensor, law: Callable, chance: Branches, depth: int) -> Verdict:
    """At T = 0 the target's law as a softmax."""
    return verify.rejection(tree, logits, lambda z, d, path: z.double().softmax(-1), chance, depth)


# --- the table

SHARP = Sampling(temperature=0.6)
NUCLEUS = Sampling(temperature=1.0, top_p=0.7)
GREEDY = Sampling(temperature=0.0)


def table(p: list[float], q: list[float], **laws: Sampling) -> World:
    """A world without memory, one token long."""
    v = len(p)
    rows = [torch.tensor([law], dtype=torch.float64).log() for law in (p, q)]
    target, drafter = ([row.expand(v**i, v).clone() for i in range(3)] for row in rows)
    return World(target, drafter, length=1, **laws)


STOCK = table([0.68 / 1.01, 0.08 / 1.01, 0.01 / 1.01, 0.21 / 1.01, 0.03 / 1.01], [0.2, 0.1, 0.02, 0.63, 0.05])
COIN = table([0.5, 0.5], [0.5, 0.5])

# What is wrong, who is wrong (rule, draft), where, and the range its bias must lie in.
MUTANTS: dict[str, tuple[Rule, Draft, World, float, float]] = {
    "min(1, p/q) for top-k candidates as if sampled": (
        verify.rejection, top_k(2, judged=True), world("random", seed=2, length=2), 0.40, 0.61),
    "a sampled tree re-ranked by its own scores": (
        verify.rejection, reranked((2, 1), 4), world("random", length=2), 0.05, 0.10),
    "a sampled layer cut to its best": (
        verify.rejection, reranked((2,), 2), world("random", length=2), 0.05, 0.10),
    "a drafted token dropped for its own confidence": (
        verify.rejection, confident(1, 0.25), world("random", length=2), 0.04, 0.08),
    "block verification with h = w": (
        block_mutant("h = w"), chain(2), world("random", length=2), 0.05, 0.11),
    "block verification stopping at the first failure": (
        block_mutant("stops at the first failure"), chain(2), world("random", length=2), 0.14, 0.18),
    "block verification with the residual [p - q]+": (
        block_mutant("residual [p - q]+"), chain(2), world("near", seed=2, length=2), 0.001, 0.005),
    "the bonus token without temperature": (
        raw_bonus, chain(1), world("near", length=2, sampling=SHARP), 0.05, 1.0),
    "the bonus token without top-p": (
        raw_bonus, chain(2), world("near", length=3, sampling=NUCLEUS), 0.05, 1.0),
    "each candidate path draws its own token: one row": (own_draws(1), top_k(1, judged=False), COIN, 0.2499, 0.2501),
    "each candidate path draws its own token: three rows": (own_draws(3), top_k(1, judged=False), COIN, 0.437, 0.438),
    "accepts when p/q is below the draw": (below_the_draw, chain(1), world("random", length=1), 0.05, 1.0),
    "duplicates dropped among siblings drawn with replacement": (
        verify.rejection, without_duplicates((3,)), world("random", v=4, seed=10, length=1), 0.10, 0.18),
    "a softmax where T = 0 wants a one-hot": (
        softmax_at_zero, top_k(1, judged=False), table([0.501, 0.499], [0.6, 0.4], sampling=GREEDY), 0.49, 0.5),
    "argmax drafts judged by a softmax q": (verify.rejection, argmax_judged(1), STOCK, 0.11, 0.13),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name: str) -> None:
    rule, draft, w, low, high = MUTANTS[name]
    measured = bias(rule, draft, w)
    assert measured > EXACT, "the checker of the real rules fails it"
    assert low <= measured <= high, f"bias {measured:.4f}"


@pytest.mark.parametrize("name", MUTANTS)
def test_the_real_rules_pass_in_the_same_world(name: str) -> None:
    w = replace(MUTANTS[name][2], length=min(2, MUTANTS[name][2].length))
    for rule, draft in (
        (verify.rejection, sampled((2,))),
        (verify.rejection, sampled((2,), replacement=True)),
        (verify.rejection, top_k(2, judged=False)),
        (verify.block, chain(2)),
    ):
        assert bias(rule, draft, w) < EXACT


def test_the_mutated_block_without_a_mutation_passes() -> None:
    """So it is the one changed line that the bias comes from."""
    for kind in ("random", "near"):
        assert bias(block_mutant("in nothing"), chain(2), world(kind, seed=2, length=2)) < EXACT


def test_argmax_drafts_judged_by_a_softmax_come_out_as_the_page_says() -> None:
    found = joint(verify.rejection, argmax_judged(1), STOCK)
    assert [found.get((x,), 0.0) for x in range(5)] == pytest.approx([0.67, 0, 0, 0.33, 0], abs=0.005)


# --- randomness that rounds share

Intervals = tuple[tuple[int, float, float], ...]  # per position: U lies in [low, high)


class Positional(Branches):
    """Acceptance by one uniform number per absolute position, which a later round meets again."""

    def __init__(self, scripts: list[tuple[int, ...]], length: int, known: Intervals, shared: bool):
        super().__init__(scripts)
        self.length, self.shared = length, shared
        self.known = [{position: (low, high) for position, low, high in known} for _ in scripts]

    def accept(self, prob: Tensor, index: Tensor, of: int) -> Tensor:
        out = []
        for row, (p, i) in enumerate(zip(prob.tolist(), index.tolist(), strict=True)):
            low, high = self.known[row].get(self.length + i - 1, (0.0, 1.0))
            p = min(max(p, low), high)
            yes = self._choose(row, (high - p, p - low)) == 1
            if self.shared:
                self.known[row][self.length + i - 1] = (low, p) if yes else (p, high)
            out.append(yes)
        return torch.tensor(out)


def joint_by_position(w: World, gamma: int, shared: bool) -> dict[Text, float]:
    """The text's law under block verification whose acceptance is keyed by position (not shared: the right way)."""
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
    found = []
    while scripts:
        chance = Positional(scripts, len(text), known, shared)
        tree = chain(gamma)(chance, w, text)
        law = lambda logits, d, path: w.law(logits, text, path)  # noqa: E731
        rows = emitted(tree, verify.block(tree, w.output(tree, text), law, chance, gamma))
        for tokens, intervals, weight in zip(rows, chance.known, chance.weight, strict=True):
            longer = text + tokens
            kept = tuple((i, *u) for i, u in sorted(intervals.items()) if i >= len(longer))
            found.append(((longer, kept), weight))
        scripts = chance.untaken()
    return found


def test_randomness_keyed_by_position_biases_block_verification() -> None:
    w = world("random", v=2, seed=1, depth=8)
    right, wrong = (distance(joint_by_position(w, 3, shared), plain(w)) for shared in (False, True))
    assert right < EXACT
    assert 0.005 < wrong < 0.05, f"bias {wrong:.4f}"


def show() -> None:
    for name, (rule, draft, w, low, high) in MUTANTS.items():
        print(f"{name:60s} {bias(rule, draft, w):.5f}  [{low}, {high}]")


if __name__ == "__main__":
    show()
