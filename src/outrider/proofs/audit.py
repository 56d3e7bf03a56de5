"""The losslessness audit of a target, a drafter and a rule, on the code that serves them.

    equality     seed for seed against an independent plain loop (stock model, stock cache, transformers' warpers), and
                 against the engine without a drafter
    exact        every branch of the rejection rules that serve this target, on tiny vocabularies, in float64
    statistics   many samples of two tokens against the target's exact distribution: a G-test, with its power

A statistical test cannot prove equality, but it has a smallest detectable deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from .. import drafters
from ..backends.torch import noise
from ..backends.torch.carrier import carrying
from ..budgets.budgeter import FixedBudget
from ..engine import Engine, Request, generate
from ..params import LOSSY, InputError, Sampling
from .divergence import Divergence, first_difference
from .enumeration import Exact, exact
from .samples import (
    SAMPLINGS,
    TOGETHER,
    Progress,
    Statistic,
    drafts,
    pairs,
    statistics,
    warpers,
)  # fmt: skip

LEAST_SAMPLES = 100
# Cost of a token of a compared text in passes over one token: plain twice, rounding, drafted in two batch sizes.
WORK = 5.0
EXACT = 1e-12


@dataclass(frozen=True)
class Plan:
    """The plan of an audit."""

    seconds: float  # estimated
    samples: int  # per statistical test
    tests: int


@dataclass(frozen=True)
class Equality:
    """Comparison of texts, decoded in batches with one sampling setting, with plain decoding."""

    sampling: Sampling
    batch: int  # rows decoded together
    texts: int
    tokens: int  # equal to plain decoding's
    noise: float  # largest difference of logits between passes over one and over several tokens, stock model
    divergences: tuple[Divergence, ...]
    own: int  # texts equal to the engine's without a drafter


@dataclass(frozen=True)
class Audit:
    """The result of an audit; `lossless` is its verdict."""

    model: str
    drafter: str
    rule: str
    seed: int
    equality: tuple[Equality, ...]
    exact: tuple[Exact, ...]
    statistics: tuple[Statistic, ...]
    lossless: bool
    sentence: str
    bits: bool = False  # whether the target promises the same bits with drafts as without


def label(sampling: Sampling) -> str:
    """A sampling setting as text, such as T=0.7 top-p 0.9."""
    return f"T={sampling.temperature:g}" + (f" top-p {sampling.top_p:g}" if sampling.top_p < 1 else "")


@torch.no_grad()
def audit(
    llm: Any,
    rule: str = "coupled",
    prompts: Sequence[Any] = (),
    samples: int = 1000,
    seed: int = 0,
    tokens: int = 48,
    progress: Progress = lambda part, done, of: None,
    minutes: float | None = None,
    say: Callable[[Plan], None] = lambda plan: None,
) -> Audit:
    """Run the audit.

    Args:
        llm: an `LLM` of a decoder-only model.
        rule: the rule that is audited.
        prompts: texts or messages; those of at least two tokens are used, the first two for samples.
        samples: per statistical test; `minutes` overrides it.
        seed: of texts and samples.
        tokens: length of the compared texts.
        progress: called with the part, the steps done, and all steps.
        minutes: time limit, which sets the number of samples, at least LEAST_SAMPLES.
        say: called with the plan.

    Raises:
        InputError: the model, the prompts or the number of samples do not allow an audit.
    """
    if llm.target.separate:
        raise InputError("the audit supports decoder-only models; name one")
    if llm.target.integers:
        raise InputError("the audit compares with the stock model, which has full weights; load the model with those")
    if samples < LEAST_SAMPLES:
        raise InputError(f"samples must be at least {LEAST_SAMPLES}, not {samples}")
    if minutes is not None and not 0 < minutes < math.inf:
        raise InputError(f"minutes must be above 0 and finite, not {minutes:g}")
    engine = llm.engine(rule, FixedBudget(16, 4))
    remaining = min(256, engine.target.context - tokens)
    ids = [prompt for p in llm.prompts(list(prompts)) if len(prompt := list(p)[-remaining:]) > 1]
    if remaining < 2 or not ids:
        raise InputError("the audit needs prompts of at least two tokens, and a context that holds them")
    found_plan = plan(engine, ids, samples, tokens, minutes)
    say(found_plan)
    samples = found_plan.samples
    same = equality(engine, ids, seed, tokens, progress)
    biases = exact(seed, tensors=engine.target.device != "cpu")
    stats = statistics(engine, [p[-64:] for p in ids[:2]], samples, seed, progress)
    bits = engine.target.exact == "bits"
    return judge(llm.name, llm.drafter_name, rule, seed, same, biases, stats, bits)


@torch.no_grad()
def plan(engine: Engine, prompts: Sequence[list[int]], samples: int, tokens: int, minutes: float | None) -> Plan:
    """The expected time of an audit, from a short trial of its parts; with `minutes`, the number of samples."""
    prompt, sampling = prompts[0][-64:], SAMPLINGS[-1]
    pairs(engine, prompt, sampling, range(8))  # warm-up
    began = perf_counter()
    pairs(engine, prompt, sampling, range(TOGETHER))
    batch = perf_counter() - began
    began = perf_counter()
    plain(engine.target.model, prompt, 0, sampling, 8)
    one = (perf_counter() - began) / 8
    samplings = len(SAMPLINGS) if engine.rule == "coupled" else 1
    texts = WORK * samplings * len(prompts) * tokens * one
    tests = len(drafts(engine)) * len(prompts[:2]) * sum(sampling.temperature > 0 for sampling in SAMPLINGS)
    if minutes is not None:
        samples = max(LEAST_SAMPLES, int((60 * minutes - texts) / batch / tests * TOGETHER))
    return Plan(texts + tests * -(-samples // TOGETHER) * batch, samples, tests)


def judge(
    model: str,
    drafter: str,
    rule: str,
    seed: int,
    same: tuple[Equality, ...],
    exact: tuple[Exact, ...],
    stats: tuple[Statistic, ...],
    bits: bool = False,
) -> Audit:
    """The verdict with its sentence. bits: the target promises the same bits with drafts as without."""
    differ = [e for e in same if not all(d.within for d in e.divergences)]
    biased = [x for x in exact if x.counts(rule) and x.tv >= EXACT]
    deviant = [s for s in stats if s.rejected]
    worst = max((s.detectable for s in stats if s.cells > 1), default=1.0)  # one cell tests nothing
    texts = sum(e.texts for e in same)
    changed = texts - sum(e.own for e in same) if bits else 0
    lossless = rule not in LOSSY and not (differ or biased or deviant or changed)
    seen = (
        [f"{sum(not d.within for e in differ for d in e.divergences)} texts differ from plain decoding beyond rounding"]
        if differ
        else []
    )
    seen += [f"{changed} texts differ from the engine's own without a drafter"] if changed else []
    seen += (
        [f"its distribution is off by a total variation of {max(x.tv for x in biased):.2g} on a tiny model"]
        if biased
        else []
    )
    seen += [f"{len(deviant)} of {len(stats)} tests deviate (TV {max(s.tv for s in deviant):.2g})"] if deviant else []
    who = f"{drafter} under {rule} on {model}"
    near = sum(len(e.divergences) for e in same)
    if rule in LOSSY:
        sentence = f"{who}: LOSSY by design; {' and '.join(seen) or 'this audit was too small to see it'}."
    elif not lossless:
        sentence = f"{who}: NOT lossless; {' and '.join(seen)}."
    else:
        equal = "bit equality is not promised here (outrider validate); "
        if bits:
            equal = f"all {texts} texts are the engine's own without a drafter, bit for bit; "
        equal += f"{sum(e.tokens for e in same)} tokens equal the stock model's plain decoding seed for seed"
        equal += f", {near} texts differ from it within rounding" if near else ""
        sentence = f"{who}: lossless; {equal}, and no deviation above TV {worst:.2g} was detected at 99 % power."
    return Audit(model, drafter, rule, seed, same, exact, stats, lossless, sentence, bits)


# --- seed for seed


def equality(
    engine: Engine, prompts: Sequence[list[int]], seed: int, tokens: int, progress: Progress = lambda *_: None
) -> tuple[Equality, ...]:
    """Compare the engine's texts with plain decoding, by stock code and by its own. Rules other than `coupled` give the
    same text only at T = 0."""
    samplings, out = SAMPLINGS if engine.rule == "coupled" else SAMPLINGS[:1], []
    model, batches = engine.target.model, sorted({1, min(len(prompts), max(2, len(prompts) - 1))})
    alone = replace(engine, drafter=drafters.load("none", engine.target))
    for i, sampling in enumerate(samplings):
        requests = [Request(p, seed + k, tokens, sampling) for k, p in enumerate(prompts)]
        own = _written(alone, requests, 1)
        texts = [plain(model, p, seed + j, sampling, tokens) for j, p in enumerate(prompts)]
        rounding = max(_rounding(model, [*p, *t], len(p)) for p, t in zip(prompts, texts, strict=True))
        for j, batch in enumerate(batches):
            written, apart, equal = _written(engine, requests, batch), [], 0
            for k, (prompt, text, ours) in enumerate(zip(prompts, texts, written, strict=True)):
                at = first_difference(text, ours)
                equal += at
                if text != ours:
                    pair = (text[at], ours[at]) if at < min(len(text), len(ours)) else (0, 0)
                    gap = _margin(model, [*prompt, *text[:at]], seed + k, sampling, *pair)
                    within = pair[0] != pair[1] and gap <= 4 * rounding
                    apart.append(Divergence(str(k + 1), at, gap, within))
            kept = sum(ours == mine for ours, mine in zip(written, own, strict=True))
            out.append(Equality(sampling, batch, len(prompts), equal, rounding, tuple(apart), kept))
            progress("equality", i * len(batches) + j + 1, len(samplings) * len(batches))
    return tuple(out)


def _written(engine: Engine, requests: Sequence[Request], batch: int) -> list[list[int]]:
    """The engine's texts at a batch size."""
    rows = {piece.row.index: piece.row for piece in generate(engine, requests, batch)}
    return [rows[k].output for k in range(len(requests))]


