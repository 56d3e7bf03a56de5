"""The coupled rule against plain decoding, typical acceptance, and the real dice: `test_verify_exact` has the laws."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from outrider.core import sampling, verify
from outrider.core.growth import grow
from outrider.core.noise import GumbelNoise, uniforms
from outrider.core.tree import chain, check, from_lists, from_template, root_only, template
from outrider.core.types import DraftTree, Rows, Verdict
from outrider.params import Sampling

WALKS = [verify.walk_lists, verify.walk_tensors]
LAWS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.8),
    Sampling(temperature=1.4, top_k=3),
    Sampling(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.3),
)


class Table:
    """A target that remembers its whole text: logits are a hash of it."""

    def __init__(self, v: int, seed: int):
        self.v, self.seed = v, seed
        self.memo: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, text: Sequence[int]) -> Tensor:
        text = tuple(text)
        if text not in self.memo:
            g = torch.Generator().manual_seed(hash((self.seed, text)) & 0xFFFFFFFF)
            self.memo[text] = torch.randn(self.v, generator=g, dtype=torch.float64) * 1.5
        return self.memo[text]


def decode(table: Table, text: list[int], law: Sampling, seed: int, gumbel: GumbelNoise, n: int) -> list[int]:
    """Plain decoding: one token after the other."""
    out: list[int] = []
    for _ in range(n):
        logits = sampling.penalise(table(text + out)[None], [law], [(text, out)])
        out.append(int(sampling.draw(logits, [law], gumbel.at([seed], [len(text) + len(out)]))[0]))
    return out


def random_tree(g: random.Random, v: int, roots: list[int], most: int = 12) -> DraftTree:
    tokens, parents = [], []
    for root in roots:
        t, p = [root], [0]
        for _ in range(g.randrange(most)):
            parent, token = g.randrange(len(t)), g.randrange(v)
            if (parent, token) not in zip(p[1:], t[1:], strict=True):
                t.append(token)
                p.append(parent)
        tokens.append(t)
        parents.append(p)
    return from_lists(tokens, parents)


def seeing_tree(g: random.Random, ahead: list[list[int]], v: int, roots: list[int]) -> DraftTree:
    """A tree built by looking at what the target will draw: its first tokens, hidden among decoys."""
    tokens, parents = [], []
    for root, text in zip(roots, ahead, strict=True):
        t, p, at = [root], [0], 0
        for token in text[: g.randrange(len(text) + 1)]:
            kids = {token, g.randrange(v)}
            following = at
            for kid in sorted(kids):
                t.append(kid)
                p.append(at)
                following = len(t) - 1 if kid == token else following
            at = following
        tokens.append(t)
        parents.append(p)
    return from_lists(tokens, parents)


def output(table: Table, texts: list[list[int]], tree: DraftTree) -> Tensor:
    """Logits after every node; `texts` end with the root. Padding is poisoned."""
    out = torch.full((*tree.tokens.shape, table.v), float("nan"), dtype=torch.float64)
    for b, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        paths = {0: texts[b]}
        for i in range(int(tree.size[b])):
            if i:
                paths[i] = [*paths[parents[i]], tokens[i]]
            out[b, i] = table(paths[i])
    return out


def spelled(tree: DraftTree, verdict: Verdict) -> list[list[int]]:
    rows = zip(tree.tokens.tolist(), verdict.path.tolist(), verdict.count.tolist(), verdict.next.tolist(), strict=True)
    return [[*(tokens[i] for i in path[1:count]), last] for tokens, path, count, last in rows]


def chooser(
    law: Sampling, gumbel: GumbelNoise, seeds: list[int], prompts: list[list[int]], outputs: list[list[int]]
) -> Callable:
    """The target's draw in a batch, as the engine makes it; the root is the last token of each output."""
    history = list(zip(prompts, outputs, strict=True))
    start = [len(p) + len(o) - 1 for p, o in history]

    def choose(logits: Tensor, depth: int, path: Tensor) -> Tensor:
        scores = sampling.penalise(logits, [law] * len(seeds), history, path)
        return sampling.draw(scores, [law] * len(seeds), gumbel.at(seeds, [s + depth for s in start]))

    return choose


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("law", LAWS, ids=range(len(LAWS)))
@pytest.mark.parametrize("seeing", [False, True])
def test_coupled_is_plain_decoding(walk: Callable, law: Sampling, seeing: bool) -> None:
    """Whatever the tree, round after round, in a ragged batch: token for token."""
    v, b, n = 5, 3, 9
    for trial in range(3):
        g = random.Random(trial)
        table, gumbel = Table(v, trial), GumbelNoise(v)
        prompts = [[g.randrange(v) for _ in range(1 + 2 * i)] for i in range(b)]
        seeds = [g.randrange(1 << 40) for _ in range(b)]
        truth = [decode(table, p, law, s, gumbel, n + 8) for p, s in zip(prompts, seeds, strict=True)]
        outputs = [[t[0]] for t in truth]
        while min(map(len, outputs)) < n:
            texts = [p + o for p, o in zip(prompts, outputs, strict=True)]
            roots = [text[-1] for text in texts]
            ahead = [t[len(o) : len(o) + 4] for t, o in zip(truth, outputs, strict=True)]
            tree = seeing_tree(g, ahead, v, roots) if seeing else random_tree(g, v, roots)
            check(tree)

            choose = chooser(law, gumbel, seeds, prompts, outputs)
            verdict = walk(tree, output(table, texts, tree), choose, tree.deepest)
            for out, new, known in zip(outputs, spelled(tree, verdict), truth, strict=True):
                out += new[: n + 8 - len(out)]
                assert out == known[: len(out)]
            if seeing:
                hits = verdict.count.sum()
                assert int(hits) >= b


