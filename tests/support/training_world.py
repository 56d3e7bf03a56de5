"""Short trainings of tiny drafters: their recipes and documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.training import loop
from outrider.training.data import Document
from outrider.training.recipe import Recipe
from outrider.training.state import State

RECIPE = Recipe("eagle", steps=8, rows=2, length=32, lr=1e-2, evaluate=4, prompts=2, tokens=8, save=2, warmup=2)

# Trainings that one process and several are compared in: three steps, evaluated at the end.
THREE = Recipe("eagle", steps=3, rows=4, length=32, lr=1e-2, evaluate=3, prompts=2, tokens=4, save=3, warmup=1)


def documents(count: int = 24, seed: int = 5, least: int = 8, vocab: int = 61) -> list[Document]:
    """Random texts of `least` to 29 tokens, all of them learned."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        n = int(torch.randint(least, 30, (), generator=g))
        made.append(Document(tuple(torch.randint(1, vocab, (n,), generator=g).tolist()), (True,) * n, f"{i:03d}"))
    return made


def unequal(count: int = 32) -> list[Document]:
    """Texts of which every other one is learned in full, and of the rest only the last two tokens."""
    g = torch.Generator().manual_seed(6)
    made = []
    for i in range(count):
        n = int(torch.randint(20, 30, (), generator=g))
        learn = (True,) * n if i % 2 == 0 else (False,) * (n - 2) + (True, True)
        made.append(Document(tuple(torch.randint(1, 61, (n,), generator=g).tolist()), learn, f"{i:03d}"))
    return made


def watched(target: Any, texts: list[Document], out: Path, recipe: Recipe, **more: Any) -> list[float]:
    """The loss of every step of a training."""
    losses: list[float] = []
    step = State.step

    def watch(self: State, *given: Any) -> tuple[float, int, dict[str, float]]:
        made = step(self, *given)
        losses.append(made[0])
        return made

    State.step = watch  # type: ignore[method-assign]
    try:
        loop.train(target, texts, out, recipe, quiet=True, **more)
    finally:
        State.step = step  # type: ignore[method-assign]
    return losses


# Each falls into another trap of several processes, if it can be fallen into (tests/training/test_distributed.py).
CASES: dict[str, Recipe] = {
    "eagle": THREE,
    "anchors": replace(THREE, method="block", options={"block": 4, "anchors": 3, "taps": (1, 2)}),
    "tied": replace(THREE, method="draft-lm", options={"hidden": 24, "heads": 2, "layers": 1}),
    "pieces": replace(THREE, rows=1, accumulate=3),  # the second process has no row in the second piece
    "idle": replace(  # the second process has no row at all
        THREE, method="eagle3", rows=1, options={"parallel": True, "passes": 3, "taps": (0, 2, 3), "draft_vocab": 40}
    ),
}
EAGLE3 = replace(THREE, method="eagle3", options={"passes": 2, "taps": (0, 2, 3), "draft_vocab": 40})
KILLED = replace(RECIPE, steps=12, rows=4, save=4, evaluate=12)
