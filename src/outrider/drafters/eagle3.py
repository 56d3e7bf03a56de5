"""EAGLE-3 (Li et al. 2025): three layers of the target fused into one vector; it predicts tokens, not features.

g_i     = fc(cat(l_i, m_i, h_i))                   hidden states of three layers, low, middle and high
a_{i+1} = layer(cat(norm(e(t_{i+1})), norm(g_i)))  at position i, residual g_i; then a takes the place of g
logits of t_{i+2} = lm_head(norm(a_{i+1}))            over the draft vocabulary; target id = i + d2t[i]

P-EAGLE (Hui et al. 2026, `parallel`) drafts all tokens in one pass. Behind the last pair stand pairs of a mask token
and a learned feature, one for each further token; each sees the pairs and masks before it, and nothing is fed back.
"""

from __future__ import annotations

from typing import Any

from ._eagles import loader
from ._trained import in_tensors

load = loader("eagle3")


def __getattr__(name: str) -> Any:
    """The network and its drafter in tensors (`_eagle3.py`), imported on first use."""
    return getattr(in_tensors("eagle3"), name)
