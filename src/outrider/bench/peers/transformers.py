"""Stock transformers on the same weights: `generate`, its static cache, its assisted generation, its prompt lookup.

transformers                    the dynamic cache, as users have it
transformers?cache=static       a cache of fixed size
transformers?compile=true       torch.compile on the static cache, where that works for the model
transformers:DRAFT              assisted generation with the draft model DRAFT (demo: the demo's own)
transformers?lookup=10          prompt lookup, at most 10 tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from ...backends.torch.load import from_pretrained
from ...engine.stopping import Stop
from ...params import InputError
from ..models import Models
from ..types import Answer, Ask


def load(
    models: Models, path: str | None = None, cache: str = "dynamic", compile: bool = False, lookup: int = 0
) -> Stock:
    """transformers' `generate`: plain, assisted by the model in `path`, or with prompt lookup of `lookup` tokens.

    Raises InputError for an unknown cache, and for `compile` without a GPU.
    """
    if cache not in ("dynamic", "static"):
        raise InputError(f"transformers has the caches dynamic and static, not {cache!r}")
    target: Any = models.llm().target
    options: dict[str, Any] = {}
    if compile and not target.device.startswith("cuda"):
        raise InputError("transformers compiles its static cache only on a GPU; leave compile out")
    old = target.model.generation_config  # a model may ship a repetition penalty, which changes the distribution
    target.model.generation_config = GenerationConfig(
        bos_token_id=old.bos_token_id, decoder_start_token_id=old.decoder_start_token_id
    )
    if cache == "static" or compile:
        options |= {"cache_implementation": "static", "disable_compile": not compile}
    if path:
        where = "demo/draft" if path == "demo" else path
        options["assistant_model"] = from_pretrained(where, target.dtype, target.device, models.trust, {}).eval()
    if lookup:
        options["prompt_lookup_num_tokens"] = lookup
    return Stock(target.model, options)


@dataclass(frozen=True)
class Stock:
    """transformers' `generate`."""

    model: Any
    options: dict[str, Any]

    def run(self, prompts: Sequence[Sequence[int]], ask: Ask) -> Answer:
        """Rows of a batch are padded on the left, as transformers requires."""
        longest, pad = max(map(len, prompts)), min(ask.eos, default=0)
        device = self.model.device
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        sampling: dict[str, Any] = {"do_sample": False}
        if ask.temperature > 0:
            torch.manual_seed(ask.seeds[0])
            sampling = {"do_sample": True, "temperature": ask.temperature, "top_k": 0, "top_p": 1.0}
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=ask.limit, eos_token_id=sorted(ask.eos) or None, pad_token_id=pad,
            **sampling, **self.options,
        )  # fmt: skip
        first = 1 if self.model.config.is_encoder_decoder else longest
        rows = out[:, first:].tolist()
        return Answer([row[: Stop(ask.eos).cut([], row)[0]] for row in rows])  # without padding
