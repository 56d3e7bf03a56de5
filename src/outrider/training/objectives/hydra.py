"""Hydra's objective (Ankner et al. 2024, sections 3 and 4): heads that also read the tokens drafted before theirs.

    L = sum over heads k = 1 .. K of  CE(p, q_k(f_i, e(token_{i+1}), .., e(token_{i+k})))

p is the target's distribution of token_{i+1+k} (the teacher), or the text's token. Hydra++ first passes features
through a decoder layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...backends.torch.tensors import embed
from ...core.protocols import Target
from ...drafters import hydra
from ..data import Batch, Document, trimmed
from ..features import TargetFeatures, mask_of
from ._layer import layer_like
from ._losses import likeliest, precise, soft_cross_entropy
from ._objective import Optimiser, TrimmedObjective

NATIVE = True
OPTIMISER = Optimiser(lr=1e-3, betas=(0.9, 0.999), clip=1.0, warmup=40)


class HydraObjective(TrimmedObjective):
    """The distribution, or the token, at each position ahead, given the tokens between."""

    drafter = "hydra"

    def __init__(self, target: Target, net: hydra.HydraNet, decay: float, teacher: bool):
        super().__init__(target, net)
        self.decay, self.teacher = decay, teacher

    def forward(self, batch: Batch, seen: TargetFeatures, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The summed loss, the number of positions, and the accuracy by head."""
        true, k = seen.features[-1], self.net.config.heads
        read = true
        if self.net.prefix is not None:
            read = self.net.prefix(true, batch.positions, mask_of(batch, true.dtype))
        rows, columns = batch.wanted(2).nonzero().unbind(1)
        with torch.no_grad():
            spelled = torch.stack([batch.ahead(i) for i in range(1, k + 1)], -1)[rows, columns]
            embeds = embed(self.target, spelled).to(true.dtype)
        total, hits = true.new_zeros((), dtype=torch.float32), {}
        for head in range(1, k + 1):
            counted = batch.wanted(1 + head)[rows, columns]
            tokens, asked = batch.ahead(1 + head)[rows, columns], counted.sum()
            if self.places is not None:  # tokens outside the draft vocabulary have no loss
                tokens = self.places[tokens]
                counted = counted & (tokens >= 0)
            r, c, tokens = rows[counted], columns[counted], tokens[counted]
            student = precise(self.net(head - 1, read[r, c], embeds[counted][:, :head]))
            with torch.no_grad():
                target_logits = precise(self.head(true[r, c + head]))
            if self.teacher:
                loss = soft_cross_entropy(student, target_logits)
            else:
                loss = functional.cross_entropy(student, tokens, reduction="none")
            total = total + self.decay**head * loss.sum()
            hits[f"hit{head}"] = (likeliest(student) == likeliest(target_logits)).float().sum().detach() / asked
        return total, total.new_tensor(float(len(rows))), hits


def build(
    target: Target,
    documents: Sequence[Document] = (),
    heads: int = 4,
    layers: int = 1,
    prefix: bool = False,
    decay: float = 1.0,
    teacher: bool = True,
    draft_vocab: int = 0,
) -> HydraObjective:
    """Hydra for a target: `heads`, each of `layers`. `prefix`: Hydra++; `decay`: head i has weight decay^i; `teacher`:
    train on the target's distribution instead of the text's tokens; `draft_vocab`: size of the draft vocabulary (0:
    all).
    """
    tokens = trimmed(documents, target.vocab, draft_vocab)
    net = hydra.fresh(target, heads, layers, layer_like(target) if prefix else None, tokens)
    return HydraObjective(target, net, decay, teacher)
