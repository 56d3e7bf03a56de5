"""P-EAGLE's additions to EAGLE-3's layout: `mask_hidden`, the mask token, plain layers above the first.

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
DRAFTS = 8  # default number of tokens per pass


def fields(config: Mapping[str, Any], block: Mapping[str, Any], where: object, notes: list[str]) -> dict[str, int]:
    """P-EAGLE's fields of the network's config. block: the fields of our export. Raises InputError without a mask
    token."""
    masks = {config[name] for name in (*VLLM, "mask_token_id") if config.get(name) is not None}
    if len(masks) != 1:
        tokens = ", ".join(map(str, sorted(masks))) or "none"
        raise InputError(f"the config of {where} must have one mask token, as {VLLM[0]}; it has {tokens}")
    drafts = block.get("parallel") or config.get("speculative_tokens")
    if not drafts:
        notes.append(f"the config has no number of drafted tokens, so it is {DRAFTS}")
    layers = number(config, "num_hidden_layers", where, 1)
    return {"layers": layers, "parallel": int(drafts or DRAFTS), "mask_token": int(masks.pop())}


def named(name: str, first: str) -> str:
    """A tensor's name in files whose first layer is named `first`."""
    upper = re.sub("^upper[.]([0-9]+)[.]", lambda match: f"layers.{int(match[1]) + 1}.", name)
    return re.sub("^midlayer[.]", first, upper)


def shed(bag: Bag, notes: list[str]) -> None:
    """Drop norms that vLLM creates for every layer but uses only in the first."""
    for name in sorted(n for n in bag.left if re.fullmatch("layers[.][1-9][0-9]*[.]hidden_norm[.]weight", n)):
        bag.drop(name)
        notes.append(f"{name} is not used, so it is dropped")


def check_export(config: Mapping[str, Any], engine: str) -> None:
    """Raise InputError for an engine, or for parts, without P-EAGLE."""
    if engine != "vLLM":
        raise InputError(f"{engine} does not draft in parallel; export this drafter for vllm or speculators")
    if config["layer"]["hidden"] != config["target_hidden"]:
        raise InputError("vLLM's P-EAGLE has its target's hidden size; train this drafter without hidden")
    if config["fc_norm"] or config["norm_output"]:
        raise InputError("vLLM reads no fc_norm and no norm_output of P-EAGLE; train it without")
