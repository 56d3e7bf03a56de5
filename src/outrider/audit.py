"""The losslessness audit of a target, a drafter and a rule, on the code that serves them.

    equality     seed for seed against a plain loop of its own: stock model, stock cache, transformers' warpers
    exact        every branch of the rejection rules' own functions on tiny vocabularies, in float64
    statistics   many samples of two tokens against the target's exact law: a G-test, with the power it had

A statistical test cannot prove equality; it can say how large a deviation it would have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from . import noise
from .branches import Exact, exact
from .budget import FixedBudget
from .engine import Batch, Engine, Request, Row, generate
from .gtest import detectable, g_test, holm
from .types import LOSSY, InputError, Sampling

LAWS = (Sampling(0.0), Sampling(0.7), Sampling(1.0), Sampling(1.0, top_p=0.9))
ALPHA, POWER = 1e-3, 0.99  # of the whole family; at which the smallest detectable deviation is reported
LEAST, CELLS = 5.0, 32  # a cell's expectation; cells at most
TOGETHER = 128  # samples drawn at a time
EXACT = 1e-12
Progress = Callable[[str, int, int], None]  # (part, done, of)


@dataclass(frozen=True)
class Divergence:
    """The first token of a text that differs, and how near the target was to choosing it."""

    prompt: int
    position: int  # tokens written before it
    margin: float  # logits by which plain decoding preferred its own token
    within: bool  # explained by rounding


@dataclass(frozen=True)
class Equality:
    law: Sampling
    batch: int  # rows decoded together
    texts: int
    tokens: int  # equal ones
    noise: float  # largest difference of logits between passes over one and over several tokens, in stock code
    divergences: tuple[Divergence, ...]


@dataclass(frozen=True)
class Statistic:
    """A G-test of pairs of tokens. `tv` is the distance seen over the cells, chance included."""

    prompt: int
    law: Sampling
    draft: str
    samples: int
    cells: int
    g: float
    p: float
    tv: float
    detectable: float  # the smallest TV over these cells that is found with 99 % power
    rejected: bool = False  # by Holm's procedure over all tests


@dataclass(frozen=True)
class Audit:
    model: str
    drafter: str
    rule: str
    seed: int
    equality: tuple[Equality, ...]
    exact: tuple[Exact, ...]
    statistics: tuple[Statistic, ...]
    lossless: bool
    sentence: str


def label(law: Sampling) -> str:
    return f"T={law.temperature:g}" + (f" top-p {law.top_p:g}" if law.top_p < 1 else "")


@torch.no_grad()
def audit(
    llm: Any,
    rule: str = "coupled",
    prompts: Sequence[Any] = (),
    samples: int = 1000,
    seed: int = 0,
    tokens: int = 48,
    progress: Progress = lambda part, done, of: None,
) -> Audit:
    """The whole audit. Texts of `tokens` tokens are compared; `samples` are drawn for each of the first two prompts."""
    if not hasattr(llm.target, "model") or llm.target.model.config.is_encoder_decoder:
        raise InputError("the audit knows decoder-only models; name one")
    if samples < 100:
        raise InputError(f"samples must be at least 100, not {samples}")
    engine = llm.engine(rule, FixedBudget(16, 4))
    room = min(256, engine.target.context - tokens)
    ids = [prompt for p in llm.prompts(list(prompts)) if len(prompt := list(p)[-room:]) > 1]
    if room < 2 or not ids:
        raise InputError("the audit needs prompts of at least two tokens, and a context with room for them")
    same = equality(engine, ids, seed, tokens, progress)
    found = exact(seed)
    stats = statistics(engine, [p[-64:] for p in ids[:2]], samples, seed, progress)
    return judge(llm.name, llm.drafter_name, rule, seed, same, found, stats)


def judge(
    model: str,
    drafter: str,
    rule: str,
    seed: int,
    same: tuple[Equality, ...],
    found: tuple[Exact, ...],
    stats: tuple[Statistic, ...],
) -> Audit:
    """The verdict, in one sentence."""
    differ = [e for e in same if not all(d.within for d in e.divergences)]
    biased = [x for x in found if x.counts(rule) and x.tv >= EXACT]
    deviant = [s for s in stats if s.rejected]
    worst = max((s.detectable for s in stats if s.cells > 1), default=1.0)  # one cell tests nothing
    lossless = rule not in LOSSY and not (differ or biased or deviant)
    seen = (
        [f"{sum(len(e.divergences) for e in differ)} texts differ from plain decoding beyond rounding"]
        if differ
        else []
    )
    seen += (
        [f"its law is off by a total variation of {max(x.tv for x in biased):.2g} on a tiny model"] if biased else []
    )
    seen += [f"{len(deviant)} of {len(stats)} samples deviate (TV {max(s.tv for s in deviant):.2g})"] if deviant else []
    who = f"{drafter} under {rule} on {model}"
    near = sum(len(e.divergences) for e in same)
    if rule in LOSSY:
        sentence = f"{who}: LOSSY by design; {' and '.join(seen) or 'this audit was too small to see it'}."
    elif not lossless:
        sentence = f"{who}: NOT lossless; {' and '.join(seen)}."
    else:
        equal = f"{sum(e.tokens for e in same)} tokens equal plain decoding seed for seed"
        equal += f", {near} texts part from it within rounding" if near else ""
        sentence = f"{who}: lossless; {equal}, and no deviation above TV {worst:.2g} was found at 99 % power."
    return Audit(model, drafter, rule, seed, same, found, stats, lossless, sentence)


# --- seed for seed


def equality(
    engine: Engine, prompts: Sequence[list[int]], seed: int, tokens: int, progress: Progress = lambda *_: None
) -> tuple[Equality, ...]:
    """The engine's texts beside plain decoding's. Rules other than `coupled` have the same text at T = 0 alone."""
    laws, out = LAWS if engine.rule == "coupled" else LAWS[:1], []
    model, batches = engine.target.model, sorted({1, min(len(prompts), max(2, len(prompts) - 1))})  # type: ignore[attr-defined]
    for i, law in enumerate(laws):
        texts = [plain(model, p, seed + j, law, tokens) for j, p in enumerate(prompts)]
        rounding = max(_rounding(model, [*p, *t], len(p)) for p, t in zip(prompts, texts, strict=True))
        for j, batch in enumerate(batches):
            rows: dict[int, Row] = {}
            requests = [Request(p, seed + k, tokens, law) for k, p in enumerate(prompts)]
            for piece in generate(engine, requests, batch):
                rows[piece.row.index] = piece.row
            apart, equal = [], 0
            for k, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
                ours = rows[k].output
                at = next(
                    (n for n, (a, b) in enumerate(zip(text, ours, strict=False)) if a != b), min(len(text), len(ours))
                )
                equal += at
                if text != ours:
                    pair = (text[at], ours[at]) if at < min(len(text), len(ours)) else (0, 0)
                    gap = _margin(model, [*prompt, *text[:at]], seed + k, law, *pair)
                    within = pair[0] != pair[1] and gap <= 4 * rounding
                    apart.append(Divergence(k, at, gap, within))
            out.append(Equality(law, batch, len(prompts), equal, rounding, tuple(apart)))
            progress("equality", i * len(batches) + j + 1, len(laws) * len(batches))
    return tuple(out)


def warpers(law: Sampling) -> Any:
    """Transformers' own form of a law with temperature and top-p."""
    found = [TemperatureLogitsWarper(law.temperature)] if law.temperature not in (0, 1) else []
    return LogitsProcessorList([*found, *([TopPLogitsWarper(law.top_p)] if law.top_p < 1 else [])])


