"""Counter-based Gumbel noise: randomness that belongs to the position, not to the step.

`G(seed, position, token)` is Gumbel noise computed by integer hashing, so that it is the same in any batch, for any
subset of token ids, and on any device (`backends/torch/noise.py` has it in tensors, `backends/native/c` in C).
`argmax(log p + G)` then draws from p (the Gumbel-max form of sampling), and a text is a function of (p, seed) alone.

    key  = splitmix64 of (seed, position, stream), as two 32-bit halves k0, k1
    bits = mix(mix(id ^ k0) + k1), `mix` a 32-bit avalanche        (one xor key alone would merely permute the ids)
    G    = -log(-log(u)), u = (2 bits + 1) / 2^33, by an integer table with linear interpolation

The map from bits to G uses one int-to-float conversion (exactly rounded everywhere) and integer arithmetic, because
float32 logarithms differ between builds in 8 to 21 % of all values. Its error is below 1e-4; the bias of a draw
between two tokens stays below 1e-6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from .types import Array

MASK64 = (1 << 64) - 1
GRID = 1 << 18  # G is a multiple of 2^-18, |G| < 24
BITS = 9  # mantissa bits kept by the table
SHIFT, BASE, SIDE = 23 - BITS, 127 << BITS, 32 << BITS
BLOCK = 1 << 16  # noise values computed at a time: small vocabularies get several positions ahead
STORE = 1 << 24  # noise values kept (64 MB)

# Streams: which use of randomness a number serves.
RACE, ACCEPT, EMIT, DRAFT = range(4)


Word = TypeVar("Word", int, np.ndarray)  # 64 bits, one or an array of them


def _splitmix(z: Word) -> Word:
    z = (z + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def digest(seed: int, tokens: Sequence[int]) -> int:
    """64 bits of a seed and a text."""
    for token in tokens:
        seed = _splitmix((seed ^ token) & MASK64)
    return _splitmix(seed & MASK64)


def keys(seeds: Sequence[int], counters: Sequence[int], stream: int = RACE) -> Array:
    """The two 32-bit keys of each seed and counter, uint32 [b, 2]. Counters are not negative."""
    first = np.array([s & MASK64 for s in seeds], np.uint64)
    k = _splitmix(_splitmix(_splitmix(first) ^ np.array(counters, np.uint64)) ^ np.uint64(stream))
    return k.astype("<u8").view(np.uint32).reshape(-1, 2)


_A, _B = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def _mix(x: Array) -> Array:
    x = x ^ (x >> 16)
    x *= _A
    x ^= x >> 15
    x *= _B
    return x ^ (x >> 16)


def bits(k0: Array, k1: Array, ids: Array) -> Array:
    """32 random bits per id, uint32; the arguments are uint32 and broadcast."""
    return _mix(_mix(ids ^ k0) + k1)


def _build_table() -> tuple[Array, Array]:
    # Knots at the float32 numbers x in [1, 2^32] with BITS mantissa bits; u = x / 2^33 below the median, 1 - u above.
    knots = (np.arange(SIDE + 1, dtype=np.int64) << SHIFT) + (127 << 23)
    x = np.minimum(knots.astype(np.uint32).view(np.float32).astype(np.float64) * 2.0**-33, 0.75)
    gumbels = np.stack([-np.log(-np.log1p(-x)), -np.log(-np.log(x))])
    values = np.rint(gumbels * GRID).astype(np.int32)
    return values[:, :-1].ravel(), (values[:, 1:] - values[:, :-1]).ravel()


# The values and slopes of `gumbel`'s linear pieces, int32 [2 * SIDE].
VALUES, SLOPES = _build_table()


def gumbel(h: Array) -> Array:
    """The Gumbel variate of 32 random bits (uint32), in float32."""
    side = h.view(np.int32) >> 31  # 0 or -1: which side of the median
    x = ((h.view(np.int32) ^ side).astype(np.float32) * np.float32(2) + np.float32(1)).view(np.int32)
    x = np.minimum(x, np.int32((159 << 23) - 1))
    i = (x >> SHIFT) - BASE - side * SIDE
    g = VALUES[i] + ((SLOPES[i] * (x & ((1 << SHIFT) - 1))) >> SHIFT)
    return g.astype(np.float32) * np.float32(1.0 / GRID)


def gumbels(seeds: Sequence[int], counters: Sequence[int], ids: Array, stream: int = RACE) -> Array:
    """G in float32 for explicit ids: `ids` [b, ...], or [v] for the same ids in every row."""
    k, ids = keys(seeds, counters, stream), np.asarray(ids).astype(np.uint32)
    shape = (len(seeds),) + (1,) * max(1, ids.ndim - 1)
    return gumbel(bits(k[:, 0].reshape(shape), k[:, 1].reshape(shape), ids))


def uniforms(seeds: Sequence[int], serials: Sequence[int], n: int, stream: int = ACCEPT) -> Array:
    """n uniform numbers in (0, 1) per row with 52 random bits, float64 [b, n], keyed by (seed, round, stream)."""
    k, ids = keys(seeds, serials, stream), np.arange(2 * n, dtype=np.uint32)
    h = bits(k[:, :1], k[:, 1:], ids).astype(np.int64)
    # Number i is made of ids 2i and 2i + 1, so that it does not depend on how many are computed.
    return (((h[:, 0::2] << 20) + (h[:, 1::2] >> 12)).astype(np.float64) + 0.5) * 2.0**-52


class GumbelNoise:
    """G by absolute position over the vocabulary, computed a block of positions ahead and kept up to a limit.

    One instance serves any number of rows and rounds; it is a cache of a pure function, never a state.
    """

    def __init__(self, vocab: int):
        self.vocab, self.ids = vocab, np.arange(vocab, dtype=np.uint32)
        self.block = max(1, min(32, BLOCK // vocab))
        self.limit = max(8, STORE // (vocab * self.block))
        self.store: dict[tuple[int, int], Array] = {}

    def at(self, seeds: Sequence[int], positions: Sequence[int], ids: Array | None = None) -> Array:
        """G [b, v] in float32, or for `ids` [b, ...] the same shape."""
        if ids is not None:
            return gumbels(seeds, positions, ids)
        return np.stack([self._row(s, p) for s, p in zip(seeds, positions, strict=True)])

    def _row(self, seed: int, position: int) -> Array:
        number, offset = divmod(position, self.block)
        kept = self.store.get((seed, number))
        if kept is None:
            while len(self.store) >= self.limit:
                self.store.pop(next(iter(self.store)))
            first = number * self.block
            kept = gumbels([seed] * self.block, range(first, first + self.block), self.ids)
            self.store[seed, number] = kept
        row: Array = kept[offset]
        return row
