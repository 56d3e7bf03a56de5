"""What Medusa's and Hydra's networks share: residual blocks, and heads that begin as the target's own LM head."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ..types import InputError, Round, Target


class ResBlock(nn.Module):
    """x + SiLU(W1 x + b). With `inputs` wider than hidden, R x + SiLU(W1 x + b): R takes the place of the identity.

    It begins as the identity of the first `hidden` entries: W1 = b = 0, R = [I 0 ... 0].
    """

    def __init__(self, hidden: int, inputs: int | None = None):
        super().__init__()
        wide = hidden if inputs is None else inputs
        self.linear = nn.Linear(wide, hidden)
        self.res_connection = nn.Linear(wide, hidden) if inputs is not None else None
        with torch.no_grad():
            for layer in (self.linear, self.res_connection):
                if layer is not None:
                    layer.weight.zero_()
                    layer.bias.zero_()
            if self.res_connection is not None:
                self.res_connection.weight[:, :hidden].fill_diagonal_(1.0)

    def forward(self, x: Float[Tensor, "*s wide"]) -> Float[Tensor, "*s h"]:
        kept = x if self.res_connection is None else self.res_connection(x)
        return kept + functional.silu(self.linear(x))


def width(target: Target) -> int:
    """The width of a target's features."""
    config = getattr(target, "config", None)
    found = getattr(config, "hidden_size", None)
    return int(found) if found is not None else _embedding(target)


def _embedding(target: Target) -> int:
    token = torch.zeros(1, dtype=torch.long, device=getattr(target, "device", "cpu"))
    return target.embed(token).shape[-1]


def check_embedding(target: Target, hidden: int) -> None:
    """Refuse a target whose embeddings are not as wide as its features."""
    if (wide := _embedding(target)) != hidden:
        raise InputError(f"the target's embeddings have width {wide} and its features {hidden}; use Medusa or EAGLE-3")


@torch.no_grad()
def lm_head(target: Target, hidden: int) -> tuple[Float[Tensor, "v h"], Float[Tensor, " v"]]:
    """The target's LM head as a matrix and a bias: its answers to the unit vectors, with the family's scale in them.

    A soft cap is no part of a linear map. Near zero it changes nothing, so small vectors see the map before it.
    """
    device: Any = getattr(target, "device", "cpu")
    like: dict[str, Any] = {"dtype": getattr(target, "dtype", torch.float32), "device": device}
    unit = 2.0**-10 if getattr(getattr(target, "config", None), "final_logit_softcapping", None) else 1.0
    bias = target.head(torch.zeros(1, hidden, **like))[0]
    return ((target.head(torch.eye(hidden, **like) * unit) - bias) / unit).T.contiguous(), bias


def last(round: Round, features: Float[Tensor, "b m h"], before: Tensor | None) -> Float[Tensor, "b h"]:
    """The features of each row's last committed token; those of `before` where this round committed none."""
    end = (round.count - 1).clamp(min=0)[:, None]
    node = round.path.gather(1, end)
    found = features.gather(1, node[..., None].expand(-1, -1, features.shape[-1]))[:, 0]
    return found if before is None else torch.where(round.count[:, None] > 0, found, before)