def plain(model: Any, prompt: list[int], seed: int, law: Sampling, tokens: int) -> list[int]:
    """Plain decoding, independent of the engine: stock cache, one token at a time."""
    ids, cache = torch.tensor([prompt], device=model.device), DynamicCache(config=model.config)
    fed, out = ids, list[int]()
    while len(out) < tokens:
        logits = model(fed, past_key_values=cache, use_cache=True).logits[:, -1]
        out.append(int(_raced(ids, logits, seed, law).argmax(-1)))
        fed = torch.tensor([[out[-1]]], device=model.device)
        ids = torch.cat([ids, fed], 1)
    return out


def _raced(ids: Int[Tensor, "1 n"], logits: Float[Tensor, "1 v"], seed: int, law: Sampling) -> Float[Tensor, "1 v"]:
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if law.temperature == 0:
        return scores
    tokens = torch.arange(scores.shape[1], device=scores.device)
    return warpers(law)(ids, scores) + noise.gumbels([seed], [ids.shape[1]], tokens)


def _margin(model: Any, text: list[int], seed: int, law: Sampling, ours: int, theirs: int) -> float:
    """By how many logits plain decoding preferred its token to the engine's; at the nucleus' edge, how near it was."""
    ids = torch.tensor([text], device=model.device)
    logits = model(ids).logits[:, -1]
    scores, heat = _raced(ids, logits, seed, law)[0], law.temperature or 1.0
    gap = float(scores[ours] - scores[theirs]) * heat
    if law.top_p < 1:
        # A mass near top_p moves by at most e / (2 T) when no logit moves by more than e.
        p = (logits[0].double() / heat).softmax(-1)
        edges = [abs(float(p[p <= p[x]].sum()) - (1 - law.top_p)) for x in (ours, theirs)]
        gap = min(gap, 4 * heat * min(edges))
    return gap


