"""The noise of `core/noise.py` in tensors, for other devices: the same numbers bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float32, Float64, Int32
from torch import Tensor

from ...core import noise
from ...core.noise import ACCEPT as ACCEPT
from ...core.noise import BASE, GRID, RACE, SHIFT, SIDE
from ...core.noise import EMIT as EMIT


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


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


_tables: dict[torch.device, tuple[Tensor, Tensor]] = {}


def gumbel(h: Int32[Tensor, "*s"]) -> Float32[Tensor, "*s"]:
    """The Gumbel variate of 32 random bits."""
    if h.device not in _tables:
        value, slope = (torch.from_numpy(table).to(h.device) for table in (noise.VALUES, noise.SLOPES))
        _tables[h.device] = value, slope
    value, slope = _tables[h.device]
    side = h >> 31  # 0 or -1: which side of the median
    x = ((h ^ side).to(torch.float32) * 2 + 1).view(torch.int32).clamp(max=(159 << 23) - 1)
    i = (x >> SHIFT) - BASE - side * SIDE
    g = value[i] + ((slope[i] * (x & ((1 << SHIFT) - 1))) >> SHIFT)
    return g.to(torch.float32) * (1.0 / GRID)


def keys(
    seeds: Sequence[int], counters: Sequence[int], stream: int = RACE, device: torch.device | None = None
) -> Int32[Tensor, "b 2"]:
    """The keys of each seed and counter."""
    return torch.from_numpy(noise.keys(seeds, counters, stream).view("i4")).to(device)


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
    """n uniform numbers in (0, 1) per row with 52 random bits, keyed by (seed, round, stream)."""
    k = keys(seeds, serials, stream, device)
    ids = torch.arange(2 * n, dtype=torch.int32, device=device)
    h = bits(k[:, :1], k[:, 1:], ids).to(torch.int64) & 0xFFFFFFFF
    # Number i is made of ids 2i and 2i + 1, so that it does not depend on how many are requested.
    return (((h[:, 0::2] << 20) + (h[:, 1::2] >> 12)).to(torch.float64) + 0.5) * 2.0**-52
