"""Tiny real models for the contract: a target, and a draft model that is the target with noise on its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import contract_weights
import numpy as np
import torch
from small import noised, tiny_llama
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider import drafters
from outrider.backends.torch import load_target
from outrider.backends.torch.carrier import carried, carrying
from outrider.budgets.budgeter import FixedBudget
from outrider.core import noise
from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Target
from outrider.engine import Engine, Request, Row, generate
from outrider.params import Sampling

VOCAB, CONTEXT, WIDE = 61, 160, 32
NAMES = [*drafters.names(), *contract_weights.VARIANTS]
PROMPTS = [[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 14, 15], [2, 7, 18, 28], [1], [5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6]]


def needs(name: str, folder: str) -> str:
    """The SPEC of a drafter in the contract. The model is the noisy copy; nets are random ones."""
    if name == "model":
        return f"model:{folder}?top_k=3"
    if name in contract_weights.MAKERS:
        where = Path(folder).with_name(f"{Path(folder).name}-{name}")
        if not where.exists():
            contract_weights.MAKERS[name](where, VOCAB, WIDE)
        method = "" if name in contract_weights.VARIANTS else f"{name}:"  # a folder says by itself what it holds
        return f"{method}{where}{contract_weights.OPTIONS.get(name, '')}"
    return name


@dataclass
class World:
    target: Target
    model: Any
    folder: str

    def drafter(self, name: str) -> Any:
        return drafters.load(needs(name, self.folder), self.target)

    def engine(self, drafter: Any, rule: str = "coupled", nodes: int = 12, depth: int = 4, **more: Any) -> Engine:
        budget = more.pop("budget", None) or FixedBudget(nodes, depth)
        return Engine(self.target, drafter, budget, GumbelNoise(VOCAB), rule, **more)  # type: ignore[arg-type]


def make_world(folder: Path) -> World:
    sizes = {"hidden_size": WIDE, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_llama(VOCAB, seed=7, max_position_embeddings=CONTEXT, initializer_range=0.25, **sizes)
    noised(model, 0.15).save_pretrained(folder)
    return World(load_target(model), model, str(folder))


class NoEven(LogitsProcessor):
    """A user's own processor."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(0, scores.shape[1], 2), float("-inf"))


def outputs(engine: Engine, requests: list[Request], batch_size: int = 8) -> list[Row]:
    rows: dict[int, Row] = {}
    for piece in generate(engine, requests, batch_size):
        rows[piece.row.index] = piece.row
    return [rows[i] for i in range(len(requests))]


def stop_at(eos: set[int]) -> Callable[..., tuple[int, str | None]]:
    def cut(output: Any, new: Any) -> tuple[int, str | None]:
        for i, token in enumerate(new, 1):
            if token in eos:
                return i, "eos"
        return len(new), None

    return cut


known: dict[Any, list[int]] = {}  # plain texts: every drafter is held against the same ones


def plain(
    model: Any, prompt: list[int], seed: int, sampling: Sampling, limit: int, eos: set[int] = frozenset()
) -> list[int]:  # type: ignore[assignment]
    """Plain decoding, independent of the engine: stock cache, one token at a time, transformers' own processors."""
    key = (id(model), tuple(prompt), seed, repr(sampling), limit, frozenset(eos))
    if key not in known:
        known[key] = _plain(model, prompt, seed, sampling, limit, eos)
    return list(known[key])


def _plain(model: Any, prompt: list[int], seed: int, sampling: Sampling, limit: int, eos: set[int]) -> list[int]:
    warps, repeats = LogitsProcessorList(), RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    if sampling.temperature > 0:
        warps.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            warps.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            warps.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0:
            warps.append(MinPLogitsWarper(sampling.min_p))
    ids, past, out = torch.tensor([prompt]), None, []
    with torch.no_grad():
        while len(out) < limit and len(prompt) + len(out) < CONTEXT:
            made = model(ids[:, -1:] if past else ids, **carrying(model, past))
            past = carried(model, made)
            scores = made.logits[:, -1]
            for token, bias in sampling.logit_bias.items():
                scores[0, token] += bias
            scores = repeats(ids, scores)
            for token in out:
                scores[0, token] -= sampling.frequency_penalty
            for token in set(out):
                scores[0, token] -= sampling.presence_penalty
            scores = warps(ids, scores)
            if sampling.temperature > 0:
                scores = scores + torch.from_numpy(noise.gumbels([seed], [len(prompt) + len(out)], np.arange(VOCAB)))
            out.append(int(scores.argmax(-1)))
            if out[-1] in eos:
                break
            ids = torch.cat([ids, torch.tensor([[out[-1]]])], 1)
    return out
