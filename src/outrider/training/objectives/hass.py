"""HASS (Zhang et al. 2024, section 3): EAGLE's network, three alignment passes and the top-K loss (`eagle.py`)."""

from __future__ import annotations

from collections.abc import Iterable

from ...drafters import eagle
from ...targets import HFTarget
from ..data import Document
from .eagle import OPTIMISER as OPTIMISER
from .eagle import EagleObjective, fresh


def build(
    target: HFTarget,
    documents: Iterable[Document] = (),
    inputs: str = eagle.INPUTS[0],
    noise: float = 0.1,
    cls: float = 0.1,
    passes: int = 3,
    beta: float = 1.0,
    topk: float = 1.0,
    k: int = 10,
    loss: str = "top-k",
    published: bool = False,
    draft_vocab: int = 0,
) -> EagleObjective:
    """HASS for a target: `passes`, `beta` of its harmonised alignment; `topk`, `k` and `loss` of its ranking loss;
    `draft_vocab`: tokens that can be drafted, by frequency; 0: all."""
    net = fresh(target, documents, inputs, "hass", draft_vocab)
    return EagleObjective(target, net, noise, cls, passes, beta, topk, k, loss, published)
