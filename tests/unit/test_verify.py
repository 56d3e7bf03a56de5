"""The rules as the engine calls them: the coupled rule against plain decoding, typical acceptance, the real dice.

`test_verify_exact` has the distributions. Everything runs over the reference and the tensors, which must agree.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.backends.native.library import library
from outrider.backends.native.walk import Walk
from outrider.backends.torch import verify as tensors
from outrider.backends.torch.tensors import TensorTree
from outrider.core import sampling, verify
from outrider.core.changes import Changes
from outrider.core.growth import grow
from outrider.core.noise import GumbelNoise, uniforms
from outrider.core.tree import chain, check, from_lists, from_template, root_only, template
from outrider.core.types import Array, DraftTree, HostRow, Question, Rows, RowText, Verdict
from outrider.params import Rule, Sampling

Judge = Callable[[Question], Verdict | None]


def in_tensors(question: Question) -> Verdict:
    return tensors.judge(replace(question, logits=torch.from_numpy(question.logits.copy())))


JUDGES = pytest.mark.parametrize("judge", [verify.judge, in_tensors], ids=["reference", "tensors"])
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.8),
    Sampling(temperature=1.4, top_k=3),
    Sampling(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.3),
    Sampling(temperature=0.8, min_p=0.1, logit_bias={1: 2.0, 2: -1.5}, presence_penalty=0.5),
)


class Table:
    """A target that remembers its whole text: logits are a hash of it."""

    def __init__(self, v: int, seed: int):
        self.v, self.seed = v, seed

    def __call__(self, text: Sequence[int]) -> Array:
        return np.random.default_rng([self.seed, *text]).normal(size=self.v) * 1.5


def decode(table: Table, text: list[int], params: Sampling, seed: int, gumbel: GumbelNoise, n: int) -> list[int]:
    """Plain decoding: one token after the other."""
    out: list[int] = []
    for _ in range(n):
        logits = sampling.penalise(table(text + out), params, text, out)
        out.append(sampling.draw(logits, params, gumbel.at([seed], [len(text) + len(out)])[0]))
    return out


def random_tree(g: random.Random, v: int, roots: list[int], most: int = 12) -> DraftTree:
    made: list[HostRow] = []
    for root in roots:
        t, p = [root], [0]
        for _ in range(g.randrange(most)):
            parent, token = g.randrange(len(t)), g.randrange(v)
            if (parent, token) not in zip(p[1:], t[1:], strict=True):
                t.append(token)
                p.append(parent)
        made.append((t, p, [0.0] * len(t)))
    return from_lists(made, values=False)


def seeing_tree(g: random.Random, ahead: list[list[int]], v: int, roots: list[int]) -> DraftTree:
    """A tree built by looking at what the target will draw: its first tokens, hidden among decoys."""
    made: list[HostRow] = []
    for root, text in zip(roots, ahead, strict=True):
        t, p, at = [root], [0], 0
        for token in text[: g.randrange(len(text) + 1)]:
            following = at
            for kid in sorted({token, g.randrange(v)}):
                t.append(kid)
                p.append(at)
                following = len(t) - 1 if kid == token else following
            at = following
        made.append((t, p, [0.0] * len(t)))
    return from_lists(made, values=False)


def output(table: Table, texts: list[list[int]], tree: DraftTree) -> Array:
    """Logits after every node; `texts` end with the root. Padding is poisoned."""
    out = np.full((*tree.tokens.shape, table.v), np.nan)
    for b, (tokens, parents, _) in enumerate(tree.host):
        paths = {0: texts[b]}
        for i in range(len(tokens)):
            if i:
                paths[i] = [*paths[parents[i]], tokens[i]]
            out[b, i] = table(paths[i])
    return out


def spelled(tree: DraftTree, verdict: Verdict | None) -> list[list[int]]:
    assert verdict is not None
    rows = zip(tree.tokens.tolist(), verdict.paths, verdict.next, strict=True)
    return [[*(tokens[i] for i in path[1:]), last] for tokens, path, last in rows]


def rows_of(
    samplings: Sequence[Sampling], rule: Rule, v: int, seeds: Sequence[int], starts: Sequence[int], serial: int = 0
) -> Rows:
    b = len(samplings)
    return Rows((0,) * b, tuple(starts), tuple(seeds), (serial,) * b, tuple(samplings), rule, (9,) * b, GumbelNoise(v))


def texts_of(samplings: Sequence[Sampling], history: Sequence[tuple[list[int], list[int]]]) -> list[RowText]:
    return [
        RowText(prompt, said, None if (made := Changes.of(s, prompt)) is None else made.upto(said))
        for s, (prompt, said) in zip(samplings, history, strict=True)
    ]


@JUDGES
@pytest.mark.parametrize("params", SAMPLINGS, ids=range(len(SAMPLINGS)))
@pytest.mark.parametrize("seeing", [False, True])
def test_coupled_is_plain_decoding(judge: Judge, params: Sampling, seeing: bool) -> None:
    """Whatever the tree, round after round, in a ragged batch: token for token."""
    v, b, n = 5, 3, 9
    for trial in range(3):
        g = random.Random(trial)
        table, gumbel, samplings = Table(v, trial), GumbelNoise(v), [params] * b
        prompts = [[g.randrange(v) for _ in range(1 + 2 * i)] for i in range(b)]
        seeds = [g.randrange(1 << 40) for _ in range(b)]
        truth = [decode(table, p, params, s, gumbel, n + 8) for p, s in zip(prompts, seeds, strict=True)]
        outputs = [[t[0]] for t in truth]
        while min(map(len, outputs)) < n:
            texts = [p + o for p, o in zip(prompts, outputs, strict=True)]
            roots = [text[-1] for text in texts]
            ahead = [t[len(o) : len(o) + 4] for t, o in zip(truth, outputs, strict=True)]
            tree = seeing_tree(g, ahead, v, roots) if seeing else random_tree(g, v, roots)
            check(tree)
            rows = rows_of(samplings, "coupled", v, seeds, [len(text) - 1 for text in texts])
            history = list(zip(prompts, outputs, strict=True))
            verdict = judge(Question(rows, tree, output(table, texts, tree), texts_of(samplings, history)))
            for out, new, known in zip(outputs, spelled(tree, verdict), truth, strict=True):
                out += new[: n + 8 - len(out)]
                assert out == known[: len(out)]


@JUDGES
def test_a_tree_of_the_true_text_is_fully_accepted(judge: Judge) -> None:
    table, gumbel, params, prompt = Table(6, 3), GumbelNoise(6), Sampling(temperature=1.0), [1, 2]
    truth = decode(table, prompt, params, 77, gumbel, 8)
    tree = chain([truth[:7]])
    rows = rows_of([params], "coupled", 6, [77], [len(prompt)])
    verdict = judge(Question(rows, tree, output(table, [[*prompt, truth[0]]], tree), [RowText(prompt, truth[:1])]))
    assert verdict is not None
    assert verdict.paths == [[*range(7)]]
    assert verdict.finite == [True]
    assert spelled(tree, verdict) == [truth[1:]]


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_walks_are_bounded_and_judge_only_nodes_that_they_reach(depth: int) -> None:
    """In tensors the path of a row whose walk has ended ends in -1, so that nothing dear need be computed for it."""
    g, waited = random.Random(depth), 0
    for trial in range(24):
        b, v = 1 + trial % 4, 3
        tree = random_tree(g, v, [0] * b, most=14)
        logits, asked, visited = np.random.default_rng(trial).normal(size=(b, tree.nodes, v)), [0] * b, list[int]()

        def of_tensors(
            scores: torch.Tensor, d: int, path: torch.Tensor, b: int = b, asked: list[int] = asked
        ) -> torch.Tensor:
            assert path.shape == (b, d - 1)
            assert d <= depth + 1
            for i, text in enumerate(path.tolist()):
                asked[i] += -1 not in text
                assert text[-1:] == [-1] or -1 not in text
            return scores.argmax(-1)

        result = tensors.coupled(TensorTree.of(tree), torch.from_numpy(logits), of_tensors, depth)
        assert asked == result.count.tolist()
        waited += b * int(result.count.max()) - sum(asked)
        for r, row in enumerate(tree.host):

            def choose(
                node: int, path: list[int], table: Array = logits[r], row: HostRow = row, visited: list[int] = visited
            ) -> int:
                visited.append(node)
                assert len(path) <= depth
                assert not path or path[-1] == row[0][node]
                return int(table[node].argmax())

            visited.clear()
            path, token = verify.coupled(row, choose, depth)
            assert visited == path
            assert path == result.path[r, : result.count[r]].tolist()
            assert token == int(result.next[r])
    assert waited > 10 or depth == 0


@JUDGES
def test_padding_is_no_child(judge: Judge) -> None:
    """Padding has parent 0 and token 0: a draw of token 0 must not walk into it."""
    tree = from_lists([([1], [0], [0.0]), ([1, 2, 0], [0, 0, 1], [0.0] * 3)], values=False)
    samplings = [Sampling()] * 2
    verdict = judge(
        Question(rows_of(samplings, "coupled", 4, [0, 0], [0, 0]), tree, np.zeros((2, 3, 4)), [RowText([1], [])] * 2)
    )
    assert verdict is not None
    assert verdict.paths == [[0], [0]]
    assert verdict.next == [0, 0]


def test_a_walk_off_the_cpu_has_a_fixed_number_of_steps_and_no_sync() -> None:
    """On the meta device anything that needs a value raises."""
    tree = TensorTree.of(from_template([0, 0], np.ones((2, 6), np.int64), template((2, 1, 1))))
    meta = replace(
        tree, **{n: getattr(tree, n).to("meta") for n in ("tokens", "parents", "depths", "size", "ancestors")}
    )
    calls = []

    def choose(logits: torch.Tensor, depth: int, path: torch.Tensor) -> torch.Tensor:
        calls.append(depth)
        return logits.argmax(-1)

    verdict = tensors.coupled(meta, torch.empty(2, 7, 5, device="meta"), choose, 3)
    assert calls == [1, 2, 3, 4]
    assert verdict.path.shape == (2, 4)


@JUDGES
def test_coupled_follows_a_deep_path_through_a_large_tree(judge: Judge) -> None:
    v, n = 4096, 60
    tokens, parents = [7, *(i % 50 for i in range(n - 1))], [0, *(i // 2 for i in range(n - 1))]
    tree = from_lists([(tokens, parents, [0.0] * n)], values=False)
    logits = np.random.default_rng(0).normal(size=(1, n, v)).astype(np.float32)
    at = 0
    for _ in range(4):
        at = max(i for i, parent in enumerate(parents) if parent == at)
        logits[0, parents[at], tokens[at]] = 99.0
    verdict = judge(Question(rows_of([Sampling()], "coupled", v, [0], [0]), tree, logits, [RowText([7], [])]))
    assert verdict is not None
    assert len(verdict.paths[0]) == 5


# --- the forms of a rule agree


def drawn_tree(rows: Rows, q: Array, shape: tuple[int, ...], replacement: bool) -> DraftTree:
    """A tree of a static shape, node i's children drawn from q[:, i]."""
    parents, b = template(shape), len(rows)
    tokens = np.zeros((b, len(parents)), np.int64)
    for node in sorted(set(parents[1:])):
        below = [i for i in range(1, len(parents)) if parents[i] == node]
        tokens[:, below] = sampling.sample(q[:, node : node + 1], len(below), rows, node, replacement)[:, 0]
    tree = from_template([0] * b, tokens[:, 1:], parents)
    return replace(tree, q=q[:, : max(parents) + 1], replacement=replacement)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("v", [5, 300])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
