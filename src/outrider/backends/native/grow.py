"""Trees of compiled drafters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Of a tree: `depth` layers, the `width` best nodes of each are fed, at most `nodes` are kept, the root included;
    `top_k` candidates below a node, confidences softmax(r / scale)."""

    depth: int
    width: int
    nodes: int
    top_k: int
    scale: float
