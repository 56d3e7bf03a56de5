"""Medusa-1's objective (Cai et al. 2024, section 2.2.1): the heads learn, the backbone is frozen.

    L = sum over heads k = 1 .. K of  0.8^k * CE(token_{i+1+k}, p_k(f_i))

Head k reads the feature of position i and foretells the token k places after the target's own next one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..drafters import medusa
from ..targets import HFTarget
from ._losses import soft_cross_entropy
from .data import Batch
from .features import Seen


class MedusaObjective(nn.Module):
    taps = (-1,)

    def __init__(
        self, target: HFTarget, net: medusa.MedusaNet, config: medusa.MedusaConfig, decay: float, teacher: bool
    ):
        super().__init__()
        self.target, self.net, self.config, self.decay, self.teacher = target, net, config, decay, teacher

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.net.parameters()), "scale": 1.0}]

    def forward(self, batch: Batch, seen: Seen, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss summed over the positions learned, how many they are, and the share of right guesses by head."""
        features, k = seen.features[-1], self.config.heads
        places = batch.wanted(2).nonzero()
        rows, columns = places.unbind(1)
        made = self.net(features[rows, columns], self.target.head)
        total, hits = features.new_zeros((), dtype=torch.float32), {}
        for head in range(1, k + 1):
            counted = batch.wanted(1 + head)[rows, columns]
            student = made[head - 1][counted].float()
            tokens = batch.ahead(1 + head)[rows, columns][counted]
            if self.teacher:
                with torch.no_grad():
                    law = self.target.head(features[rows, (columns + head).clamp(max=features.shape[1] - 1)][counted])
                loss = soft_cross_entropy(student, law.float())
            else:
                loss = functional.cross_entropy(student, tokens, reduction="none")
            total = total + self.decay**head * loss.sum()
            hits[f"hit{head}"] = (student.argmax(-1) == tokens).float().mean().detach()
        return total, total.new_tensor(float(len(places))), hits

    def save(self, folder: str | Path) -> None:
        medusa.save(folder, self.net, self.config)


def build(
    target: HFTarget,
    heads: int = 4,
    layers: int = 1,
    share_head: bool = False,
    decay: float = 0.8,
    teacher: bool = False,
) -> MedusaObjective:
    """Medusa-1. `teacher`: heads learn the target's law instead of the text's tokens."""
    net, config = medusa.fresh(target, heads=heads, layers=layers, share_head=share_head)
    return MedusaObjective(target, net, config, decay, teacher)
