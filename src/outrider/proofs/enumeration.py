"""The distribution of the rejection rules by enumeration of all drafts and decisions over a tiny vocabulary.

The rules are those that serve the audited target, with scripted decisions in place of random numbers: `core/verify.py`
on CPUs, `backends/torch/verify.py` on other devices. The last token of a round is kept as its distribution. All sums
are in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from ..core import verify
from ..core.sampling import distribution
from ..core.tree import from_template, template
from ..core.types import Array, DraftTree, Question
from ..params import Sampling

Text = tuple[int, ...]
SAMPLINGS = (Sampling(1.0), Sampling(0.7, top_p=0.9))  # the second gives zeros in p and q
CASES = (  # rule, draft, children per node by depth
    ("rejection", "sampled chain", (1, 1, 1)),
    ("rejection", "sampled tree", (2, 2)),
    ("rejection", "sampled tree, with replacement", (2, 2)),
    ("rejection", "deterministic tree", (2, 2)),
    ("block", "sampled chain", (1, 1, 1)),
    ("block", "deterministic chain", (1, 1, 1)),
    ("typical", "deterministic tree", (2, 2)),
)


@dataclass(frozen=True)
class Exact:
    """The total variation between a rule's output and plain decoding."""

    rule: str
    draft: str
    tv: float

    def counts(self, rule: str) -> bool:
        """Whether users of `rule` run this (`block` falls back to `rejection` for trees)."""
        return self.rule == rule or (self.rule == "rejection" and rule == "block")


@dataclass
class Branch:
    """Scripted randomness of one row: decides by the script, then always rejects."""

    script: tuple[bool, ...]
    taken: list[bool] = field(default_factory=list)
    weight: float = 1.0  # probability of the decisions so far
    next: Array | None = None  # [v] float64: the distribution of the token after the accepted ones

    def accept(self, probability: float, index: int) -> bool:
        """Take uncertain decisions from the script."""
        if not 0 < probability < 1:
            return probability >= 1
        place = len(self.taken)
        self.taken.append(self.script[place] if place < len(self.script) else False)
        self.weight *= probability if self.taken[-1] else 1 - probability
        return self.taken[-1]

    def draw(self, weights: Array) -> int:
        """Keep the distribution."""
        self.next = weights / weights.sum()
        return 0

    def untaken(self) -> list[tuple[bool, ...]]:
        """Scripts that branch off this row's decisions, one per decision."""
        return [(*self.taken[:i], not self.taken[i]) for i in range(len(self.script), len(self.taken))]


@dataclass(frozen=True)
class World:
    """A target and a drafter over a tiny vocabulary: distributions after every text, [v] float64."""

    sampling: Sampling
    logits: dict[Text, Array]  # the target's
    p: dict[Text, Array]
    q: dict[Text, Array]


Judge = Callable[[str, World, DraftTree, Array, list[Branch]], list[Text]]


def exact(seed: int = 0, v: int = 3, tensors: bool = False) -> tuple[Exact, ...]:
    """The total variation between each rule and plain decoding, the worst of two sampling settings.

    Args:
        seed: of the tiny models.
        v: vocabulary size.
        tensors: use the tensor rules of targets on other devices, which need torch.
    """
    judge = _by_reference
    if tensors:
        from .tensor_rules import judge
    out = []
    for rule, draft, shape in CASES:
        worlds = [_world(seed + i, v, len(shape), sampling, i > 0) for i, sampling in enumerate(SAMPLINGS)]
        out.append(Exact(rule, draft, max(_bias(rule, draft, shape, world, judge) for world in worlds)))
    return tuple(out)


def _world(seed: int, v: int, depth: int, sampling: Sampling, zeros: bool) -> World:
    g = np.random.default_rng(seed)
    texts = [text for n in range(depth + 1) for text in product(range(v), repeat=n)]
    raw = 1.2 * g.standard_normal((2, len(texts), v))
    if zeros:
        gone = g.random(raw.shape) < 0.3
        raw[gone & (np.arange(v) != g.integers(v, size=(2, len(texts), 1)))] = -np.inf
    p, q = ({t: distribution(x, sampling) for t, x in zip(texts, rows, strict=True)} for rows in raw)
    return World(sampling, dict(zip(texts, raw[0], strict=True)), p, q)