def _rounding(model: Any, text: list[int], first: int) -> float:
    """The largest difference of logits between passes over one and over several tokens; never below the precision."""
    ids, found = torch.tensor([text], device=model.device), []
    for width in (1, 4, len(text)):
        cache, parts = DynamicCache(config=model.config), []
        for i in [0, *range(first, len(text), width)]:
            end = first if i == 0 else i + width
            parts.append(model(ids[:, i:end], past_key_values=cache, use_cache=True).logits[0, -1 if i == 0 else 0 :])
        found.append(torch.cat(parts)[: len(text) - first].double())
    least = torch.finfo(torch.promote_types(model.dtype, torch.float32)).eps * float(found[0].abs().max()) * 4
    return max(least, *(float((x - found[0]).abs().max()) for x in found[1:]))


# --- many samples


def statistics(
    engine: Engine, prompts: Sequence[list[int]], samples: int, seed: int, progress: Progress = lambda *_: None
) -> tuple[Statistic, ...]:
    """Pairs of tokens drawn by the rule, against the target's law; a test for each prompt, law and kind of draft."""
    hot = [law for law in LAWS if law.temperature > 0]
    plans = [(i, law, draft, shape) for draft, shape in _drafts(engine) for i in range(len(prompts)) for law in hot]
    out = []
    for n, (i, law, draft, shape) in enumerate(plans):
        chosen = replace(engine, budget=FixedBudget(16, 4, shape))
        cells = exact_cells(engine.target.model, prompts[i], law, samples)  # type: ignore[attr-defined]
        counts = torch.zeros(len(cells.law), dtype=torch.float64)
        for first in range(0, samples, TOGETHER):
            number = min(TOGETHER, samples - first)
            begin = (seed * len(plans) + n) * samples + first  # no seed serves twice
            for pair in pairs(chosen, prompts[i], law, range(begin, begin + number)):
                counts[cells.of(*pair)] += 1
            progress("samples", n * samples + first + number, len(plans) * samples)
        g, p = g_test(counts, cells.law)
        tv = float((counts / samples - cells.law).abs().sum()) / 2
        power = detectable(samples, len(counts), ALPHA / len(plans), POWER)
        out.append(Statistic(i, law, draft, samples, len(counts), g, p, tv, power))
    rejected = holm([s.p for s in out], ALPHA)
    return tuple(replace(s, rejected=r) for s, r in zip(out, rejected, strict=True))


