"""Hydra's objective (Ankner et al. 2024, sections 3 and 4): heads that also read the tokens drafted before theirs.

    L = sum over heads k = 1 .. K of  CE(p, q_k(f_i, e(token_{i+1}), .., e(token_{i+k})))

p is the target's own law of token_{i+1+k} (the teacher), or the text's token itself. Hydra++ reads features through one
decoder layer of its own first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..drafters import hydra
from ..targets import HFTarget
from ._losses import soft_cross_entropy
from .data import Batch
from .eagle import layer_like
from .features import Seen, mask_of


class HydraObjective(nn.Module):
    taps = (-1,)

    def __init__(self, target: HFTarget, net: hydra.HydraNet, config: hydra.HydraConfig, decay: float, teacher: bool):
        super().__init__()
        self.target, self.net, self.config, self.decay, self.teacher = target, net, config, decay, teacher

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.net.parameters()), "scale": 1.0}]

    def forward(self, batch: Batch, seen: Seen, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss summed over the positions learned, how many they are, and the share of right guesses by head."""
        true, k = seen.features[-1], self.config.heads
        read = true
        if self.net.prefix is not None:
            read = self.net.prefix(true, batch.positions, mask_of(batch, true.dtype))
        rows, columns = batch.wanted(2).nonzero().unbind(1)
        with torch.no_grad():
            spelled = torch.stack([batch.ahead(i) for i in range(1, k + 1)], -1)[rows, columns]
            embeds = self.target.embed(spelled).to(true.dtype)
        total, hits = true.new_zeros((), dtype=torch.float32), {}
        for head in range(1, k + 1):
            counted = batch.wanted(1 + head)[rows, columns]
            r, c = rows[counted], columns[counted]
            student = self.net(head - 1, read[r, c], embeds[counted][:, :head]).float()
            tokens = batch.ahead(1 + head)[r, c]
            with torch.no_grad():
                law = self.target.head(true[r, c + head]).float()
            if self.teacher:
                loss = soft_cross_entropy(student, law)
            else:
                loss = functional.cross_entropy(student, tokens, reduction="none")
            total = total + self.decay**head * loss.sum()
            hits[f"hit{head}"] = (student.argmax(-1) == law.argmax(-1)).float().mean().detach()
        return total, total.new_tensor(float(len(rows))), hits

    def save(self, folder: str | Path) -> None:
        hydra.save(folder, self.net, self.config)


def build(
    target: HFTarget, heads: int = 4, layers: int = 1, prefix: bool = False, decay: float = 1.0, teacher: bool = True
) -> HydraObjective:
    """Hydra; `prefix`: Hydra++."""
    net, config = hydra.fresh(target, heads, layers, layer_like(target) if prefix else None)
    return HydraObjective(target, net, config, decay, teacher)