def _bias(rule: str, draft: str, shape: tuple[int, ...], world: World, judge: Judge) -> float:
    """Total variation of the first len(shape) + 1 tokens; rounds are completed by plain decoding."""
    length, v = len(shape) + 1, len(world.p[()])
    parents = template(shape)
    drafts = list(_drafts(draft, parents, world))
    written: dict[Text, float] = defaultdict(float)
    pending: list[tuple[int, tuple[bool, ...]]] = [(i, ()) for i in range(len(drafts))]
    while pending:
        branches, texts = [Branch(script) for _, script in pending], [drafts[i][1] for i, _ in pending]
        tokens = np.array([[text[-1] for text in row[1:]] for row in texts], np.int64)
        tree = from_template([0] * len(texts), tokens, parents)
        if "deterministic" not in draft:
            q = np.stack([[world.q[text] for text in row[: max(parents) + 1]] for row in texts])
            tree = replace(tree, q=q, replacement="with" in draft)
        logits = np.stack([[world.logits[text] for text in row] for row in texts])
        ends = judge(rule, world, tree, logits, branches)
        for (i, _), branch, end in zip(pending, branches, ends, strict=True):
            after = np.eye(v)[end[-1]] if branch.next is None else branch.next
            _spread(written, end[:-1], drafts[i][0] * branch.weight * after, world, length)
        pending = [(i, s) for (i, _), branch in zip(pending, branches, strict=True) for s in branch.untaken()]
    plain: dict[Text, float] = defaultdict(float)
    _spread(plain, (), world.p[()], world, length)
    return float(0.5 * sum(abs(written[t] - plain[t]) for t in product(range(v), repeat=length)))


def _drafts(draft: str, parents: Sequence[int], world: World) -> Iterator[tuple[float, list[Text]]]:
    """The probability of every draft, and the text of each of its nodes."""
    for tokens in product(range(len(world.p[()])), repeat=len(parents) - 1):
        weight, texts = 1.0, list[Text]([()])
        for i, (token, parent) in enumerate(zip(tokens, parents[1:], strict=True), 1):
            elder = [tokens[j - 1] for j in range(1, i) if parents[j] == parent]
            weight *= _chance(world.q[texts[parent]], token, elder, draft)
            texts.append((*texts[parent], token))
        if weight > 0:
            yield weight, texts


def _chance(q: Array, token: int, elder: Sequence[int], draft: str) -> float:
    """The probability that a child is `token`, given its earlier siblings."""
    if "deterministic" in draft:
        return float(token == np.argsort(-q, kind="stable")[len(elder)])
    free = np.ones(len(q))
    if "with" not in draft:
        free[list(elder)] = 0.0
    left = q * free if (q * free).sum() > 0 else free  # if q is exhausted, any token that no sibling has
    return float(left[token] / left.sum())


def _spread(written: dict[Text, float], text: Text, next: Array, world: World, length: int) -> None:
    """Add the probabilities of a text's continuations by plain decoding to `length` tokens."""
    for token, weight in enumerate(next.tolist()):
        longer = (*text, token)
        if weight and len(longer) == length:
            written[longer] += weight
        elif weight:
            _spread(written, longer, weight * world.p[longer], world, length)


def _by_reference(rule: str, world: World, tree: DraftTree, logits: Array, branches: list[Branch]) -> list[Text]:
    """Accepted tokens and the next one of every row, by `core/verify.py`."""
    ends: list[Text] = []
    for b, (row, branch) in enumerate(zip(tree.host, branches, strict=True)):

        def p(node: int, path: list[int], b: int = b) -> Array:
            return distribution(logits[b, node], world.sampling)

        q = None if tree.q is None else tree.q[b]
        if rule == "typical":
            path, token = verify.typical(row, p, Question.epsilon, Question.delta, tree.deepest)
        elif rule == "block":
            path, token = verify.block(row, p, branch, tree.deepest, q)
        else:
            path, token = verify.rejection(row, p, branch, tree.deepest, q, tree.replacement)
        ends.append((*(row[0][node] for node in path[1:]), token))
    return ends
