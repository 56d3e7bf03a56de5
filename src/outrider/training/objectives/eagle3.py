"""EAGLE-3's objective (Li et al. 2025, section 3): the training-time test. No feature is regressed.

    L = sum over steps j = 1 .. 3 (7 in the paper) of  0.8^(j-1) * CE(p, q_j)

Step j reads at position i its output of step j - 1 at i - 1, nothing detached, and attends to the same keys as the j-th
step of a draft (`_passes.py`). p is the target's distribution of token_{i+2} restricted to the draft vocabulary and
renormalised; a position counts if the text's token is in that vocabulary (in the published code, if the target's argmax
is: the same for greedy answers, and six times as expensive with a vocabulary of 49k and a draft vocabulary of 8k).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...backends.torch.tensors import embed
from ...core.protocols import Target
from ...drafters import _heads, eagle3
from ...nets.configs import check_taps, default_taps
from ...params import InputError
from ..data import Batch, Document, draft_size, frequent
from ..features import TargetFeatures
from ._layer import layer_like
from ._losses import cross_entropy, likeliest, precise
from ._objective import Optimiser, TrimmedObjective
from ._parallel import ParallelObjective
from ._passes import Passes, moved

NATIVE = True
OPTIMISER = Optimiser(lr=5e-4, warmup=100)


class Eagle3Objective(TrimmedObjective):
    """The target's distribution over several steps on the drafter's own outputs."""

    drafter = "eagle3"

    def __init__(self, target: Target, net: eagle3.Eagle3Net, passes: int = 3, decay: float = 0.8):
        super().__init__(target, net)
        self.passes, self.decay = passes, decay
        self.taps = (*net.config.taps, -1)

    def forward(self, batch: Batch, seen: TargetFeatures, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The summed loss, the number of positions, and the accuracy by step."""
        net = self.net
        true = net.fuse(torch.cat([seen.features[tap] for tap in net.config.taps], -1))
        ahead = batch.ahead(1)
        embeds = net.embed_tokens(ahead) if net.config.own_embedding else embed(self.target, ahead).to(true.dtype)
        with torch.no_grad():
            rows, columns = (batch.wanted(2) & self.draftable(batch.ahead(2))).nonzero().unbind(1)
            p = precise(self.head(seen.features[-1][rows, columns + 1])).softmax(-1)
        at = batch.positions[rows, columns]
        passes, read, hits = Passes(batch), true, {}
        weight, total = true.new_zeros((), dtype=torch.float32), true.new_zeros((), dtype=torch.float32)
        for j in range(1, self.passes + 1):
            made = net(read, embeds, batch.positions, attention=passes.attention)
            counted = at >= j - 1
            student = precise(net.logits(made[rows[counted], columns[counted]]))
            right = p if j == 1 else p[counted]
            total = total + self.decay ** (j - 1) * cross_entropy(student, right).sum()
            weight = weight + counted.sum()
            hits[f"hit{j}"] = (likeliest(student) == likeliest(right)).float().mean().detach()
            read = moved(made, true, batch.positions)
        return total, weight / self.passes, hits


def build(
    target: Target,
    documents: Sequence[Document] = (),
    passes: int = 3,
    decay: float = 0.8,
    draft_vocab: int = -1,
    hidden: int = 0,
    taps: tuple[int, ...] = (),
    parallel: bool = False,
    layers: int = 1,
    mask_token: int = 0,
) -> Eagle3Objective | ParallelObjective:
    """EAGLE-3 for a target. `passes`: steps on its own outputs, each weighted by `decay` relative to the one before;
    `draft_vocab`: size of the draft vocabulary (0: all; -1: chosen by the data, `draft_size`); `hidden`: its hidden
    size (0: the target's); `taps`: the three hidden states to read (default: 2, L/2, L-3). `parallel`: P-EAGLE, which
    drafts `passes` tokens in one pass of `layers`; `mask_token` is the input for future tokens."""
    wide = target.hidden
    chosen = tuple(taps) or default_taps(target.layers)
    check_taps(chosen)
    if passes < 1:
        raise InputError("passes must be at least 1")
    size = draft_size(documents, target.vocab, draft_vocab)
    config = eagle3.Eagle3Config(
        layer=layer_like(target, 2, hidden or wide),
        vocab=target.vocab,
        draft_vocab=size,
        target_hidden=wide,
        taps=(chosen[0], chosen[1], chosen[2]),
        own_embedding=bool(hidden) and hidden != wide,
        layers=layers,
        parallel=passes if parallel else 0,
        mask_token=mask_token,
    )
    net = eagle3.Eagle3Net(config)
    kept = frequent(documents, target.vocab, size)
    net.d2t.copy_(kept - torch.arange(size))
    net.t2d.zero_()[kept] = True
    if wide == config.layer.hidden:
        with torch.no_grad():
            net.lm_head.weight.copy_(_heads.weight(target, kept)[0])
    return ParallelObjective(target, net, decay) if parallel else Eagle3Objective(target, net, passes, decay)
