"""Gumbel noise: the same bits everywhere, and the right distribution."""

from __future__ import annotations

import hashlib
import math
import shutil
import subprocess
from pathlib import Path

import cffi
import numpy as np
import pytest
import torch
from scipy import stats

from outrider.backends.native.variants import FLAGS, SOURCES
from outrider.backends.torch import noise as tensors
from outrider.core import noise
from outrider.core.noise import ACCEPT, DRAFT, EMIT, GRID, MASK64, RACE, GumbelNoise, bits, gumbel, gumbels, uniforms

ALPHA = 1e-4  # per test; seeds are fixed
EULER = 0.57721566490153286


def raw(seeds: list[int], positions: list[int], n: int) -> np.ndarray:
    """The 32 bits of ids 0..n-1, as unsigned integers."""
    k = noise.keys(seeds, positions, RACE)
    return bits(k[:, :1], k[:, 1:], np.arange(n, dtype=np.uint32))


def even(counts: np.ndarray) -> float:
    return float(stats.chisquare(counts.ravel()).pvalue)


# --- the same everywhere


def test_pinned_values() -> None:
    """These may never change: texts of a given seed depend on them."""
    g = gumbels([0, 1, 12345678901234567890], [0, 1, 100_000], np.arange(1000))
    u = uniforms([7, 8], [0, 3], 100)
    digest = hashlib.sha256(g.tobytes() + u.tobytes()).hexdigest()
    assert digest == "e7f35a83d6d7e6fd7c8a82cf36ba39e6f3055714b7ff25e42c436fed7cc369ca"


def key(seed: int, counter: int, stream: int) -> list[int]:
    """The definition, one number at a time."""
    z = seed & MASK64
    for more in (counter, stream, 0):
        z = (z + 0x9E3779B97F4A7C15) & MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        z = z ^ (z >> 31) ^ more
    return [z & 0xFFFFFFFF, z >> 32]


def test_many_keys_at_once_are_the_same_keys() -> None:
    seeds = [(3**i) * (-1) ** i for i in range(60)]
    counters = [7**i % (1 << 62) for i in range(60)]
    for stream in (RACE, ACCEPT, EMIT, DRAFT):
        many = noise.keys(seeds, counters, stream)
        assert many.tolist() == [key(s, c, stream) for s, c in zip(seeds, counters, strict=True)]


def test_any_batch_any_subset_any_layout() -> None:
    v, seeds, positions = 3000, [3, 3, 99, 1 << 63], [0, 17, 17, 123_456]
    full = gumbels(seeds, positions, np.arange(v))
    assert full.shape == (4, v)
    for i in range(4):
        assert np.array_equal(gumbels(seeds[i : i + 1], positions[i : i + 1], np.arange(v))[0], full[i])
    ids = np.random.default_rng(0).integers(v, size=(4, 3, 5))
    row = np.arange(4)[:, None, None]
    assert np.array_equal(gumbels(seeds, positions, ids), full[row, ids])
    assert np.array_equal(gumbels(seeds, positions, np.arange(v)[::7]), full[:, ::7])
    turned = ids.transpose(0, 2, 1)
    assert np.array_equal(gumbels(seeds, positions, turned), full[row, turned])
    for n in (1, 2, 7, 15, 17, 63):  # every tail of the vectorised loops
        assert np.array_equal(gumbels(seeds, positions, np.arange(n)), full[:, :n])


def test_the_cache_is_only_a_cache() -> None:
    gumbel = GumbelNoise(500)
    full = gumbels([4] * 100, range(100), np.arange(500))
    for position in (0, 99, 31, 32, 33, 0):
        assert np.array_equal(gumbel.at([4], [position])[0], full[position])
    assert np.array_equal(gumbel.at([4, 4], [5, 60]), full[[5, 60]])
    ids = np.array([[3, 499], [0, 7]])
    assert np.array_equal(gumbel.at([4, 4], [5, 60], ids), np.take_along_axis(full[[5, 60]], ids, 1))
    gumbel.limit = 8
    for position in range(0, 2000, 7):
        gumbel.at([5], [position])
    assert len(gumbel.store) <= 8
    assert np.array_equal(gumbel.at([4], [2])[0], full[2])


def corners() -> np.ndarray:
    """32-bit numbers around every power of two, and the ends."""
    powers = 1 << np.arange(33, dtype=np.int64)
    return np.unique(np.concatenate([powers + d for d in (-2, -1, 0, 1)] + [2**32 - powers])) & 0xFFFFFFFF


