"""Logits to a distribution: the only home of temperature, top-k, top-p, min-p, penalties and biases; drawing from it.

The reference, in numpy; `backends/native/c/walk.h` has it in C and `backends/torch/sampling.py` in tensors. The order
is that of transformers: bias and penalties on the raw logits, then temperature, top-k, top-p, min-p. The Gumbel-max
form of sampling, `argmax(logits + T * G)`, needs no softmax and no division by T, so that greedy decoding (T = 0) is
the same formula without its second term. Logits are float32 or float64; probabilities are float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..params import Sampling
from .noise import DRAFT, uniforms
from .types import Array, Rows

POOLED, POOL = 4096, 64  # larger vocabularies are ranked by their best POOL tokens: hashing is what costs
BLOCK = 64  # logits that `largest` looks at together


def softmax(x: Array) -> Array:
    """Along the last axis, in float64."""
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def narrow(logits: Array, sampling: Sampling) -> Array:
    """Logits [v], -inf where top-k, top-p or min-p exclude; not divided by T.

    The filters see logits / T, one after the other as in transformers (all equals of the k-th best stay).
    """
    if sampling.temperature == 0 or not sampling.warped:
        return logits
    scores = logits / logits.dtype.type(sampling.temperature)
    gone = np.zeros(len(scores), bool)
    if 0 < sampling.top_k < len(scores):
        gone = scores < np.partition(scores, -sampling.top_k)[-sampling.top_k]
        scores = np.where(gone, -np.inf, scores)
    if sampling.top_p < 1:  # summed from below, as transformers does
        order = np.argsort(scores, kind="stable")
        out = order[:-1][softmax(scores[order]).cumsum()[:-1] <= 1 - sampling.top_p]
        gone[out], scores[out] = True, -np.inf
    if sampling.min_p > 0:
        p = softmax(scores)
        gone |= p < sampling.min_p * p.max()
    return np.where(gone, logits.dtype.type(-np.inf), logits)


def distribution(logits: Array, sampling: Sampling) -> Array:
    """Probabilities [v] of the next token: softmax(narrow(logits) / T), at T = 0 all on the largest logit."""
    if sampling.temperature > 0:
        return softmax(narrow(logits, sampling).astype(np.float64) / sampling.temperature)
    p = np.zeros(len(logits))
    p[logits.argmax()] = 1.0
    return p


def draw(logits: Array, sampling: Sampling, noise: Array | None) -> int:
    """A token: argmax(narrow(logits) + T * G), the lowest id among equals. `noise` [v] may be None at T = 0."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    assert noise is not None, "sampling needs noise"
    # Two operations on purpose, as C and tensors do it: a fused multiply-add would round otherwise.
    scaled = noise * np.float32(sampling.temperature)
    return int((narrow(logits, sampling) + scaled).argmax())


