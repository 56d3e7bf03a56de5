"""Weights in eight bits: every linear layer of a stock model but its LM head keeps int8 rows and a scale for each.

Weight-only, symmetric, by output channel: y = (x W8^T) * s with W = W8 * s. Activations stay as they are, so a token's
numbers do not depend on the tokens beside it, and drafts stay exact for the quantised model (which is another target
than the full one: its text differs).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """A linear layer whose weights are int8."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        full = linear.weight.detach()
        scale = full.float().abs().amax(1).clamp(min=1e-12) / 127
        self.register_buffer("weight", (full.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8))
        self.register_buffer("scale", scale.to(full.dtype))
        self.bias = linear.bias

    def forward(self, x: Float[Tensor, "*s i"]) -> Float[Tensor, "*s o"]:
        if packs(x):
            flat = x.flatten(end_dim=-2) if x.dim() > 1 else x[None]
            y = torch.ops.aten._weight_int8pack_mm(flat, self.weight, self.scale)
            y = y.view(*x.shape[:-1], self.weight.shape[0])
        else:
            y = nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


def packs(x: Tensor) -> bool:
    """Is there a kernel for it? torch's on CPUs takes no float64; its 16-bit ones read beyond rows of other sizes."""
    return x.device.type == "cpu" and (x.dtype == torch.float32 or (x.element_size() == 2 and x.shape[-1] % 16 == 0))


def quantise(model: nn.Module) -> int:
    """Replace the linear layers in place; how many bytes of weights that saved."""
    head, saved = getattr(model, "get_output_embeddings", lambda: None)(), 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                saved += child.weight.numel() * (child.weight.element_size() - 1)
                setattr(parent, name, Int8Linear(child))
    return saved