def test_the_forms_of_a_rule_give_the_same_verdict(rule: Rule, v: int, dtype: str) -> None:
    """On random trees and drawn ones, with every kind of sampling side by side; and compiled code where it applies."""
    code, b, lengths, compiled = library("float32", "float32"), len(SAMPLINGS), set(), 0
    for trial in range(16):
        g, source = random.Random(trial), np.random.default_rng(trial)
        samplings = [Sampling()] * b if trial == 15 else list(SAMPLINGS)
        rows = rows_of(samplings, rule, v, [g.randrange(1 << 60) for _ in samplings], [3] * b, trial)
        shape = ((2, 2, 1), (1, 1, 1), (3, 1))[trial % 3]
        q = sampling.softmax(source.normal(size=(b, 8, v)))
        drawn = rule in ("rejection", "block") and trial % 2
        tree = drawn_tree(rows, q, shape, trial % 4 == 1) if drawn else random_tree(g, min(v, 6), [0] * b)
        chances = sampling.softmax(source.normal(size=(b, tree.nodes, v)) * 2 + 6 * (np.arange(v) < 6))
        if drawn:  # a target like its drafter
            chances[:, : tree.q.shape[1]] = 0.5 * tree.q + 0.5 * chances[:, : tree.q.shape[1]]
        history = [([0, 1, 2], [g.randrange(v) for _ in range(4)]) for _ in samplings]
        question = Question(rows, tree, np.log(chances).astype(dtype), texts_of(samplings, history))
        verdict = verify.judge(question)
        assert in_tensors(question) == verdict
        lengths |= {len(path) for path in verdict.paths}
        if code is not None:
            fast = Walk(code)(replace(question, logits=question.logits.copy()))
            assert fast is None or fast == verdict
            compiled += fast is not None
    assert len(lengths) > 1
    assert (compiled > 8) == (code is not None and rule == "coupled" and dtype == "float32")


