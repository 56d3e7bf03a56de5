"""Counter-based Gumbel noise: randomness that belongs to the position, not to the step.

`G(seed, position, token)` is Gumbel noise computed by integer hashing, so that it is the same in any batch, for any
subset of token ids, eager or compiled, on any device. `argmax(log p + G)` then draws from p (the Gumbel-max form of
sampling), and a text is a function of (p, seed) alone.

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
import torch
from jaxtyping import Float, Float32, Float64, Int32
from torch import Tensor

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


def _signed(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def key(seed: int, position: int, stream: int = RACE) -> tuple[int, int]:
    """The two signed 32-bit keys of (seed, position, stream)."""
    k = _splitmix(_splitmix(_splitmix(seed & MASK64) ^ position) ^ stream)
    return _signed(k), _signed(k >> 32)


_A, _B = _signed(0x7FEB352D), _signed(0x846CA68B)


def _mix(x: Int32[Tensor, ...]) -> Int32[Tensor, ...]:
    # Right shifts of int32 are arithmetic: the masks make them logical.
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _A
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _B
    return x ^ ((x >> 16) & 0xFFFF)


def bits(k0: Int32[Tensor, ...], k1: Int32[Tensor, ...], ids: Int32[Tensor, ...]) -> Int32[Tensor, ...]:
    """32 random bits per id; the arguments broadcast."""
    return _mix(_mix(ids ^ k0) + k1)


def _build_table() -> tuple[Tensor, Tensor]:
    # Knots at the float32 numbers x in [1, 2^32] with BITS mantissa bits; u = x / 2^33 below the median, 1 - u above.
    knots = (np.arange(SIDE + 1, dtype=np.int64) << SHIFT) + (127 << 23)
    x = np.minimum(knots.astype(np.uint32).view(np.float32).astype(np.float64) * 2.0**-33, 0.75)
    gumbels = np.stack([-np.log(-np.log1p(-x)), -np.log(-np.log(x))])
    values = np.rint(gumbels * GRID).astype(np.int32)
    flat = values[:, :-1].ravel(), (values[:, 1:] - values[:, :-1]).ravel()
    value, slope = (torch.from_numpy(t.copy()) for t in flat)
    return value, slope


_tables: dict[torch.device, tuple[Tensor, Tensor]] = {torch.device("cpu"): _build_table()}


def gumbel(h: Int32[Tensor, "*s"]) -> Float32[Tensor, "*s"]:
    """The Gumbel variate of 32 random bits."""
    if h.device not in _tables:
        value, slope = _tables[torch.device("cpu")]
        _tables[h.device] = value.to(h.device), slope.to(h.device)
    value, slope = _tables[h.device]
    side = h >> 31  # 0 or -1: which side of the median
    x = ((h ^ side).to(torch.float32) * 2 + 1).view(torch.int32).clamp(max=(159 << 23) - 1)
    i = (x >> SHIFT) - BASE - side * SIDE
    g = value[i] + ((slope[i] * (x & ((1 << SHIFT) - 1))) >> SHIFT)
    return g.to(torch.float32) * (1.0 / GRID)


def tables() -> tuple[Int32[Tensor, " knots"], Int32[Tensor, " knots"]]:
    """Values and slopes of `gumbel`'s table, on the host."""
    return _tables[torch.device("cpu")]


def keys(
    seeds: Sequence[int], counters: Sequence[int], stream: int = RACE, device: torch.device | None = None
) -> Int32[Tensor, "b 2"]:
    """The keys of each seed and counter; many at once by arrays."""
    if len(seeds) < 16:
        pairs = [key(s, c, stream) for s, c in zip(seeds, counters, strict=True)]
        return torch.tensor(pairs, dtype=torch.int32, device=device).view(len(pairs), 2)
    first = np.array([s & MASK64 for s in seeds], dtype=np.uint64)
    k = _splitmix(_splitmix(_splitmix(first) ^ np.array(list(counters), dtype=np.uint64)) ^ np.uint64(stream))
    return torch.from_numpy(k.astype("<u8").view(np.int32).reshape(-1, 2)).to(device)


def gumbels(
    seeds: Sequence[int], counters: Sequence[int], ids: Tensor, stream: int = RACE
) -> Float32[Tensor, b * rest]:  # noqa: F821
    """G for explicit ids: `ids` [b, ...], or [v] for the same ids in every row."""
    k = keys(seeds, counters, stream, ids.device)
    ids = ids.to(torch.int32)
    if ids.dim() == 1:
        ids = ids.expand(len(seeds), -1)
    shape = (len(seeds),) + (1,) * (ids.dim() - 1)
    return gumbel(bits(k[:, 0].view(shape), k[:, 1].view(shape), ids))


def uniforms(
    seeds: Sequence[int], serials: Sequence[int], n: int, stream: int = ACCEPT, device: torch.device | None = None
) -> Float64[Tensor, "b n"]:
    """n uniform numbers in (0, 1) per row with 53 random bits, keyed by (seed, round, stream)."""
    k = keys(seeds, serials, stream, device)
    ids = torch.arange(2 * n, dtype=torch.int32, device=device)
    h = bits(k[:, :1], k[:, 1:], ids).to(torch.int64) & 0xFFFFFFFF
    # Number i is made of ids 2i and 2i + 1, so that it does not depend on how many are asked for.
    return (((h[:, 0::2] << 20) + (h[:, 1::2] >> 12)).to(torch.float64) + 0.5) * 2.0**-52


class GumbelNoise:
    """G by absolute position over a whole vocabulary, computed a block of positions ahead and kept while there is room.

    One instance serves any number of rows and rounds; it is a cache of a pure function, never a state.
    """

    def __init__(self, vocab: int, device: torch.device | str = "cpu"):
        self.ids = torch.arange(vocab, dtype=torch.int32, device=device)
        self.block = max(1, min(32, BLOCK // vocab))
        self.limit = max(8, STORE // (vocab * self.block))
        self.store: dict[tuple[int, int], Tensor] = {}

    def at(self, seeds: Sequence[int], positions: Sequence[int], ids: Tensor | None = None) -> Float[Tensor, b * rest]:  # noqa: F821
        """G [b, v], or for `ids` [b, ...] the same shape."""
        if ids is not None or self.ids.device.type != "cpu":  # there one call for all is quicker than what is kept
            return gumbels(seeds, positions, self.ids if ids is None else ids)
        return torch.stack([self._row(s, p) for s, p in zip(seeds, positions, strict=True)])

    def _row(self, seed: int, position: int) -> Float32[Tensor, " v"]:
        number, offset = divmod(position, self.block)
        found = self.store.get((seed, number))
        if found is None:
            while len(self.store) >= self.limit:
                self.store.pop(next(iter(self.store)))
            first = number * self.block
            found = gumbels([seed] * self.block, range(first, first + self.block), self.ids)
            self.store[seed, number] = found
        return found[offset]
