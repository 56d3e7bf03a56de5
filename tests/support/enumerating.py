"""Exact distributions of the rejection rules: every branch of the real code, with its probability.

`explore` runs a round again and again, each time as a batch whose rows follow their own scripts of decisions, until
every sequence of decisions has been taken once. Drafting draws from the same chance, so its randomness is enumerated
too. `joint` chains rounds until the first tokens of the text are known and returns their distribution.

A rule here is a function of a batch in numpy. `FORMS` are the two forms of the real rules: the reference, called row by
row, and the tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from outrider.backends.torch import verify as tensors
from outrider.backends.torch.tensors import TensorTree
from outrider.core import sampling, verify
from outrider.core.tree import from_lists, from_template, template
from outrider.core.types import Array, DraftTree, Verdict
from outrider.params import Sampling

PLAIN = Sampling(temperature=1.0)
Text = tuple[int, ...]
Warp = Callable[[Array, int, Array], Array]  # (logits [b, v], depth of the token, path [b, depth - 1]) -> [b, v]
Rule = Callable[..., Verdict]  # (tree, logits [b, n, v], warp, chance, depth)
Draft = Callable[["Branches", "World", Text], DraftTree]


class Branches:
    """A chance whose rows each follow a script, and then always take the first branch."""

    def __init__(self, scripts: Sequence[tuple[int, ...]]):
        self.scripts = scripts
        self.taken: list[list[int]] = [[] for _ in scripts]
        self.options: list[list[int]] = [[] for _ in scripts]
        self.weight = [1.0] * len(scripts)

    def __len__(self) -> int:
        return len(self.scripts)

    def choose(self, row: int, weights: Sequence[float]) -> int:
        real = [i for i, w in enumerate(weights) if w > 0]
        if len(real) == 1:
            return real[0]
        place = len(self.taken[row])
        branch = self.scripts[row][place] if place < len(self.scripts[row]) else 0
        self.taken[row].append(branch)
        self.options[row].append(len(real))
        self.weight[row] *= weights[real[branch]] / sum(weights)
        return real[branch]

    def accept(self, row: int, probability: float, index: int) -> bool:
        return self.choose(row, (1 - probability, probability)) == 1

    def draw(self, weights: Array) -> Array:
        """A token of each row [b, v]."""
        return np.array([self.choose(i, w) for i, w in enumerate(weights.tolist())])

    def untaken(self) -> list[tuple[int, ...]]:
        """Scripts that turn off these rows' ways, each at one decision."""
        return [
            (*taken[:i], other)
            for script, taken, options in zip(self.scripts, self.taken, self.options, strict=True)
            for i in range(len(script), len(taken))
            for other in range(1, options[i])
        ]


@dataclass
class OfRow:
    """The chance of one row, as the reference uses it."""

    chance: Branches
    row: int

    def accept(self, probability: float, index: int) -> bool:
        return self.chance.accept(self.row, float(probability), index)

    def draw(self, weights: Array) -> int:
        return self.chance.choose(self.row, weights.tolist())


@dataclass
class OfTensors:
    """The chance of all rows, as the tensors ask it."""

    chance: Branches

    def accept(self, prob: torch.Tensor, index: torch.Tensor, of: int) -> torch.Tensor:
        assert bool((index < of).all())
        pairs = enumerate(zip(prob.tolist(), index.tolist(), strict=True))
        return torch.tensor([self.chance.accept(row, p, i) for row, (p, i) in pairs])

    def draw(self, weights: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.chance.draw(weights.numpy()))


def by_reference(rule: Any) -> Rule:
    """A rule of `core.verify`, row by row."""

    def judged(tree: DraftTree, logits: Array, warp: Warp, chance: Branches, depth: int) -> Verdict:
        results = []
        for b, row in enumerate(tree.host):

            def of_row(node: int, path: list[int], b: int = b) -> Array:
                return warp(logits[b : b + 1, node], len(path) + 1, np.array([path], np.int64))[0]

            q = None if tree.q is None else tree.q[b]
            more = (tree.replacement,) if rule is verify.rejection else ()
            results.append(rule(row, of_row, OfRow(chance, b), min(depth, tree.deepest), q, *more))
        return Verdict([path for path, _ in results], [token for _, token in results], [True] * len(results))

    return judged


