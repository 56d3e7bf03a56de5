"""What every stock model has as a target, whether its prompts go through a decoder or an encoder."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from functools import cached_property
from threading import RLock
from typing import Any

import torch

from ...core.protocols import Target
from ...core.types import Question, Verdict
from .turns import turn
from .verify import judge


class StockTarget(Target):
    """A stock model with a language-modelling head, in `eval` mode. Its config is the user's own again after each pass.

    Args:
        model: of transformers.
        config: of the layers that write text.
        layers: how many of them.
    """

    def __init__(self, model: Any, config: Any, layers: int):
        self.model, self.config, self.lock, self.tensors = model.eval(), config, RLock(), True
        self.vocab, self.layers = int(model.get_output_embeddings().weight.shape[0]), layers
        self.dtype: torch.dtype = model.dtype
        self.precision, self.device = str(model.dtype).removeprefix("torch."), str(model.device)
        self.mark = ""  # of the weights as they were loaded (`mark.py`)

    @cached_property
    def config_dict(self) -> dict[str, Any]:
        """The config of the layers that write text."""
        return self.config.to_dict()

    @property
    def signature(self) -> str:
        """A fingerprint of its weights."""
        seen = hashlib.sha256()
        for name, value in self.model.state_dict().items():
            seen.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            some = value.flatten()[:: max(1, value.numel() // 64)][:64]
            seen.update(some.float().cpu().numpy().tobytes())
        return seen.hexdigest()

    def turn(self) -> AbstractContextManager[None]:
        """One step of a batch, alone over this target (`turns.py`)."""
        return turn(self.lock, self.device)

    def release(self) -> None:
        """Give memory back that torch keeps for later."""
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def settle(self) -> None:
        """Wait for the device's queue."""
        if self.device != "cpu":
            torch.accelerator.synchronize(self.device)

    def judge(self, question: Question) -> Verdict | None:
        """Apply a rule on the device; None on a CPU."""
        return None if self.device == "cpu" else judge(question)
