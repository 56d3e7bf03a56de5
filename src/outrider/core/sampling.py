"""Logits to a distribution: the only home of temperature, top-k, top-p, min-p, penalties and biases; drawing from it.

The reference, in numpy; `native/c/walk.h` has it in C and `backends/torch/sampling.py` in tensors. The order is that of
transformers: bias and penalties on the raw logits, then temperature, top-k, top-p, min-p. The Gumbel-max form of
sampling, `argmax(logits + T * G)`, needs no softmax and no division by T, so that greedy decoding (T = 0) is the same
formula without its second term. Logits are float32 or float64; probabilities are float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..params import Sampling
from .noise import DRAFT, uniforms
from .types import Array, Rows


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
