"""The recipe of a training, saved beside its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import ceil, inf
from pathlib import Path
from typing import Any

from .. import files
from ..checkpoints.files import json_of
from ..params import InputError
from ..schema import from_dict, to_dict
from .objectives import optimiser_of

NAME = "recipe.json"
EPOCHS, LEAST = 3, 200  # default epochs, and minimum steps
FALL = 0.2  # share of the steps over which the rate decays
FREE = {"steps", "evaluate", "prompts", "tokens", "save", "target", "data", "cache"}  # may differ when a run resumes


@dataclass(frozen=True)
class Recipe:
    """A step has `rows` x `accumulate` rows of `length` tokens. Rates and clipping of 0 mean the method's defaults."""

    method: str
    steps: int = 0  # 0: EPOCHS over all rows
    rows: int = 2
    length: int = 1024
    accumulate: int = 1  # batches per step
    lr: float = 0.0
    final: float = 0.1  # the rate decays to this share
    warmup: int = -1
    clip: float = 0.0
    decay: float = 0.0
    seed: int = 0
    bf16: bool | None = False  # autocast, also of a stock target; None: if bfloat16 is fast (`loop.precision`)
    cache: str = ""  # folder for cached features; default on CPUs: in the run's folder, until it ends
    features: str = ""  # folder of another engine's features
    init: str = ""  # a drafter to start from
    evaluate: int = 0  # steps between evaluations; 0: ten in all
    prompts: int = 16  # held-out prompts decoded at each evaluation
    tokens: int = 32
    save: int = 0  # steps between checkpoints; 0: every five minutes
    options: Mapping[str, Any] = field(default_factory=dict)
    target: str = ""  # names of target and data, for readers of the file
    data: tuple[str, ...] = ()

    def over(self, count: int) -> Recipe:
        """This recipe with default steps filled in: EPOCHS over this many rows."""
        epochs = -(-EPOCHS * count // max(1, self.rows * self.accumulate))
        return replace(self, steps=self.steps or max(LEAST, epochs))

    def complete(self) -> Recipe:
        """Fill in the method's default rates.

        Raises:
            InputError: a size or rate is out of range, or the method is unknown.
        """
        counts = self.steps, self.save, self.evaluate
        if min(self.rows, self.length, self.accumulate, self.prompts) < 1 or min(counts) < 0:
            raise InputError(
                "--rows, --length, --accumulate and --limit must be at least 1, and --steps, --save and --evaluate at "
                "least 0"
            )
        if not all(0 <= value < inf for value in (self.lr, self.clip, self.decay)) or not 0 <= self.final <= 1:
            raise InputError(
                "--lr, --clip and --decay must be finite numbers of at least 0, and a recipe's final must be between 0 "
                "and 1"
            )
        if self.features and self.cache:
            raise InputError("features come from a folder or are cached in one; give --features or --cache")
        paper = optimiser_of(self.method)
        warmup = min(paper.warmup, self.steps // 10) if self.warmup < 0 else self.warmup
        return replace(
            self,
            lr=self.lr or paper.lr,
            clip=self.clip or paper.clip,
            warmup=warmup,
            evaluate=self.evaluate or max(1, self.steps // 10),
        )

    def rate(self, step: int) -> float:
        """The factor of the rate: warm-up, constant, then linear decay to `final` over the last fifth. Before the decay
        it does not depend on the number of steps, so that a run can be made longer, or shorter."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        left = max(0.0, self.steps - step) / max(1.0, FALL * self.steps)
        return self.final + (1 - self.final) * min(1.0, left)

    def continuing(self, folder: Path, done: int, default: bool = False) -> Recipe:
        """This recipe, or that of the run in `folder` with this one's steps.

        A resumed run may be made longer, or shorter while the new length's decay has not begun, and be evaluated or
        saved at other steps. Its filled-in defaults stay; the rate decays at the end of the new length.

        Args:
            done: steps of its checkpoint.
            default: this recipe's steps are the default, which makes no run shorter.

        Raises:
            InputError: the folder has a run of another recipe, or one that has gone too far for these steps.
        """
        path = folder / NAME
        if not path.exists() or not (folder / "checkpoint.pt").exists():
            return self
        try:
            known = {field.name for field in fields(Recipe)}  # a run of an older version may have more
            kept = from_dict(Recipe, {name: value for name, value in json_of(path).items() if name in known})
        except TypeError as error:
            raise InputError(f"{path} is not a recipe of this version ({error}); give another --out") from None
        filled = replace(
            self,
            warmup=kept.warmup if self.warmup < 0 else self.warmup,
            options={**kept.options, **{k: v for k, v in self.options.items() if (k, v) != ("draft_vocab", -1)}},
            lr=self.lr or kept.lr,
            clip=self.clip or kept.clip,
            bf16=kept.bf16 if self.bf16 is None else self.bf16,
        )
        mine, theirs = to_dict(filled), to_dict(kept)
        other = sorted(k for k in mine.keys() - FREE if mine[k] != theirs[k])
        if other:
            names = f"{', '.join(other)} differ{'s' * (len(other) == 1)}"
            raise InputError(
                f"{folder} holds a run of another recipe ({names}); give another --out, or the same recipe to resume"
            )
        if default:
            return replace(filled, steps=max(self.steps, kept.steps))
        least = min(kept.steps, ceil(max(done, filled.warmup) / (1 - FALL)))
        if self.steps < least:
            raise InputError(
                f"{folder} has done {done} of {kept.steps} steps, and the rate falls over the last fifth of a run; "
                f"give --steps {least} or more, or another --out"
            )
        return filled

    def keep(self, folder: Path) -> None:
        """Write it into the run's folder, which is created."""
        with files.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / NAME, json.dumps(to_dict(self), indent=1) + "\n")
