"""Medusa-2's objective (Cai et al. 2024, section 2.2.2): heads and backbone are trained together. This changes the
target, so its texts are no longer the original's: LOSSY, and labelled so.

    L = L_LM + lambda_0 * sum over heads k = 1 .. K of  0.8^k * CE(token_{i+1+k}, p_k(f_i))

L_LM is the cross-entropy of the next token, or with `distil` (self-distillation, section 2.3.2) KL(p_0 || p), with p_0
the distribution of the original target: without a second model, and with the target's own text in place of tuning data.
The backbone is trained by a LoRA adapter; the heads' learning rate is four times its rate. Two stages: for `heads_only`
steps the backbone is frozen, then the scale of the heads' gradients into it grows from 0 to 1 over `ramp` steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from ...backends.torch import HFTarget
from ...checkpoints import native
from ...drafters import medusa
from ...params import InputError
from ..data import Batch
from ..features import TargetFeatures, hidden, learned
from ._lora import Adapter
from ._losses import forward_kl, precise
from ._objective import Optimiser
from .medusa import MedusaObjective

LABEL = "medusa2: trained together with Medusa heads; its texts are not the original model's"

OPTIMISER = Optimiser(lr=5e-4, betas=(0.9, 0.999), clip=1.0, warmup=40)


class Medusa2Objective(nn.Module):
    """Medusa's heads together with the backbone's language modelling loss."""

    drafter = "medusa"
    taps = ()  # the target's pass is part of the loss

    def __init__(
        self,
        target: HFTarget,
        heads: MedusaObjective,
        adapter: Adapter,
        weight: float,
        heads_only: int,
        ramp: int,
        distil: bool,
    ):
        super().__init__()
        self.target, self.heads, self.adapter = target, heads, adapter
        self.low_rank = nn.ParameterList(adapter.parameters)
        self.weight, self.heads_only, self.ramp, self.distil = weight, heads_only, ramp, distil

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": list(self.heads.parameters()), "scale": 4.0},
            {"params": list(self.low_rank), "scale": 1.0},
        ]

    def backbone_scale(self, step: int) -> float:
        """Scale of the heads' gradients into the backbone, 0 to 1."""
        if step < self.heads_only:
            return 0.0
        return min(1.0, (step - self.heads_only + 1) / self.ramp) if self.ramp else 1.0

    def forward(self, batch: Batch, seen: TargetFeatures, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The summed loss, the number of tokens, and parts."""
        del seen
        together = step >= self.heads_only
        with torch.set_grad_enabled(together and torch.is_grad_enabled()):
            features = hidden(self.target, batch)[-1]
            features = features.to(learned(features.dtype))
            places = batch.wanted(1)
            logits = precise(self.target.head(features[places]))
            if self.distil:
                language = forward_kl(logits, self._teacher(batch, places)).sum()
            else:
                language = functional.cross_entropy(logits, batch.ahead(1)[places], reduction="sum")
        calm = features.detach()
        read = TargetFeatures({-1: calm + self.backbone_scale(step) * (features - calm)})
        total, _, parts = self.heads(batch, read, step)
        weight = places.sum().to(total.dtype)
        parts["language"] = language.detach() / weight.clamp(min=1)
        if not together:  # DDP needs a gradient of every parameter
            total = total + 0.0 * torch.stack([p.sum() for p in self.low_rank]).sum()
        return language + self.weight * total, weight, parts

    def _teacher(self, batch: Batch, places: Bool[Tensor, "b n"]) -> Float[Tensor, "k v"]:
        """Logits of the original target, with the adapter disabled, at the `k` marked positions."""
        with torch.no_grad(), self.adapter.off():
            return precise(self.target.head(hidden(self.target, batch)[-1][places]))

    def save(self, folder: str | Path) -> None:
        """Save the heads, and in `target/` the changed target."""
        native.save(folder, self.heads.drafter, self.heads.net)  # no mark: merging changes the target
        self.adapter.merge(Path(folder) / "target", LABEL)


def build(
    target: HFTarget,
    heads: int = 4,
    layers: int = 1,
    share_head: bool = False,
    decay: float = 0.8,
    teacher: bool = False,
    weight: float = -1.0,
    heads_only: int = 0,
    ramp: int = 0,
    distil: bool = False,
    rank: int = 32,
    alpha: int = 16,
) -> Medusa2Objective:
    """Medusa-2: Medusa's `heads`, `layers`, `share_head`, `decay` and `teacher`, and the backbone by LoRA of `rank` and
    `alpha`. `weight` of the heads' loss, lambda_0 (-1: 0.2, with `distil` 0.01); `heads_only`: steps before the
    backbone is trained; `ramp`: steps over which the heads' gradients into it grow to full scale; `distil`: train the
    backbone on its original distribution instead of the text.
    """
    if heads_only < 0 or ramp < 0:
        raise InputError("heads_only and ramp must be at least 0")
    net = medusa.fresh(target, heads, layers, share_head, lossy=True)
    adapter = Adapter(target, rank, alpha)
    chosen = weight if weight >= 0 else 0.01 if distil else 0.2
    own = MedusaObjective(target, net, decay, teacher)
    return Medusa2Objective(target, own, adapter, chosen, heads_only, ramp, distil)
