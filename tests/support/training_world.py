"""A short training of a tiny drafter: its recipe and its documents."""

from __future__ import annotations

import torch

from outrider.training.data import Document
from outrider.training.recipe import Recipe

RECIPE = Recipe("eagle", steps=8, rows=2, length=32, lr=1e-2, evaluate=4, prompts=2, tokens=8, save=2, warmup=2)


def documents(count: int = 24) -> list[Document]:
    g = torch.Generator().manual_seed(5)
    made = []
    for i in range(count):
        n = int(torch.randint(8, 30, (), generator=g))
        made.append(Document(tuple(torch.randint(1, 61, (n,), generator=g).tolist()), (True,) * n, f"{i:03d}"))
    return made
