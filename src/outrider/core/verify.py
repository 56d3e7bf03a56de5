"""The rules: which nodes of a draft tree are accepted, and which token the target adds.

    coupled    the target draws at every node it arrives at and the walk follows the hits: equal to plain decoding
    rejection  speculative sampling on a chain (Leviathan et al. 2023, Chen et al. 2023), recursively on a tree
               (SpecInfer, EAGLE), and for deterministic candidates
    block      block verification of a chain (Sun et al. 2024)
    typical    Medusa's typical acceptance (Cai et al. 2024): LOSSY

The reference, one row at a time in float64; `backends/native/c/walk.h` has the coupled rule in C and
`backends/torch/verify.py` has all of them in tensors for other devices. A rule sees logits only through a function of
the caller, called at visited nodes alone, with the tokens accepted below the root so far:

    choose(node, path) -> token      the target's own draw
    p_at(node, path)   -> p [v]      the target's distribution, float64

It returns the accepted nodes, the root first, and the token after them. `depth` bounds how many may be accepted; it
must not depend on what was drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

from .noise import ACCEPT, EMIT, uniforms
from .sampling import distribution, draw, inverted, penalise
from .types import Array, HostRow, Question, Verdict

Choose = Callable[[int, list[int]], int]
Distribution = Callable[[int, list[int]], Array]
Walked = tuple[list[int], int]


@runtime_checkable
class Chance(Protocol):
    """The rejection rules' randomness for one row, as two verbs, so that a test can explore every branch."""

    def accept(self, probability: float, index: int) -> bool:
        """True with this probability; decision number `index`, of which each is made once."""

    def draw(self, weights: Array) -> int:
        """A token with probability proportional to its weight."""


class Dice:
    """Chance of (seed, round): never of the position, which rounds share (that would bias block verification)."""

    def __init__(self, seed: int, serial: int, nodes: int):
        self.seed, self.serial, self.nodes = seed, serial, nodes
        self.table: Array | None = None

    def accept(self, probability: float, index: int) -> bool:
        if self.table is None:
            self.table = uniforms([self.seed], [self.serial], self.nodes, ACCEPT)[0]
        return bool(self.table[index] < probability)

    def draw(self, weights: Array) -> int:
        """By inversion: one uniform number is far cheaper than Gumbel noise for the vocabulary."""
        return inverted(weights, uniforms([self.seed], [self.serial], 1, EMIT)[0, 0])


def judge(question: Question) -> Verdict:
    """Apply the rule of `question.rows` to every row. Logits (and q) are arrays in float32 or float64."""
    verdict = Verdict([], [], [])
    for b, row in enumerate(question.tree.host):
        seen: list[float] = []
        path, token = _judged(question, b, row, seen)
        if question.texts[b].process is None:  # which may have mended them
            seen += question.logits[b][path, [*(row[0][node] for node in path[1:]), token]].tolist()
        verdict.paths.append(path)
        verdict.next.append(token)
        verdict.finite.append(bool(np.isfinite(seen).all()))
    return verdict


def _judged(question: Question, b: int, row: HostRow, seen: list[float]) -> Walked:
    """The path and the token after it. seen: gets the scores of the tokens that were chosen, and the sums of
    distributions, which are NaN where a logit is NaN or infinite."""
    rows, tree, text = question.rows, question.tree, question.texts[b]
    sampling, depth, rule = rows.sampling[b], tree.deepest, rows.rule

    def scores(node: int, path: list[int]) -> Array:
        logits, output = question.logits[b, node], [*text.output, *path]
        if text.process is not None:
            logits = text.process(output, logits)
        return penalise(logits, sampling, text.prompt, output)

    def choose(node: int, path: list[int]) -> int:
        sampled, position = sampling.temperature > 0, rows.start[b] + len(path) + 1
        z = scores(node, path)
        token = draw(z, sampling, rows.gumbel.at([rows.seeds[b]], [position])[0] if sampled else None)
        seen.append(float(z[token]))
        return token

    def p_at(node: int, path: list[int]) -> Array:
        p = distribution(scores(node, path), sampling)
        seen.append(float(p.sum()))
        return p

    if rule == "coupled":
        return coupled(row, choose, depth)
    if rule == "typical":
        return typical(row, p_at, question.epsilon, question.delta, depth)
    q = None if tree.q is None else np.asarray(tree.q[b], np.float64)
    dice = Dice(rows.seeds[b], rows.serial[b], tree.nodes)
    if rule == "block" and q is not None and max(len(q), 1) == depth == tree.nodes - 1:
        return block(row, p_at, dice, depth, q)
    return rejection(row, p_at, dice, depth, q, tree.replacement)


def _children(row: HostRow) -> list[list[int]]:
    """Of every node, the nodes below it in the order of their ids."""
    below: list[list[int]] = [[] for _ in row[1]]
    for node, parent in enumerate(row[1]):
        if node:
            below[parent].append(node)
    return below


