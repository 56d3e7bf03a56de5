"""EAGLE's objective (Li et al. 2024a, section 4.2) and HASS's (Zhang et al. 2024, section 3): one network, one file.

    L = sum over passes j of  beta^(j-1) * [ SmoothL1(f', f) + w_cls * CE(head(f), head(f')) + w_topk * L_topk ]

EAGLE is one pass without the top-K term, with noise on its input features. Pair i, (feature_i, token_{i+1}), predicts
feature_{i+1}, which gives the distribution of token_{i+2}: it counts if token_{i+2} is in the same document and in the
loss mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...backends.torch import vocabulary
from ...backends.torch.tensors import embed
from ...core.protocols import Target
from ...drafters import eagle
from ...nets import configs
from ...params import InputError
from ..data import Batch, Document, trimmed
from ..features import TargetFeatures
from ._layer import layer_like
from ._linear import nearest
from ._losses import LOSSES, likeliest, precise, smooth_l1, soft_cross_entropy
from ._objective import Optimiser, TrimmedObjective, uniform
from ._passes import Passes, moved

NATIVE = True
OPTIMISER = Optimiser(lr=5e-4, warmup=100)


class EagleObjective(TrimmedObjective):
    """The next feature and its distribution; with several aligned passes, HASS."""

    drafter = "eagle"

    def __init__(
        self,
        target: Target,
        net: eagle.EagleNet,
        noise: float = 0.1,
        cls: float = 0.1,
        passes: int = 1,
        beta: float = 1.0,
        topk: float = 0.0,
        k: int = 10,
        loss: str = "top-k",
        published: bool = False,
        linear: bool = True,
    ):
        super().__init__(target, net)
        self.linear = linear
        if loss not in LOSSES:
            raise InputError(f"there is no loss {loss!r}; choose one of {', '.join(LOSSES)}")
        if passes < 1 or k < 1:
            raise InputError("passes and k must be at least 1")
        self.noise, self.cls, self.passes, self.beta, self.published = noise, cls, passes, beta, published
        self.topk, self.k, self.ranking = topk, min(k, net.config.draft_vocab or target.vocab), LOSSES[loss]

    def prepare(self, seen: Iterable[tuple[Batch, TargetFeatures]]) -> None:
        """Initialise by linear regression to the next feature; the layer contributes nothing yet."""
        if not self.linear:
            return

        def pairs() -> Iterable[tuple[Tensor, Tensor]]:
            for batch, features in seen:
                true, wanted = features.features[-1], batch.wanted(2)
                yield self.net.given(true, self._embeds(batch, true))[wanted], true.roll(-1, 1)[wanted]

        with torch.no_grad():
            matrix = nearest(pairs())
            if matrix is not None:
                self.net.fc.weight.copy_(matrix)
                for last in (self.net.layers[0].self_attn.o_proj, self.net.layers[0].mlp.down_proj):
                    last.weight.zero_()

    def _embeds(self, batch: Batch, like: Tensor) -> Tensor:
        tokens = batch.tokens if self.net.config.inputs == "feature+unshifted" else batch.ahead(1)
        with torch.no_grad():
            return embed(self.target, tokens).to(like.dtype)

    def forward(self, batch: Batch, seen: TargetFeatures, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The summed loss, the number of positions, and the accuracy by pass."""
        true = seen.features[-1]
        embeds = self._embeds(batch, true)
        read = true + self._noise(batch, true, step) if self.noise and self.training else true
        passes, weight, total, hits = Passes(batch, self.published), true.new_zeros(()), true.new_zeros(()), {}
        wanted = batch.wanted(2)
        for j in range(1, self.passes + 1):
            made = self.net(read, embeds, batch.positions, attention=passes.attention)
            counted = wanted & (batch.positions >= j - 1)  # earlier positions have no j-th step
            loss, hit = self._loss(made[counted], true.roll(-1, 1)[counted], batch.ahead(2)[counted])
            total = total + self.beta ** (j - 1) * loss.sum()
            weight = weight + counted.sum()
            hits[f"hit{j}"] = hit
            read = moved(made, true, batch.positions)
        return total, weight / self.passes, hits

    def _loss(self, predicted: Tensor, true: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of every position, and the accuracy. Positions whose token is outside the draft vocabulary have no
        distribution loss and count as errors."""
        near, count = smooth_l1(precise(predicted), precise(true)), max(1, len(tokens))
        if self.places is not None:
            known = self.places[tokens] >= 0
            predicted, true = predicted[known], true[known]
        with torch.no_grad():
            teacher = precise(self.head(true))
        student = precise(self.head(predicted.to(true.dtype)))
        token_loss = self.cls * soft_cross_entropy(student, teacher)
        if self.topk:
            token_loss = token_loss + self.topk * self.ranking(student, teacher, self.k)
        loss = near + token_loss if self.places is None else near.index_add(0, known.nonzero()[:, 0], token_loss)
        return loss, (likeliest(student) == likeliest(teacher)).float().sum().detach() / count

    def _noise(self, batch: Batch, like: Tensor, step: int) -> Tensor:
        """U(-noise, noise), a function of step and row."""
        return ((uniform(batch, step, 0x85EBCA77, *like.shape[1:]) * 2 - 1) * self.noise).to(like)


def fresh(target: Target, documents: Sequence[Document], inputs: str, trained: str, draft_vocab: int) -> eagle.EagleNet:
    """An untrained network. draft_vocab: number of tokens, the most frequent in the documents; 0: all."""
    hidden = target.hidden
    tokens = trimmed(documents, target.vocab, draft_vocab)
    few = 0 if tokens is None else len(tokens)
    config = eagle.EagleConfig(layer_like(target), target.vocab, hidden, inputs, trained=trained, draft_vocab=few)
    net = eagle.EagleNet(config)
    if tokens is not None:
        vocabulary.keep(net.d2t, tokens)
    return net


def build(
    target: Target,
    documents: Sequence[Document] = (),
    inputs: str = configs.INPUTS[0],
    noise: float = 0.1,
    cls: float = 0.1,
    draft_vocab: int = -1,
    linear: bool = True,
) -> EagleObjective:
    """EAGLE for a target: noise on the features, one pass. `inputs` feature+shifted, feature+unshifted, feature or
    token; `noise`: its half-width; `cls`: weight of the token loss beside the feature loss; `draft_vocab`: size of the
    draft vocabulary (0: all). `linear`: initialise by linear regression to the next feature (false: randomly, as in the
    paper).
    """
    net = fresh(target, documents, inputs, "eagle", draft_vocab)
    return EagleObjective(target, net, noise, cls, linear=linear)
