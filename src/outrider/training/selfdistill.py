"""Self-distillation (Cai et al. 2024, section 2.3.2): the teacher is the target itself, its adapter switched off.

    L_LM = KL(p_0 || p),   p_0: the law of the target as it was

No second model is held, and the text of the target's own (`outrider data generate`) takes the place of data that it was
tuned on.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..targets import HFTarget
from ._lora import Adapter
from .data import Batch
from .features import hidden


def original(target: HFTarget, adapter: Adapter, batch: Batch, places: Bool[Tensor, "b n"]) -> Float[Tensor, "k v"]:
    """Logits of the target as it was, at some places."""
    with torch.no_grad(), adapter.off():
        return target.head(hidden(target, batch)[-1][places]).float()


def divergence(student: Float[Tensor, "k v"], teacher: Float[Tensor, "k v"]) -> Float[Tensor, " k"]:
    """KL(p || q) of two laws given by their logits."""
    log_p = teacher.log_softmax(-1)
    return (log_p.exp() * (log_p - student.log_softmax(-1))).sum(-1)