def test_a_tree_of_the_truth_is_accepted_whole() -> None:
    table, gumbel, law, prompt = Table(6, 3), GumbelNoise(6), Sampling(temperature=1.0), [1, 2]
    truth = decode(table, prompt, law, 77, gumbel, 8)
    tree = chain([truth[:7]])
    texts = [[*prompt, truth[0]]]

    def choose(logits: Tensor, depth: int, path: Tensor) -> Tensor:
        assert path.tolist() == [truth[1:depth]]
        return sampling.draw(logits, [law], gumbel.at([77], [len(prompt) + depth]))

    for walk in WALKS:
        verdict = walk(tree, output(table, texts, tree), choose, 6)
        assert verdict.count.tolist() == [7]
        assert spelled(tree, verdict) == [truth[1:]]


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_the_walks_agree(depth: int) -> None:
    g = random.Random(depth)
    for trial in range(24):
        b, v = 1 + trial % 4, 3
        tree = random_tree(g, v, [0] * b, most=14)
        logits = torch.randn(b, tree.nodes, v, generator=torch.Generator().manual_seed(trial))

        def choose(scores: Tensor, d: int, path: Tensor, b: int = b, depth: int = depth) -> Tensor:
            assert path.shape == (b, d - 1)
            assert d <= depth + 1
            return scores.argmax(-1)

        one, two = (walk(tree, logits, choose, min(depth, tree.deepest)) for walk in WALKS)
        assert all(torch.equal(getattr(one, name), getattr(two, name)) for name in ("path", "count", "next"))
        three = verify.coupled(tree, logits, choose, depth)
        assert torch.equal(one.path, three.path)
        assert one.path.shape[1] == min(depth, tree.deepest) + 1
        assert int(one.count.max()) <= depth + 1


@pytest.mark.parametrize("walk", WALKS)
def test_rows_whose_walk_has_ended_are_told_apart(walk: Callable) -> None:
    """Their path ends in -1, so that nothing dear need be computed: of the others, one choice for each token."""
    g, waited = random.Random(5), 0
    for trial in range(24):
        b, v = 1 + trial % 4, 3
        tree = random_tree(g, v, [0] * b, most=14)
        logits = torch.randn(b, tree.nodes, v, generator=torch.Generator().manual_seed(trial))
        asked = [0] * b

        def choose(scores: Tensor, d: int, path: Tensor, asked: list[int] = asked) -> Tensor:
            for i, text in enumerate(path.tolist()):
                asked[i] += -1 not in text
                assert text[-1:] == [-1] or -1 not in text
            return scores.argmax(-1)

        verdict = walk(tree, logits, choose, tree.deepest)
        assert asked == verdict.count.tolist()
        waited += b * int(verdict.count.max()) - sum(asked)
    assert waited > 10


