"""A drafter that fails is switched off, and nobody's text changes; rows can be cancelled in a running batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from outrider import drafters
from outrider.budgets.adaptive import FixedBudget
from outrider.drafters._guard import GuardedDrafter, guarded
from outrider.engine import Batch, Engine, generate
from outrider.request import Request, Row
from outrider.testing import TableTarget, plain
from outrider.types import Sampling

TARGET = TableTarget(vocab=7, order=2, seed=5)
PROMPTS = ([1, 2, 3], [4, 5], [6, 0, 1, 2])


@dataclass
class Breaks:
    """Prompt lookup that raises an exception in one of its calls, the second time it is called."""

    where: str
    taps: tuple[int, ...] = ()
    inner: Any = field(default_factory=lambda: drafters.load("lookup"))

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> Any:
        if self.where == "open":
            raise MemoryError("no room")
        return Broken(self, self.inner.open(prompts, capacity))


class Broken:
    def __init__(self, drafter: Breaks, inner: Any):
        self.drafter, self.inner, self.calls = drafter, inner, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += name == self.drafter.where
        if name == self.drafter.where and self.calls > 1:
            raise RuntimeError(f"{name} is broken")
        return getattr(self.inner, name)

    observe = property(lambda self: self.__getattr__("observe"))
    propose = property(lambda self: self.__getattr__("propose"))
    select = property(lambda self: self.__getattr__("select"))
    join = property(lambda self: lambda other: self.__getattr__("join")(other.inner))


def requests() -> list[Request]:
    return [Request(p, i, 12 + 5 * i, Sampling(temperature=1.0)) for i, p in enumerate(PROMPTS)]


def texts(drafter: GuardedDrafter, batch_size: int) -> list[list[int]]:
    engine = Engine.of(TARGET, drafter, FixedBudget(8, 3))
    rows = {piece.row.index: piece.row for piece in generate(engine, requests(), batch_size)}
    return [rows[i].output for i in range(len(PROMPTS))]


@pytest.mark.parametrize("where", ["open", "observe", "propose", "select", "nothing"])
def test_a_failing_drafter_is_switched_off_and_the_texts_stay(where: str) -> None:
    drafter = guarded(Breaks(where))
    wanted = [plain(TARGET, r.prompt, r.max_new_tokens, 1.0, r.seed) for r in requests()]
    assert texts(drafter, 2) == wanted
    assert (drafter.failure is None) == (where == "nothing")
    assert texts(drafter, 3) == wanted, "and in the next batch"


def test_a_cancelled_row_leaves_and_the_others_go_on() -> None:
    engine = Engine.of(TARGET, drafters.load("lookup"), FixedBudget(8, 3))
    rows = [Row(request, i) for i, request in enumerate(requests())]
    with torch.no_grad():
        batch, _ = Batch.start(engine, rows[:2])
        assert batch is not None
        batch.round()
        batch = batch.leave()
        assert batch is not None
        batch.cancel(rows[0])
        batch = batch.leave()
        newcomers, _ = Batch.start(engine, rows[2:])
        batch = newcomers if batch is None else batch.join(newcomers)
        while batch is not None:
            batch.round()
            batch = batch.leave()
    assert rows[0].finish == "cancelled"
    for row, request in zip(rows, requests(), strict=True):
        text = plain(TARGET, request.prompt, request.max_new_tokens, 1.0, request.seed)
        assert row.output == (text[: len(row.output)] if row.index == 0 else text)
    assert 0 < len(rows[0].output) < 12
