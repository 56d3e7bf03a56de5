"""What makes a figure invalid. Every method is checked alike, our own too; a fault takes its cell out of the tables.

answer      texts for all prompts, nothing after the end of a text, no token too many or too few, consistent claims
repeated    a time that was reported before
divergence  at T = 0, and under `coupled` at any T, a text must be plain decoding's, token for token
own         plain decoding must write what the stock model's own pass chooses
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.protocols import Target
from ..core.tree import chain
from ..proofs.divergence import Divergence, first_difference
from .types import Answer, Ask, Sample

if TYPE_CHECKING:
    from ..llm import LLM

SLACK = 1.02  # the clocks of a method and of the runner may differ by this factor, and by a millisecond
TIE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}  # margins that rounding may reverse
RARE = 1000  # one token in so many may have a larger margin: bfloat16 rounds a few by a whole logit


def answer(given: Answer, ask: Ask, rows: int, vocab: int, remaining: Sequence[int], seconds: float) -> list[str]:
    """What is wrong with one answer.

    remaining: the tokens that fit into the context behind each prompt. seconds: the call's time by our clock.
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
            faults.append(f"returned {len(tokens)} tokens where {limit} were asked for")
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
    """Where two texts after the same prompt part."""
    at = first_difference(mine, plain)
    a, b = (t[at] if at < len(t) else None for t in (mine, plain))
    margin = math.inf
    if a is not None and b is not None and all(0 <= token < llm.target.vocab for token in (a, b)):
        scores = perturbed(llm, ids, plain[: at + 1], temperature, seed)[-1]
        margin = float(scores[b] - scores[a])
    return Divergence(prompt, at, margin, margin <= tie(llm), turn, a, b)


def own(llm: LLM, ids: Sequence[int], new: Sequence[int], temperature: float, seed: int) -> int:
    """Tokens of a plain text where the stock pass prefers another one by more than rounding explains."""
    scores = perturbed(llm, ids, new, temperature, seed)
    return int((scores.max(1) - scores[np.arange(len(new)), list(new)] > tie(llm)).sum())


def tie(llm: LLM) -> float:
    """The margins that rounding may reverse."""
    return TIE[llm.target.precision]


def seq2seq(llm: LLM) -> bool:
    """Whether the target is an encoder-decoder."""
    return llm.target.separate


def perturbed(llm: LLM, ids: Sequence[int], new: Sequence[int], temperature: float, seed: int) -> np.ndarray:
    """[new, v]: what plain decoding takes the largest of: logits, with the Gumbel noise of their positions at T > 0."""
    scores = logits(llm, ids, new)
    if temperature > 0:
        from ..core.noise import GumbelNoise

        first = 1 if seq2seq(llm) else len(ids)
        noise = GumbelNoise(llm.target.vocab).at([seed] * len(new), range(first, first + len(new)))
        scores = scores + temperature * np.asarray(noise, dtype=np.float64)
    return scores


def logits(llm: LLM, ids: Sequence[int], new: Sequence[int]) -> np.ndarray:
    """[new, v], float64: the logits of each new token, by the stock model's own pass over prompt and text.

    A target whose own passes are not the stock model's (quantised weights) makes them itself, and so does one that has
    no stock model here.
    """
    if find_spec("torch") is None or llm.target.integers or (model := llm.target.model) is None:
        return own_logits(llm.target, ids, new)
    import torch

    written = list(new[:-1])
    with torch.no_grad():
        if seq2seq(llm):
            decoder = torch.tensor([[model.config.decoder_start_token_id, *written]], device=model.device)
            inputs = torch.tensor([list(ids)], device=model.device)
            found = model(input_ids=inputs, decoder_input_ids=decoder).logits[0]
        else:
            text = torch.tensor([[*ids, *written]], device=model.device)
            some = {"logits_to_keep": len(new)} if "logits_to_keep" in signature(model.forward).parameters else {}
            found = model(text, **some).logits[0, -len(new) :]
    return np.asarray(found.double().cpu().numpy())


def own_logits(target: Target, ids: Sequence[int], new: Sequence[int]) -> np.ndarray:
    """The same by the target's own passes: the prompt, then the text as one chain."""
    session, written = target.open(len(ids) + len(new) + 1), list(new[:-1])
    with target.turn():
        for chunk in session.prefill([list(ids)]):
            found = [host(chunk.output.logits)[0, -1:]]
        if written:
            found.append(host(session.forward(chain([written])).logits)[0])
    return np.concatenate(found)


def host(logits: Any) -> np.ndarray:
    """Logits, an array or a tensor of another device, as a float64 array."""
    if isinstance(logits, np.ndarray):
        return logits.astype(np.float64)
    return np.asarray(logits.double().cpu().numpy())