@JUDGES
@pytest.mark.parametrize("rule", ["rejection", "block", "typical", "coupled"])
def test_rows_judged_together_are_judged_as_alone(judge: Judge, rule: Rule) -> None:
    """A row's verdict does not depend on its neighbours or on their padding."""
    b, v, source = 6, 4, np.random.default_rng(1)
    samplings = [Sampling(temperature=1.0)] * b
    rows = rows_of(samplings, rule, v, range(b), [0] * b)
    tree = random_tree(random.Random(3), v, [0] * b, most=14)
    logits = source.normal(size=(b, tree.nodes, v))
    full = judge(Question(rows, tree, logits, [RowText([0], [])] * b))
    assert full is not None
    for i in range(b):
        one = from_lists([tree.host[i]], values=False)
        alone = rows_of(samplings[:1], rule, v, [i], [0])
        result = judge(Question(alone, one, logits[i : i + 1, : one.nodes].copy(), [RowText([0], [])]))
        assert spelled(one, result)[0] == spelled(tree, full)[i]
    assert len(set(map(len, full.paths))) > 1
    none = judge(Question(rows, root_only([0] * b), logits[:, :1].copy(), [RowText([0], [])] * b))
    assert none is not None
    assert none.paths == [[0]] * b


@JUDGES
def test_a_caller_s_own_processing_comes_before_the_penalties(judge: Judge) -> None:
    """It sees the output down to each node; what it excludes is never drawn."""
    seen: list[list[int]] = []

    def process(said: list[int], logits: Array) -> Array:
        seen.append(list(said))
        return np.where(np.arange(len(logits)) == said[-1], -np.inf, logits).astype(logits.dtype)

    tree, logits = chain([[3, 1, 2]]), np.zeros((1, 3, 4), np.float32)
    logits[0, :, 3], logits[0, 0, 1], logits[0, 1, 2] = 5.0, 4.0, 6.0
    rows = rows_of([Sampling()], "coupled", 4, [0], [2])
    verdict = judge(Question(rows, tree, logits, [RowText([0, 0], [3], process=process)]))
    assert verdict is not None
    assert (verdict.paths, verdict.next) == ([[0, 1, 2]], [3])
    assert seen == [[3], [3, 1], [3, 1, 2]]