def _drafts(engine: Engine) -> list[tuple[str, tuple[int, ...] | None]]:
    """The drafter's own way; under the rejection rules also sampled drafts, of a drafter that can make them."""
    own: list[tuple[str, tuple[int, ...] | None]] = [("own", None)]
    if engine.rule in ("rejection", "block") and hasattr(engine.drafter, "growth"):
        own += [("sampled chain", (1, 1, 1))] if engine.rule == "block" else [("sampled tree", (2, 2))]
    return own


@dataclass(frozen=True)
class Cells:
    """A partition of the pairs of tokens. Pairs not named belong to their first token's cell, or to the last."""

    law: Float64[Tensor, " k"]
    index: dict[tuple[int, ...], int]

    def of(self, first: int, second: int) -> int:
        return self.index.get((first, second), self.index.get((first,), len(self.law) - 1))


def exact_cells(model: Any, prompt: list[int], law: Sampling, samples: int) -> Cells:
    """The target's own p(x1) p(x2 | x1), from the stock model; at most CELLS cells, each expected LEAST times."""
    ids = torch.tensor([prompt], device=model.device)
    first = _law(ids, model(ids).logits[:, -1], law)[0]
    likely = [x for x in first.topk(min(CELLS, len(first))).indices.tolist() if samples * float(first[x]) >= LEAST]
    named: list[tuple[float, tuple[int, ...]]] = []
    for some in (likely[i : i + 8] for i in range(0, len(likely), 8)):
        longer = torch.tensor([[*prompt, x] for x in some], device=model.device)
        for x, second in zip(some, _law(longer, model(longer).logits[:, -1], law), strict=True):
            top = second.topk(min(CELLS, len(second)))
            named += [
                (float(first[x]) * p, (x, y)) for p, y in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
    named = sorted((c for c in named if samples * c[0] >= LEAST), reverse=True)[: CELLS * 3 // 4]
    rests = {x: float(first[x]) - sum(p for p, pair in named if pair[0] == x) for x in likely}
    several = sorted(((p, (x,)) for x, p in rests.items() if samples * p >= LEAST), reverse=True)
    named = [*named, *several[: CELLS - 1 - len(named)]]
    rest = max(0.0, 1 - sum(p for p, _ in named))
    index = {key: i for i, (_, key) in enumerate(named)}
    masses = [p for p, _ in named]
    if samples * rest < LEAST and named:  # the rest joins the least of the cells
        least = min(range(len(masses)), key=masses.__getitem__)
        masses.append(masses.pop(least) + rest)
        index = {key: len(named) - 1 if i == least else i - (i > least) for key, i in index.items()}
    else:
        masses.append(rest)
    weights = torch.tensor(masses, dtype=torch.float64)
    return Cells(weights / weights.sum(), index)


def _law(ids: Int[Tensor, "b n"], logits: Float[Tensor, "b v"], law: Sampling) -> Float64[Tensor, "b v"]:
    return warpers(law)(ids, logits.double()).softmax(-1).cpu()


def pairs(engine: Engine, prompt: list[int], law: Sampling, seeds: Sequence[int]) -> list[tuple[int, int]]:
    """The two tokens after a prompt, for many seeds, by the engine's own rounds.

    A prompt's first token is drawn by the race whatever the rule. So all but its last token are read, once for all
    seeds, and the last is made that first token; what follows is the rule's.
    """
    forced = Sampling(0.0, logit_bias={prompt[-1]: 1e9})
    one = Row(Request(prompt[:-1], seeds[0], 16, forced), 0)
    batch = Batch.start(engine, [one])[0]
    assert batch is not None
    assert one.output == prompt[-1:]
    same = [0] * len(seeds)
    batch.session.select(same)
    batch.drafting.select(same)
    batch.root = batch.root[same]
    batch.rows = [Row(Request(prompt[:-1], s, 16, law), i, list(one.output), one.length) for i, s in enumerate(seeds)]
    rows, running = list(batch.rows), batch
    while running is not None:
        running.round()
        for row in running.rows:
            row.finish = "length" if len(row.output) > 2 else None
        running = running.leave()  # type: ignore[assignment]
    return [(row.output[1], row.output[2]) for row in rows]
