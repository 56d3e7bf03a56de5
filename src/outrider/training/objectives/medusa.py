"""Medusa-1's objective (Cai et al. 2024, section 2.2.1): heads on a frozen backbone.

    L = sum over heads k = 1 .. K of  0.8^k * CE(token_{i+1+k}, p_k(f_i))

Head k reads the feature of position i and predicts the token k positions after the target's next one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...core.protocols import Target
from ...drafters import medusa
from ..data import Batch, Document, trimmed
from ..features import TargetFeatures
from ._losses import likeliest, precise, soft_cross_entropy
from ._objective import Optimiser, TrimmedObjective

NATIVE = True
OPTIMISER = Optimiser(lr=1e-3, betas=(0.9, 0.999), clip=1.0, warmup=40)


class MedusaObjective(TrimmedObjective):
    """The token, or the distribution, at each position ahead."""

    drafter = "medusa"

    def __init__(self, target: Target, net: medusa.MedusaNet, decay: float, teacher: bool):
        super().__init__(target, net)
        self.decay, self.teacher = decay, teacher

    def forward(self, batch: Batch, seen: TargetFeatures, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The summed loss, the number of positions, and the accuracy by head."""
        features, k = seen.features[-1], self.net.config.heads
        places = batch.wanted(2).nonzero()
        rows, columns = places.unbind(1)
        made = self.net(features[rows, columns], self.head)
        total, hits = features.new_zeros((), dtype=torch.float32), {}
        for head in range(1, k + 1):
            counted = batch.wanted(1 + head)[rows, columns]
            tokens, asked = batch.ahead(1 + head)[rows, columns], counted.sum()
            if self.places is not None:  # tokens outside the draft vocabulary have no loss
                tokens = self.places[tokens]
                counted = counted & (tokens >= 0)
            student, tokens = precise(made[head - 1][counted]), tokens[counted]
            if self.teacher:
                with torch.no_grad():
                    target_logits = self.head(
                        features[rows, (columns + head).clamp(max=features.shape[1] - 1)][counted]
                    )
                loss = soft_cross_entropy(student, precise(target_logits))
            else:
                loss = functional.cross_entropy(student, tokens, reduction="none")
            total = total + self.decay**head * loss.sum()
            hits[f"hit{head}"] = (likeliest(student) == tokens).float().sum().detach() / asked
        return total, total.new_tensor(float(len(places))), hits


def build(
    target: Target,
    documents: Sequence[Document] = (),
    heads: int = 4,
    layers: int = 1,
    share_head: bool = False,
    decay: float = 0.8,
    teacher: bool = False,
    draft_vocab: int = 0,
) -> MedusaObjective:
    """Medusa-1 for a target: `heads`, each of `layers`. `share_head`: all use the target's head; `decay`: head i has
    weight decay^i; `teacher`: train on the target's distribution instead of the text's tokens; `draft_vocab`: size of
    the draft vocabulary (0: all).
    """
    tokens = trimmed(documents, target.vocab, draft_vocab)
    return MedusaObjective(target, medusa.fresh(target, heads, layers, share_head, tokens=tokens), decay, teacher)
