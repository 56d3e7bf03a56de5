"""What makes a figure invalid. Every method is checked alike, our own too; a fault takes its cell out of the tables.

    answer      texts for all prompts, no token after the end, none too many, none missing, claims that add up
    repeated    a time that was reported before
    divergences at T = 0, and under `coupled` at any T, a text is plain decoding's, token for token
    uniforms    any lossless method's sampled tokens follow the target's law

The last is a test of all tokens at once. Take a token x drawn by a law p over the vocabulary, its tokens put in falling
order of p: u = P(tokens before x) + V p(x), with V uniform, is uniform on (0, 1) exactly if x follows p (a randomised
probability integral transform). A sampler that is too greedy gives small u too often, one that is too flat large ones.
Each token is judged by the law after its own text, so the u of a run are independent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from scipy import stats

from ..backends.torch.seq2seq import SeqTarget
from ..core.noise import GumbelNoise
from ..core.tree import chain
from ..llm import LLM
from ..proofs.divergence import Divergence, first_difference
from .types import Answer, Ask, Sample

SLACK = 1.02  # the clocks of a method and of the runner may differ by this factor, and by a millisecond
BINS = 20  # of the u's histogram
LEAST = 200  # tokens: fewer say nothing of a law
REFUSED = 1e-6  # the chance of an honest cell to be refused
TIE = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.bfloat16: 0.5,
    torch.float16: 0.1,
}  # margins that rounding may turn
RARE = 1000  # of so many tokens one may have more: bfloat16 rounds a few by a whole logit


def answer(given: Answer, ask: Ask, rows: int, vocab: int, remaining: Sequence[int], seconds: float) -> list[str]:
    """What is wrong with one answer. `room[i]` tokens fit into the context behind prompt i; `seconds` by our clock."""
    if len(given.tokens) != rows:
        return [f"answered {len(given.tokens)} of {rows} prompts"]
    found = []
    for i, tokens in enumerate(given.tokens):
        limit = min(ask.limit, remaining[i])
        ends = [k for k, token in enumerate(tokens) if token in ask.eos]
        if any(not 0 <= token < vocab for token in tokens):
            found.append("returned a token that the vocabulary does not have")
        if ends and ends[0] < len(tokens) - 1:
            found.append("returned tokens after the end of the text")
        elif len(tokens) > limit:
            found.append(f"returned {len(tokens)} tokens where {limit} were asked for")
        elif len(tokens) < limit and not ends:
            found.append(f"stopped after {len(tokens)} of {limit} tokens without an end of the text")
    for usage, tokens in zip(given.usages, given.tokens, strict=False):
        if usage.new_tokens != len(tokens):
            found.append(f"counts {usage.new_tokens} tokens where its text has {len(tokens)}")
        if usage.prefill_seconds + usage.decode_seconds > seconds * SLACK + 1e-3:
            found.append("reports more time than has passed")
    if given.prefill is not None and not 0 < given.prefill <= seconds * SLACK + 1e-3:
        found.append(f"says that the prompt took {given.prefill:.4f} s of {seconds:.4f} s")
    return list(dict.fromkeys(found))


def repeated(samples: Sequence[Sample]) -> list[str]:
    """Detect reused timings: times measured apart hardly ever agree to the last bit.

    A clock may be coarse, so one in ten may be equal.
    """
    told = [u.decode_seconds for s in samples for t in s.turns for u in t.usages[:1] if u.rounds > 1]
    again = len(told) - len(set(told))
    return ["reports times that it had reported before"] if again > max(1, len(told) // 10) else []


@torch.no_grad()
def divergence(
    llm: LLM, prompt: str, turn: int, ids: Sequence[int], mine: Sequence[int], plain: Sequence[int],
    temperature: float, seed: int,
) -> Divergence:  # fmt: skip
    """Where two texts after the same prompt part."""
    at = first_difference(mine, plain)
    a, b = (t[at] if at < len(t) else None for t in (mine, plain))
    margin = math.inf
    if all(token is not None and 0 <= token < llm.target.vocab for token in (a, b)):
        scores = logits(llm, ids, plain[: at + 1])[-1].double()
        if temperature > 0:
            place = at + (1 if seq2seq(llm) else len(ids))
            gumbel = GumbelNoise(llm.target.vocab, scores.device)
            scores = scores + temperature * gumbel.at([seed], [place])[0].double()
        margin = float(scores[b] - scores[a])
    return Divergence(prompt, at, margin, margin <= tie(llm), turn, a, b)


@torch.no_grad()
def own(llm: LLM, ids: Sequence[int], new: Sequence[int], temperature: float, seed: int) -> int:
    """Tokens of a plain text in whose place the target's own pass prefers another by more than rounding may turn."""
    scores = logits(llm, ids, new).double()
    if temperature > 0:
        first = 1 if seq2seq(llm) else len(ids)
        gumbel = GumbelNoise(llm.target.vocab, scores.device)
        noise = gumbel.at([seed] * len(new), range(first, first + len(new)))
        scores = scores + temperature * noise.double()
    mine = scores.gather(1, torch.tensor(list(new), device=scores.device)[:, None])[:, 0]
    return int((scores.max(1).values - mine > tie(llm)).sum())


