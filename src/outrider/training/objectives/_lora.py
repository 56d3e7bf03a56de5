"""A low-rank adapter in the target's layers (Hu et al. 2021), by peft, for Medusa-2."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ...backends.torch import HFTarget
from ...backends.torch.load import save_pretrained, save_tokenizer
from ...params import InputError


class Adapter:
    """W + (alpha / rank) B A in every linear layer but the LM head, initially B = 0."""

    def __init__(self, target: HFTarget, rank: int = 32, alpha: int = 16):
        if rank < 1 or alpha <= 0:
            raise InputError("the adapter's rank and alpha must be positive")
        try:
            import peft
        except ImportError:
            raise InputError("training the target's adapter needs peft; install it with pip install peft") from None
        target.model.requires_grad_(False)
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        self.inside: Any = peft.LoraModel(target.model, config, "default")  # changes the target's modules in place
        self.parameters: list[nn.Parameter] = [p for p in target.model.parameters() if p.requires_grad]

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context with the original target."""
        self.inside.disable_adapter_layers()
        try:
            yield
        finally:
            self.inside.enable_adapter_layers()

    def merge(self, folder: str | Path, label: str) -> None:
        """Save the changed target as a plain model; `label` goes into its config."""
        model = copy.deepcopy(self.inside).merge_and_unload()
        model.config.outrider_changed = label
        save_pretrained(model, folder)
        save_tokenizer(self.inside.model, folder)
