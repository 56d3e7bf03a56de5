"""A bench whose target's distribution is known: a table, letters for tokens, and a clock that only `sleep` moves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider import drafters
from outrider.bench.cells import Analysis, document
from outrider.bench.models import Models
from outrider.bench.results import to_json
from outrider.bench.runner import Group, Runner
from outrider.bench.store import Store
from outrider.bench.types import Method, Prompt, Task
from outrider.core.types import Usage
from outrider.llm import LLM
from outrider.testing import TableTarget

VOCAB = 11


class Letters:
    """A tokenizer of the letters a, b, c, ..."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [(ord(c) - 97) % VOCAB for c in text]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(97 + i) for i in ids)


def rounds_of(accepted_at: list[int], tested_at: list[int], rounds: int, **more: float) -> Usage:
    """The usage of one text of so many rounds."""
    made = Usage(
        new_tokens=1 + rounds + sum(accepted_at), rounds=rounds, accepted=sum(accepted_at), tested=sum(tested_at),
        accepted_at=accepted_at, tested_at=tested_at,
    )  # fmt: skip
    return replace(made, **more)


@dataclass
class Clock:
    """Seconds that pass by `sleep`, and a part of a microsecond at every look, so that no two times are equal."""

    now: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self) -> float:
        self.now += 1e-6 * self.dice.random()
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Lab:
    """Where a small run takes place."""

    folder: Path
    target: TableTarget = field(default_factory=lambda: TableTarget(VOCAB, order=2, seed=3, context=1024, scale=1.0))
    eos: frozenset[int] = frozenset()
    tokens: int = 40
    turns: tuple[int, ...] = (1,) * 6

    def __post_init__(self) -> None:
        llm = LLM(self.target, Letters(), drafters.load("none"), "table", "none", self.eos)
        self.models = Models("table", loaded={"plain": llm}, drafted={("plain", "none"): llm})
        words = ["abcde", "fghij", "kabba", "cabig", "ddeef", "gagag", "bcdfa", "hijka"]
        prompts = [
            Prompt(str(i), tuple(words[(i + t) % 8] + words[i // 8 % 8] for t in range(n)))
            for i, n in enumerate(self.turns)
        ]
        self.task = Task("letters", tuple(prompts))

    def drafter(self, name: str, drafter: Any) -> None:
        """Make a drafter known by a name."""
        self.models.drafted["plain", name] = replace(self.models.llm(), drafter=drafter, budgets={})

    def runner(self, **options: Any) -> Runner:
        header = {"target": "table", "started": "now", "arguments": {"model": "table", "tokens": self.tokens}}
        store = Store.open(self.folder, header)
        store.begin()
        return Runner(self.models, store, self.tokens, **options)

    def group(self, methods: Sequence[Method], temperature: float = 0.0, batch: int = 1, repeats: int = 1) -> Group:
        return Group(self.task, temperature, batch, tuple(methods), repeats)

    def measure(
        self, methods: Sequence[Method], temperature: float = 0.0, batch: int = 1, repeats: int = 1,
        peers: dict[str, Any] | None = None,
    ) -> dict[str, dict[str, Any]]:  # fmt: skip
        """Run, and judge: cells by method. `peers` stand for what files of bench/peers would load."""
        runner, group = self.runner(), self.group(methods, temperature, batch, repeats)
        runner.peers |= peers or {}
        runner.open([m for m in methods if m.name not in runner.peers])
        assert runner.run(group)
        return {c.method: to_json(c) for c in document(Analysis(runner, keep_loops=True), [group]).cells}
