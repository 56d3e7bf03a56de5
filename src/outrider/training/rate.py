"""The share of the machine's rate that a training uses: its useful operations relative to a large GEMM's."""

from __future__ import annotations

import time
from functools import cache

import torch

from ..core.protocols import Target

RUNS = 3


@cache
def product_rate(device: torch.device, half: bool) -> float:
    """Operations per second of a large GEMM in bfloat16 or float32: the best of RUNS, measured once per process."""
    n = 8192 if device.type == "cuda" else 2048
    a = torch.ones(n, n, dtype=torch.bfloat16 if half else torch.float32, device=device)
    best = float("inf")
    for _ in range(RUNS + 1):  # the first one compiles
        began = time.perf_counter()
        made = a @ a
        made[0, 0].item()  # synchronises with the device
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best


def operations_of(target: Target) -> float:
    """Operations per token of the target: two per weight of its layers, without attention."""
    config, h = target.config_dict, target.hidden
    heads = int(config.get("num_attention_heads") or 1)
    width = int(config.get("head_dim") or h // heads)
    kv = int(config.get("num_key_value_heads") or heads)
    inner = int(config.get("intermediate_size") or 4 * h)
    return 2.0 * target.layers * (h * width * (2 * heads + 2 * kv) + 3 * h * inner)
