"""Objective of block drafters (DFlash, Chen et al. 2026; JetSpec; DSpark; DFlash 2): blocks at sampled anchors.

    L = sum over anchors a and slots k of  w_k * (loss(p, q_k) + regress * smooth-L1(x_k, f_k))
    w_k = 1, or exp(-k / decay), or D-PACE's (below)

An anchor is a position with loss whose next token has loss too. Its block attends to the features before it, not to its
own, as in decoding. p is the target's distribution of the token that slot k drafts, q_k that of the slot's logits plus
the pair head's scores after the true token before it (teacher forcing). Both are restricted to the draft vocabulary.

    kl  forward KL, as the cross entropy with p     ce  cross entropy with the target's argmax
    tv  1 - sum min(p, q), the rejection rate       lk  -log sum min(p, q)

`regress` is ours: x_k, the input of the head, is regressed to f_k, the target's feature there, as in EAGLE. f_k also
depends on the text between anchor and slot, so slots after the first learn its mean.

D-PACE (arXiv 2605.18810) weights a slot by how much of the block depends on it: with s_j = (1 - c) q_j + c, where q_j
is the drafter's probability of the target's argmax at slot j,  w_k = sum_{i >= k} prod_{j <= i} s_j.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...backends.torch import vocabulary
from ...backends.torch.padding import additive
from ...backends.torch.tensors import embed
from ...core.protocols import Target
from ...drafters import _heads
from ...nets.block import BlockConfig, BlockNet
from ...params import InputError
from ..data import Batch, Document, frequent
from ..features import TargetFeatures
from ..sizes import FewSizes
from ._layer import layer_like
from ._linear import nearest
from ._losses import cross_entropy, likeliest, precise, smooth_l1
from ._objective import Optimiser, TrimmedObjective, uniform

NATIVE = True
OPTIMISER = Optimiser(lr=6e-4, clip=1.0, warmup=100)
LOSSES = ("kl", "ce", "tv", "lk")
AT_ONCE = 1 << 26  # maximum logits in memory, of drafter and target each


class BlockObjective(TrimmedObjective):
    """The distribution of every slot of blocks at sampled anchors."""

    drafter = "block"

    def __init__(
        self,
        target: Target,
        net: BlockNet,
        anchors: int = 64,
        loss: str = "kl",
        decay: float = 0.0,
        dpace: float = 0.5,
        regress: float = 10.0,
    ):
        super().__init__(target, net)
        if loss not in LOSSES:
            raise InputError(f"the loss of a block drafter is one of {', '.join(LOSSES)}, not {loss!r}")
        if anchors < 1:
            raise InputError(f"anchors must be at least 1, not {anchors}")
        if not 0 <= dpace <= 1 or (dpace and decay):
            raise InputError("dpace must be between 0 and 1, and decay needs dpace=0: both set the weights of slots")
        if regress < 0:
            raise InputError(f"regress is at least 0, not {regress:g}")
        self.anchors, self.loss, self.decay, self.dpace, self.regress = anchors, loss, decay, dpace, regress
        self.taps = tuple(dict.fromkeys((*net.config.taps, -1)))

    def forward(self, batch: Batch, seen: TargetFeatures, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The weighted loss summed over slots, the sum of weights, and the accuracy by slot."""
        config = self.net.config
        anchor, real = self._anchors(batch, step)
        hidden = self._hidden(batch, seen, anchor)
        slot = torch.arange(config.block, device=anchor.device)
        before = (anchor[..., None] + slot - (0 if config.sample_from_anchor else 1)).flatten(1)  # the token before
        n, documents = batch.tokens.shape[1], batch.documents
        inside = before.clamp(0, n - 1)
        learned = batch.wanted(1).gather(1, inside) & (before < n)
        learned &= documents.gather(1, inside) == documents.gather(1, anchor.repeat_interleave(config.block, 1))
        learned &= real.repeat_interleave(config.block, 1)
        if not config.sample_from_anchor:
            learned &= (slot > 0).repeat(anchor.shape[1])
        learned &= self.draftable(batch.ahead(1).gather(1, inside))
        rows, places = learned.nonzero().unbind(1)
        at, slots = inside[rows, places], places % config.block
        given = seen.features[-1][rows, at], hidden[rows, places], batch.tokens[rows, at]
        loss, chance, right = self._judged(*given)
        drafted = slots - (0 if config.sample_from_anchor else 1)
        far = drafted.to(loss.dtype)
        weight = torch.exp(-far / self.decay) if self.decay else torch.ones_like(far)
        if self.dpace:
            weight = self._pace(chance, (rows, places), hidden.shape[:2])
        hits = {f"hit{k + 1}": right[drafted == k].mean() for k in range(config.drafts) if bool((drafted == k).any())}
        return (weight * loss).sum(), weight.sum(), hits

    def _judged(
        self, feature: Float[Tensor, "k h"], made: Float[Tensor, "k h"], above: Int[Tensor, " k"]
    ) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"], Float[Tensor, " k"]]:
        """For every slot the loss, its probability of the target's argmax, and whether that is its own argmax. Beyond
        AT_ONCE, logits are computed in parts, and again for the gradient."""
        vocabulary = self.target.vocab if self.places is None else len(self.places)
        most = max(1, AT_ONCE // vocabulary)
        if len(made) <= most:
            return self._judge(feature, made, above)
        parts = zip(*(given.split(most) for given in (feature, made, above)), strict=True)
        judged = [checkpoint(self._judge, *part, use_reentrant=False) for part in parts]
        loss, chance, right = (torch.cat(values) for values in zip(*judged, strict=True))
        return loss, chance, right

    def _judge(self, feature: Tensor, made: Tensor, above: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with FewSizes():  # also for the recomputed logits, outside of the step's own context
            with torch.no_grad():
                teacher = precise(self.head(feature))
                first = likeliest(teacher)
            student = self.head(made) if self.places is None else self.net.lm_head(made)
            student = precise(self.net.corrected(student, above, made))
        loss = self._loss(student, teacher)
        if self.regress:
            loss = loss + self.regress * smooth_l1(precise(made), precise(feature))
        with torch.no_grad():
            chance = student.softmax(-1).gather(-1, first[:, None])[:, 0]
            right = (likeliest(student) == first).float()
        return loss, chance, right

    def prepare(self, seen: Iterable[tuple[Batch, TargetFeatures]]) -> None:
        """Initialise seeded slots by linear regression to their features: layers contribute nothing yet, and the last
        norm gives the features' scale."""
        net, config = self.net, self.net.config
        if not config.seeded:
            return
        hidden, squares, count = config.layer.hidden, torch.zeros(()), 0
        with torch.no_grad():
            if -1 in config.taps:  # the context vector starts near the last feature
                at = config.taps.index(-1) * hidden
                net.fc.weight[:, at : at + hidden] += torch.eye(hidden).to(net.fc.weight)

            def pairs() -> Iterator[tuple[Tensor, Tensor]]:
                nonlocal squares, count
                for batch, features in seen:
                    given, true = self._seeds(batch, features)
                    squares = squares.to(true) + true.pow(2).sum((0, 1))
                    count += true.shape[0] * true.shape[1]
                    yield given, true.flatten(1)

            matrix = nearest(pairs())
            if matrix is None:
                return
            size = (squares / count).sqrt().clamp(min=1e-6)
            maps = matrix.view(config.block, hidden, 2 * hidden) / size[:, None]
            maps[0, :, hidden:] -= torch.eye(hidden).to(maps)  # the anchor's own vector is added already
            net.seed.weight.copy_(maps.flatten(0, 1))
            net.norm.weight.copy_(size)
            for layer in net.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()

    def _seeds(self, batch: Batch, seen: TargetFeatures) -> tuple[Float[Tensor, "k i"], Float[Tensor, "k B h"]]:
        """For all positions with loss whose block is inside their text, the seeds of slots and their features."""
        net, config, n = self.net, self.net.config, batch.tokens.shape[1]
        context = net.context(torch.cat([seen.features[tap] for tap in config.taps], -1))
        embeds = embed(self.target, batch.tokens).to(context.dtype)
        anchor = torch.arange(1, max(1, n - config.block), device=context.device)
        at = anchor[:, None] + torch.arange(config.block, device=context.device)
        inside = (batch.documents[:, at] == batch.documents[:, anchor - 1, None]).all(-1)
        inside &= batch.learn[:, anchor] & batch.wanted(1)[:, anchor]
        given = torch.cat([context[:, anchor - 1], embeds[:, anchor]], -1)[inside]
        true = seen.features[-1][:, at - (0 if config.sample_from_anchor else 1)][inside]
        return precise(given), precise(true)

    def _anchors(self, batch: Batch, step: int) -> tuple[Int[Tensor, "b a"], Bool[Tensor, "b a"]]:
        """Anchors sampled without replacement, ascending, and which of them are real; a function of step and row."""
        open_ = batch.learn & batch.wanted(1)
        score = uniform(batch, step, 0xC2B2AE35, open_.shape[1]).masked_fill(~open_, -1.0)
        top = score.topk(min(self.anchors, score.shape[1]), -1)
        real = top.values >= 0
        order = torch.where(real, top.indices, score.shape[1]).sort(-1).values
        return order.clamp(max=score.shape[1] - 1), order < score.shape[1]

    def _hidden(self, batch: Batch, seen: TargetFeatures, anchor: Int[Tensor, "b a"]) -> Float[Tensor, "b m h"]:
        """Normed hidden states of every anchor's slots."""
        net, config = self.net, self.net.config
        context = net.context(torch.cat([seen.features[tap] for tap in config.taps], -1))
        keys, values = net.keys_values(context, net.rope.at(batch.positions, context.dtype))
        with torch.no_grad():
            embeds = embed(self.target, batch.tokens.gather(1, anchor)).to(context.dtype)
            mask = None if config.mask_token < 0 else embed(self.target, anchor.new_tensor([config.mask_token]))[0]
        before = (anchor - 1).clamp(min=0)[..., None].expand(*anchor.shape, context.shape[2])
        first = (batch.positions.gather(1, anchor) == 0)[..., None]  # first token of its text
        last = context.gather(1, before).masked_fill(first, 0.0)
        x = net.slots(embeds, net.mask_embedding if mask is None else mask, last)
        slot = torch.arange(config.block, device=anchor.device)
        positions = (batch.positions.gather(1, anchor)[..., None] + slot).flatten(1)
        return net(x, net.rope.at(positions, x.dtype), keys, values, self._mask(batch, anchor, x.dtype))

    def _mask(self, batch: Batch, anchor: Int[Tensor, "b a"], dtype: torch.dtype) -> Float[Tensor, "b 1 m s"]:
        """A slot attends to its document before its anchor, and to its own block."""
        size, causal, documents = self.net.config.block, self.net.config.causal, batch.documents
        place = torch.arange(batch.tokens.shape[1], device=anchor.device)
        context = (place < anchor[..., None]) & (documents[:, None] == documents.gather(1, anchor)[..., None])
        own = torch.ones(size, size, dtype=torch.bool, device=anchor.device)
        blocks = torch.block_diag(*[own.tril() if causal else own] * anchor.shape[1])
        blocks = blocks.expand(len(anchor), *blocks.shape)
        return additive(torch.cat([context.repeat_interleave(size, 1), blocks], -1), dtype)[:, None]

    def _pace(self, chance: Float[Tensor, " k"], at: tuple[Tensor, Tensor], size: torch.Size) -> Float[Tensor, " k"]:
        """D-PACE's weights; slots without loss are skipped."""
        smooth, learned = chance.new_ones(size), chance.new_zeros(size)
        smooth[at], learned[at] = (1 - self.dpace) * chance + self.dpace, 1.0
        blocks = (-1, self.net.config.block)
        reach = smooth.unflatten(1, blocks).cumprod(-1) * learned.unflatten(1, blocks)
        return reach.flip(-1).cumsum(-1).flip(-1).flatten(1)[at]

    def _loss(self, student: Float[Tensor, "k v"], teacher: Float[Tensor, "k v"]) -> Float[Tensor, " k"]:
        if self.loss == "kl":
            return cross_entropy(student, teacher.softmax(-1))
        if self.loss == "ce":
            return nn.functional.cross_entropy(student, likeliest(teacher), reduction="none")
        overlap = torch.minimum(student.softmax(-1), teacher.softmax(-1)).sum(-1)
        return 1 - overlap if self.loss == "tv" else -overlap.clamp(min=1e-6).log()


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """`count` distinct hidden states spread from the second layer's to the fourth last's (DFlash)."""
    if count == 1:
        return (layers // 2 + 1,)
    taps = tuple(round(1 + j * (layers - 4) / (count - 1)) + 1 for j in range(count))
    if len(set(taps)) < count or min(taps) < 1:
        raise InputError(f"{count} distinct layers cannot be spread over a target of {layers}; name them as taps")
    return taps


def build(
    target: Target,
    documents: Sequence[Document] = (),
    layers: int = 1,
    block: int = 8,
    causal: bool = True,
    sample_from_anchor: bool = True,
    pair_head: str = "markov",
    pair_rank: int = 64,
    conv: int = 0,
    draft_vocab: int = 0,
    taps: tuple[int, ...] = (),
    mask_token: int = -1,
    anchors: int = 64,
    loss: str = "kl",
    decay: float = 0.0,
    dpace: float = 0.5,
    regress: float = 10.0,
    seeded: bool = True,
) -> BlockObjective:
    """A block drafter for a target. `layers` of the network; `block` slots; `causal`: a slot attends to no later slot;
    `sample_from_anchor`: the anchor's slot drafts too; `pair_head` markov, selector or none, of rank `pair_rank`;
    `conv`: kernel size of convolutions around attention and MLP, 2 in DFlash 2 (0: none); `draft_vocab`: size of the
    draft vocabulary (0: all, with the target's head); `taps`: the hidden states to read (default: up to five);
    `mask_token` of empty slots (-1: a learned vector); `anchors` per row; `loss` kl, ce, tv or lk; `decay`: slot k has
    weight exp(-k / decay), with `dpace=0` (0: off); `dpace`: D-PACE's c (0: equal weights); `regress`: weight of the
    regression to the target's features, as in EAGLE (0: off); `seeded`: slots get the last context vector and the
    anchor directly, and start as linear maps of them."""
    size = draft_vocab or target.vocab
    depth = target.layers
    config = BlockConfig(
        layer=layer_like(target),
        layers=layers,
        vocab=target.vocab,
        draft_vocab=size,
        target_hidden=target.hidden,
        taps=tuple(taps) or default_taps(depth, min(5, max(1, depth - 3))),
        block=block,
        causal=causal,
        sample_from_anchor=sample_from_anchor,
        pair_head=pair_head,
        pair_rank=pair_rank,
        conv=conv,
        conv_group=math.gcd(16, target.hidden),
        mask_token=mask_token,
        seeded=seeded,
    )
    net = BlockNet(config)
    if size < target.vocab:
        kept = frequent(documents, target.vocab, size)
        vocabulary.keep(net.d2t, kept)
        with torch.no_grad():
            net.lm_head.weight.copy_(_heads.weight(target, kept)[0])
    return BlockObjective(target, net, anchors, loss, decay, dpace, regress)
