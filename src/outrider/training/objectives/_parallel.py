"""P-EAGLE's objective (Hui et al. 2026): all tokens of a draft in one pass, as in drafting.

    L = sum over depths d = 0 .. D - 1 of  decay^d * CE(p, q_d)

Depth 0 is EAGLE-3's first step at every pair. The chain of pair i continues with masks at positions i + 1, i + 2, ...:
the one at i + d predicts token_{i+2+d} and attends to the true pairs up to i and to its own chain's masks up to itself.
Most chains end early, which saves most of the cost: a share max(0.7^d, 0.2) of them reaches depth d, sampled at each
step. p is restricted to the draft vocabulary, as in EAGLE-3.

    pairs at      0  1  2  3        masks of the chain of pair 1 at   2  3       of pair 2 at   3
    attend to     themselves and earlier pairs                        pairs 0 1, masks 2 (3)    pairs 0 1 2
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...backends.torch.padding import additive
from ...backends.torch.tensors import embed
from ...core.protocols import Target
from ...drafters import eagle3
from ..data import Batch
from ..features import TargetFeatures, mask_of, visible
from ._losses import cross_entropy, likeliest, precise
from ._objective import TrimmedObjective, uniform

SHARE, LEAST = 0.7, 0.2  # share of chains that reach one more depth, and minimum share at any depth

Pairs = list[tuple[Tensor, Tensor]]  # every layer's keys and values


class ParallelObjective(TrimmedObjective):
    """The target's distribution at every depth, one pass over pairs and masks."""

    drafter = "eagle3"

    def __init__(self, target: Target, net: eagle3.Eagle3Net, decay: float = 0.8):
        super().__init__(target, net)
        self.decay, self.taps = decay, (*net.config.taps, -1)

    def forward(self, batch: Batch, seen: TargetFeatures, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss summed over depths, the number of positions, and the accuracy by depth."""
        net = self.net
        true, kept = net.fuse(torch.cat([seen.features[tap] for tap in net.config.taps], -1)), Pairs()

        def keep(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            kept.append((k, v))
            return k, v

        made = net(true, self._embeds(batch.ahead(1), true), batch.positions, mask_of(batch, true.dtype), keep)
        pair, depth, real = self._chains(batch, step)
        masked = self._masks(batch, pair, depth, kept) if pair.numel() else made[:, :0]
        total, hits = true.new_zeros((), dtype=torch.float32), {}
        if not pair.numel():  # DDP needs a gradient of every parameter
            total = total + 0.0 * net.mask_hidden.sum()
        for d in range(net.config.parallel):
            wanted = batch.wanted(d + 2) & self.draftable(batch.ahead(d + 2))
            rows, at = (real & (depth == d) & wanted.gather(1, pair) if d else wanted).nonzero().unbind(1)
            read, last = (masked, pair[rows, at]) if d else (made, at)
            with torch.no_grad():
                p = precise(self.head(seen.features[-1][rows, last + d + 1])).softmax(-1)
            student = precise(net.logits(read[rows, at]))
            total = total + self.decay**d * cross_entropy(student, p).sum()
            right = (likeliest(student) == likeliest(p)).float().sum().detach()
            hits[f"hit{d + 1}"] = right / max(1, len(p))
        return total, batch.wanted(2).sum().to(total.dtype), hits

    def _chains(self, batch: Batch, step: int) -> tuple[Int[Tensor, "b m"], Int[Tensor, "b m"], Bool[Tensor, "b m"]]:
        """The pair and the depth of every mask of this step, and whether it is real (not padding)."""
        start, depths = batch.wanted(2), self.net.config.parallel
        drawn = uniform(batch, step, 0x27D4EB2F, start.shape[1]).masked_fill(~start, torch.inf)
        reached = [batch.same(d + 2) & (drawn < max(SHARE**d, LEAST)) for d in range(1, depths)]
        chosen = torch.stack([torch.zeros_like(start), *reached], -1).flatten(1)  # depth 0 is not a mask
        order = chosen.int().sort(dim=1, descending=True, stable=True)
        most = int(chosen.sum(1).max())
        index = order.indices[:, :most]
        return index // depths, index % depths, order.values[:, :most].bool()

    def _masks(
        self, batch: Batch, pair: Int[Tensor, "b m"], depth: Int[Tensor, "b m"], kept: Pairs
    ) -> Float[Tensor, "b m h"]:
        """The network's outputs for the masks, after the true pairs' keys and values."""
        net, layers = self.net, iter(kept)
        given = net.fuse(net.mask_hidden).expand(*pair.shape, -1)
        text = visible(batch).gather(1, pair[..., None].expand(*pair.shape, batch.tokens.shape[1]))
        own = (pair[:, :, None] == pair[:, None]) & (depth[:, :, None] >= depth[:, None])

        def behind(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = next(layers)
            return torch.cat([keys, k], 2), torch.cat([values, v], 2)

        embeds = self._embeds(torch.full_like(pair, net.config.mask_token), given)
        mask = additive(torch.cat([text, own], -1), given.dtype)[:, None]
        return net(given, embeds, batch.positions.gather(1, pair) + depth, mask, behind)

    def _embeds(self, tokens: Int[Tensor, "b m"], like: Tensor) -> Float[Tensor, "b m h"]:
        if self.net.config.own_embedding:
            return self.net.embed_tokens(tokens)
        with torch.no_grad():
            return embed(self.target, tokens).to(like.dtype)
