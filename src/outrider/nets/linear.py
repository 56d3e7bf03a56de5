"""A drafter's products of weights and rows, as this machine's processor takes them fastest."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ..core import eight


class Linear(nn.Linear):
    """A linear layer of a drafter; out of training by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.training else linear(input, self.weight, self.bias)


def linear(x: Float[Tensor, "*s i"], weight: Float[Tensor, "o i"], bias: Tensor | None = None) -> Float[Tensor, "*s o"]:
    """x W^T + b, for a drafter's inference, where rounding may differ from `functional.linear`'s.

    Eight bits are read where the matrix carries them. A CPU reads a single bfloat16 vector up to twice as fast by `mv`
    (docs/log.md).
    """
    if (few := eight.carried(weight, x)) is not None:
        made = eight.product(x, few).to(x.dtype)
        return made if bias is None else made + bias
    if x.dtype != torch.bfloat16 or x.numel() != x.shape[-1] or x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    made = torch.mv(weight, x.reshape(-1)).view(*x.shape[:-1], -1)
    return made if bias is None else made + bias
