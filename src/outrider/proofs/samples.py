"""Many samples of two tokens by the engine's rounds against the target's exact distribution: a G-test with its
power."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from ..budgets.budgeter import FixedBudget
from ..engine import Batch, Engine, Request, Row
from ..params import NOT_FINITE, InputError, Sampling
from .gtest import detectable, g_test, holm

SAMPLINGS = (Sampling(0.0), Sampling(0.7), Sampling(1.0), Sampling(1.0, top_p=0.9))
ALPHA, POWER = 1e-3, 0.99  # familywise; of the reported detectable deviation
LEAST, CELLS = 5.0, 32  # minimum expected count of a cell; maximum number of cells
TOGETHER = 128  # batch size of samples
Progress = Callable[[str, int, int], None]  # (part, done, of)


@dataclass(frozen=True)
class Statistic:
    """A G-test of pairs of tokens. tv: the observed distance over the cells, including chance."""

    prompt: int
    sampling: Sampling
    draft: str
    samples: int
    cells: int
    g: float
    p: float
    tv: float
    detectable: float  # the smallest TV over these cells that is detected with 99 % power
    rejected: bool = False  # by Holm's procedure over all tests


def warpers(sampling: Sampling) -> Any:
    """Transformers' warpers for a temperature and top-p."""
    temperature = [TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature not in (0, 1) else []
    return LogitsProcessorList([*temperature, *([TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else [])])


def statistics(
    engine: Engine, prompts: Sequence[list[int]], samples: int, seed: int, progress: Progress = lambda *_: None
) -> tuple[Statistic, ...]:
    """Test pairs of tokens sampled by the rule, for each prompt, sampling setting and kind of draft."""
    hot = [sampling for sampling in SAMPLINGS if sampling.temperature > 0]
    plans = [
        (i, sampling, draft, shape) for draft, shape in drafts(engine) for i in range(len(prompts)) for sampling in hot
    ]
    out = []
    for n, (i, sampling, draft, shape) in enumerate(plans):
        chosen = replace(engine, budget=FixedBudget(16, 4, shape))
        cells = exact_cells(engine.target.model, prompts[i], sampling, samples)
        counts = torch.zeros(len(cells.expected), dtype=torch.float64)
        for first in range(0, samples, TOGETHER):
            number = min(TOGETHER, samples - first)
            begin = (seed * len(plans) + n) * samples + first  # seeds are used once
            for pair in pairs(chosen, prompts[i], sampling, range(begin, begin + number)):
                counts[cells.of(*pair)] += 1
            progress("samples", n * samples + first + number, len(plans) * samples)
        g, p = g_test(counts, cells.expected)
        tv = float((counts / samples - cells.expected).abs().sum()) / 2
        power = detectable(samples, len(counts), ALPHA / len(plans), POWER)
        out.append(Statistic(i, sampling, draft, samples, len(counts), g, p, tv, power))
    rejected = holm([s.p for s in out], ALPHA)
    return tuple(replace(s, rejected=r) for s, r in zip(out, rejected, strict=True))


def drafts(engine: Engine) -> list[tuple[str, tuple[int, ...] | None]]:
    """The drafter's default drafts; under the rejection rules also sampled ones, if it supports them."""
    own: list[tuple[str, tuple[int, ...] | None]] = [("own", None)]
    if engine.rule in ("rejection", "block") and engine.drafter.uncalibrated.samples:
        own += [("sampled chain", (1, 1, 1))] if engine.rule == "block" else [("sampled tree", (2, 2))]
    return own


@dataclass(frozen=True)
class Cells:
    """A partition of the pairs of tokens. Unnamed pairs are in their first token's cell, or in the last."""

    expected: Float64[Tensor, " k"]
    index: dict[tuple[int, ...], int]

    def of(self, first: int, second: int) -> int:
        return self.index.get((first, second), self.index.get((first,), len(self.expected) - 1))


def exact_cells(model: Any, prompt: list[int], sampling: Sampling, samples: int) -> Cells:
    """p(x1) p(x2 | x1) by the stock model, in at most CELLS cells with expected counts of at least LEAST."""
    ids = torch.tensor([prompt], device=model.device)
    first = _distribution(ids, model(ids).logits[:, -1], sampling)[0]
    likely = [x for x in first.topk(min(CELLS, len(first))).indices.tolist() if samples * float(first[x]) >= LEAST]
    named: list[tuple[float, tuple[int, ...]]] = []
    for some in (likely[i : i + 8] for i in range(0, len(likely), 8)):
        longer = torch.tensor([[*prompt, x] for x in some], device=model.device)
        for x, second in zip(some, _distribution(longer, model(longer).logits[:, -1], sampling), strict=True):
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
    if samples * rest < LEAST and named:  # the rest joins the smallest cell
        least = min(range(len(masses)), key=masses.__getitem__)
        masses.append(masses.pop(least) + rest)
        index = {key: len(named) - 1 if i == least else i - (i > least) for key, i in index.items()}
    else:
        masses.append(rest)
    weights = torch.tensor(masses, dtype=torch.float64)
    return Cells(weights / weights.sum(), index)


def _distribution(ids: Int[Tensor, "b n"], logits: Float[Tensor, "b v"], sampling: Sampling) -> Float64[Tensor, "b v"]:
    return warpers(sampling)(ids, logits.double()).softmax(-1).cpu()


def pairs(engine: Engine, prompt: list[int], sampling: Sampling, seeds: Sequence[int]) -> list[tuple[int, int]]:
    """The two tokens after a prompt for many seeds, by the engine's rounds.

    The first token after prefill is sampled with Gumbel noise under every rule. So the prompt is prefilled without its
    last token, once for all seeds, and that token is put in the first one's place; what follows is the rule's. Raises
    InputError for logits that are NaN or infinite.
    """
    forced = Sampling(0.0, logit_bias={prompt[-1]: 1e9})
    one = Row(Request(prompt[:-1], seeds[0], 16, forced), 0)
    batch = Batch.start(engine, [one])[0]
    if batch is None or one.output != prompt[-1:]:
        raise InputError(NOT_FINITE)
    same = [0] * len(seeds)
    batch.session.select(same)
    batch.drafting.select(same)
    batch.root = [batch.root[i] for i in same]
    batch.rows = [
        Row(Request(prompt[:-1], s, 16, sampling), i, list(one.output), one.length) for i, s in enumerate(seeds)
    ]
    rows, running = list(batch.rows), batch
    while running is not None:
        running.round()
        for row in running.rows:
            if row.finish == "error":
                raise InputError(NOT_FINITE)
            row.finish = "length" if len(row.output) > 2 else None
        running = running.leave()  # type: ignore[assignment]
    return [(row.output[1], row.output[2]) for row in rows]
