"""Our own engine: every drafter, rule, budget and variant of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...engine import Batch, Engine, Request, Row
from ...engine.prefixes import Prefixes
from ...engine.stopping import Stop
from ...params import Sampling
from .. import methods
from ..models import Models
from ..types import Answer, Ask, Method


def load(method: Method, models: Models) -> Ours:
    """Our engine for a method, as a peer."""
    llm = models.with_drafter(method.variant, method.spec)
    rule, options = methods.rule_of(method.rule)
    engine = llm.engine(rule, methods.budget_of(method.budget))
    prefixes = Prefixes(rows=1) if llm.target.exact == "bits" else None
    return Ours(replace(engine, prefixes=prefixes, **options))  # type: ignore[arg-type]


@dataclass
class Ours:
    """Outrider's engine behind the protocol of peers."""

    engine: Engine  # with one budget for the run, as in a server

    def forget(self) -> None:
        """Forget earlier texts, before the same prompts come again."""
        self.engine.drafter.forget()

    def run(self, prompts: Sequence[Sequence[int]], ask: Ask) -> Answer:
        """All prompts as one batch. A chat that is alone continues what was read and written in the turns before."""
        sampling = Sampling(ask.temperature)
        engine = self.engine if len(prompts) == 1 else replace(self.engine, prefixes=None)
        if ask.turn == 0 and engine.prefixes is not None:
            engine.prefixes.clear()
        rows = [
            Row(Request(list(ids), seed, ask.limit, sampling, Stop(ask.eos).cut), i)
            for i, (ids, seed) in enumerate(zip(prompts, ask.seeds, strict=True))
        ]
        batch, _ = Batch.start(engine, rows)
        states = (batch.session, batch.drafting) if batch else ()
        while batch is not None:
            batch.round()
            batch = batch.leave()
        usages = [row.usage for row in rows]
        return Answer([row.output for row in rows], max(u.prefill_seconds for u in usages), usages, states)