def test_padding_is_no_child() -> None:
    """Padding has parent 0 and token 0: a draw of token 0 must not walk into it."""
    tree = from_lists([[1], [1, 2, 0]], [[0], [0, 0, 1]])
    logits = torch.zeros(2, 3, 4)
    for walk in WALKS:
        verdict = walk(tree, logits, lambda z, d, path: z.argmax(-1), tree.deepest)
        assert verdict.count.tolist() == [1, 1]
        assert verdict.next.tolist() == [0, 0]


def test_a_walk_off_the_cpu_has_a_fixed_number_of_steps_and_no_sync() -> None:
    """On the meta device anything that needs a value raises."""
    tree = from_template(torch.zeros(2, dtype=torch.long), torch.ones(2, 6, dtype=torch.long), template((2, 1, 1)))
    meta = replace(
        tree, **{n: getattr(tree, n).to("meta") for n in ("tokens", "parents", "depths", "size", "ancestors")}
    )
    calls = []

    def choose(logits: Tensor, depth: int, path: Tensor) -> Tensor:
        calls.append((depth, tuple(logits.shape), tuple(path.shape)))
        return logits.argmax(-1)

    verdict = verify.coupled(meta, torch.empty(2, 7, 5, device="meta"), choose, 3)
    assert [c[0] for c in calls] == [1, 2, 3, 4]
    assert verdict.path.shape == (2, 4)


