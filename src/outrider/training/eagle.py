"""EAGLE's objective (Li et al. 2024a, section 4.2) and HASS's (Zhang et al. 2024, section 3): one network, one file.

    L = sum over passes j of  beta^(j-1) * [ SmoothL1(f', f) + w_cls * CE(head(f), head(f')) + w_topk * L_topk ]

EAGLE is one pass without the top-K term, with noise on the features it reads. Pair i, (feature_i, token_{i+1}),
foretells feature_{i+1}, whose law is that of token_{i+2}: it counts where token_{i+2} is of the same document and to
be learned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..drafters import eagle
from ..nn import LayerShape
from ..targets import HFTarget
from ..types import InputError
from ._losses import LOSSES, smooth_l1, soft_cross_entropy
from ._passes import Passes, moved
from .data import Batch
from .features import Seen, visible


class EagleObjective(nn.Module):
    taps = (-1,)

    def __init__(
        self,
        target: HFTarget,
        net: eagle.EagleNet,
        noise: float = 0.1,
        cls: float = 0.1,
        passes: int = 1,
        beta: float = 1.0,
        topk: float = 0.0,
        k: int = 10,
        loss: str = "top-k",
        published: bool = False,
    ):
        super().__init__()
        if loss not in LOSSES:
            raise InputError(f"there is no loss {loss!r}; choose one of {', '.join(LOSSES)}")
        if passes < 1 or k < 1:
            raise InputError("passes and k must be at least 1")
        self.target, self.net = target, net
        self.noise, self.cls, self.passes, self.beta, self.published = noise, cls, passes, beta, published
        self.topk, self.k, self.ranking = topk, min(k, target.vocab), LOSSES[loss]

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.net.parameters()), "scale": 1.0}]

    def forward(self, batch: Batch, seen: Seen, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss summed over the positions learned, how many they are, and the share of right guesses by pass."""
        true = seen.features[-1]
        tokens = batch.tokens if self.net.config.inputs == "feature+unshifted" else batch.ahead(1)
        with torch.no_grad():
            embeds = self.target.embed(tokens).to(true.dtype)
        read = true + self._noise(batch, true, step) if self.noise and self.training else true
        passes, weight, total, hits = Passes(visible(batch), self.published), true.new_zeros(()), true.new_zeros(()), {}
        wanted = batch.wanted(2)
        for j in range(1, self.passes + 1):
            made = self.net(read, embeds, batch.positions, look=passes.look)
            counted = wanted & (batch.positions >= j - 1)  # no draft has had j steps before
            loss, hit = self._loss(made[counted], true.roll(-1, 1)[counted])
            total = total + self.beta ** (j - 1) * loss.sum()
            weight = weight + counted.sum()
            hits[f"hit{j}"] = hit
            read = moved(made, true, batch.positions)
        return total, weight / self.passes, hits

    def _loss(self, foretold: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = self.target.head(true).float()
        student = self.target.head(foretold.to(true.dtype)).float()
        loss = smooth_l1(foretold.float(), true.float()) + self.cls * soft_cross_entropy(student, teacher)
        if self.topk:
            loss = loss + self.topk * self.ranking(student, teacher, self.k)
        return loss, (student.argmax(-1) == teacher.argmax(-1)).float().mean().detach()

    def _noise(self, batch: Batch, like: Tensor, step: int) -> Tensor:
        """U(-noise, noise), a function of step and row, whatever process holds the row."""
        rows = []
        for key in batch.keys:
            seed = (0x9E3779B1 * (step + 1) + 0x85EBCA77 * key) % 2**32  # a CPU generator reads 32 bits of a seed
            generator = torch.Generator().manual_seed(seed)
            rows.append(torch.rand(like.shape[1:], generator=generator))
        return ((torch.stack(rows) * 2 - 1) * self.noise).to(like)

    def save(self, folder: str | Path) -> None:
        eagle.save(folder, self.net)


def layer_like(target: HFTarget, inputs: int = 1, hidden: int = 0) -> LayerShape:
    """The shape of the target's own layers, as far as this layer has their parts."""
    config = target.config
    hidden = hidden or int(config.hidden_size)
    heads = int(config.num_attention_heads)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_theta" not in rope:  # several, by layer type, or none: the plain one
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    return LayerShape(
        hidden=hidden,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        intermediate=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        inputs=inputs * hidden,
        rope={k: v for k, v in rope.items() if k in ("rope_type", "rope_theta")} | {"rope_type": "default"},
        eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
    )


def build(target: HFTarget, inputs: str = eagle.INPUTS[0], noise: float = 0.1, cls: float = 0.1) -> EagleObjective:
    """EAGLE: noise on the features, one pass."""
    config = eagle.EagleConfig(layer_like(target), target.vocab, int(target.config.hidden_size), inputs)
    return EagleObjective(target, eagle.EagleNet(config), noise, cls)


def build_hass(
    target: HFTarget,
    inputs: str = eagle.INPUTS[0],
    noise: float = 0.1,
    cls: float = 0.1,
    passes: int = 3,
    beta: float = 1.0,
    topk: float = 1.0,
    k: int = 10,
    loss: str = "top-k",
    published: bool = False,
) -> EagleObjective:
    """HASS: the same network, three alignment passes and the top-K loss."""
    config = eagle.EagleConfig(layer_like(target), target.vocab, int(target.config.hidden_size), inputs, trained="hass")
    return EagleObjective(target, eagle.EagleNet(config), noise, cls, passes, beta, topk, k, loss, published)
