"""The arguments of `outrider.bench.run`, checked without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ..params import InputError
from . import methods, tasks
from .types import Method

C = TypeVar("C", bound="Config")


@dataclass(frozen=True)
class Config:
    """A grid: methods by tasks by temperatures by batch sizes.

    `model` is a name as `outrider.load` takes it. Fields that are left empty take the defaults in their comments.
    """

    model: str | None = None
    drafters: tuple[str, ...] = ()  # see `methods.parse`; empty: lookup, and what drafts for the model by default
    tasks: tuple[str, ...] = ()  # names, groups, JSONL files; empty: the demo's own tasks, else sample
    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    peers: tuple[str, ...] = ("transformers",)
    tokens: int = 128  # at most, for every turn
    limit: int | None = None  # at most N prompts of each task
    repeats: int = 1
    seed: int = 0
    threads: int | None = None  # None: torch's default
    dtype: str = "auto"
    device: str = "auto"
    weights: str = "auto"  # of methods that name none, as `outrider.load` takes it
    compile: bool = True
    trust_remote_code: bool = False
    data: str | None = None  # folder of the published tasks' files
    keep_loops: bool = False  # keep prompts whose plain text repeats itself
    max_minutes: float | None = None
    out: Path = Path("runs/bench")

    def named(self: C) -> C:
        """The same with defaults filled in: model, drafters and tasks."""
        from ..names import find

        model = find(self.model)
        drafters = self.drafters or tuple(dict.fromkeys(("lookup", model.drafter)))
        tasks = self.tasks or (("demo",) if model.name == "demo" else ("sample",))
        return replace(self, model=model.name, drafters=drafters, tasks=tasks)

    def rows(self) -> list[Method]:
        """The methods; plain decoding first."""
        return methods.table([methods.parse(text) for text in self.drafters], self.peers)

    def arguments(self) -> dict[str, Any]:
        """As JSON, for run.json."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()} | {"out": str(self.out)}

    def check(self) -> None:
        """Raise InputError for values that no model accepts."""
        counts = {"--max-new-tokens": self.tokens, "--repeats": self.repeats, "--batch-size": min(self.batch_sizes)}
        for name, count in {**counts, "--limit": self.limit, "threads": self.threads}.items():
            if count is not None and count < 1:
                raise InputError(f"{name} must be at least 1, not {count}")
        if self.tokens < 2:
            raise InputError("--max-new-tokens must be at least 2: the prompt's pass gives the first token of a text")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise InputError(f"--max-minutes must be above 0, not {self.max_minutes:g}")
        if not 0 <= min(self.temperatures) <= max(self.temperatures) < float("inf"):
            raise InputError("--temperature must be a finite number of at least 0")
        lossy = [m for m in self.rows() if not methods.lossless(m)]
        if lossy and max(self.temperatures) == 0:
            raise InputError("typical acceptance at temperature 0 is greedy decoding; give a --temperature above 0")
        tasks.expand(self.tasks)
