"""What is to be measured: the arguments of `outrider.bench.run`, which can be checked without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..params import InputError
from . import methods
from .types import Method


@dataclass(frozen=True)
class Config:
    """A grid: drafters by rules by budgets by variants, on tasks by temperatures by batch sizes.

    `model` is a name as `outrider.load` takes it. Fields left empty take the defaults that their comments name.
    """

    model: str | None = None
    drafters: tuple[str, ...] = ()  # [LABEL=]SPEC[@BUDGET][@RULE]; empty: lookup, and the model's own if some ship
    tasks: tuple[str, ...] = ()  # names, groups, JSON lines; empty: demo for the demo, sample for others
    temperatures: tuple[float, ...] = (0.0,)
    rules: tuple[str, ...] = ("coupled",)
    batch_sizes: tuple[int, ...] = (1,)
    budgets: tuple[str, ...] = ("auto",)
    variants: tuple[str, ...] = ("plain",)  # of the target: see `methods.VARIANTS`
    peers: tuple[str, ...] = ("transformers",)
    tokens: int = 128  # new ones at most, for every turn
    limit: int | None = None  # prompts of each task
    repeats: int = 1
    seed: int = 0
    threads: int | None = None  # None: torch's own number
    dtype: str = "auto"
    device: str = "auto"
    compile: bool = True  # record the target's passes where that is proved to give the same logits
    trust_remote_code: bool = False
    data: str | None = None  # folder of the tasks' files
    judge: str | None = None  # the model that texts are judged by; None: the target judges lossy ones
    lossy: bool = False  # allow rules that change the text's law
    keep_loops: bool = False
    observe: bool = False
    explain: bool = True
    memory: float | None = None  # GiB
    max_minutes: float | None = None
    replay: str | None = None  # recorded answers instead of a model
    tokenizer: str | None = None  # of the recorded answers
    cost: str = "7b@a100"
    out: Path = Path("runs/bench")

    def named(self) -> Config:
        """With model, drafters and tasks named that were left to their defaults. Imports torch."""
        from ..backends.torch import find

        place = find(self.model)
        drafters = self.drafters or tuple(dict.fromkeys(("lookup", place.drafter)))
        tasks = self.tasks or (("demo",) if place.name == "demo" else ("sample",))
        return replace(self, model=place.name, drafters=drafters, tasks=tasks)

    def rows(self) -> list[Method]:
        """The methods, plain decoding of each variant first."""
        return methods.rows(self.drafters, self.rules, self.budgets, self.variants, self.peers)

    def arguments(self) -> dict[str, Any]:
        """What a run is repeated with, for run.json."""
        found = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {**found, "out": str(self.out)}

    def check(self) -> None:
        """Raise InputError for what can be known to be wrong before anything is loaded."""
        counts = {"--max-new-tokens": self.tokens, "--repeats": self.repeats, "--batch-size": min(self.batch_sizes)}
        for name, count in {**counts, "--limit": self.limit, "--threads": self.threads}.items():
            if count is not None and count < 1:
                raise InputError(f"{name} must be at least 1, not {count}")
        for name, size in {"--max-minutes": self.max_minutes, "--memory": self.memory}.items():
            if size is not None and not size > 0:
                raise InputError(f"{name} must be above 0, not {size:g}")
        if not 0 <= min(self.temperatures) <= max(self.temperatures) < float("inf"):
            raise InputError("--temperature must be a finite number of at least 0")
        if self.replay:
            self._check_replay()
            return
        rows = replace(self, drafters=self.drafters or ("lookup",)).rows()
        changing = [m for m in rows if not methods.lossless(m)]
        if changing and not self.lossy:
            raise InputError("typical acceptance changes the text's law; say --lossy if that is what you want")
        if changing and max(self.temperatures) == 0:
            raise InputError("typical acceptance at temperature 0 is greedy decoding; give a --temperature above 0")
        from .tasks import expand

        expand(self.tasks)

    def _check_replay(self) -> None:
        from .cost import parse

        parse(self.cost)
        other = Config(replay=self.replay)
        used = ("model", "tasks", "temperatures", "rules", "batch_sizes", "variants", "peers")
        if any(getattr(self, name) != getattr(other, name) for name in used):
            raise InputError("a replay takes --drafter, --budget, --tokenizer, --cost and --limit; leave the rest out")