def test_coupled_follows_a_deep_path_through_a_large_tree() -> None:
    v, n = 4096, 60
    tree = from_lists([[7] * 1 + [i % 50 for i in range(n - 1)]], [[0] + [i // 2 for i in range(n - 1)]])
    logits = torch.randn(1, n, v, generator=torch.Generator().manual_seed(0))
    at = 0
    for _ in range(4):
        at = int((tree.parents[0] == at).nonzero()[-1])
        logits[0, tree.parents[0, at], tree.tokens[0, at]] = 99.0
    law = (Sampling(),)
    verdict = verify.coupled(tree, logits, lambda z, d, path: sampling.draw(z, law, None), 5)
    assert verdict.count.tolist() == [5]


# --- typical acceptance


def _law(logits: Tensor, depth: int, path: Tensor) -> Tensor:
    return logits.double().softmax(-1)


def test_typical_by_the_definition() -> None:
    """Against the definition, path by path."""
    g = random.Random(5)
    for trial in range(16):
        tree = random_tree(g, 4, [0, 0], most=14)
        logits = torch.randn(2, tree.nodes, 4, generator=torch.Generator().manual_seed(trial))
        p = logits.double().softmax(-1)
        bar = (0.4 * torch.exp((p * p.log()).sum(-1))).clamp(max=0.3)
        verdict = verify.typical(tree, logits, _law, 0.3, 0.4)
        for b in range(2):
            best = ((0, 0.0), [0])
            for i in range(1, int(tree.size[b])):
                path = [i]
                while path[0]:
                    path.insert(0, int(tree.parents[b, path[0]]))
                steps = [(path[j], int(tree.tokens[b, path[j + 1]])) for j in range(len(path) - 1)]
                if all(p[b, at, x] > bar[b, at] for at, x in steps):
                    score = (len(steps), sum(math.log(p[b, at, x]) for at, x in steps))
                    best = max(best, (score, path))
            count = int(verdict.count[b])
            assert verdict.path[b, :count].tolist() == best[1]
            assert int(verdict.next[b]) == int(p[b, best[1][-1]].argmax())


def test_typical_at_zero_temperature_is_greedy() -> None:
    g = random.Random(2)
    for trial in range(20):
        tree = random_tree(g, 3, [0, 0], most=14)
        logits = torch.randn(2, tree.nodes, 3, generator=torch.Generator().manual_seed(trial))
        a = verify.typical(tree, logits, lambda z, d, path: sampling.law(z, Sampling()))
        b = verify.coupled(tree, logits, lambda z, d, path: z.argmax(-1), 99)
        assert spelled(tree, a) == spelled(tree, b)


def test_typical_is_bounded_by_depth() -> None:
    tree = chain([[0, 1, 2, 1]])
    verdict = verify.typical(tree, torch.zeros(1, 4, 3), _law, 0.09, 0.3, depth=2)
    assert verdict.count.tolist() == [3]
    assert verdict.path.tolist() == [[0, 1, 2]]


# --- the real dice and the real draft sampling


def rows(b: int, law: Sampling, rule: str = "rejection", serial: int = 0, v: int = 4) -> Rows:
    zeros = torch.zeros(b, dtype=torch.long)
    return Rows(zeros, zeros, (0,) * b, tuple(range(b)), (serial,) * b, (law,) * b, rule, (9,) * b, GumbelNoise(v))  # type: ignore[arg-type]


P = torch.tensor([[0.40, 0.30, 0.20, 0.10], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
Q = torch.tensor([[0.30, 0.35, 0.10, 0.25], [0.3, 0.3, 0.2, 0.2], [0.4, 0.2, 0.2, 0.2], [0.55, 0.15, 0.15, 0.15]])
FIRST = torch.tensor([0.35, 0.15, 0.3, 0.2])
GUESS = torch.tensor([0.2, 0.3, 0.4, 0.1])


@pytest.mark.parametrize(
    ("rule", "shape", "replacement"),
    [("rejection", (1, 1), False), ("rejection", (2, 1), False), ("rejection", (2, 1), True), ("block", (1, 1), False)],
)
def test_the_real_dice_follow_the_law(rule: str, shape: tuple[int, ...], replacement: bool) -> None:
    """G-test on pairs of first tokens, 1e5 samples, through `sampling.sample` and `Dice`: no enumeration here.

    99 % power at TV 0.015. Seeds are fixed; four tests at family level 1e-3.
    """
    b, counts = 50_000, torch.zeros(16)
    for serial in range(0, 4, 2):
        r = rows(b, Sampling(temperature=1.0), rule, serial)
        first = sampling.sample(GUESS.expand(b, 1, 4), shape[0], r, 0, replacement)[:, 0]
        q = Q[first]
        second = sampling.sample(q, shape[1], r, 1, replacement).flatten(1)
        laws = torch.cat([GUESS.expand(b, 1, 4), q], 1)
        tree = from_template(
            r.root, torch.cat([first, second], 1), template(shape), q=laws, replacement=replacement
        )  # fmt: skip
        logits = torch.empty(b, tree.nodes, 4)
        logits[:, 0] = FIRST.log()
        logits[:, 1:] = P[tree.tokens[:, 1:]].log()
        verdict = getattr(verify, rule)(tree, logits, _law, verify.Dice(r.seeds, r.serial), 2)
        after = torch.multinomial(P[verdict.next], 1, generator=_g(serial))[:, 0]  # where one token was added
        one = torch.where(verdict.count > 1, tree.tokens.gather(1, verdict.path[:, 1:2])[:, 0], verdict.next)
        third = tree.tokens.gather(1, verdict.path[:, 2:3])[:, 0]
        two = torch.where(verdict.count > 2, third, torch.where(verdict.count > 1, verdict.next, after))
        counts += torch.bincount(one * 4 + two, minlength=16)
    expected = (FIRST[:, None] * P).flatten().double() * counts.sum()
    observed = counts.double().numpy()
    g = 2 * float((observed * np.log(observed / expected.numpy())).sum())
    assert stats.chi2.sf(g, 15) > 1e-3 / 4


def _g(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_dice_are_of_seed_and_round_alone() -> None:
    """The same row in another batch, beside a larger tree, meets the same dice; another round meets others."""
    prob = torch.full((2,), 0.5, dtype=torch.float64)
    table = uniforms([5, 9], [3, 3], 64)
    dice, alone = verify.Dice([5, 9], [3, 3]), verify.Dice([9], [3])
    for i in (1, 40, 7):
        index = torch.tensor([i, i])
        both = dice.accept(prob, index, 64)
        assert both.tolist() == (table[:, i] < 0.5).tolist()
        assert alone.accept(prob[:1], index[:1], i + 1).tolist() == both[1:].tolist()
    weights = torch.rand(2, 50, generator=_g(0)).double()
    assert verify.Dice([9], [3]).draw(weights[1:]).tolist() == verify.Dice([5, 9], [3, 3]).draw(weights)[1:].tolist()
    later = torch.stack([uniforms([5], [s], 8)[0] for s in range(4)])
    assert later.unique().numel() == 32


def test_dice_never_draw_what_has_no_weight() -> None:
    weights = torch.zeros(4096, 6, dtype=torch.float64)
    weights[:, 2], weights[:, 4] = 0.3, 0.6
    drawn = verify.Dice(range(4096), [0] * 4096).draw(weights)
    assert set(drawn.tolist()) == {2, 4}
    assert float((drawn == 4).double().mean()) == pytest.approx(2 / 3, abs=0.03)
    sure = verify.Dice(range(4096), [0] * 4096)
    index = torch.zeros(4096, dtype=torch.long)
    assert bool(sure.accept(torch.ones(4096, dtype=torch.float64), index, 1).all())
    assert not bool(sure.accept(torch.zeros(4096, dtype=torch.float64), index, 1).any())


def test_rows_judged_together_are_judged_as_alone() -> None:
    """rejection and block: a row's verdict does not depend on its neighbours or on their padding."""
    b, shape = 6, (2, 2, 1)
    law = Sampling(temperature=1.0)
    r = rows(b, law)
    parents = template(shape)
    g = _g(1)
    tokens = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(b * 7)]).view(b, -1)[:, : len(parents) - 1]
    q = torch.rand(b, 7, 4, generator=g).softmax(-1)
    tree = from_template(r.root, tokens, parents, q=q)
    logits = torch.randn(b, tree.nodes, 4, generator=g)
    whole = verify.rejection(tree, logits, _law, verify.Dice(r.seeds, r.serial), 3)
    for i in range(b):
        row = slice(i, i + 1)
        one = replace(
            tree, **{n: getattr(tree, n)[row] for n in ("tokens", "parents", "depths", "size", "ancestors", "q")}
        )
        found = verify.rejection(one, logits[row], _law, verify.Dice(r.seeds[row], r.serial[row]), 3)
        assert spelled(one, found)[0] == spelled(tree, whole)[i]
    assert len(set(map(len, spelled(tree, whole)))) > 1
    alone = verify.rejection(root_only(r.root), logits[:, :1], _law, verify.Dice(r.seeds, r.serial), 3)
    assert alone.count.tolist() == [1] * b


def test_a_grown_tree_hits_more_often_with_the_shared_noise() -> None:
    """The drafter that ranks by log q + T * G proposes the target's own draw more often than one that does not."""
    v, law = 200, Sampling(temperature=1.0)
    g = _g(3)
    p = torch.randn(200, v, generator=g) * 2
    q = p + 0.4 * torch.randn(200, v, generator=g)
    gumbel = GumbelNoise(v)
    hits = {}
    for rule in ("coupled", "rejection"):
        r = replace(rows(200, law, rule, v=v), gumbel=gumbel)
        drawn = sampling.draw(p, r.sampling, r.noise(1))
        offered = sampling.rank(q[:, None], r, 1, 4)[0][:, 0]
        hits[rule] = float((offered == drawn[:, None]).any(1).float().mean())
    assert hits["coupled"] > 0.9 > 0.75 > hits["rejection"]
    grown, _ = grow(
        torch.zeros(2, dtype=torch.long), lambda fed, since: sampling.rank(q[: 2 * (fed.nodes - since)].view(2, -1, v),
        replace(rows(2, law, "coupled", v=v), gumbel=gumbel), fed.deepest + 1, 3), depth=3, width=2, nodes=8,
    )  # fmt: skip
    check(grown)
