"""EAGLE-2 beside the others at 26 nodes each. A study of its own, `TREES`: without its parts where nothing is cut, 16x5
and 61x6, and what is observed of it.

A tree without re-ranking has its root and, for each of its layers, the nodes that were fed: 3 x 5 + 1 and 10 x 6 + 1.
`OBSERVED` are read by `observe`: confidences, and acceptance at the six nodes of the tree (2, 2).
"""

from __future__ import annotations

from typing import Any

from ..rows import Source, merged, sources

PARTS = {"": "", " without value": "&value=false", " without re-ranking": "&rerank=false",
         " without both": "&value=false&rerank=false"}  # fmt: skip
SIZES = ("16x5", "61x6")
METHODS = {
    "EAGLE-2": "{eagle}?scale=1@26x5@rejection",
    "EAGLE": "{eagle}?tree=static@26x5@rejection",
    "Hydra": "{hydra}?scale=1@26x4@rejection",
    "Medusa": "{medusa}?scale=1@26x4@rejection",
    "SpS": "{llm}?scale=1@26x5@rejection",
    "PLD": "lookup@26x5@rejection",
    "Lookahead": "lookahead@26x5@rejection",
    "EAGLE-2, coupled": "{eagle}?scale=1@26x5",
    "EAGLE, coupled": "{eagle}?tree=static@26x5",
}  # fmt: skip
OBSERVED = ("confident", "positions")
TREES = {
    **{f"{size}{part}": f"{{eagle}}?scale=1&nodes=61{options}@{size}@rejection"
       for size in SIZES for part, options in PARTS.items()},
    "confident": "{eagle}?scale=1@16x6@rejection",
    "positions": "{eagle}@2,2@rejection",
}  # fmt: skip
STUDIED = {"SmolLM2": "eagle2_trees", "demo": "eagle2_trees_demo"}  # the studies of `TREES`
CHANGES: dict[str, Any] = {}
DEMO = {"PLD": "lookup", "SpS": "draft model", "Medusa": "Medusa", "Hydra": "Hydra", "EAGLE": "EAGLE tree",
        "EAGLE-2": "EAGLE-2"}  # fmt: skip


def trees(model: str) -> dict[str, Source]:
    """Where a model's trees stand."""
    return sources(STUDIED[model], {name: name for name in TREES}, 0.0, 1.0)


USES = {
    "SmolLM2": merged(trees("SmolLM2")),
    "demo": merged(sources("drafters", DEMO), trees("demo"), sources("calibration", {"confident": "eagle, 16x6"}),
                   sources("calibration", {"confident": "eagle, rejection, 16x6"}, 1.0)),
}  # fmt: skip