def penalise(logits: Array, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> Array:
    """Logit bias, then repetition, presence and frequency penalties, on logits [v].

    `output` ends with the tokens accepted in this round above the node. Repetition looks at prompt and output; presence
    and frequency at output alone.
    """
    if not sampling.penalised and not sampling.logit_bias:
        return logits
    counts = Counter(output) if sampling.penalised else Counter[int]()
    seen = {*prompt, *counts} if sampling.penalised else set[int]()
    ids = [*seen, *(token for token in sampling.logit_bias if token not in seen)]
    kind = logits.dtype

    def column(values: Sequence[float]) -> Array:
        return np.array(values, kind)

    z, said = logits[ids], column([counts[token] for token in ids])
    factor = column([sampling.repetition_penalty] * len(seen) + [1.0] * (len(ids) - len(seen)))
    if sampling.logit_bias:
        z = z + column([sampling.logit_bias.get(token, 0.0) for token in ids])
    z = np.where(z < 0, z * factor, z / factor)
    presence, frequency = kind.type(sampling.presence_penalty), kind.type(sampling.frequency_penalty)
    changed = logits.copy()
    changed[ids] = z - presence * (said > 0) - frequency * said
    return changed


def largest(x: Array, k: int) -> Array:
    """Where the k largest of x [.., v] are, the largest first: int64 [.., k]. They lie in the k blocks of BLOCK with
    the largest maxima, so a large vocabulary is not sorted."""
    v = x.shape[-1]
    rows = x.reshape(-1, v)
    where = np.broadcast_to(np.arange(v), rows.shape)
    if v > 2 * BLOCK * k:
        end = v - v % BLOCK  # of the full blocks
        maxima = rows[:, :end].reshape(len(rows), -1, BLOCK).max(-1)
        blocks = np.argpartition(maxima, -k, -1)[:, -k:]
        where = (blocks[..., None] * BLOCK + np.arange(BLOCK)).reshape(len(rows), -1)
        where = np.concatenate([where, np.broadcast_to(np.arange(end, v), (len(rows), v - end))], 1)
        where.sort(-1)
        rows = np.take_along_axis(rows, where, 1)
    order = np.argsort(-rows, -1, kind="stable")[:, :k]
    chosen: Array = np.take_along_axis(where, order, 1).reshape(*x.shape[:-1], k)
    return chosen


def rank(
    logits: Array,
    rows: Rows,
    depth: int | Array,
    k: int,
    scale: float = 1.0,
    pool: int = POOL,
    warp: bool = False,
    names: Array | None = None,
) -> tuple[Array, Array]:
    """The k candidates below each of w nodes, best first, and the logs of their confidences.

    Under `coupled` candidates are ranked by r = log q + T * G, with the noise G of absolute position
    `rows.start + depth` that the target's own choice there will use; elsewhere, and at T = 0, by log q (EAGLE-2).
    The confidence is softmax(r / scale). q is taken at temperature 1 and unfiltered, which is best for trees.
    Above POOLED tokens only the `pool` best of q are raced.

    Args:
        logits: [b, w, v], the logits of q.
        depth: of the candidates, one for all nodes or [b, w].
        warp: apply the row's filters to q, which is best for chains.
        names: token ids of the columns, where they are not 0 .. v - 1.

    Returns:
        Token ids int64 [b, w, k] and logs float32 [b, w, k]; k at most v.
    """
    x, k = logits, min(k, logits.shape[-1])
    if warp and any(s.warped for s in rows.sampling):
        x = np.stack([np.stack([narrow(z, s) for z in row]) for row, s in zip(x, rows.sampling, strict=True)])
    raced, ids = rows.rule == "coupled" and rows.sampled, None
    if raced and x.shape[-1] > POOLED:
        ids = largest(x, min(max(pool, k), x.shape[-1]))
        x = np.take_along_axis(x, ids, -1)
    if raced:
        wanted = ids if names is None or ids is None else names[ids]
        noise = _noise(rows, depth, wanted)
        if names is not None and ids is None:
            noise = noise[..., names]
        x = x + noise * np.array([[[s.temperature]] for s in rows.sampling], np.float32)
    top = largest(x, k)
    scaled = x if scale == 1 else x / x.dtype.type(scale)
    highest = scaled.max(-1, keepdims=True)
    total = np.log(np.exp(scaled - highest).sum(-1, keepdims=True))
    confidence = (np.take_along_axis(scaled, top, -1) - highest - total).astype(np.float32)
    chosen = top if ids is None else np.take_along_axis(ids, top, -1)
    return chosen if names is None else names[chosen], confidence


def _noise(rows: Rows, depth: int | Array, ids: Array | None) -> Array:
    """G of candidates at their depths: [b, 1, v] or [b, w, v], for `ids` [b, w, k] the same shape."""
    if isinstance(depth, int):
        return rows.noise(depth)[:, None] if ids is None else rows.noise(depth, ids)
    levels, which = np.unique(depth, return_inverse=True)
    noise = np.stack([rows.noise(int(d), ids) for d in levels])
    which, row = which.reshape(depth.shape), np.arange(len(depth))[:, None]
    made: Array = noise[which, row] if ids is None else noise[which, row, np.arange(depth.shape[1])]
    return made


def sample(q: Array, k: int, rows: Rows, first: int = 0, replacement: bool = False) -> Array:
    """k children of each of the nodes first, first + 1, ..., drawn from their distributions q [b, w, v], in the order
    they were drawn: int64 [b, w, k].

    Where q has run out without replacement, the first tokens that no sibling carries. The randomness belongs to (seed,
    round, node), never to a position, which would tie successive rounds together and bias the rejection rules.
    """
    b, w, v = q.shape
    seeds = [s for s in rows.seeds for _ in range(w)]
    counters = [(serial << 16) + first + i for serial in rows.serial for i in range(w)]
    u = uniforms(seeds, counters, k, DRAFT).reshape(b, w, k)
    children = np.empty((b, w, k), np.int64)
    for r in range(b):
        for i in range(w):
            weights, free = q[r, i].astype(np.float64), np.ones(v, bool)
            for j in range(k):
                child = inverted(weights, u[r, i, j])
                if j > 0 and not replacement and not weights.any():
                    child = int(free.argmax())
                children[r, i, j] = child
                if not replacement:
                    weights[child], free[child] = 0.0, False
    return children


def inverted(weights: Array, u: float) -> int:
    """The token whose share of the summed weights [v] holds `u` of the total."""
    sums = weights.cumsum()
    return min(int(np.searchsorted(sums, u * sums[-1], side="right")), len(weights) - 1)