@JUDGES
def test_logits_that_are_not_finite_are_reported(judge: Judge) -> None:
    logits = np.zeros((2, 2, 4), np.float32)
    logits[1, 0, 2] = np.nan
    tree = chain([[0, 1], [0, 1]])
    rows = rows_of([Sampling()] * 2, "coupled", 4, [0, 0], [0, 0])
    verdict = judge(Question(rows, tree, logits, [RowText([0], [])] * 2))
    assert verdict is not None
    assert verdict.finite == [True, False]


@JUDGES
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_one_logit_that_is_not_finite_makes_no_distribution(judge: Judge, rule: str, wrong: float) -> None:
    """Its row is reported, whichever token comes out, and the row beside it goes on."""
    logits = np.zeros((2, 3, 4), np.float32)
    logits[1, 0, 2] = wrong
    tree = chain([[0, 1, 3], [0, 1, 3]])
    if rule == "block":
        tree = replace(tree, q=np.full((2, 2, 4), 0.25))
    for seed in range(12):
        rows = rows_of([Sampling()] * 2, rule, 4, [seed, seed], [0, 0])
        verdict = judge(Question(rows, tree, logits, [RowText([0], [])] * 2))
        if verdict is None:
            pytest.skip("this judge has not this rule")
        assert verdict.finite == [True, False]


@JUDGES
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_what_a_process_mends_is_finite(judge: Judge, rule: str) -> None:
    """Rows that end early are asked about no token again, whatever their process would say there."""

    def process(said: list[int], logits: Array) -> Array:
        assert said[-1] < 4
        return np.nan_to_num(logits, nan=-1.0, posinf=2.0)

    tree, logits = chain([[0, 1, 3], [0, 2, 3]]), np.zeros((2, 3, 4), np.float32)
    logits[0, :, 2], logits[1, 0, 1] = np.nan, np.inf
    for seed in range(8):
        rows = rows_of([Sampling()] * 2, rule, 4, [seed, seed + 50], [1, 1])
        verdict = judge(Question(rows, tree, logits, [RowText([0], [0], process=process)] * 2))
        assert verdict is not None
        assert verdict.finite == [True, True]


