"""The rules: which nodes of a draft tree are accepted, and which token the target adds.

Pure tensor functions of a tree, the target's logits for its nodes, and a source of chance.

    coupled    the target draws at every node it arrives at and the walk follows the hits: equal to plain decoding
    rejection  speculative sampling on a chain (Leviathan et al. 2023, Chen et al. 2023), recursively on a tree
               (SpecInfer, EAGLE), and for deterministic candidates
    block      block verification of a chain (Sun et al. 2024)
    typical    Medusa's typical acceptance (Cai et al. 2024): LOSSY

The rules see logits only through two functions of the caller, called at visited nodes alone. `depth` is that of the
token to come, 1 below the root; `path` [b, depth - 1] holds the tokens accepted so far, without the root:

    choose(logits [b, v], depth, path) -> [b]             the target's own draw
    distribution(logits [b, v], depth, path) -> [b, v]    the target's distribution

Every rule takes `depth`, a bound on the accepted depth that must not depend on what was drafted. A row that has
stopped keeps its place in the batch; its later calls are ignored. Under `coupled` its path then ends in -1,
so that what is dear can be left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ...core.types import Question, RowText, Verdict
from . import nucleus, sampling
from .noise import ACCEPT, EMIT, uniforms
from .padding import padded
from .tensors import TensorRows, TensorTree

Choose = Callable[[Tensor, int, Tensor], Tensor]
Distribution = Callable[[Tensor, int, Tensor], Tensor]


@dataclass(frozen=True)
class TensorVerdict:
    """The accepted path (node ids from the root, padded by 0) and the one token the target adds itself."""

    path: Int[Tensor, "b k"]
    count: Int[Tensor, " b"]  # valid entries of `path`, root included
    next: Int[Tensor, " b"]


def judge(question: Question) -> Verdict:
    """Apply the rule of `question.rows` on the device of the logits, with one host sync at the end."""
    logits, texts, epsilon = question.logits, question.texts, question.epsilon
    rows, tree = TensorRows(question.rows, logits.device), TensorTree.of(question.tree, logits.device)
    depth, dice = tree.deepest, Dice(rows.seeds, rows.serial)
    sums = [logits.new_zeros(len(logits))]  # of distributions, NaN where a logit is NaN or infinite
    processed = {b: True for b, text in enumerate(texts) if text.process}  # rows: are all their scores numbers?

    def scores(z: Tensor, path: Tensor) -> Tensor:
        if any(text.process for text in texts):
            places = zip(texts, path.tolist(), sampling.wide(z), strict=True)
            z = torch.stack([_processed(text, tail, x) for text, tail, x in places])
            for b in processed:  # -inf forbids a token; what is asked of a row that has ended is not looked at
                ended = path.shape[1] and int(path[b, -1]) < 0
                processed[b] &= bool(ended or not (z[b].isnan() | z[b].isposinf()).any())
        return sampling.penalise(z, rows.sampling, [(text.prompt, text.output) for text in texts], path)

    def choose(z: Tensor, depth: int, path: Tensor) -> Tensor:
        return nucleus.choose(scores(z, path), rows.sampling, partial(rows.some_noise, depth))

    def distribution(z: Tensor, depth: int, path: Tensor) -> Tensor:
        p = sampling.distributions(scores(z, path).double(), rows.sampling)
        sums.append(p.sum(-1))
        return p

    if rows.rule == "coupled":
        verdict = coupled(tree, logits, choose, depth)
    elif rows.rule == "typical":
        verdict = typical(tree, logits, distribution, epsilon, question.delta, depth)
    elif rows.rule == "block" and tree.q is not None and max(tree.q.shape[1], 1) == depth == tree.nodes - 1:
        verdict = block(tree, logits, distribution, dice, depth)
    else:
        widths = (max(Counter(parents[1:]).values(), default=1) for _, parents, _ in question.tree.host)
        verdict = rejection(tree, logits, distribution, dice, depth, max(widths))
    return _host(tree, verdict, logits, torch.stack(sums).isfinite().all(0), processed)


def _processed(text: RowText, tail: list[int], logits: Float[Tensor, " v"]) -> Float[Tensor, " v"]:
    """What the caller's process makes of one row's logits. It is not called for a row whose walk has ended."""
    if text.process is None or (tail and tail[-1] < 0):
        return logits
    return torch.from_numpy(text.process([*text.output, *tail], logits.cpu().numpy())).to(logits)


def _host(
    tree: TensorTree, verdict: TensorVerdict, logits: Tensor, sound: Bool[Tensor, " b"], processed: dict[int, bool]
) -> Verdict:
    """The verdict on the host, and whether each row's logits are finite: its distributions are `sound` and those of
    its tokens finite, or as `processed` says."""
    count, following = verdict.count[:, None], verdict.next[:, None]
    spelled = tree.tokens.gather(1, verdict.path)
    said = torch.cat([spelled[:, 1:], following], 1).scatter(1, count - 1, following)
    seen = logits[torch.arange(len(said), device=said.device)[:, None], verdict.path, said]
    finite = sound & (seen.isfinite() | (torch.arange(seen.shape[1], device=seen.device) >= count)).all(1)
    packed = torch.cat([count, following, finite[:, None].long(), verdict.path], 1).tolist()
    return Verdict(
        [row[3 : 3 + row[0]] for row in packed],
        [row[1] for row in packed],
        [processed.get(b, bool(row[2])) for b, row in enumerate(packed)],
    )


@runtime_checkable
class Chance(Protocol):
    """The rejection rules' randomness, as two verbs, so that a test can explore every branch of the real code."""

    def accept(self, prob: Float64[Tensor, " b"], index: Int[Tensor, " b"], of: int) -> Bool[Tensor, " b"]:
        """True with probability `prob`; decision number `index` (each number is used once) out of `of`."""

    def draw(self, weights: Float64[Tensor, "b v"]) -> Int[Tensor, " b"]:
        """A token with probability proportional to its weight."""