def by_tensors(rule: Any) -> Rule:
    """A rule of `backends.torch.verify`."""

    def judged(tree: DraftTree, logits: Array, warp: Warp, chance: Branches, depth: int) -> Verdict:
        def wrapped(z: torch.Tensor, d: int, path: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(warp(z.numpy(), d, path.numpy()))

        given = TensorTree.of(replace(tree, ancestors=None))
        return lists_of(rule(given, torch.from_numpy(logits), wrapped, OfTensors(chance), depth))

    return judged


def lists_of(result: tensors.TensorVerdict) -> Verdict:
    """A verdict in tensors as lists."""
    rows = zip(result.path.tolist(), result.count.tolist(), strict=True)
    return Verdict([path[:n] for path, n in rows], result.next.tolist(), [True] * len(result.next))


@dataclass(frozen=True)
class Form:
    """One form of the rejection rules."""

    name: str
    rejection: Rule
    block: Rule

    def __repr__(self) -> str:
        return self.name


FORMS = (
    Form("reference", by_reference(verify.rejection), by_reference(verify.block)),
    Form("tensors", by_tensors(tensors.rejection), by_tensors(tensors.block)),
)


EVERY_FORM = pytest.mark.parametrize("form", FORMS, ids=repr)
EXACT = 1e-12  # a bias below this is rounding


def single(tokens: list[int], parents: list[int], q: Array | None = None, rows: int = 1) -> DraftTree:
    """One tree for all rows, with q [inner, v]."""
    tree = from_lists([(tokens, parents, [0.0] * len(tokens))], values=False)
    return repeat(replace(tree, q=None if q is None else q[None]), rows)


def explore(run: Callable[[Branches], list], limit: int = 3_000_000) -> Iterator[tuple[object, float]]:
    """(outcome, probability) of every branch of `run`, which returns one outcome per row."""
    scripts: list[tuple[int, ...]] = [()]
    total = 0
    while scripts:
        chance = Branches(scripts)
        total += len(scripts)
        assert total < limit, "too many branches"
        yield from zip(run(chance), chance.weight, strict=True)
        scripts = chance.untaken()


@dataclass
class World:
    """Logits of a target and of a drafter after every text over a tiny vocabulary, and the target's sampling."""

    target: list[Array]  # [length][v ** length, v], float64
    drafter: list[Array]
    sampling: Sampling = PLAIN
    draft_sampling: Sampling | None = None  # None: the same
    length: int = 3  # the tokens compared
    memo: dict[Any, Array] = field(default_factory=dict, init=False)

    @property
    def v(self) -> int:
        return int(self.target[0].shape[-1])

    def code(self, text: Sequence[int]) -> int:
        number = 0
        for token in text:
            number = number * self.v + token
        return number

    def warp(self, logits: Array, text: Text, path: Array) -> Array:
        """The target's distribution at nodes with logits [b, v], below paths [b, d]."""
        return np.stack([self._law(z, (*text, *p)) for z, p in zip(logits, path.tolist(), strict=True)])

    def _law(self, logits: Array, text: Text) -> Array:
        key = (logits.tobytes(), text)
        if key not in self.memo:
            scores = sampling.penalise(logits, self.sampling, (0,), text)  # the prompt is token 0
            self.memo[key] = sampling.distribution(scores, self.sampling)
        return self.memo[key]

    def p(self, text: Text) -> Array:
        """The target's distribution after a text."""
        return self._law(self.target[len(text)][self.code(text)], text)

    def q(self, codes: Array, length: int) -> Array:
        """The drafter's distribution after texts of one length, given by their codes."""
        drawn_by = self.draft_sampling or self.sampling
        if ("q", length) not in self.memo:
            rows = [sampling.distribution(logits, drawn_by) for logits in self.drafter[length]]
            self.memo["q", length] = np.stack(rows)
        return self.memo["q", length][codes]

    def output(self, tree: DraftTree, text: Text) -> Array:
        """The target's logits at every node; the root is the last token of `text`."""
        codes = np.full_like(tree.tokens, self.code(text))
        out = np.full((*tree.tokens.shape, self.v), np.nan)  # padding must not matter
        for i in range(tree.nodes):
            if i:
                before = np.take_along_axis(codes, tree.parents[:, i : i + 1], 1)[:, 0]
                codes[:, i] = before * self.v + tree.tokens[:, i]
            for d in np.unique(tree.depths[:, i]).tolist():
                rows = (tree.depths[:, i] == d) & (i < tree.size)
                out[rows, i] = self.target[len(text) + d][codes[rows, i]]
        return out


def _tables(v: int, depth: int, seed: int, zeros: float, sharp: float) -> list[Array]:
    g = torch.Generator().manual_seed(seed)
    tables = []
    for length in range(depth):
        logits = torch.randn(v**length, v, generator=g, dtype=torch.float64) * sharp
        if zeros:
            gone = torch.rand(logits.shape, generator=g) < zeros
            gone[torch.arange(len(gone)), torch.randint(v, (len(gone),), generator=g)] = False
            logits = logits.masked_fill(gone, float("-inf"))
        tables.append(logits.numpy())
    return tables


def world(
    kind: str = "random", v: int = 3, seed: int = 0, depth: int = 6, length: int = 3, **samplings: Sampling
) -> World:
    """random | zeros (in p and q) | equal (p = q) | disjoint (supports) | near (q close to p) | opposed."""
    zeros = 0.4 if kind == "zeros" else 0.0
    target = _tables(v, depth, seed, zeros, 1.2)
    drafter = _tables(v, depth, seed + 1, zeros, 1.2)
    if kind == "equal":
        drafter = target
    if kind == "near":
        drafter = [t + 0.3 * d for t, d in zip(target, drafter, strict=True)]
    if kind == "opposed":
        drafter = [-t for t in target]
    if kind == "disjoint":
        for t, d in zip(target, drafter, strict=True):
            t[:, v // 2 :] = -np.inf
            d[:, : v // 2] = -np.inf
    return World(target, drafter, length=length, **samplings)


def sampled(shape: tuple[int, ...], replacement: bool = False) -> Draft:
    """Children drawn from q one after the other, as `sampling.sample` draws them."""

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        parents = template(shape)
        b, n = len(chance), len(parents)
        codes = [np.full(b, w.code(text))]
        level, tokens, distributions, row = [0], [], [], np.arange(b)
        for d, width in enumerate(shape):
            following = []
            for node in level:
                q = w.q(codes[node], len(text) + d)
                distributions.append(q)
                q, free = q.copy(), np.ones_like(q)
                for _ in range(width):
                    # Where q has run out, any token will do that is no sibling's: here the first.
                    first = free * (free.cumsum(-1) == 1)
                    x = chance.draw(np.where(q.sum(-1, keepdims=True) > 0, q, first))
                    if not replacement:
                        q[row, x] = free[row, x] = 0.0
                    following.append(len(codes))
                    tokens.append(x)
                    codes.append(codes[node] * w.v + x)
            level = following
        assert len(codes) == n
        tree = from_template([text[-1] if text else 0] * b, np.stack(tokens, 1), parents)
        return replace(tree, q=np.stack(distributions, 1), replacement=replacement)

    return draft


def repeat(tree: DraftTree, b: int) -> DraftTree:
    """One row's tree for b rows."""
    fields = {name: getattr(tree, name) for name in ("tokens", "parents", "depths", "size", "ancestors", "values", "q")}
    wide = {k: None if x is None else np.repeat(x, b, 0) for k, x in fields.items()}
    return replace(tree, **wide)


def cut(tree: DraftTree, chosen: Sequence[Sequence[int]]) -> DraftTree:
    """The nodes `chosen` of each row (ascending, closed under parents), each with its own distribution."""
    rows = []
    for (tokens, parents, values), ids in zip(tree.host, chosen, strict=True):
        place = {node: i for i, node in enumerate(ids)}
        rows.append(([tokens[i] for i in ids], [place.get(parents[i], 0) for i in ids], [values[i] for i in ids]))
    made = from_lists(rows, values=False)
    if tree.q is None:
        return made
    last = tree.q.shape[1] - 1  # leaves get any
    index = np.array([[min(i, last) for i in [*ids, *[0] * (made.nodes - len(ids))]] for ids in chosen])
    return replace(made, q=np.take_along_axis(tree.q, index[..., None], 1), replacement=tree.replacement)


def outcomes(rule: Rule, draft: Draft, w: World, text: Text) -> dict[Text, float]:
    """The distribution of what one round adds to a text."""

    def run(chance: Branches) -> list[Text]:
        tree = draft(chance, w, text)
        depth = min(tree.deepest, len(w.target) - 1 - len(text))

        def warp(logits: Array, d: int, path: Array) -> Array:
            assert path.shape == (len(logits), d - 1)
            return w.warp(logits, text, path)

        return emitted(tree, rule(tree, w.output(tree, text), warp, chance, depth))

    results: dict[Text, float] = defaultdict(float)
    for tokens, weight in explore(run):
        results[tokens] += weight
    return dict(results)


def emitted(tree: DraftTree, verdict: Verdict) -> list[Text]:
    rows = zip(tree.tokens.tolist(), verdict.paths, verdict.next, strict=True)
    return [(*(tokens[node] for node in path[1:]), last) for tokens, path, last in rows]


def joint(rule: Rule, draft: Draft, w: World) -> dict[Text, float]:
    """The distribution of the text's first `w.length` tokens, round after round."""
    texts: list[dict[Text, float]] = [defaultdict(float) for _ in range(w.length + 1)]  # by length, all rounds merged
    texts[0][()] = 1.0
    for states in texts[:-1]:
        for text, weight in states.items():
            for tokens, p in outcomes(rule, draft, w, text).items():
                longer = (text + tokens)[: w.length]
                texts[len(longer)][longer] += weight * p
    return texts[-1]


def plain(w: World) -> dict[Text, float]:
    """The distribution of plain decoding."""
    results = {}
    for text in product(range(w.v), repeat=w.length):
        weight = 1.0
        for i, token in enumerate(text):
            weight *= float(w.p(text[:i])[token]) if weight else 0.0
        results[text] = weight
    return results


def distance(a: dict[Text, float], b: dict[Text, float]) -> float:
    """Total variation."""
    return 0.5 * sum(abs(a.get(t, 0.0) - b.get(t, 0.0)) for t in {*a, *b})


def bias(rule: Rule, draft: Draft, w: World) -> float:
    """How far a rule's text is from plain decoding: the checker that passes the real rules and must fail wrong ones."""
    result = joint(rule, draft, w)
    assert abs(sum(result.values()) - 1) < 1e-9, "the branches' probabilities sum to one"
    return distance(result, plain(w))
