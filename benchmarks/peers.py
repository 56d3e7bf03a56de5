"""The ways to decode that are compared, each behind one call: `run(prompt, limit) -> Sample`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from outrider.budget import Budgeter
from outrider.engine import Engine, Request, Row, generate
from outrider.llm import LLM
from outrider.types import Rule, Sampling, Usage


@dataclass
class Sample:
    """One text and what it took. `prefill` is the time of the prompt's pass and the first token."""

    tokens: list[int]
    seconds: float
    prefill: float
    usage: Usage | None = None

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first."""
        return (len(self.tokens) - 1) / max(self.seconds - self.prefill, 1e-9)


@dataclass(frozen=True)
class Peer:
    name: str
    run: Callable[[Sequence[int], int], Sample] = field(repr=False)


def outrider_peer(
    name: str, llm: LLM, rule: Rule = "coupled", budget: Budgeter | None = None, temperature: float = 0.0, seed: int = 0
) -> Peer:
    """One of our own methods; its budget is one instance for the whole run, as in a server."""
    engine = llm.engine(rule, budget)

    def run(prompt: Sequence[int], limit: int) -> Sample:
        return decode(engine, prompt, limit, llm.eos, temperature, seed)

    return Peer(name, run)


def decode(
    engine: Engine, prompt: Sequence[int], limit: int, eos: frozenset[int], temperature: float = 0.0, seed: int = 0
) -> Sample:
    def cut(output: Sequence[int], new: Sequence[int]) -> tuple[int, str | None]:
        for i, token in enumerate(new, 1):
            if token in eos:
                return i, "eos"
        return len(new), None

    began = perf_counter()
    row: Row | None = None
    for piece in generate(engine, [Request(list(prompt), seed, limit, Sampling(temperature), cut)], 1):
        row = piece.row
    seconds = perf_counter() - began
    assert row is not None
    return Sample(row.output, seconds, row.usage.prefill_seconds, row.usage)


def stock_peer(name: str, model: Any, eos: frozenset[int], **options: Any) -> Peer:
    """transformers' own `generate`, greedy; `options` turn on assisted generation or prompt lookup."""
    pad = min(eos) if eos else 0

    def call(ids: torch.Tensor, limit: int) -> list[int]:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False,
            eos_token_id=sorted(eos) or None, pad_token_id=pad, **options,
        )  # fmt: skip
        return out[0, ids.shape[1] :].tolist()

    def run(prompt: Sequence[int], limit: int) -> Sample:
        ids = torch.tensor([list(prompt)])
        began = perf_counter()
        call(ids, 1)
        prefill = perf_counter() - began
        began = perf_counter()
        tokens = call(ids, limit)
        return Sample(tokens, perf_counter() - began, prefill)

    return Peer(name, run)