def plain(model: Any, prompt: list[int], seed: int, sampling: Sampling, tokens: int) -> list[int]:
    """Plain decoding, independent of the engine: stock cache, one token at a time."""
    ids, cache = torch.tensor([prompt], device=model.device), DynamicCache(config=model.config)
    fed, out = ids, list[int]()
    while len(out) < tokens:
        logits = model(fed, **carrying(model, cache)).logits[:, -1]
        out.append(int(_raced(ids, logits, seed, sampling).argmax(-1)))
        fed = torch.tensor([[out[-1]]], device=model.device)
        ids = torch.cat([ids, fed], 1)
    return out


def _raced(
    ids: Int[Tensor, "1 n"], logits: Float[Tensor, "1 v"], seed: int, sampling: Sampling
) -> Float[Tensor, "1 v"]:
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0:
        return scores
    tokens = torch.arange(scores.shape[1], device=scores.device)
    return warpers(sampling)(ids, scores) + noise.gumbels([seed], [ids.shape[1]], tokens)


def _margin(model: Any, text: list[int], seed: int, sampling: Sampling, ours: int, theirs: int) -> float:
    """The logit margin of plain decoding's token over the engine's; at the nucleus' edge, the distance to it."""
    ids = torch.tensor([text], device=model.device)
    logits = model(ids).logits[:, -1]
    scores, heat = _raced(ids, logits, seed, sampling)[0], sampling.temperature or 1.0
    gap = float(scores[ours] - scores[theirs]) * heat
    if sampling.top_p < 1:
        # A probability mass changes by at most e / (2 T) when no logit changes by more than e.
        p = (logits[0].double() / heat).softmax(-1)
        edges = [abs(float(p[p <= p[x]].sum()) - (1 - sampling.top_p)) for x in (ours, theirs)]
        gap = min(gap, 4 * heat * min(edges))
    return gap


def _rounding(model: Any, text: list[int], first: int) -> float:
    """The largest difference of logits between passes over one and over several tokens; at least the precision."""
    ids, logits = torch.tensor([text], device=model.device), []
    for width in (1, 4, len(text)):
        cache, parts = DynamicCache(config=model.config), []
        for i in [0, *range(first, len(text), width)]:
            end = first if i == 0 else i + width
            parts.append(model(ids[:, i:end], **carrying(model, cache)).logits[0, -1 if i == 0 else 0 :])
        logits.append(torch.cat(parts)[: len(text) - first].double())
    least = torch.finfo(torch.promote_types(model.dtype, torch.float32)).eps * float(logits[0].abs().max()) * 4
    return max(least, *(float((x - logits[0]).abs().max()) for x in logits[1:]))
