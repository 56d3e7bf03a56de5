"""Many samples of two tokens by the engine's own rounds, against the target's exact law: a G-test with its power."""

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
from ..params import Sampling
from .gtest import detectable, g_test, holm

LAWS = (Sampling(0.0), Sampling(0.7), Sampling(1.0), Sampling(1.0, top_p=0.9))
ALPHA, POWER = 1e-3, 0.99  # of the whole family; at which the smallest detectable deviation is reported
LEAST, CELLS = 5.0, 32  # a cell's expectation; cells at most
TOGETHER = 128  # samples drawn at a time
Progress = Callable[[str, int, int], None]  # (part, done, of)


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


def warpers(law: Sampling) -> Any:
    """Transformers' own form of a law with temperature and top-p."""
    temperature = [TemperatureLogitsWarper(law.temperature)] if law.temperature not in (0, 1) else []
    return LogitsProcessorList([*temperature, *([TopPLogitsWarper(law.top_p)] if law.top_p < 1 else [])])


def statistics(
    engine: Engine, prompts: Sequence[list[int]], samples: int, seed: int, progress: Progress = lambda *_: None
) -> tuple[Statistic, ...]:
    """Pairs of tokens drawn by the rule, against the target's law; a test for each prompt, law and kind of draft."""
    hot = [law for law in LAWS if law.temperature > 0]
    plans = [(i, law, draft, shape) for draft, shape in drafts(engine) for i in range(len(prompts)) for law in hot]
    out = []
    for n, (i, law, draft, shape) in enumerate(plans):
        chosen = replace(engine, budget=FixedBudget(16, 4, shape))
        cells = exact_cells(engine.target.model, prompts[i], law, samples)
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


def drafts(engine: Engine) -> list[tuple[str, tuple[int, ...] | None]]:
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

    A prompt's first token is drawn with Gumbel noise whatever the rule. So all but its last token are read, once for
    all seeds, and the last is made that first token; what follows is the rule's.
    """
    forced = Sampling(0.0, logit_bias={prompt[-1]: 1e9})
    one = Row(Request(prompt[:-1], seeds[0], 16, forced), 0)
    batch = Batch.start(engine, [one])[0]
    assert batch is not None
    assert one.output == prompt[-1:]
    same = [0] * len(seeds)
    batch.session.select(same)
    batch.drafting.select(same)
    batch.root = [batch.root[i] for i in same]
    batch.rows = [Row(Request(prompt[:-1], s, 16, law), i, list(one.output), one.length) for i, s in enumerate(seeds)]
    rows, running = list(batch.rows), batch
    while running is not None:
        running.round()
        for row in running.rows:
            row.finish = "length" if len(row.output) > 2 else None
        running = running.leave()  # type: ignore[assignment]
    return [(row.output[1], row.output[2]) for row in rows]
