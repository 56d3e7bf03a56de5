"""What Medusa's and Hydra's networks share: residual blocks, and the feature that heads read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ..backends.torch import vocabulary
from ..backends.torch.tensors import TensorRound, array, tensor
from ..backends.torch.tensors import embed as embed
from ..backends.torch.tensors import head as head_of
from ..checkpoints.target import linear_head
from ..core.protocols import Target
from ..params import InputError


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


def check_embedding(target: Target, hidden: int) -> None:
    """Refuse a target whose embeddings are not as wide as its features."""
    wide = embed(target, torch.zeros(1, dtype=torch.long, device=target.device)).shape[-1]
    if wide != hidden:
        raise InputError(f"the target's embeddings have width {wide} and its features {hidden}; use Medusa or EAGLE-3")


def rows(target: Target, ids: Int[Tensor, " vd"] | None) -> Callable[[Tensor], Tensor]:
    """The target's LM head, for the tokens of a draft vocabulary alone: features [.., h] to logits [.., vd]."""
    if ids is None:
        return lambda features: head_of(target, features)
    matrix, bias = weight(target, ids)
    cap = target.config_dict.get("final_logit_softcapping")

    def head(features: Tensor) -> Tensor:
        logits = functional.linear(features.to(matrix.dtype), matrix, bias)
        return torch.tanh(logits / cap) * cap if cap else logits

    return head


def weight(target: Target, ids: Int[Tensor, " vd"]) -> tuple[Float[Tensor, "vd h"], Float[Tensor, " vd"] | None]:
    """The rows of the target's LM head for these tokens, and their bias, with the family's scale in both."""
    vocabulary.check_ids(ids, target.vocab)
    rows = target.head_rows(array(ids))
    if rows is not None:
        return tensor(rows, target.device), None
    every, bias = linear_head(target)
    return every[ids].contiguous(), bias[ids] if bool(bias.any()) else None


def last(round: TensorRound, before: Tensor | None) -> Float[Tensor, "b h"]:
    """The final hidden state of each row's last committed token; that of `before` where this round committed none."""
    features, end = round.features(-1), (round.count - 1).clamp(min=0)[:, None]
    node = round.path.gather(1, end)
    last = features.gather(1, node[..., None].expand(-1, -1, features.shape[-1]))[:, 0]
    return last if before is None else torch.where(round.count[:, None] > 0, last, before)
