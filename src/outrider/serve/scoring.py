"""The logprobs of a prompt's own tokens (`echo` with `logprobs`).

The prompt is scored as if a drafter had proposed it: as chains, by the target's pass over trees, which also verifies
generated text. So a token has the logprob that it would have if it had been generated. The text that follows is
independent: its prompt is prefilled again, or copied from the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..core.protocols import Target
from ..core.tree import chain
from ..params import NOT_FINITE
from .job import Scored, scored

STEP = 32  # tokens per pass, each with logits over the vocabulary


@dataclass(eq=False)
class Scoring:
    """A prompt's scores, computed by the first of its samples and shared by all."""

    prompt: Sequence[int]
    top: int  # number of alternatives per token
    scores: list[Scored] | None = None  # of all tokens but the first

    def read(self, target: Target) -> Iterator[None]:
        """Compute them; yields after each pass."""
        if self.scores is not None:
            return
        prompt, scores = self.prompt, list[Scored]()
        session = target.open(len(prompt) + STEP)
        for chunk in session.prefill([prompt[:1]]):
            logits = chunk.output.logits[0]
        while True:
            for token, at in zip(prompt[len(scores) + 1 :], logits, strict=False):
                scores.append(scored(token, at, self.top))
                if math.isnan(scores[-1].logprob):
                    raise ArithmeticError(NOT_FINITE)
            read = len(scores)
            if read == len(prompt) - 1:
                break
            yield
            line = list(prompt[read : min(read + STEP, len(prompt) - 1)])
            logits = session.forward(chain([line])).logits[0]
            session.keep([list(range(len(line)))])
        self.scores = scores
        yield
