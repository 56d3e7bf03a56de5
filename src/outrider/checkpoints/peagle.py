"""What P-EAGLE's folders have beyond EAGLE-3's: `mask_hidden`, the mask token, plain layers above the first.

The layers above are layers.1.*, layers.2.*, ...; the mask token is `pard_token` or `ptd_token_id` where vLLM loads the
folder itself, and `mask_token_id` in the format of speculators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..params import InputError
from .parts import Bag, number

MASK = "mask_hidden"
VLLM = ("ptd_token_id", "pard_token")
NONE = {"layers": 1, "parallel": 0, "mask_token": 0}
DRAFTS = 8  # tokens of a pass where a folder does not say


def fields(config: Mapping[str, Any], block: Mapping[str, Any], where: object, notes: list[str]) -> dict[str, int]:
    """What the network's config says of P-EAGLE. `block`: what our own export says. Raises InputError without a mask
    token."""
    said = {config[name] for name in (*VLLM, "mask_token_id") if config.get(name) is not None}
    if len(said) != 1:
        told = ", ".join(map(str, sorted(said))) or "none"
        raise InputError(f"the config of {where} must say one mask token, as {VLLM[0]}; it says {told}")
    drafts = block.get("parallel") or config.get("speculative_tokens")
    if not drafts:
        notes.append(f"how many tokens a pass drafts is not said, so it is {DRAFTS}")
    layers = number(config, "num_hidden_layers", where, 1)
    return {"layers": layers, "parallel": int(drafts or DRAFTS), "mask_token": int(said.pop())}


def named(name: str, first: str) -> str:
    """A tensor's name in files whose first layer is called `first`."""
    upper = re.sub("^upper[.]([0-9]+)[.]", lambda match: f"layers.{int(match[1]) + 1}.", name)
    return re.sub("^midlayer[.]", first, upper)


def shed(bag: Bag, notes: list[str]) -> None:
    """Leave out norms that vLLM makes for every layer and uses in the first alone."""
    for name in sorted(n for n in bag.left if re.fullmatch("layers[.][1-9][0-9]*[.]hidden_norm[.]weight", n)):
        bag.drop(name)
        notes.append(f"{name} is not used, so it is left out")


def check_export(config: Mapping[str, Any], engine: str) -> None:
    """Raise InputError for an engine, or for parts, without P-EAGLE."""
    if engine != "vLLM":
        raise InputError(f"{engine} does not draft in parallel; export this drafter for vllm or speculators")
    if config["layer"]["hidden"] != config["target_hidden"]:
        raise InputError("vLLM's P-EAGLE is as wide as its target; train this drafter without hidden")
    if config["fc_norm"] or config["norm_output"]:
        raise InputError("vLLM reads no fc_norm and no norm_output of P-EAGLE; train it without")
