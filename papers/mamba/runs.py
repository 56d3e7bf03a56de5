"""Mamba and Transformer draft models as chains and over the paper's shapes, under `rejection`; its bandit.

The bandit has the paper's reward and bound, forgets at each request, and the paper's comparison is the shape (3,3,2,1).
"""

from __future__ import annotations

from typing import Any

from ..rows import merged, sources

LINE = "1,1,1,1,1"
SHAPES = ("3,3,2,1", "3,2,2,1,1", "2,2,2,1,1,1")
BANDIT = f"{' '.join(SHAPES)} paper"
METHODS = {
    **{f"{name}, chain": f"{{{name.lower()}}}@{LINE}@rejection" for name in ("Mamba", "Llama")},
    **{f"{name}, {shape}": f"{{{name.lower()}}}@{shape}@rejection" for name in ("Mamba", "Llama") for shape in SHAPES},
    **{f"small {name}, chain": f"{{small {name.lower()}}}@{LINE}@rejection" for name in ("Mamba", "Llama")},
    "Mamba, bandit": f"{{mamba}}@{BANDIT}@rejection",
    "Mamba, chain, coupled": f"{{mamba}}@{LINE}",
    "Mamba, tree": "{mamba}?scale=1@16x6@rejection",
    "Llama, tree": "{llama}?scale=1@16x6@rejection",
    "EAGLE, chain": "{eagle}?tree=chain@6x5@rejection",
    "another tokenizer": f"{{other}}?vocab=text@{LINE}@rejection",
}
CHANGES: dict[str, Any] = {
    name: {"batch_sizes": (1,), "observe": ("Mamba, tree", "Llama, tree")} for name in ("SmolLM2", "demo")
}  # a bandit is one row's
DEMO = {
    "Mamba, chain": "Mamba 1.5M, chain",
    "Llama, chain": "Llama 1.5M, chain",
    "small Mamba, chain": "Mamba 0.5M, chain",
    "small Llama, chain": "Llama 0.5M, chain",
    **{f"Mamba, {shape}": f"Mamba 1.5M, {shape}" for shape in SHAPES},
    "another tokenizer": "Mamba of another tokenizer, text",
    "its own": "Mamba 0.5M, pretrained, chain",
}
REJECTION = {"Mamba, chain": "Mamba 1.5M, chain, rejection", "Llama, chain": "Llama 1.5M, chain, rejection",
             "Mamba, 3,2,2,1,1": "Mamba 1.5M, 3,2,2,1,1, rejection"}  # fmt: skip
USES = {"demo": merged(sources("mamba", DEMO), sources("mamba", REJECTION, 1.0))}