def test_tensors_have_the_same_bits() -> None:
    """Ids, keys and hashes at the corners of 32 bits; seeds and counters at those of 64."""
    edges = corners().astype(np.uint32)
    signed = torch.from_numpy(edges.view(np.int32))
    assert np.array_equal(tensors.gumbel(signed).numpy(), gumbel(edges))
    for k0, k1 in ((0, 0), (1, 0xFFFFFFFF), (0x80000000, 0x7FFFFFFF), (0xDEADBEEF, 0x12345678)):
        mine = bits(np.array([k0], np.uint32), np.array([k1], np.uint32), edges)
        key0, key1 = (torch.from_numpy(np.array([k], np.uint32).view(np.int32)) for k in (k0, k1))
        assert np.array_equal(tensors.bits(key0, key1, signed).numpy().view(np.uint32), mine)
    seeds = [0, 1, -1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), 12345678901234567890]
    counters = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1]
    ids = np.concatenate([np.arange(2000), [2**31 - 2, 2**31 - 1]])
    for stream in (RACE, ACCEPT, EMIT, DRAFT):
        given = torch.from_numpy(ids)
        assert np.array_equal(
            tensors.gumbels(seeds, counters, given, stream).numpy(), gumbels(seeds, counters, ids, stream)
        )
        assert np.array_equal(
            tensors.uniforms(seeds, counters, 33, stream).numpy(), uniforms(seeds, counters, 33, stream)
        )


IN_C = """
#include "noise.h"
void all(const int32_t *knots, const int32_t *slopes, const uint64_t *keys, const int64_t *ids, long n, float *made) {
    for (long i = 0; i < n; i++) made[i] = noise(knots, slopes, keys[i], ids[i]);
}
uint64_t key_at(uint64_t seed, int64_t position) { return key_of(seed, position); }
"""


def unmixed(h: int) -> int:
    """The number that two rounds of mixing with keys of zero turn into h."""
    for _ in range(2):
        h ^= h >> 16
        h = h * pow(0x846CA68B, -1, 1 << 32) & 0xFFFFFFFF
        h ^= (h >> 15) ^ (h >> 30)
        h = h * pow(0x7FEB352D, -1, 1 << 32) & 0xFFFFFFFF
        h ^= h >> 16
    return h


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_c_has_the_same_bits(tmp_path: Path) -> None:
    """Hashes at the corners of 32 bits, by ids that are mixed into them; keys of seeds at the corners of 64."""
    (tmp_path / "all.c").write_text(IN_C, encoding="utf-8")
    made = tmp_path / "all.so"
    subprocess.run(["cc", *FLAGS, "-march=native", f"-I{SOURCES}", "all.c", "-o", made], cwd=tmp_path, check=True)
    ffi = cffi.FFI()
    ffi.cdef(
        "void all(int32_t *, int32_t *, uint64_t *, int64_t *, long, float *); uint64_t key_at(uint64_t, int64_t);"
    )
    code = ffi.dlopen(str(made))
    edges = corners()
    ids, keys, result = (
        np.array([unmixed(int(h)) for h in edges]),
        np.zeros(len(edges), np.uint64),
        np.zeros(len(edges), "f4"),
    )
    assert np.array_equal(
        bits(np.array([0], np.uint32), np.array([0], np.uint32), ids.astype(np.uint32)), edges.astype(np.uint32)
    )
    code.all(*(ffi.from_buffer(kind, part) for kind, part in zip(
        ("int32_t[]", "int32_t[]", "uint64_t[]", "int64_t[]"), (noise.VALUES, noise.SLOPES, keys, ids), strict=True
    )), len(ids), ffi.from_buffer("float[]", result))  # fmt: skip
    assert np.array_equal(result, gumbel(edges.astype(np.uint32)))
    for seed, position in zip((0, 1, (1 << 64) - 1, 1 << 63), (0, 2**31, 2**32, 2**62), strict=True):
        low, high = noise.keys([seed], [position])[0].tolist()
        assert code.key_at(seed, position) == low | high << 32


def test_uniforms_do_not_depend_on_their_count() -> None:
    assert np.array_equal(uniforms([5, 6], [1, 2], 10), uniforms([5, 6], [1, 2], 200)[:, :10])
    u = uniforms(range(1000), [0] * 1000, 100)
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    assert stats.kstest(u.ravel(), "uniform").pvalue > ALPHA
    assert np.unique(u).size == u.size


# --- the right distribution


def test_bits_are_uniform() -> None:
    h = raw([1], [5], 1 << 20)
    assert stats.kstest((h[0].astype(np.float64) + 0.5) / 2**32, "uniform").pvalue > ALPHA
    for shift in (0, 8, 16, 24):
        assert even(np.bincount((h[0] >> shift) & 255, minlength=256)) > ALPHA
    assert np.unique(h[0]).size == h.size, "distinct ids have distinct bits under one key"


