"""The logprobs of a prompt's own tokens (`echo` with `logprobs`).

The prompt is read for them as if a drafter had guessed it: as chains, by the target's pass over trees, which is the
pass that judges what is written. So a token has the logprob that it would have if it had been written. The text that
follows knows nothing of it: its prompt is read once more, or copied where a text began like it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..core.protocols import Target
from ..core.tree import chain_of
from ..params import NOT_FINITE
from .job import Scored, scored

STEP = 32  # tokens of a pass, each with logits for the whole vocabulary


@dataclass(eq=False)
class Scoring:
    """A prompt's scores. Its samples share them: the first one that is read makes them."""

    prompt: Sequence[int]
    top: int  # alternatives that are wanted beside each token
    scores: list[Scored] | None = None  # of all tokens but the first, before which nothing stands

    def read(self, target: Target) -> Iterator[None]:
        """Make them, with a pause after each pass."""
        if self.scores is not None:
            return
        prompt, found = self.prompt, list[Scored]()
        session = target.open(len(prompt) + STEP)
        for chunk in session.prefill([prompt[:1]]):
            logits = chunk.output.logits[0]
        while True:
            for token, at in zip(prompt[len(found) + 1 :], logits, strict=False):
                found.append(scored(token, at, self.top))
                if math.isnan(found[-1].logprob):
                    raise ArithmeticError(NOT_FINITE)
            read = len(found)
            if read == len(prompt) - 1:
                break
            yield
            line = torch.tensor([list(prompt[read : min(read + STEP, len(prompt) - 1)])], device=target.device)
            count = torch.tensor([line.shape[1]], device=target.device)
            logits = session.forward(chain_of(line, count)).logits[0]
            session.keep(torch.arange(line.shape[1], device=target.device)[None], count)
        self.scores = found
        yield
