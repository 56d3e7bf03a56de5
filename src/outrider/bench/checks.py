"""Faults that make a cell invalid. Every method is checked alike, our own too.

answer      texts for all prompts, nothing after the end of a text, the right number of tokens, consistent times
repeated    hardly any time occurs twice
divergence  at T = 0, and under `coupled` at any T, a text must be plain decoding's, token for token
own         plain decoding must choose what the stock model's forward chooses; without one, what a single pass chooses
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..proofs.divergence import Divergence, first_difference
from ..proofs.logits import perturbed
from .types import Answer, Ask, Sample

if TYPE_CHECKING:
    from ..llm import LLM

SLACK = 1.02  # factor by which the clocks of a method and of the runner may differ, besides a millisecond
TIE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}  # logit margins that rounding may reverse
RARE = 1000  # one token in 1000 may have a larger margin: bfloat16 rounds a few by a full logit


def answer(given: Answer, ask: Ask, rows: int, vocab: int, remaining: Sequence[int], seconds: float) -> list[str]:
    """The faults of one answer.

    remaining: number of tokens that fit into the context after each prompt. seconds: the call's time by our clock.
    """
    if len(given.tokens) != rows:
        return [f"answered {len(given.tokens)} of {rows} prompts"]
    faults = []
    for i, tokens in enumerate(given.tokens):
        limit = min(ask.limit, remaining[i])
        ends = [k for k, token in enumerate(tokens) if token in ask.eos]
        if any(not 0 <= token < vocab for token in tokens):
            faults.append("returned a token that the vocabulary does not have")
        if ends and ends[0] < len(tokens) - 1:
            faults.append("returned tokens after the end of the text")
        elif len(tokens) > limit:
            faults.append(f"returned {len(tokens)} tokens where the limit is {limit}")
        elif len(tokens) < limit and not ends:
            faults.append(f"stopped after {len(tokens)} of {limit} tokens without an end of the text")
    for usage, tokens in zip(given.usages, given.tokens, strict=False):
        if usage.new_tokens != len(tokens):
            faults.append(f"counts {usage.new_tokens} tokens where its text has {len(tokens)}")
        if usage.prefill_seconds + usage.decode_seconds > seconds * SLACK + 1e-3:
            faults.append("reports more time than has passed")
    if given.prefill is not None and not 0 < given.prefill <= seconds * SLACK + 1e-3:
        faults.append(f"says that the prompt took {given.prefill:.4f} s of {seconds:.4f} s")
    return list(dict.fromkeys(faults))


def repeated(samples: Sequence[Sample]) -> list[str]:
    """Detect reused timings: times measured apart hardly ever agree to the last bit (a coarse clock: a tenth may)."""
    times = [u.decode_seconds for s in samples for t in s.turns for u in t.usages[:1] if u.rounds > 1]
    again = len(times) - len(set(times))
    return ["reports times that it had reported before"] if again > max(1, len(times) // 10) else []


def divergence(
    llm: LLM, prompt: str, turn: int, ids: Sequence[int], mine: Sequence[int], plain: Sequence[int],
    temperature: float, seed: int,
) -> Divergence:  # fmt: skip
    """The first difference of two texts after the same prompt."""
    at = first_difference(mine, plain)
    a, b = (t[at] if at < len(t) else None for t in (mine, plain))
    margin = None
    if a is not None and b is not None and all(0 <= token < llm.target.vocab for token in (a, b)):
        scores = perturbed(llm, ids, plain[: at + 1], temperature, seed)[-1]
        margin = float(scores[b] - scores[a])
    return Divergence(prompt, at, margin, margin is not None and margin <= TIE[llm.target.precision], turn, a, b)


def own(llm: LLM, ids: Sequence[int], new: Sequence[int], temperature: float, seed: int) -> int:
    """The number of tokens of a plain text where `proofs.logits` prefer another by more than rounding explains."""
    scores = perturbed(llm, ids, new, temperature, seed)
    return int((scores.max(1) - scores[np.arange(len(new)), list(new)] > TIE[llm.target.precision]).sum())
