"""What was not measured on SmolLM2, and why."""

from __future__ import annotations

from ..evidence import SECOND, unmeasured

MAMBA = "it takes Mambas and Transformers of several sizes, tokenizers and lengths of context"
LOSSES = "it takes a training of HASS for each setting"
BASE = "it takes a training of EAGLE as long as HASS's; the one that was trained is shorter and does not ship"
UNMEASURED = {
    "E-T3": ("it takes a mixture of experts of this size, and a training", ""),
    "E-T6": ("it takes a training on answers that are not the target's own", ""),
    "E-cost": ("a statement on targets of billions of parameters", ""),
    "E2-T2": ("a statement on targets of 8B and 70B, which need GPUs", ""),
    "H-step-acc": (BASE, ""),
    **dict.fromkeys(("H-topk", "H-loss", "H-beta"), (LOSSES, "")),
    **dict.fromkeys(("Ma-F1", "Ma-F2", "Ma-T2", "Ma-T3"), (MAMBA, "")),
}  # fmt: skip
for ids, (why, command) in UNMEASURED.items():
    unmeasured(ids, why, command, SECOND)
