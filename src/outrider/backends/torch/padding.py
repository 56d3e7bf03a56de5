"""Rows of different length as one tensor, and masks as attention adds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def padded(
    rows: Sequence[Sequence[int]], device: torch.device | str | None = None, width: int = 0, fill: int = 0
) -> Int[Tensor, "b n"]:
    """Lists of whole numbers as rows [b, n], filled up on the right; n: the longest one's length, at least `width`."""
    n = max(width, max(map(len, rows), default=0))
    return torch.tensor([[*row, *[fill] * (n - len(row))] for row in rows], dtype=torch.long, device=device)


def additive(seen: Bool[Tensor, "*s"], dtype: torch.dtype) -> Float[Tensor, "*s"]:
    """An attention mask to be added to scores: 0 where a query sees, -inf where it does not."""
    return torch.where(seen, *_ends(dtype, seen.device))


@lru_cache(maxsize=32)
def _ends(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device), torch.full((), -math.inf, dtype=dtype, device=device)
