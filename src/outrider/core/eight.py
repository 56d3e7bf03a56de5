"""Matrices in eight bits, by torch's product for CPUs: symmetric, one scale for each output, activations in bfloat16.

A target's matrix is replaced (`targets/packed.py`). A drafter's keeps its full one too: a few rows read the eight bits,
which is a quarter or half of the bytes, and many rows the full numbers. Drafts then differ in their last digits; texts
do not, since the target judges them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

ROWS = 8  # that the product reads faster than float32 is read
LEAST = 2**18  # numbers of a matrix that is worth it
TILE = 16  # inputs must be a multiple
NAME = "eight_bits"
Eight = tuple[Int[Tensor, "o i"], Float[Tensor, " o"]]


def multiplies_halves() -> bool:
    """Has this processor products in 16 bits? True for builds of torch that do not say."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported() or torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        return True


def pays(device: torch.device, dtype: torch.dtype) -> bool:
    """Does a drafter on this device and in this precision draft faster with eight bits? Measured on processors without
    products in 16 bits alone (docs/log.md)."""
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and not multiplies_halves()


def rounded(full: Float[Tensor, "o i"]) -> Eight:
    """Numbers of -127 to 127 and scales: full = numbers * scale, rounded."""
    scale = (full.float().abs().amax(1).clamp(min=1e-12) / 127).to(torch.bfloat16)
    return (full.float() / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def product(x: Float[Tensor, "*s i"], eight: Eight) -> Float[Tensor, "*s o"]:
    """x W^T, in bfloat16."""
    rows = (x.flatten(end_dim=-2) if x.dim() > 1 else x[None]).to(torch.bfloat16).contiguous()
    made = torch.ops.aten._weight_int8pack_mm(rows, *eight)
    return made.view(*x.shape[:-1], eight[1].shape[0])


def carry(full: Float[Tensor, "o i"]) -> None:
    """Keep the eight bits of a drafter's matrix with it, where they are worth it."""
    if full.dim() == 2 and full.numel() >= LEAST and full.shape[1] % TILE == 0:
        full.__dict__[NAME] = rounded(full.detach())


def carried(full: Float[Tensor, "o i"], x: Float[Tensor, "*s i"]) -> Eight | None:
    """The eight bits that a matrix carries, if these rows are read faster by them."""
    if x.dtype == torch.float32 and x.numel() > ROWS * x.shape[-1]:
        return None
    found: Eight | None = full.__dict__.get(NAME)
    return found