class Dice:
    """Chance of (seed, round): never of the position, which rounds share (that would bias block verification)."""

    def __init__(self, seeds: Sequence[int], serials: Sequence[int]):
        self.seeds, self.serials = seeds, serials
        self.table: Tensor | None = None

    def accept(self, prob: Float64[Tensor, " b"], index: Int[Tensor, " b"], of: int) -> Bool[Tensor, " b"]:
        if self.table is None or self.table.shape[1] < of:
            self.table = uniforms(self.seeds, self.serials, of, ACCEPT, prob.device)
        return self.table.gather(1, index[:, None])[:, 0] < prob

    def draw(self, weights: Float64[Tensor, "b v"]) -> Int[Tensor, " b"]:
        """By inversion: one uniform per row is far cheaper than Gumbel noise for the whole vocabulary."""
        u = uniforms(self.seeds, self.serials, 1, EMIT, weights.device)
        sums = weights.cumsum(-1)
        return torch.searchsorted(sums, u * sums[:, -1:], right=True)[:, 0].clamp(max=weights.shape[1] - 1)


def coupled(tree: TensorTree, logits: Float[Tensor, "b n v"], choose: Choose, depth: int) -> TensorVerdict:
    """Draw at every node arrived at; go to the child that carries the draw, or stop and emit it.

    Exactly depth + 1 draws and no host sync.
    """
    depth = min(depth, tree.deepest)
    b, n, _ = logits.shape
    index, node = torch.arange(b, device=logits.device), torch.arange(n, device=logits.device)
    real = _real(tree)
    at = torch.zeros_like(index)
    emitted, count, alive = at, at + 1, at == 0
    path, text = at[:, None], at.new_empty(b, 0)
    for d in range(depth + 1):
        drawn = choose(logits[index, at], d + 1, text)
        emitted = torch.where(alive, drawn, emitted)
        if d == depth:
            break
        hit = real & (tree.parents == at[:, None]) & (tree.tokens == drawn[:, None])
        child = torch.where(hit, node, n).amin(1)
        alive = alive & (child < n)
        at = torch.where(alive, child, at)
        count = count + alive
        path = torch.cat([path, torch.where(alive, child, 0)[:, None]], 1)
        text = torch.cat([text, torch.where(alive, drawn, -1)[:, None]], 1)
    return TensorVerdict(path, count, emitted)


def _real(tree: TensorTree) -> Bool[Tensor, "b n"]:
    """Which nodes are drafted ones: neither the root nor padding."""
    node = torch.arange(tree.nodes, device=tree.tokens.device)
    return (node > 0) & (node < tree.size[:, None])


