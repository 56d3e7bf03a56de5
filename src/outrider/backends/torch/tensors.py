"""The values of `core/types.py` in tensors of a device: what networks and stock models compute with.

Everything is converted at the seam: `TensorTree.of(tree, device)` on the way in, `.host()` on the way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...core.protocols import Round, Target
from ...core.types import Array, DraftTree, Rows
from ...params import Rule, Sampling
from . import noise

Device = torch.device | str


@dataclass(frozen=True)
class TensorTree:
    """A `DraftTree` in tensors."""

    tokens: Int[Tensor, "b n"]
    parents: Int[Tensor, "b n"]
    depths: Int[Tensor, "b n"]
    size: Int[Tensor, " b"]
    ancestors: Bool[Tensor, "b n n"] | None
    deepest: int
    values: Float[Tensor, "b n"] | None = None
    q: Float[Tensor, "b inner v"] | None = None
    replacement: bool = False

    @classmethod
    def of(cls, tree: DraftTree, device: Device = "cpu") -> TensorTree:
        """The same tree; on the CPU it shares the arrays' memory."""
        tokens, parents, depths, size = (tensor(x, device) for x in (tree.tokens, tree.parents, tree.depths, tree.size))
        ancestors = None if tree.ancestors is None else tensor(tree.ancestors, device)
        values = None if tree.values is None else tensor(tree.values, device)
        q = None if tree.q is None else tensor(tree.q, device)
        return cls(tokens, parents, depths, size, ancestors, tree.deepest, values, q, tree.replacement)

    @property
    def nodes(self) -> int:
        """Nodes of the widest row, the root and padding included."""
        return self.tokens.shape[1]

    def host(self) -> DraftTree:
        """The same tree on the host, but for `q`, which stays where it is; waits for the device."""
        tokens, parents, depths, size = (array(x) for x in (self.tokens, self.parents, self.depths, self.size))
        ancestors = None if self.ancestors is None else array(self.ancestors)
        values = None if self.values is None else array(self.values.float())
        q = self.q if self.q is None or self.q.device.type != "cpu" else array(self.q)
        return DraftTree(tokens, parents, depths, size, ancestors, self.deepest, values, q, self.replacement)


@dataclass(frozen=True)
class TensorRows:
    """`Rows` for what computes on a device."""

    rows: Rows
    device: Device = "cpu"

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def root(self) -> Int[Tensor, " b"]:
        """Tokens of the roots."""
        return torch.tensor(self.rows.root, device=self.device)

    @cached_property
    def position(self) -> Int[Tensor, " b"]:
        """Absolute positions of the roots."""
        return torch.tensor(self.rows.start, device=self.device)

    @property
    def temperature(self) -> Float[Tensor, " b"]:
        """Of each row; 0 is greedy."""
        return torch.tensor([s.temperature for s in self.rows.sampling], device=self.device)

    @property
    def start(self) -> tuple[int, ...]:
        return self.rows.start

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.rows.seeds

    @property
    def serial(self) -> tuple[int, ...]:
        return self.rows.serial

    @property
    def sampling(self) -> tuple[Sampling, ...]:
        return self.rows.sampling

    @property
    def rule(self) -> Rule:
        return self.rows.rule

    @property
    def remaining(self) -> tuple[int, ...]:
        return self.rows.remaining

    @property
    def sampled(self) -> bool:
        """Is any row sampled (T > 0)?"""
        return self.rows.sampled

    def noise(self, depth: int, ids: Tensor | None = None) -> Tensor:
        """G for a token at `start + depth`: [b, v], or for `ids` [b, ...] the same shape."""
        return self.some_noise(depth, range(len(self)), ids)

    def some_noise(self, depth: int, rows: Sequence[int], ids: Tensor | None = None) -> Tensor:
        """The same for some of the rows alone."""
        seeds, positions = [self.seeds[i] for i in rows], [self.start[i] + depth for i in rows]
        if str(self.device) == "cpu":
            return torch.from_numpy(self.rows.gumbel.at(seeds, positions, None if ids is None else ids.numpy()))
        every = torch.arange(self.rows.gumbel.vocab, device=self.device) if ids is None else ids
        return noise.gumbels(seeds, positions, every)


@dataclass(frozen=True)
class TensorRound:
    """A `Round` for what computes on a device."""

    round: Round
    device: Device = "cpu"

    @cached_property
    def tree(self) -> TensorTree:
        """Its tree."""
        return TensorTree.of(self.round.tree, self.device)

    @cached_property
    def path(self) -> Int[Tensor, "b k"]:
        """Node ids from the root, padded by 0; -1: not one of this drafter's nodes."""
        width = max(1, *map(len, self.round.paths))
        rows = [[*path, *[0] * (width - len(path))] for path in self.round.paths]
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    @cached_property
    def count(self) -> Int[Tensor, " b"]:
        """Nodes committed in each row."""
        return torch.tensor([len(path) for path in self.round.paths], device=self.device)

    @cached_property
    def next(self) -> Int[Tensor, " b"]:
        """The next roots."""
        return torch.tensor(self.round.next, device=self.device)

    def features(self, tap: int) -> Float[Tensor, "b m h"]:
        """The target's hidden states of one tap."""
        return tensor(self.round.output.features[tap], self.device)


def tensor(x: Array | Tensor, device: Device = "cpu") -> Tensor:
    """An array (uint16: the bits of bfloat16) or a tensor as a tensor on a device; on the CPU it shares the memory."""
    if isinstance(x, Tensor):
        return x.to(device)
    if x.dtype == np.uint16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x if x.flags.writeable else x.copy()).to(device)


def array(x: Tensor) -> Array:
    """A tensor as an array on the host (bfloat16 as the uint16 of its bits); on the CPU it shares the memory."""
    x = x.detach().cpu()
    made: Array = x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()
    return made


def embed(target: Target, tokens: Int[Tensor, "*s"]) -> Float[Tensor, "*s h"]:
    """A target's embeddings as tensors, whatever it computes in."""
    return target.embed(tokens) if target.tensors else tensor(target.embed(array(tokens)), tokens.device)


def head(target: Target, features: Float[Tensor, "*s h"]) -> Float[Tensor, "*s v"]:
    """A target's logits of hidden states as tensors, whatever it computes in."""
    return target.head(features) if target.tensors else tensor(target.head(array(features)), features.device)


def dtype_of(target: Target) -> torch.dtype:
    """The precision of a target's hidden states."""
    kind: Any = getattr(torch, target.precision)
    assert isinstance(kind, torch.dtype)
    return kind
