"""The two demo models and how they are trained: every number that a run depends on."""

from __future__ import annotations

from dataclasses import dataclass

BETA2, DECAY, MUON_MOMENTUM = 0.95, 0.1, 0.95


@dataclass(frozen=True)
class Recipe:
    """The shape of a Llama model, then its training run."""

    name: str
    layers: int
    steps: int
    hidden: int = 192
    intermediate: int = 512
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64
    vocab: int = 4096
    context: int = 2048
    theta: float = 10000.0
    eps: float = 1e-5
    seed: int = 1
    blocks: int = 8  # blocks of 1,024 tokens per step
    rows: int = 8  # rows of 512 tokens per pass (half as many of 1,024)
    warmup: int = 60
    cooldown: float = 0.5  # the last part of the steps, in which the rate falls to nothing
    long: float = 0.20  # the last part of the steps, with rows of 1,024 tokens instead of 512
    matrix_rate: float = 0.02  # Muon, for the matrices of the layers
    other_rate: float = 4e-3  # AdamW, for embeddings and norms
    teacher: str = ""  # a trained recipe; in the last part of the steps, `taught`, its distribution is learnt
    taught: float = 0.0  # instead of the text's next token
    compile: bool = True

    def rate(self, step: int) -> float:
        """Warm-up, constant, linear decay: the factor on both rates at a step."""
        left = (self.steps - step) / max(1.0, self.cooldown * self.steps)
        return min(1.0, (step + 1) / self.warmup, left)

    @property
    def plateau(self) -> int:
        """The steps before the rate begins to fall."""
        return int((1 - self.cooldown) * self.steps)

    def learns_distribution(self, step: int) -> bool:
        return bool(self.teacher) and step >= (1 - self.taught) * self.steps

    def length(self, step: int) -> int:
        return 1024 if step >= (1 - self.long) * self.steps else 512


TARGET = Recipe("target", layers=24, steps=1800)
DRAFT = Recipe("draft", layers=2, steps=1000, teacher="target", taught=0.35)
RECIPES = {r.name: r for r in (TARGET, DRAFT)}
