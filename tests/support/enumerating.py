"""Exact laws of the rejection rules: every branch of the real code, with its probability.

`explore` runs a round again and again, each time as a batch whose rows follow their own scripts of decisions, until
every sequence of decisions has been taken once. Drafting draws from the same chance, so its randomness is enumerated
too. `joint` chains rounds until the first tokens of the text are known and returns their law.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from outrider.core import sampling
from outrider.core.tree import from_template, template
from outrider.core.types import DraftTree, Verdict
from outrider.params import Sampling

PLAIN = Sampling(temperature=1.0)
Text = tuple[int, ...]
Rule = Callable[..., Verdict]  # (tree, logits, law, chance, depth)
Draft = Callable[["Branches", "World", Text], DraftTree]


class Branches:
    """A Chance whose rows each follow a script, and then always take the first branch."""

    def __init__(self, scripts: Sequence[tuple[int, ...]]):
        self.scripts = scripts
        self.taken: list[list[int]] = [[] for _ in scripts]
        self.options: list[list[int]] = [[] for _ in scripts]
        self.weight = [1.0] * len(scripts)

    def __len__(self) -> int:
        return len(self.scripts)

    def _choose(self, row: int, weights: Sequence[float]) -> int:
        real = [i for i, w in enumerate(weights) if w > 0]
        if len(real) == 1:
            return real[0]
        place = len(self.taken[row])
        branch = self.scripts[row][place] if place < len(self.scripts[row]) else 0
        self.taken[row].append(branch)
        self.options[row].append(len(real))
        self.weight[row] *= weights[real[branch]] / sum(weights)
        return real[branch]

    def accept(self, prob: Tensor, index: Tensor, of: int) -> Tensor:
        assert bool((index < of).all())
        return torch.tensor([self._choose(i, (1 - p, p)) == 1 for i, p in enumerate(prob.tolist())])

    def draw(self, weights: Tensor) -> Tensor:
        return torch.tensor([self._choose(i, w) for i, w in enumerate(weights.tolist())])

    def untaken(self) -> list[tuple[int, ...]]:
        """Scripts that turn off these rows' ways, each at one decision."""
        return [
            (*taken[:i], other)
            for script, taken, options in zip(self.scripts, self.taken, self.options, strict=True)
            for i in range(len(script), len(taken))
            for other in range(1, options[i])
        ]


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

    target: list[Tensor]  # [length][v ** length, v]
    drafter: list[Tensor]
    sampling: Sampling = PLAIN
    draft_sampling: Sampling | None = None  # None: the same
    length: int = 3  # the tokens compared

    @property
    def v(self) -> int:
        return self.target[0].shape[-1]

    def code(self, text: Sequence[int]) -> int:
        number = 0
        for token in text:
            number = number * self.v + token
        return number

    def scores(self, logits: Tensor, text: Text, path: Tensor) -> Tensor:
        if not (self.sampling.penalised or self.sampling.logit_bias):
            return logits.double()
        history = [((0,), text)] * len(logits)  # the prompt is token 0
        return sampling.penalise(logits.double(), [self.sampling] * len(logits), history, path)

    def law(self, logits: Tensor, text: Text, path: Tensor) -> Tensor:
        return sampling.law(self.scores(logits, text, path), self.sampling)

    def p(self, text: Text) -> Tensor:
        """The target's law after a text."""
        logits = self.target[len(text)][self.code(text)][None]
        return self.law(logits, text, torch.empty(1, 0, dtype=torch.long))[0]

    def q(self, codes: Tensor, length: int) -> Tensor:
        """The drafter's law after texts of one length, given by their codes."""
        return sampling.law(self.drafter[length][codes], self.draft_sampling or self.sampling)

    def output(self, tree: DraftTree, text: Text) -> Tensor:
        """The target's logits at every node; the root is the last token of `text`."""
        codes = torch.full_like(tree.tokens, self.code(text))
        out = torch.empty(*tree.tokens.shape, self.v, dtype=torch.float64)
        for i in range(tree.nodes):
            if i:
                before = codes.gather(1, tree.parents[:, i : i + 1])[:, 0]
                codes[:, i] = before * self.v + tree.tokens[:, i]
            for d in tree.depths[:, i].unique().tolist():
                rows = (tree.depths[:, i] == d) & (i < tree.size)
                out[rows, i] = self.target[len(text) + d][codes[rows, i]]
        out[torch.arange(tree.nodes) >= tree.size[:, None]] = float("nan")  # padding must not matter
        return out


