"""Grouped attention with a mask: the query groups are folded into rows, so keys and values are read once.

Registered with transformers as "outrider" and switched on only around our own passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "outrider"


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention [b, h, n, d] x [b, g, view, d] -> [b, n, h, d]; h / g query heads share a key head.

    Stock attention repeats keys and values over the whole buffer; folding makes [b, g, (h / g) n, d] of the queries.
    """
    b, h, n, _ = query.shape
    groups = h // key.shape[1]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if attention_mask is None:
        grouped = groups > 1
        out = sdpa(query, key, value, scale=scaling, is_causal=n > 1 and n == key.shape[2], enable_gqa=grouped)
    elif groups == 1:
        out = sdpa(query, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        mask = attention_mask
        if mask.shape[1] == 1:
            mask = mask if n == 1 else mask.repeat(1, 1, groups, 1)
        else:
            mask = mask.reshape(b, h // groups, groups * n, -1)
        folded = query.reshape(b, h // groups, groups * n, query.shape[3])
        out = sdpa(folded, key, value, attn_mask=mask, scale=scaling).reshape(b, h, n, value.shape[3])
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def switched(config: Any, name: str) -> Iterator[None]:
    """This attention for the passes inside; the user's own again afterwards, whatever happens."""
    before = config._attn_implementation
    if before == name:
        yield
        return
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