def rejection(
    tree: TensorTree,
    logits: Float[Tensor, "b n v"],
    distribution: Distribution,
    chance: Chance,
    depth: int,
    width: int | None = None,
) -> TensorVerdict:
    """Recursive rejection sampling; the children of a node are tested in index order, the order they were drawn in:

        accept child x with probability P(x) / Q(x); else P = N([P - Q]+) and, drawn without replacement, Q(x) = 0;
        Q = N(Q); when all are rejected emit from P, below the last accepted node from p itself.

    `tree.q` [:, i] is the distribution that the children of node i were drawn from. Without it, or where it has run
    out, a child is a point mass: Q(x) = 1. On a chain this is speculative sampling. Without `width`, the largest number
    of siblings, there is a host sync.
    """
    b = logits.shape[0]
    depth, rank = min(depth, tree.deepest), _sibling_ranks(tree)
    if width is None:
        alone = tree.q is not None and tree.q.shape[1] == tree.nodes - 1  # every node but the last has one child
        width = 1 if alone else int(rank.max()) + 1
    index = torch.arange(b, device=logits.device)
    at = torch.zeros_like(index)
    count, alive = at + 1, at == 0
    path, text = at[:, None], at.new_empty(b, 0)
    p = _normal(distribution(logits[:, 0], 1, text).double())
    for d in range(1, depth + 1):
        child, p = _test_children(tree, rank, width, at, alive, p, chance)
        alive = child > 0
        at = torch.where(alive, child, at)
        count = count + alive
        path = torch.cat([path, child[:, None]], 1)
        text = torch.cat([text, tree.tokens.gather(1, at[:, None])], 1)
        p = torch.where(alive[:, None], _normal(distribution(logits[index, at], d + 1, text).double()), p)
    return TensorVerdict(path, count, chance.draw(p))


def _test_children(
    tree: TensorTree,
    rank: Int[Tensor, "b n"],
    width: int,
    at: Int[Tensor, " b"],
    alive: Bool[Tensor, " b"],
    p: Float64[Tensor, "b v"],
    chance: Chance,
) -> tuple[Int[Tensor, " b"], Float64[Tensor, "b v"]]:
    """The child each row descends to (0: none) and what is left of P after the rejections."""
    n = tree.nodes
    row, node = torch.arange(len(at), device=at.device), torch.arange(n, device=at.device)
    q = p.new_zeros(1, 1).expand_as(p)
    if tree.q is not None:
        inner = tree.q.shape[1]
        q = torch.where((at < inner)[:, None], _normal(tree.q[row, at.clamp(max=inner - 1)].double()), 0.0)
    chosen = torch.zeros_like(at)
    below = tree.parents == at[:, None]
    for j in range(width):
        child = torch.where(below & (rank == j), node, n).amin(1)
        testing = alive & (chosen == 0) & (child < n)
        child = torch.where(testing, child, 0)
        x = tree.tokens.gather(1, child[:, None])
        qx = q.gather(1, x)
        ratio = (p.gather(1, x) / torch.where(qx > 0, qx, 1.0))[:, 0]
        hit = chance.accept(ratio.clamp(max=1) * testing, child, n) & testing
        chosen = torch.where(hit, child, chosen)
        missed = (testing & ~hit)[:, None]
        point = torch.zeros_like(p).scatter_(1, x, 1.0)
        p = torch.where(missed, _residual(p, torch.where(qx > 0, q, point)), p)
        if not tree.replacement:
            q = torch.where(missed, _normal(q.scatter(1, x, 0.0)), q)
    return chosen, p


def _sibling_ranks(tree: TensorTree) -> Int[Tensor, "b n"]:
    """How many siblings come before each node; -1 for the root and padding."""
    real = _real(tree)
    same = (tree.parents[:, :, None] == tree.parents[:, None]) & real[:, None]
    return torch.where(real, same.tril(-1).sum(-1), -1)


