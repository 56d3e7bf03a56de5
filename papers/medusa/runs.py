"""Medusa's heads as a chain, a Cartesian tree and a sparse one, and typical acceptance beside the lossless rules."""

from __future__ import annotations

from typing import Any

from ..rows import merged, sources

HEADS = "{medusa}"
METHODS = {
    "heads as a chain": f"{HEADS}?tree=chain@16x4@rejection",
    "dense tree": f"{HEADS}?tree=static&shape=3,2,1@16x4@rejection",
    **{f"dense tree {shape.replace(',', 'x')}": f"{HEADS}?tree=static&shape={shape}@32x4@rejection"
       for shape in ("2,2,1", "4,2,1", "2,2,2,1", "5,1,1,1", "2,3,1")},
    "Medusa": f"{HEADS}?scale=1@16x4@rejection",
    **{f"{n} nodes": f"{HEADS}?scale=1@{n}x4@rejection" for n in (4, 8, 32, 60)},
    "Medusa, coupled": f"{HEADS}?scale=1@16x4",
    "typical, low": f"{HEADS}?scale=1@16x4@typical?epsilon=0.03&delta=0.1",
    "typical, high": f"{HEADS}?scale=1@16x4@typical?epsilon=0.3&delta=0.3",
}  # fmt: skip
CHANGES: dict[str, Any] = {}
RUNGS = ("heads as a chain", "dense tree", "sparse tree", "Medusa-2")
TYPICAL = {f"typical, {kind}": f"Medusa, typical?epsilon={eps:g}&delta={delta:g}, 16x4"
           for kind, eps, delta in (("low", 0.03, 0.1), ("high", 0.3, 0.3))}  # fmt: skip
LADDER = {"heads as a chain": "heads as a chain", "dense tree": "Cartesian tree 3 x 2 x 1",
          "sparse tree": "optimised sparse tree"}  # fmt: skip
SIZES = {
    f"{n} nodes": f"HASS, {size}" for n, size in ((4, "4x3"), (8, "8x4"), (16, "16x6"), (32, "32x6"), (60, "60x6"))
}
USES = {
    "SmolLM2": merged(
        sources(
            "smollm2_findings",
            {"heads as a chain": "Medusa, chain", "dense tree": "Medusa, 3 x 2 x 1", "sparse tree": "Medusa, tuned"},
        ),
        sources(
            "smollm2",
            {
                "Medusa": "Medusa, 16 nodes",
                "1 nodes": "none",
                "2 nodes": "HASS chain of 1",
                "4 nodes": "HASS, 4 nodes",
                "16 nodes": "HASS, 16 nodes",
            },
        ),
        sources("smollm2_findings", {f"typical, {kind}": f"Medusa, {kind} typical" for kind in ("low", "high")}, 1.0),
    ),
    "demo": merged(
        sources("ladder", LADDER),
        sources("medusa2", {"Medusa-2": "Medusa-2"}),
        sources("drafters", {"Medusa": "Medusa"}),
        sources("sizes", SIZES),
        sources("typical", TYPICAL, 0.7),
    ),
}
