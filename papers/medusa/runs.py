"""Medusa's heads as a chain, in dense (Cartesian) trees and in sparse ones of as many nodes, and typical acceptance
beside the lossless rules.

The sparse trees of SmolLM2 are parts of `tree.json`, which `outrider tune-tree` grew from questions of its training.
"""

from __future__ import annotations

from typing import Any

from ..rows import merged, sources

HEADS, TREE = "{medusa}", "{medusa's tree}"
DENSE = {"2,2,1": 11, "2,3,1": 15, "3,2,1": 16, "4,2,1": 21, "5,1,1,1": 21, "2,2,2,1": 23}  # shapes and their nodes
METHODS = {
    "heads as a chain": f"{HEADS}?tree=chain@16x4@rejection",
    **{f"dense tree {shape}": f"{HEADS}?tree=static&shape={shape}@{n}x4@rejection" for shape, n in DENSE.items()},
    **{f"sparse tree of {n}": f"{HEADS}?tree={TREE}@{n}x4@rejection" for n in sorted(set(DENSE.values()))},
    "Medusa": f"{HEADS}?scale=1@16x4@rejection",
    **{f"{n} nodes": f"{HEADS}?scale=1@{n}x4@rejection" for n in (2, 4, 8, 32, 60)},
    "Medusa, coupled": f"{HEADS}?scale=1@16x4",
    "typical, low": f"{HEADS}?scale=1@16x4@typical?epsilon=0.03&delta=0.1",
    "typical, high": f"{HEADS}?scale=1@16x4@typical?epsilon=0.3&delta=0.3",
}  # fmt: skip
CHANGES: dict[str, Any] = {}
RUNGS = ("heads as a chain", "dense tree 3,2,1", "sparse tree of 16", "Medusa-2")
TYPICAL = {f"typical, {kind}": f"Medusa, typical?epsilon={eps:g}&delta={delta:g}, 16x4"
           for kind, eps, delta in (("low", 0.03, 0.1), ("high", 0.3, 0.3))}  # fmt: skip
LADDER = {"heads as a chain": "heads as a chain", "dense tree 3,2,1": "Cartesian tree 3 x 2 x 1",
          "sparse tree of 16": "optimised sparse tree"}  # fmt: skip
SIZES = {
    f"{n} nodes": f"HASS, {size}" for n, size in ((4, "4x3"), (8, "8x4"), (16, "16x6"), (32, "32x6"), (60, "60x6"))
}
USES = {
    "demo": merged(
        sources("ladder", LADDER),
        sources("medusa2", {"Medusa-2": "Medusa-2"}),
        sources("medusa2_distilled", {"self-distilled": "Medusa-2"}),
        sources("drafters", {"Medusa": "Medusa"}),
        sources("sizes", SIZES),
        sources("typical", TYPICAL, 0.7),
    ),
}