def tie(llm: LLM) -> float:
    """The margins that rounding may turn."""
    kind = llm.target.dtype
    return TIE[kind]


def seq2seq(llm: LLM) -> bool:
    """Is the target an encoder-decoder?"""
    return isinstance(llm.target, SeqTarget)


def logits(llm: LLM, ids: Sequence[int], new: Sequence[int]) -> torch.Tensor:
    """[new, v]: what each new token was drawn from, by the stock model's own pass over prompt and text, if it has the
    same law."""
    target: Any = llm.target
    written = list(new[:-1])
    if not hasattr(target, "model") or getattr(target, "whole", False):  # by its own passes
        session = target.open(len(ids) + len(new) + 1)
        for chunk in session.prefill([list(ids)]):
            first = chunk.output.logits[0, -1:]
        rest = session.forward(chain([written])).logits[0] if written else first[:0]
        return torch.cat([first, rest]).float()
    device = target.device
    if seq2seq(llm):
        start = target.model.config.decoder_start_token_id
        out = target.model(
            input_ids=torch.tensor([list(ids)], device=device),
            decoder_input_ids=torch.tensor([[start, *written]], device=device),
        )
        return out.logits[0].float()
    text = torch.tensor([[*ids, *written]], device=device)
    some = {"logits_to_keep": len(new)} if "logits_to_keep" in target.accepts else {}
    return target.model(text, **some).logits[0, -len(new) :].float()


@torch.no_grad()
def uniforms(llm: LLM, ids: Sequence[int], new: Sequence[int], temperature: float, dice: random.Random) -> list[float]:
    """u of every new token; see above."""
    law = (logits(llm, ids, new).double() / temperature).softmax(-1)
    at = torch.tensor(list(new), device=law.device)[:, None]
    mine = law.gather(1, at)
    number = torch.arange(law.shape[1], device=law.device)
    before = (law > mine) | ((law == mine) & (number < at))
    below = (law * before).sum(1)
    return [a + dice.random() * p for a, p in zip(below.tolist(), mine[:, 0].tolist(), strict=True)]


def law_test(us: Sequence[float]) -> float | None:
    """The p-value of a test that these numbers are uniform on (0, 1); None of fewer than LEAST.

    The smaller p of a chi-square test over BINS and of a test of the mean, times two.
    """
    if len(us) < LEAST:
        return None
    counts = [0] * BINS
    for u in us:
        counts[min(BINS - 1, int(u * BINS))] += 1
    shape = float(stats.chisquare(counts).pvalue)
    mean = (sum(us) / len(us) - 0.5) * math.sqrt(12 * len(us))
    return min(1.0, 2 * min(shape, float(2 * stats.norm.sf(abs(mean)))))
