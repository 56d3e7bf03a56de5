"""EAGLE-3 (Li et al. 2025): three layers of the target fused into one vector; it predicts tokens, not features.

g_i     = fc(cat(l_i, m_i, h_i))                   hidden states of three layers, low, middle and high
a_{i+1} = layer(cat(norm(e(t_{i+1})), norm(g_i)))  at position i, residual g_i; then a takes the place of g
law of t_{i+2} = lm_head(norm(a_{i+1}))            over the draft vocabulary; target id = i + d2t[i]

P-EAGLE (Hui et al. 2026, `parallel`) drafts all tokens in one pass. Behind the last pair stand pairs of a mask token
and a learned feature, one for each further token; each sees the pairs and masks before it, and nothing is fed back.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..core.protocols import Drafter, Target
from . import _trained


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    tree: str = "dynamic",
    shape: tuple[int, ...] = (),
    depth: int = 8,
    width: int = 0,
    top_k: int = 10,
    nodes: int = 60,
    scale: float = 0.0,
    value: bool = True,
    rerank: bool = True,
    replacement: bool = False,
) -> Drafter:
    """A trained drafter from its folder: in compiled code where the target's passes are, else by torch.

    The options are the fields of `_growth.Growth`. Without a shape, the static tree is EAGLE-1's; `scale` 0: the
    folder's. Raises InputError where the folder is damaged, holds another drafter, or belongs to another target.
    """
    growth = _trained.Options(tree, shape, depth, width, top_k, nodes, scale, value, rerank, replacement)
    made = _trained.compiled("eagle3", target, path, growth)
    return import_module("._eagle3", __package__).load(target, path, growth) if made is None else made


def __getattr__(name: str) -> Any:
    """The network and its drafter in tensors (`_eagle3.py`), imported when they are asked for."""
    return getattr(import_module("._eagle3", __package__), name)
