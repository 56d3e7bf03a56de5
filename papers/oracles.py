"""A drafter that knows the answer and errs at a given rate: speed as a function of acceptance, nothing else varying.

The study `oracle`: a random Llama of about 100M parameters, its own greedy text as the answer. At alpha 0 every draft
is wrong, and the adaptive budget should cost next to nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.backends.torch.load import load_tokenizer
from outrider.bench.models import Models
from outrider.bench.peers.outrider import Ours
from outrider.bench.types import Answer, Ask
from outrider.budgets.adaptive import AdaptiveBudget
from outrider.core.protocols import Drafting, Round
from outrider.core.tree import chain
from outrider.core.types import Budget, DraftTree, Rows
from outrider.engine import Engine

from .measure import Study

ALPHAS = (0.0, 0.5, 0.7, 0.8, 0.9, 1.0)
PLACE = Path("runs/bench/random-llama")


@dataclass(frozen=True)
class OracleDrafter:
    """Proposes `answers[tuple(prompt)]`, each token replaced by a wrong one with probability 1 - alpha."""

    answers: dict[tuple[int, ...], list[int]]
    alpha: float
    vocab: int
    taps: tuple[int, ...] = ()

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> OracleDrafting:
        texts = [[*p, *self.answers[tuple(p)]] for p in prompts]
        return OracleDrafting(self, texts, random.Random(0))


@dataclass
class OracleDrafting:
    drafter: OracleDrafter
    texts: list[list[int]]
    dice: random.Random = field(repr=False)

    def observe(self, round: Round) -> None:
        del round

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        depth = min(budget.depth, budget.nodes - 1, max(rows.remaining) - 1)
        paths = []
        for text, start, root in zip(self.texts, rows.start, rows.root.tolist(), strict=True):
            path = [root]
            for token in text[start + 1 : start + 1 + depth]:
                hit = self.dice.random() < self.drafter.alpha
                path.append(token if hit else (token + 1) % self.drafter.vocab)
            paths.append(path)
        return chain(paths)

    def select(self, index: Sequence[int]) -> None:
        self.texts = [self.texts[i] for i in index]

    def join(self, other: Drafting) -> None:
        assert isinstance(other, OracleDrafting)
        self.texts += other.texts


# ------------------------------------------------------------------------------------------------ the study


def study() -> Study:
    """The run; the random model is written where it is not there."""
    if not PLACE.exists():
        torch.manual_seed(0)
        tokenizer = load_tokenizer("demo")
        config = LlamaConfig(
            vocab_size=16384, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
            num_key_value_heads=4, max_position_embeddings=1024, eos_token_id=None, bos_token_id=None,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(PLACE)
        tokenizer.save_pretrained(PLACE)
    rows = tuple(f"alpha {alpha}=oracle?alpha={alpha}" for alpha in ALPHAS)  # no drafter: `parts` has what runs
    return Study(
        str(PLACE), rows, ("demo/stories",), variants=("eager",), tokens=64, limit=2, repeats=3,
        explain=False,
    )  # fmt: skip


@dataclass
class Knowing:
    """Our engine with an oracle, which is told a prompt's greedy text when it first meets it: while it warms up, or in
    a first repeat that the median leaves out."""

    plain: Engine
    alpha: float
    answers: dict[tuple[int, ...], list[int]]

    def __post_init__(self) -> None:
        oracle = OracleDrafter(self.answers, self.alpha, self.plain.target.vocab)
        self.peer = Ours(replace(self.plain, drafter=oracle, budget=AdaptiveBudget()))

    def run(self, prompts: Sequence[Sequence[int]], ask: Ask) -> Answer:
        unknown = [p for p in prompts if tuple(p) not in self.answers]
        if unknown:
            told = Ours(self.plain).run(unknown, replace(ask, limit=80, seeds=(0,) * len(unknown)))
            self.answers |= {tuple(p): text for p, text in zip(unknown, told.tokens, strict=True)}
        return self.peer.run(prompts, ask)


def parts(config: Study) -> dict[str, Any]:
    """The models, and the peers by their labels, that `measure.run` is given."""
    models = Models.of(config)
    answers: dict[tuple[int, ...], list[int]] = {}
    llm = models.llm("eager")
    return {"models": models, "peers": {f"alpha {a}": Knowing(llm.engine(), a, answers) for a in ALPHAS}}