def _normal(weights: Float64[Tensor, "b v"]) -> Float64[Tensor, "b v"]:
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def _residual(p: Float64[Tensor, "b v"], q: Float64[Tensor, "b v"]) -> Float64[Tensor, "b v"]:
    """N([p - q]+); p itself where nothing is left, which only rounding can bring about."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, _normal(rest), p)


def block(
    tree: TensorTree, logits: Float[Tensor, "b n v"], distribution: Distribution, chance: Chance, depth: int
) -> TensorVerdict:
    """Block verification of chains (Sun et al. 2024, Algorithm 2); rows may differ in length (gamma). For i = 1..gamma:

        w_0 = 1; w_i = min(1, w_{i-1} p(x_i) / q(x_i))
        s_i = sum [w_i p(.|x_<=i) - q(.|x_<=i)]+; h_i = s_i / (s_i + 1 - w_i) for i < gamma, h_gamma = w_gamma
        tau = the largest i with U_i <= h_i         (all are tested: a failure is not the end)
        emit from p(.|x_<=gamma) if tau = gamma, else from N([w_tau p - q]+)

    Without `tree.q` the drafted tokens are point masses.
    """
    b, n, v = logits.shape
    gamma = (tree.size - 1).clamp(max=depth)
    steps = min(depth, tree.deepest, n - 1)
    tokens = tree.tokens[:, 1 : steps + 1]
    w = torch.ones(b, 1, dtype=torch.float64, device=logits.device)
    tau = torch.zeros_like(gamma)
    final = torch.zeros(b, v, dtype=torch.float64, device=logits.device)
    for i in range(steps + 1):
        p = _normal(distribution(logits[:, i], i + 1, tokens[:, :i]).double())
        last = gamma == i
        q = _chain_distribution(tree, i, v) if i < steps else torch.zeros_like(p)
        rest = (w * p - q).clamp(min=0)
        s = rest.sum(-1)
        if i > 0:
            h = torch.where(last, w[:, 0], torch.where(s > 0, s / (s + 1 - w[:, 0]), 0.0))
            inside = gamma >= i
            taken = chance.accept(h * inside, torch.full_like(gamma, i), n) & inside
            tau = torch.where(taken, i, tau)
        else:
            taken = tau == 0
        # Where rounding alone leaves no residual, p itself.
        emit = torch.where((last | (s <= 0))[:, None], p, rest)
        final = torch.where(taken[:, None], emit, final)
        if i < steps:
            x = tokens[:, i : i + 1]
            chance_of = q.gather(1, x)
            w = torch.where(chance_of > 0, w * p.gather(1, x) / chance_of, 0.0).clamp(max=1)
    node = torch.arange(steps + 1, device=logits.device)
    return TensorVerdict(torch.where(node <= tau[:, None], node, 0), tau + 1, chance.draw(final))


def _chain_distribution(tree: TensorTree, i: int, v: int) -> Float64[Tensor, "b v"]:
    """What node i's only child was drawn from; the point mass on it if no distribution is kept."""
    if tree.q is not None:
        return _normal(tree.q[:, i].double())
    mass = torch.zeros(tree.tokens.shape[0], v, dtype=torch.float64, device=tree.tokens.device)
    return mass.scatter_(1, tree.tokens[:, i + 1 : i + 2], 1.0)


def typical(
    tree: TensorTree,
    logits: Float[Tensor, "b n v"],
    distribution: Distribution,
    epsilon: float = 0.09,
    delta: float = 0.3,
    depth: int = 1 << 30,
) -> TensorVerdict:
    """Typical acceptance (Medusa, section 2.3.1). LOSSY: the text does not follow the target's distribution.

    A node is accepted if its parent is and p(x) > min(epsilon, delta * exp(-H(p))). The longest accepted path wins,
    the likelier one among equals, and the token after it is the target's likeliest: so one token is always greedy.
    At T = 0, where p is one-hot, this is greedy decoding. One host sync per depth.
    """
    b = logits.shape[0]
    row = torch.arange(b, device=logits.device)
    real = _real(tree)
    # Per row: (path, log-likelihood) of the accepted nodes of this depth; the best so far and the token after it.
    layer: list[list[tuple[list[int], float]]] = [[([0], 0.0)] for _ in range(b)]
    best: list[tuple[list[int], float]] = [([0], 0.0)] * b
    after = [0] * b
    for d in range(min(depth, tree.deepest) + 1):
        following: list[list[tuple[list[int], float]]] = [[] for _ in range(b)]
        for r in range(max(map(len, layer))):
            here = [candidates[r] if r < len(candidates) else ([0] * (d + 1), 0.0) for candidates in layer]
            nodes = torch.tensor([path for path, _ in here], device=logits.device)
            p = distribution(logits[row, nodes[:, -1]], d + 1, tree.tokens.gather(1, nodes[:, 1:])).double()
            entropy = -torch.special.xlogy(p, p).sum(-1, keepdim=True)
            chances = p.gather(1, tree.tokens)
            good = real & (tree.parents == nodes[:, -1:]) & (chances > (delta * (-entropy).exp()).clamp(max=epsilon))
            likely, worth, accepted = p.argmax(-1).tolist(), chances.log().tolist(), good.tolist()
            for i, (path, score) in enumerate(here):
                if r >= len(layer[i]):
                    continue
                if (len(path), score) > (len(best[i][0]), best[i][1]) or d == 0:
                    best[i], after[i] = (path, score), likely[i]
                following[i] += [([*path, j], score + worth[i][j]) for j, ok in enumerate(accepted[i]) if ok]
        layer = following
        if not any(layer):
            break
    paths = [path for path, _ in best]
    count = torch.tensor([len(path) for path in paths], device=logits.device)
    wide = padded(paths, logits.device, min(depth, tree.deepest) + 1)
    return TensorVerdict(wide, count, torch.tensor(after, device=logits.device))
