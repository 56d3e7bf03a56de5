"""HASS (Zhang et al. 2024, section 3): EAGLE's network, three alignment passes and the top-K loss (`eagle.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.protocols import Target
from ...nets import configs
from ..data import Document
from .eagle import NATIVE as NATIVE
from .eagle import OPTIMISER as OPTIMISER
from .eagle import EagleObjective, fresh


def build(
    target: Target,
    documents: Sequence[Document] = (),
    inputs: str = configs.INPUTS[0],
    noise: float = 0.1,
    cls: float = 0.1,
    passes: int = 3,
    beta: float = 1.0,
    topk: float = 1.0,
    k: int = 10,
    loss: str = "top-k",
    published: bool = False,
    draft_vocab: int = -1,
    linear: bool = True,
) -> EagleObjective:
    """HASS for a target: EAGLE's `inputs`, `noise`, `cls`, `draft_vocab` and `linear`. `passes` of harmonised context
    alignment, each weighted by `beta` relative to the one before; `topk`: weight of its loss over `k` tokens; `loss`
    top-k, top-p, normed-linear, normed-softmax, both-ways, recall or bild; `published`: the published code's masks.
    """
    net = fresh(target, documents, inputs, "hass", draft_vocab)
    return EagleObjective(target, net, noise, cls, passes, beta, topk, k, loss, published, linear)
