"""How long, how fast, on what: the whole recipe of a training, kept beside its checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..types import InputError
from .objectives import method_of


@dataclass(frozen=True)
class Recipe:
    """`rows` of `length` tokens make a step. Rates and clipping of 0 mean: as the method's paper has them."""

    method: str
    steps: int = 1000
    rows: int = 8
    length: int = 512
    accumulate: int = 1  # batches of rows to a step
    lr: float = 0.0
    final: float = 0.1  # the cosine ends at this share of the rate
    warmup: int = -1
    clip: float = 0.0
    decay: float = 0.0
    seed: int = 0
    bf16: bool = False
    half_features: bool = False
    cache: str = ""  # a folder for features, for repeated epochs; none: they are computed anew
    cache_dtype: str = "bfloat16"
    evaluate: int = 0  # steps between evaluations; 0: ten times in all
    prompts: int = 16  # held-out prompts that are decoded at each evaluation
    tokens: int = 32
    save: int = 200  # steps between checkpoints
    options: Mapping[str, Any] = field(default_factory=dict)

    def complete(self) -> Recipe:
        """With the method's own rates where none are given."""
        if min(self.steps, self.rows, self.length, self.accumulate, self.save) < 1:
            raise InputError("steps, rows, length, accumulate and save must be at least 1")
        if self.lr < 0 or self.clip < 0 or not 0 <= self.final <= 1:
            raise InputError("rates and clipping must not be negative, and final must lie between 0 and 1")
        method = method_of(self.method)
        warmup = min(method.warmup, self.steps // 10) if self.warmup < 0 else self.warmup
        return replace(
            self,
            lr=self.lr or method.lr,
            clip=self.clip or method.clip,
            warmup=warmup,
            evaluate=self.evaluate or max(1, self.steps // 10),
        )

    def rate(self, step: int) -> float:
        """Warm-up, then a cosine down to `final`; a factor."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def keep(self, folder: Path) -> None:
        """Write it down, or refuse to go on with another one."""
        path, mine = folder / "recipe.json", json.loads(json.dumps(asdict(self)))
        if path.exists() and (folder / "checkpoint.pt").exists():
            theirs = json.loads(path.read_text(encoding="utf-8"))
            other = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
            if other:
                raise InputError(
                    f"{folder} holds a run of another recipe ({', '.join(other)} differ); give another --out, "
                    "or the same recipe to go on"
                )
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(mine, indent=1), encoding="utf-8")
