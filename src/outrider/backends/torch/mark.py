"""A mark of a model's weights, by which a drafter knows whether it drafts for those that it was trained for."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


def mark_of(model: nn.Module) -> str:
    """16 hexadecimal digits, made of the names of all parameters and of 64 numbers of each, rounded to bfloat16: the
    same for bfloat16, float32 and float64.

    Empty where that is unknown: float16 loses small numbers, and parameters may lie elsewhere (on several
    processes, on a disk) or be tensors of a kind of their own.
    """
    named = dict(model.named_parameters())
    plain = all(type(p.data) is Tensor and p.device.type != "meta" and p.dtype != torch.float16 for p in named.values())
    if not plain:
        return ""
    digest = hashlib.sha256()
    for name, p in named.items():
        some = p.detach().flatten()[:: max(1, p.numel() // 64)][:64]
        numbers = some.cpu().bfloat16().double().numpy() + 0.0  # zeros of some formats lose their signs
        digest.update(name.encode() + numbers.tobytes())
    return digest.hexdigest()[:16]
