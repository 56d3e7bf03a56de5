"""The network of block drafters (DFlash, JetSpec, DSpark, DFlash 2): one pass reads a whole block of future positions.

    c_t = norm(fc(cat_i f_i(t)))                  the target's features at committed position t; every layer reads them
    x   = [e(anchor), mask, mask, ...]            the block's slots, at positions a, a + 1, ..., a + B - 1
    x_j = x_j + S_j [c_{a-1}; e(anchor)]          only where slots are `seeded`
    layer: q from the block; k, v from the context c (positions before a) and from the block
    u_j = head(norm(x_j))                         logits of slot j, in the draft vocabulary
    score of token c at slot j after token p:     u_j(c) + W2[c] . W1[p]              (the pair head of DSpark: markov)
                                                  u_j(c) + W2[c] . (W1[p] * H x_j)    (that of DFlash 2: selector)

`seeded` is ours: the last context vector and the anchor go into every slot directly, as both go into EAGLE's network,
and training begins with the linear maps of them that come nearest to the features to come. Else all that a slot learns
of them must pass through a layer's values, which are narrow where many heads share them (in SmolLM2, 192 numbers of
576).

DFlash 2 also mixes neighbouring slots before and after attention and MLP (`BlockConv`).

The anchor is the last committed token, whose target feature does not exist yet. Context keys and values depend on c_t
alone, so they are written once and never change. With `causal`, slot j sees slots 0 .. j of its block; else all.

`sample_from_anchor` says what slot j predicts. True: the token at a + j + 1, so B slots draft B tokens. False: the
token at a + j, so slot 0 drafts nothing and B slots draft B - 1 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ..backends.torch import vocabulary
from .configs import OUT, BlockConfig
from .layer import MLP, Attention, LayerShape, RMSNorm, Rope, apply_rotary, attend


class BlockAttention(Attention):
    """Projections with a norm per head on queries and keys (Qwen3's)."""

    def __init__(self, shape: LayerShape):
        super().__init__(shape)
        self.q_norm, self.k_norm = RMSNorm(shape.head_dim, shape.eps), RMSNorm(shape.head_dim, shape.eps)


class BlockConv(nn.Module):
    """DFlash 2's mixing of neighbouring slots around a part f of a layer: z = C1(f(C0(x))).

        C_i(y)_j = sum_{o < taps} (base_{i,o} + (P x_j)_{i,o}) * y_{j-o}

    Slots before the block count as zeros. `base` has a weight for each channel; P x_j, of the part's own input, one for
    each group of channels. It begins as the identity.
    """

    def __init__(self, hidden: int, taps: int, group: int, block: int):
        super().__init__()
        self.taps, self.group, self.block = taps, group, block
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
        nn.init.zeros_(self.kernel_projection.weight)

    def around(self, part: Callable[[Tensor], Tensor], x: Float[Tensor, "b m h"]) -> Float[Tensor, "b m h"]:
        """C1(part(C0(x))) of whole blocks, one after the other along m."""
        own = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, -1)
        before, after = (self.base_kernel + own).unbind(-3)
        return self._mixed(part(self._mixed(x, before)), after)

    def _mixed(self, y: Float[Tensor, "b m h"], weight: Float[Tensor, "b m taps h"]) -> Float[Tensor, "b m h"]:
        blocks, size = y.unflatten(1, (-1, self.block)), self.block
        shifted = [functional.pad(blocks[:, :, : size - o], (0, 0, o, 0)).flatten(1, 2) for o in range(self.taps)]
        return (weight * torch.stack(shifted, 2)).sum(2)


class BlockLayer(nn.Module):
    """A decoder layer whose keys and values come from the context and from the block."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.shape = shape = config.layer
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn, self.mlp = BlockAttention(shape), MLP(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        conv = (shape.hidden, config.conv, config.conv_group, config.block)
        self.attention_conv, self.mlp_conv = (BlockConv(*conv) if config.conv else None for _ in range(2))

    def keys_values(self, x: Float[Tensor, "b m h"], rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [b, kv, m, d] of context vectors or of normalised block states."""
        a, shape = self.self_attn, self.shape
        k = a.k_norm(a.k_proj(x).view(*x.shape[:2], shape.kv_heads, shape.head_dim))
        v = a.v_proj(x).view(*x.shape[:2], shape.kv_heads, shape.head_dim)
        return apply_rotary(k, rotary).transpose(1, 2), v.transpose(1, 2)

    def forward(
        self,
        x: Float[Tensor, "b m h"],
        rotary: Tensor,
        keys: Float[Tensor, "b kv s d"],
        values: Float[Tensor, "b kv s d"],
        mask: Float[Tensor, "#b 1 m sm"],
    ) -> Float[Tensor, "b m h"]:
        a, mlp, shape = self.self_attn, self.mlp, self.shape

        def attention(n: Tensor) -> Tensor:
            heads = n.shape[0], n.shape[1], shape.heads, shape.head_dim
            q = apply_rotary(a.q_norm(a.q_proj(n).view(heads)), rotary).transpose(1, 2)
            k, v = self.keys_values(n, rotary)
            return a.o_proj(attend(q, torch.cat([keys, k], 2), torch.cat([values, v], 2), mask, not self.training))

        def gated(n: Tensor) -> Tensor:
            return mlp.down_proj(functional.silu(mlp.gate_proj(n)) * mlp.up_proj(n))

        n = self.input_layernorm(x)
        h = x + (attention(n) if self.attention_conv is None else self.attention_conv.around(attention, n))
        n = self.post_attention_layernorm(h)
        return h + (gated(n) if self.mlp_conv is None else self.mlp_conv.around(gated, n))