def coupled(row: HostRow, choose: Choose, depth: int) -> Walked:
    """Draw at every node arrived at; go to the (first) child that carries the draw, or stop and emit it."""
    tokens, below = row[0], _children(row)
    path, text = [0], list[int]()
    while True:
        token = choose(path[-1], text)
        child = next((c for c in below[path[-1]] if tokens[c] == token), None)
        if child is None or len(path) > depth:
            return path, token
        path.append(child)
        text.append(token)


def rejection(
    row: HostRow, p_at: Distribution, chance: Chance, depth: int, q: Array | None = None, replacement: bool = False
) -> Walked:
    """Recursive rejection sampling; the children of a node are tested in index order, the order they were drawn in:

        accept child x with probability P(x) / Q(x); else P = N([P - Q]+) and, drawn without replacement, Q(x) = 0;
        Q = N(Q); when all are rejected emit from P, below the last accepted node from p itself.

    `q[i]` [v] is the distribution that the children of node i were drawn from. Without it, or where it has run out, a
    child is a point mass: Q(x) = 1. On a chain this is speculative sampling.
    """
    tokens, below = row[0], _children(row)
    path, text = [0], list[int]()
    while True:
        node, p = path[-1], _normal(p_at(path[-1], text))
        drawn_from = _normal(q[node]) if q is not None and node < len(q) else np.zeros_like(p)
        for child in below[node] if len(path) <= depth else ():
            x = tokens[child]
            point = drawn_from[x] <= 0
            if chance.accept(min(1.0, p[x] if point else p[x] / drawn_from[x]), child):
                path.append(child)
                text.append(x)
                break
            p = _residual(p, np.eye(1, len(p), x)[0] if point else drawn_from)
            if not replacement:
                drawn_from = drawn_from.copy()
                drawn_from[x] = 0.0
                drawn_from = _normal(drawn_from)
        else:
            return path, chance.draw(p)


def _normal(weights: Array) -> Array:
    total = weights.sum()
    return weights / total if total > 0 else weights


def _residual(p: Array, q: Array) -> Array:
    """N([p - q]+); p itself where nothing is left, which only rounding can bring about."""
    rest = np.maximum(p - q, 0)
    return _normal(rest) if rest.any() else p


def block(row: HostRow, p_at: Distribution, chance: Chance, depth: int, q: Array | None = None) -> Walked:
    """Block verification of a chain of gamma drafted tokens (Sun et al. 2024, Algorithm 2). For i = 1..gamma:

        w_0 = 1; w_i = min(1, w_{i-1} p(x_i) / q(x_i))
        s_i = sum [w_i p(.|x_<=i) - q(.|x_<=i)]+; h_i = s_i / (s_i + 1 - w_i) for i < gamma, h_gamma = w_gamma
        tau = the largest i with U_i <= h_i         (all are tried: a failure is not the end)
        emit from p(.|x_<=gamma) if tau = gamma, else from N([w_tau p - q]+)

    Without `q` the drafted tokens are point masses.
    """
    tokens = row[0][1 : depth + 1]
    gamma, w, tau, final = len(tokens), 1.0, 0, np.zeros(0)
    for i in range(gamma + 1):
        p, last = _normal(p_at(i, tokens[:i])), i == gamma
        below = np.zeros_like(p) if last else np.eye(1, len(p), tokens[i])[0] if q is None else _normal(q[i])
        rest = np.maximum(w * p - below, 0)
        s = rest.sum()
        h = w if last else s / (s + 1 - w) if s > 0 else 0.0
        if i == 0 or chance.accept(h, i):
            tau, final = i, p if last or s <= 0 else rest  # where rounding alone leaves no residual, p itself
        if not last:
            w = min(1.0, w * p[tokens[i]] / below[tokens[i]]) if below[tokens[i]] > 0 else 0.0
    return list(range(tau + 1)), chance.draw(final)


def typical(row: HostRow, p_at: Distribution, epsilon: float, delta: float, depth: int) -> Walked:
    """Typical acceptance (Medusa, section 2.3.1). LOSSY: the text does not follow the target's distribution.

    A node is accepted if its parent is and p(x) > min(epsilon, delta * exp(-H(p))). The longest accepted path wins,
    the likelier one among equals, and the token after it is the target's likeliest: so one token is always greedy.
    At T = 0, where p is one-hot, this is greedy decoding.
    """
    tokens, below = row[0], _children(row)
    layer: list[tuple[list[int], float]] = [([0], 0.0)]  # accepted paths of one depth, with their log-likelihoods
    best, after = layer[0], -1
    while layer:
        following = []
        for path, score in layer:
            p = p_at(path[-1], [tokens[node] for node in path[1:]])
            if after < 0 or (len(path), score) > (len(best[0]), best[1]):
                best, after = (path, score), int(p.argmax())
            entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
            for child in below[path[-1]] if len(path) <= depth else ():
                if p[tokens[child]] > min(epsilon, delta * np.exp(-entropy)):
                    following.append(([*path, child], score + float(np.log(p[tokens[child]]))))
        layer = following
    return best[0], after
