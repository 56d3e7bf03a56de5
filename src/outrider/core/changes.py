"""Biases and penalties of one row as arrays that grow with its text: what `sampling.penalise` computes from the full
text, incrementally, for the compiled walk (`backends/native/walk.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..params import Sampling

MORE = 64  # initial capacity in tokens, beyond those of the prompt


@dataclass
class Changes:
    """Of every token: how often the text has it since the prompt, the factor of repetition, and the bias."""

    sampling: Sampling
    ids: Any = field(default_factory=lambda: np.zeros(0, np.int64))
    said: Any = field(default_factory=lambda: np.zeros(0, np.float32))
    factors: Any = field(default_factory=lambda: np.zeros(0, np.float32))
    biases: Any = field(default_factory=lambda: np.zeros(0, np.float32))
    places: dict[int, int] = field(default_factory=dict)
    read: int = 0  # tokens of the text since the prompt

    @classmethod
    def of(cls, sampling: Sampling, prompt: Iterable[int]) -> Changes | None:
        """Those of a text that begins; None where nothing is changed."""
        if not sampling.penalised and not sampling.logit_bias:
            return None
        changes = cls(sampling)
        for token in sampling.logit_bias:
            changes._place(token, 1.0)
        for token in prompt if sampling.repetition_penalty != 1 else ():
            changes._place(token, sampling.repetition_penalty)
        return changes

    def upto(self, output: Sequence[int]) -> Changes:
        """Itself, with all that was written since the prompt."""
        for token in output[self.read :] if self.sampling.penalised else ():
            at = self._place(token, self.sampling.repetition_penalty)  # it may grow the arrays
            self.said[at] += 1
        self.read = len(output)
        return self

    def __len__(self) -> int:
        return len(self.places)

    def _place(self, token: int, factor: float) -> int:
        """Where a token's numbers are; its factor is this from now on."""
        at = self.places.setdefault(token, len(self.places))
        if at == len(self.ids):
            for name in ("ids", "said", "factors", "biases"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(max(MORE, len(old)), old.dtype)]))
        self.ids[at], self.factors[at] = token, factor
        self.biases[at] = self.sampling.logit_bias.get(token, 0.0)
        return at
