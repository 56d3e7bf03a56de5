"""The tensor rules, for `enumeration.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from ..backends.torch import sampling, verify
from ..backends.torch.tensors import TensorTree
from ..core.types import Array, DraftTree
from .enumeration import Branch, Text, World


@dataclass
class Branches:
    """Scripted randomness of all rows."""

    rows: list[Branch]

    def accept(self, prob: Float64[Tensor, " b"], index: Int[Tensor, " b"], of: int) -> Bool[Tensor, " b"]:
        decisions = zip(self.rows, prob.tolist(), index.tolist(), strict=True)
        return torch.tensor([i > 0 and row.accept(p, i) for row, p, i in decisions])  # the root is not decided

    def draw(self, weights: Float64[Tensor, "b v"]) -> Int[Tensor, " b"]:
        return torch.tensor([row.draw(w) for row, w in zip(self.rows, weights.numpy(), strict=True)])


def judge(rule: str, world: World, tree: DraftTree, logits: Array, branches: list[Branch]) -> list[Text]:
    """Accepted tokens and the next one of every row, by `backends/torch/verify.py`."""

    def distribution(x: Tensor, depth: int, path: Tensor) -> Tensor:
        return sampling.distribution(x, world.sampling)

    given, z = TensorTree.of(tree), torch.from_numpy(logits)
    if rule == "typical":
        verdict = verify.typical(given, z, distribution, depth=tree.deepest)
    else:
        by = verify.block if rule == "block" else verify.rejection
        verdict = by(given, z, distribution, Branches(branches), tree.deepest)
    paths = zip(verdict.path.tolist(), verdict.count.tolist(), verdict.next.tolist(), tree.tokens.tolist(), strict=True)
    return [(*(tokens[node] for node in path[1:count]), token) for path, count, token, tokens in paths]