def _tables(v: int, depth: int, seed: int, zeros: float, sharp: float) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    tables = []
    for length in range(depth):
        logits = torch.randn(v**length, v, generator=g, dtype=torch.float64) * sharp
        if zeros:
            gone = torch.rand(logits.shape, generator=g) < zeros
            gone[torch.arange(len(gone)), torch.randint(v, (len(gone),), generator=g)] = False
            logits = logits.masked_fill(gone, float("-inf"))
        tables.append(logits)
    return tables


def world(kind: str = "random", v: int = 3, seed: int = 0, depth: int = 6, length: int = 3, **laws: Sampling) -> World:
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
            t[:, v // 2 :] = float("-inf")
            d[:, : v // 2] = float("-inf")
    return World(target, drafter, length=length, **laws)


def sampled(shape: tuple[int, ...], replacement: bool = False) -> Draft:
    """Children drawn from q one after the other, as `sampling.sample` draws them."""

    def draft(chance: Branches, w: World, text: Text) -> DraftTree:
        parents = template(shape)
        b, n = len(chance), len(parents)
        codes = [torch.full((b,), w.code(text))]
        level, tokens, laws = [0], [], []
        for d, width in enumerate(shape):
            following = []
            for node in level:
                q = w.q(codes[node], len(text) + d)
                laws.append(q)
                free = torch.ones_like(q)
                for _ in range(width):
                    # Where q has run out, any token will do that is no sibling's: here the first.
                    first = free * (free.cumsum(-1) == 1)
                    x = chance.draw(torch.where(q.sum(-1, keepdim=True) > 0, q, first))
                    if not replacement:
                        q, free = q.scatter(1, x[:, None], 0.0), free.scatter(1, x[:, None], 0.0)
                    following.append(len(codes))
                    tokens.append(x)
                    codes.append(codes[node] * w.v + x)
            level = following
        assert len(codes) == n
        root = torch.full((b,), text[-1] if text else 0)
        return from_template(root, torch.stack(tokens, 1), parents, q=torch.stack(laws, 1), replacement=replacement)

    return draft


def repeat(tree: DraftTree, b: int) -> DraftTree:
    """One row's tree for b rows."""
    fields = {name: getattr(tree, name) for name in ("tokens", "parents", "depths", "size", "ancestors", "values", "q")}
    return replace(tree, **{k: None if t is None else t.expand(b, *t.shape[1:]) for k, t in fields.items()})


def outcomes(rule: Rule, draft: Draft, w: World, text: Text) -> dict[Text, float]:
    """The law of what one round adds to a text."""

    def run(chance: Branches) -> list[Text]:
        tree = draft(chance, w, text)
        depth = min(tree.deepest, len(w.target) - 1 - len(text))

        def law(logits: Tensor, d: int, path: Tensor) -> Tensor:
            assert path.shape == (len(chance), d - 1)
            return w.law(logits, text, path)

        return emitted(tree, rule(tree, w.output(tree, text), law, chance, depth))

    found: dict[Text, float] = defaultdict(float)
    for tokens, weight in explore(run):
        found[tokens] += weight
    return dict(found)


def emitted(tree: DraftTree, verdict: Verdict) -> list[Text]:
    spelled = tree.tokens.gather(1, verdict.path).tolist()
    rows = zip(spelled, verdict.count.tolist(), verdict.next.tolist(), strict=True)
    return [(*row[1:count], last) for row, count, last in rows]


def joint(rule: Rule, draft: Draft, w: World) -> dict[Text, float]:
    """The law of the text's first `w.length` tokens, round after round."""
    laws: list[dict[Text, float]] = [defaultdict(float) for _ in range(w.length + 1)]  # by length, all rounds merged
    laws[0][()] = 1.0
    for states in laws[:-1]:
        for text, weight in states.items():
            for tokens, p in outcomes(rule, draft, w, text).items():
                longer = (text + tokens)[: w.length]
                laws[len(longer)][longer] += weight * p
    return laws[-1]


def plain(w: World) -> dict[Text, float]:
    """The law of plain decoding."""
    found = {}
    for text in product(range(w.v), repeat=w.length):
        weight = 1.0
        for i, token in enumerate(text):
            weight *= float(w.p(text[:i])[token]) if weight else 0.0
        found[text] = weight
    return found


def distance(a: dict[Text, float], b: dict[Text, float]) -> float:
    """Total variation."""
    return 0.5 * sum(abs(a.get(t, 0.0) - b.get(t, 0.0)) for t in {*a, *b})


def bias(rule: Rule, draft: Draft, w: World) -> float:
    """How far a rule's text is from plain decoding: the checker that passes the real rules and must fail wrong ones."""
    found = joint(rule, draft, w)
    assert abs(sum(found.values()) - 1) < 1e-9, "the branches' probabilities sum to one"
    return distance(found, plain(w))