class BlockNet(nn.Module):
    """`context` once per committed token, `keys_values` into the cache, `forward` once per round."""

    d2t: Tensor
    markov_w1: nn.Embedding
    markov_w2: nn.Linear
    pair_hidden: nn.Linear
    lm_head: nn.Linear

    def __init__(self, config: BlockConfig):
        super().__init__()
        shape, self.config = config.layer, config
        self.rope = Rope(shape)
        self.fc = nn.Linear(len(config.taps) * config.target_hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.layers)])
        self.norm = RMSNorm(shape.hidden, shape.eps)
        if config.seeded:  # begins as nothing added
            self.seed = nn.Linear(2 * shape.hidden, config.block * shape.hidden, bias=False)
            nn.init.zeros_(self.seed.weight)
        if config.mask_token < 0:
            self.mask_embedding = nn.Parameter(torch.randn(shape.hidden) * 0.02)
        if config.draft_vocab < config.vocab:
            self.lm_head = nn.Linear(shape.hidden, config.draft_vocab, bias=False)
            self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.long))
        if config.pair_head != "none":  # begins as no correction at all
            self.markov_w1 = nn.Embedding(config.vocab, config.pair_rank)
            self.markov_w2 = nn.Linear(config.pair_rank, config.draft_vocab, bias=False)
            nn.init.normal_(self.markov_w1.weight, std=0.02)
            nn.init.zeros_(self.markov_w2.weight)
        if config.pair_head == "selector":
            self.pair_hidden = nn.Linear(shape.hidden, config.pair_rank, bias=False)

    def context(self, features: Float[Tensor, "b m f"]) -> Float[Tensor, "b m h"]:
        """c_t of the target's features [b, m, taps * H], the taps side by side."""
        return self.hidden_norm(self.fc(features))

    def keys_values(self, context: Float[Tensor, "b m h"], rotary: Tensor) -> tuple[Tensor, Tensor]:
        """All layers' keys and values of context vectors, [b, layers * kv, m, d] twice."""
        made = [layer.keys_values(context, rotary) for layer in cast("Iterable[BlockLayer]", self.layers)]
        return torch.cat([k for k, _ in made], 1), torch.cat([v for _, v in made], 1)

    def slots(
        self, anchors: Float[Tensor, "b a h"], mask: Float[Tensor, " h"], last: Float[Tensor, "b a h"]
    ) -> Float[Tensor, "b aB h"]:
        """The block inputs: each anchor's embedding, then the mask vector in the other slots; seeded by the anchors and
        the context vectors `last` of the positions before them."""
        b, a, h = anchors.shape
        rest = mask.to(anchors.dtype).expand(b, a, self.config.block - 1, h)
        slots = torch.cat([anchors[:, :, None], rest], 2).flatten(1, 2)
        if not self.config.seeded:
            return slots
        return slots + self.seed(torch.cat([last.to(anchors.dtype), anchors], -1)).view(slots.shape)

    def forward(
        self,
        x: Float[Tensor, "b m h"],
        rotary: Tensor,
        keys: Float[Tensor, "b lkv s d"],
        values: Float[Tensor, "b lkv s d"],
        mask: Float[Tensor, "#b 1 m sm"],
    ) -> Float[Tensor, "b m h"]:
        """Normed hidden states of the slots. `mask` is added to the scores, over context slots and then block slots."""
        wide = self.config.layer.kv_heads
        for layer, k, v in zip(self.layers, keys.split(wide, 1), values.split(wide, 1), strict=True):
            x = layer(x, rotary, k, v, mask)
        return self.norm(x)

    def above(self, previous: Int[Tensor, "*s"], hidden: Float[Tensor, "*#s h"]) -> Float[Tensor, "*s r"]:
        """W1[p], or W1[p] * H x: what W2's rows are multiplied with below the tokens p (target ids) in slots x."""
        result = self.markov_w1(previous)
        return result * self.pair_hidden(hidden) if self.config.pair_head == "selector" else result

    def corrected(
        self, logits: Float[Tensor, "*s vd"], previous: Int[Tensor, "*s"], hidden: Float[Tensor, "*s h"]
    ) -> Float[Tensor, "*s vd"]:
        """Slots' logits with what the pair head adds below the tokens `previous`."""
        return logits if self.config.pair_head == "none" else logits + self.markov_w2(self.above(previous, hidden))

    def choice(self, logits: Float[Tensor, "*s vd"], made: Float[Tensor, "*s vd"]) -> Float[Tensor, "*s vd"]:
        """The corrected logits `made` of the tokens that the pair head chooses among, by the slots' own `logits`."""
        top = self.config.pair_top
        return made.masked_fill(logits < logits.topk(top).values[..., -1:], OUT) if 0 < top < logits.shape[-1] else made

    def ids(self) -> Int[Tensor, " vd"] | None:
        """The target's token id of every draft token; None: the vocabularies are one."""
        if self.config.draft_vocab == self.config.vocab:
            return None
        return vocabulary.ids_of(self.d2t)