@pytest.mark.parametrize("along", ["positions", "tokens", "seeds", "streams", "serials far apart"])
def test_neighbours_are_independent(along: str) -> None:
    """Pairs of neighbours over 2^20 draws: high and low nibbles of both, and the correlation."""
    m, n = 1025, 1024
    k = {
        "positions": ([7] * m, list(range(m))),
        "tokens": ([7] * m, list(range(m))),
        "seeds": (list(range(m)), [7] * m),
        "streams": ([i // 4 for i in range(m)], [7] * m),
        "serials far apart": ([7] * m, [i << 20 for i in range(m)]),
    }[along]
    h = raw(*k, n)
    if along == "streams":
        pairs = np.stack([noise.keys([i // 4], [7], i % 4)[0] for i in range(m)])
        h = bits(pairs[:, :1], pairs[:, 1:], np.arange(n, dtype=np.uint32))
    one, two = (h[:, :-1], h[:, 1:]) if along == "tokens" else (h[:-1], h[1:])
    one, two = one.ravel(), two.ravel()
    assert one.size >= 1_000_000
    for a, b in ((28, 28), (0, 0), (28, 0), (0, 28)):
        cells = ((one >> a) & 15) * 16 + ((two >> b) & 15)
        assert even(np.bincount(cells, minlength=256)) > ALPHA
    r = np.corrcoef(one.astype(np.float64), two.astype(np.float64))[0, 1]
    assert abs(r) < 4 / math.sqrt(one.size)


def test_positions_are_no_permutations_of_each_other() -> None:
    """With one xor key alone the sorted noise of every position would be the same."""
    h = np.sort(raw([3, 3], [0, 1], 4096), axis=1)
    assert np.mean(h[0] == h[1]) < 0.01


def exact(h: np.ndarray) -> np.ndarray:
    """Gumbel variates of 32 bits in float64: x = (2 h + 1) / 2^33 is 1 - u, or u where the first bit is set."""
    x = (2.0 * np.where(h < 0, ~h, h).astype(np.int64) + 1) * 2.0**-33
    return np.where(h < 0, -np.log(-np.log(x)), -np.log(-np.log1p(-x)))


def ladder(n: int) -> np.ndarray:
    """Bits over the whole range, and all around the powers of two."""
    spaced = np.linspace(0, 2**32 - 1, n).astype(np.int64)
    edges = np.concatenate([2 ** np.arange(32), 2**32 - 2 ** np.arange(32), [0, 2**32 - 1]])
    return np.unique(np.concatenate([spaced, edges]) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def test_gumbel_map() -> None:
    """Within 1e-4 of the logarithms, over the whole range and at its edges."""
    h = ladder(1 << 20)
    g = gumbel(h.view(np.uint32)).astype(np.float64)
    assert np.abs(g - exact(h)).max() < 1e-4
    assert np.abs(g).max() < 24
    assert np.array_equal(g * GRID, np.rint(g * GRID)), "multiples of 2^-18: sums are exact"


def test_moments() -> None:
    g = gumbels(range(64), [3] * 64, np.arange(1 << 15)).astype(np.float64)
    n = g.size
    assert n >= 2_000_000
    assert float(g.mean()) == pytest.approx(EULER, abs=4 * math.pi / math.sqrt(6 * n))
    assert float(g.var()) == pytest.approx(math.pi**2 / 6, abs=4 * math.sqrt(4.4 * (math.pi**2 / 6) ** 2 / n))
    assert stats.kstest(g.ravel()[:1_000_000], "gumbel_r").pvalue > ALPHA


@pytest.mark.parametrize("p", [0.5, 0.3, 0.1, 0.01, 0.9])
def test_bias_of_a_two_token_race(p: float) -> None:
    """P(log p + G_1 > log(1 - p) + G_2) under the map itself, by quadrature over both: within 1e-6 of p."""
    n = 1 << 20
    spaced = ((np.arange(n) + 0.5) * (2**32 / n)).astype(np.int64).astype(np.uint32).view(np.int32)
    first = gumbel(spaced.view(np.uint32)).astype(np.float64)
    # Its distribution function at dense knots.
    h = ladder(1 << 20)
    values, index = np.unique(gumbel(h.view(np.uint32)).astype(np.float64), return_index=True)
    x = (np.where(h < 0, ~h, h).astype(np.int64)[index] + 0.5) / 2**32
    share = np.where(h[index] < 0, x, 1 - x)
    won = np.interp(first + math.log(p) - math.log1p(-p), values, share).mean()
    assert won == pytest.approx(p, abs=1e-6)