# --- typical acceptance


def typically(
    judge: Judge, tree: DraftTree, logits: Array, epsilon: float = 0.09, delta: float = 0.3, heat: float = 1.0
) -> Verdict:
    samplings = [Sampling(temperature=heat)] * len(logits)
    rows = rows_of(samplings, "typical", logits.shape[-1], [0] * len(samplings), [0] * len(samplings))
    verdict = judge(Question(rows, tree, logits, [RowText([0], [])] * len(samplings), epsilon, delta))
    assert verdict is not None
    return verdict


@JUDGES
def test_typical_by_the_definition(judge: Judge) -> None:
    """Against the definition, path by path."""
    g = random.Random(5)
    for trial in range(16):
        tree = random_tree(g, 4, [0, 0], most=14)
        logits = np.random.default_rng(trial).normal(size=(2, tree.nodes, 4))
        p = sampling.softmax(logits)
        bar = np.minimum(0.4 * np.exp((p * np.log(p)).sum(-1)), 0.3)
        verdict = typically(judge, tree, logits, 0.3, 0.4)
        for b, (tokens, parents, _) in enumerate(tree.host):
            best = ((0, 0.0), [0])
            for i in range(1, len(tokens)):
                path = [i]
                while path[0]:
                    path.insert(0, parents[path[0]])
                steps = [(path[j], tokens[path[j + 1]]) for j in range(len(path) - 1)]
                if all(p[b, at, x] > bar[b, at] for at, x in steps):
                    best = max(best, ((len(steps), sum(math.log(p[b, at, x]) for at, x in steps)), path))
            assert verdict.paths[b] == best[1]
            assert verdict.next[b] == int(p[b, best[1][-1]].argmax())


@JUDGES
def test_typical_at_zero_temperature_is_greedy(judge: Judge) -> None:
    g = random.Random(2)
    for trial in range(20):
        tree = random_tree(g, 3, [0, 0], most=14)
        logits = np.random.default_rng(trial).normal(size=(2, tree.nodes, 3))
        rows = rows_of([Sampling()] * 2, "coupled", 3, [0, 0], [0, 0])
        assert typically(judge, tree, logits, heat=0.0) == verify.judge(
            Question(rows, tree, logits, [RowText([0], [])] * 2)
        )


def test_typical_is_bounded_by_depth() -> None:
    tree, p = chain([[0, 1, 2, 1]]), torch.full((1, 4, 3), 1 / 3, dtype=torch.float64)
    path, _ = verify.typical(tree.host[0], lambda node, path: p[0, node].numpy(), 0.09, 0.3, 2)
    assert path == [0, 1, 2]
    verdict = tensors.typical(TensorTree.of(tree), p, lambda z, d, path: z, 0.09, 0.3, depth=2)
    assert verdict.path.tolist() == [[0, 1, 2]]


# --- the real dice and the real draft sampling

