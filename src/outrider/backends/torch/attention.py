"""Grouped attention with a mask: the query groups are folded into rows, so that keys and values are read once.

Registered with transformers as "outrider" and switched on only around our own passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ...params import InputError

NAME = "outrider"
OPEN = "outrider_open"  # set on a mask that hides nothing: kernels are faster without one
# A pass of a stock model changes the model while it runs: its config here, a function or a layer of it elsewhere. So
# such passes of all threads run one at a time, whichever target they belong to. Nobody waits for anything inside.
passing = RLock()


def attend(
    module: Any,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b g view d"],
    value: Float[Tensor, "b g view e"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "b n h e"], None]:
    """Scaled dot-product attention in which h / g query heads share a key head.

    Stock attention repeats keys and values over the whole buffer; folding makes [b, g, (h / g) n, d] of the queries.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise InputError(f"grouped attention has no {name}; this family must be listed as eager in families.py")
    b, h, n, _ = query.shape
    heads = key.shape[1]
    groups = h // heads
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if attention_mask is None:  # a prompt's first chunk, or a single token
        out = sdpa(query, key, value, scale=scaling, is_causal=n > 1, enable_gqa=groups > 1)
    elif groups == 1:
        out = sdpa(query, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        folded = query.reshape(b, heads, groups * n, query.shape[3])
        mask = None if OPEN in attention_mask.__dict__ else _repeated(attention_mask, groups)
        out = sdpa(folded, key, value, attn_mask=mask, scale=scaling)
        out = out.reshape(b, h, n, value.shape[3])
    return out.transpose(1, 2).contiguous(), None


def _repeated(mask: Shaped[Tensor, "b 1 n view"], groups: int) -> Shaped[Tensor, "b 1 gn view"]:
    """The mask once for each head of a group; kept on the mask, since all layers of a pass share it.

    Ours is of numbers; the model's own, for a prompt read through a window, is of booleans.
    """
    if mask.shape[2] == 1:
        return mask
    done = mask.__dict__.get(NAME)
    if done is None or done[0] != groups:
        done = mask.__dict__[NAME] = (groups, mask.repeat(1, 1, groups, 1))
    return done[1]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def switched(config: Any, attention: str | None, experts: str | None) -> Iterator[None]:
    """This attention, and these kernels for mixtures of experts, for the passes inside; the user's own afterwards.

    None leaves things as they are. All who share the model share its config, so other passes wait (`passing`).
    """
    with passing:
        before = config._attn_implementation, config._experts_implementation
        after = attention or before[0], experts or before[1]
        if after == before:
            yield
            return
        config._attn_implementation, config._experts_implementation = after
        try:
            yield
        finally:
            config._attn_implementation, config._experts_implementation = before