P = np.array([[0.40, 0.30, 0.20, 0.10], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
Q = np.array([[0.30, 0.35, 0.10, 0.25], [0.3, 0.3, 0.2, 0.2], [0.4, 0.2, 0.2, 0.2], [0.55, 0.15, 0.15, 0.15]])
FIRST = np.array([0.35, 0.15, 0.3, 0.2])
GUESS = np.array([0.2, 0.3, 0.4, 0.1])


@pytest.mark.parametrize(
    ("rule", "shape", "replacement"),
    [("rejection", (1, 1), False), ("rejection", (2, 1), False), ("rejection", (2, 1), True), ("block", (1, 1), False)],
)
def test_the_real_noise_follows_the_distribution(rule: Rule, shape: tuple[int, ...], replacement: bool) -> None:
    """G-test on pairs of first tokens, 4e4 samples, through `sampling.sample` and `Dice`: no enumeration here.

    99 % power at TV 0.025. Seeds are fixed; four tests at family level 1e-3. The tensors judge; the reference gives the
    same verdicts.
    """
    b, samplings, counts = 40_000, [Sampling(temperature=1.0)] * 40_000, np.zeros(16)
    rows = rows_of(samplings, rule, 4, range(b), [0] * b)
    first = sampling.sample(np.tile(GUESS, (b, 1, 1)), shape[0], rows, 0, replacement)[:, 0]
    q = Q[first]
    second = sampling.sample(q, shape[1], rows, 1, replacement).reshape(b, -1)
    tree = from_template([0] * b, np.concatenate([first, second], 1), template(shape))
    tree = replace(tree, q=np.concatenate([np.tile(GUESS, (b, 1, 1)), q], 1), replacement=replacement)
    logits = np.concatenate([np.tile(np.log(FIRST), (b, 1, 1)), np.log(P[tree.tokens[:, 1:]])], 1)
    question = Question(rows, tree, logits, [RowText([0], [])] * b)
    verdict = in_tensors(question)
    some = slice(0, 2000)
    few = replace(
        tree, tokens=tree.tokens[some], parents=tree.parents[some], depths=tree.depths[some], size=tree.size[some],
        ancestors=None, q=tree.q[some],
    )  # fmt: skip
    alone = verify.judge(Question(rows, few, logits[some], question.texts[some]))
    assert (alone.paths, alone.next) == (verdict.paths[some], verdict.next[some])
    after = np.random.default_rng(0)  # where one token was added
    for text in spelled(tree, verdict):
        two = text[1] if len(text) > 1 else int(after.choice(4, p=P[text[0]]))
        counts[text[0] * 4 + two] += 1
    expected = (FIRST[:, None] * P).ravel() * b
    assert stats.chi2.sf(2 * float((counts * np.log(counts / expected)).sum()), 15) > 1e-3 / 4


def test_dice_are_of_seed_and_round_alone() -> None:
    """The same row in another batch, beside a larger tree, meets the same dice; another round meets others."""
    prob, table = torch.full((2,), 0.5, dtype=torch.float64), uniforms([5, 9], [3, 3], 64)
    both, alone, wide = tensors.Dice([5, 9], [3, 3]), verify.Dice(9, 3, 41), verify.Dice(9, 3, 64)
    for i in (1, 40, 7):
        assert both.accept(prob, torch.tensor([i, i]), 64).tolist() == (table[:, i] < 0.5).tolist()
        assert alone.accept(0.5, i) == wide.accept(0.5, i) == (table[1, i] < 0.5)
    weights = np.random.default_rng(0).random((2, 50))
    assert verify.Dice(9, 3, 4).draw(weights[1]) == int(tensors.Dice([5, 9], [3, 3]).draw(torch.from_numpy(weights))[1])
    later = np.stack([uniforms([5], [s], 8)[0] for s in range(4)])
    assert len(np.unique(later)) == 32


def test_dice_never_draw_what_has_no_weight() -> None:
    weights = np.array([0.0, 0.0, 0.3, 0.0, 0.6, 0.0])
    drawn = [verify.Dice(seed, 0, 1).draw(weights) for seed in range(4096)]
    assert drawn == tensors.Dice(range(4096), [0] * 4096).draw(torch.from_numpy(weights).expand(4096, 6)).tolist()
    assert set(drawn) == {2, 4}
    assert drawn.count(4) / 4096 == pytest.approx(2 / 3, abs=0.03)
    assert all(verify.Dice(seed, 0, 1).accept(1.0, 0) for seed in range(4096))
    assert not any(verify.Dice(seed, 0, 1).accept(0.0, 0) for seed in range(4096))


def test_a_grown_tree_hits_more_often_with_the_shared_noise() -> None:
    """The drafter that ranks by log q + T * G proposes the target's own draw more often than one that does not."""
    v, b, params, source = 200, 200, Sampling(temperature=1.0), np.random.default_rng(3)
    p = source.normal(size=(b, v)) * 2
    q = p + 0.4 * source.normal(size=(b, v))
    hits = {}
    for rule in ("coupled", "rejection"):
        rows = rows_of([params] * b, rule, v, range(b), [0] * b)  # type: ignore[arg-type]
        drawn = np.array([sampling.draw(z, params, n) for z, n in zip(p, rows.noise(1), strict=True)])
        offered = sampling.rank(q[:, None], rows, 1, 4)[0][:, 0]
        hits[rule] = float((offered == drawn[:, None]).any(1).mean())
    assert hits["coupled"] > 0.9 > 0.75 > hits["rejection"]
    two = rows_of([params] * 2, "coupled", v, [0, 1], [0, 0])
    grown, _ = grow(
        [0, 0],
        lambda fed, since: sampling.rank(
            q[: 2 * (fed.nodes - since)].reshape(2, -1, v), two, fed.deepest + 1, 3
        ),
        depth=3, width=2, nodes=8,
    )  # fmt: skip
    check(grown)
