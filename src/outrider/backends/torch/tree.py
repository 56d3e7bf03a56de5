"""Draft trees in tensors, as networks grow them: building, pruning. Pure functions, batched and ragged.

The worked miniature of this page, one row with root token 9 and paths [5 6], [5 7], [8]:

    node      0  1  2  3  4            ancestors   1 . . . .
    token     9  5  6  7  8                        1 1 . . .
    parent    0  0  1  1  0                        1 1 1 . .
    depth     0  1  2  2  1                        1 1 . 1 .
    size      5                                    1 . . . 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...core.price import Price
from .padding import padded
from .tensors import TensorTree


def positions(tree: TensorTree, lengths: Int[Tensor, " b"]) -> Int[Tensor, "b n"]:
    """Absolute position of every node; node 0 sits at `lengths`."""
    return lengths[:, None] + tree.depths


def depths(parents: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Depth of every node: parents [0 0 1 1 0] -> [0 1 2 2 1]. (Padding, parent 0, counts as depth 1 here.)"""
    return ancestors(parents).sum(-1) - 1


def ancestors(parents: Int[Tensor, "b n"]) -> Bool[Tensor, "b n n"]:
    """The ancestor matrix by pointer doubling, in ceil(log2 n) steps without a host sync."""
    b, n = parents.shape
    seen = torch.eye(n, dtype=torch.bool, device=parents.device).expand(b, n, n).clone()
    jump = parents
    for _ in range(max(1, (n - 1).bit_length())):
        seen |= seen.gather(1, jump[..., None].expand(b, n, n))
        jump = jump.gather(1, jump)
    seen[:, :, 0] = True
    return seen


def root_only(root: Int[Tensor, " b"]) -> TensorTree:
    """No draft: every row is its root."""
    return TensorTree(root[:, None], *_alone(len(root), root.device), 0)


@lru_cache(maxsize=64)
def _alone(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parents, depths, sizes and ancestors of roots alone."""
    with torch.inference_mode(False):
        zero = torch.zeros(rows, 1, dtype=torch.long, device=device)
        one = torch.ones(rows, dtype=torch.long, device=device)
        return zero, zero, one, one.bool()[:, None, None]


def chain(rows: Sequence[Sequence[int]], device: torch.device | str | None = None) -> TensorTree:
    """One chain per row, roots included: [[9, 5, 6], [4]] -> tokens [[9 5 6], [4 0 0]], size [3 1]."""
    tokens = padded(rows, device)
    size = torch.tensor([len(r) for r in rows], dtype=torch.long, device=device)
    return chain_of(tokens, size)


def chain_of(tokens: Int[Tensor, "b n"], size: Int[Tensor, " b"], matrix: bool = True) -> TensorTree:
    """A right-padded chain of given tokens. `matrix=False` leaves the ancestor matrix out (prompts)."""
    b, n = tokens.shape
    index = torch.arange(n, device=tokens.device).expand(b, n)
    real = index < size[:, None]
    anc = None
    if matrix:
        lower = torch.ones(n, n, dtype=torch.bool, device=tokens.device).tril_()
        alone = torch.eye(n, dtype=torch.bool, device=tokens.device)
        alone[:, 0] = True
        anc = torch.where(real[..., None], lower, alone)
    return TensorTree(tokens, (index - 1).clamp(min=0) * real, index * real, size, anc, n - 1)


def from_template(
    root: Int[Tensor, " b"], tokens: Int[Tensor, "b m"], parents: Sequence[int], **fields: object
) -> TensorTree:
    """A tree of fixed shape: `parents` of all nodes (root first), `tokens` of all nodes but the root."""
    b, n = root.shape[0], len(parents)
    par, depth, anc = _shape(tuple(parents), root.device)
    size = torch.full((b,), n, dtype=torch.long, device=root.device)
    return TensorTree(
        torch.cat([root[:, None], tokens], 1), par.expand(b, n), depth.expand(b, n), size,
        anc.expand(b, n, n), int(_depth_bound(tuple(parents))), **fields,  # type: ignore[arg-type]
    )  # fmt: skip


@lru_cache(maxsize=256)
def _shape(parents: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    par = torch.tensor([parents], dtype=torch.long, device=device)
    anc = ancestors(par)
    return par, anc.sum(-1) - 1, anc


@lru_cache(maxsize=256)
def _depth_bound(parents: tuple[int, ...]) -> int:
    depth = [0]
    for p in parents[1:]:
        depth.append(depth[p] + 1)
    return max(depth)


def append(tree: TensorTree, tokens: Int[Tensor, "b k"], parents: Int[Tensor, "b k"]) -> TensorTree:
    """Add k nodes to every row of a full (unpadded) tree, carrying the ancestor matrix along."""
    assert tree.ancestors is not None
    (b, n), k = tree.tokens.shape, tokens.shape[1]
    old = torch.nn.functional.pad(tree.ancestors, (0, k))
    new = old.gather(1, parents[..., None].expand(b, k, n + k))
    new |= _eye(max(64, 1 << (n + k - 1).bit_length()), tokens.device)[n : n + k, : n + k]
    return TensorTree(
        torch.cat([tree.tokens, tokens], 1),
        torch.cat([tree.parents, parents], 1),
        torch.cat([tree.depths, tree.depths.gather(1, parents) + 1], 1),
        tree.size + k,
        torch.cat([old, new], 1),
        tree.deepest + 1,
    )


@lru_cache(maxsize=16)
def _eye(n: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.eye(n, dtype=torch.bool, device=device)


def prune(tree: TensorTree, keep: Int[Tensor, "b m"], count: Int[Tensor, " b"]) -> TensorTree:
    """The subtree of the nodes `keep[:, :count]` (ascending, root first, closed under parents); the rest is padding."""
    assert tree.ancestors is not None
    b, m = keep.shape
    real = torch.arange(m, device=keep.device) < count[:, None]
    keep = torch.where(real, keep, 0)
    new_id = torch.zeros_like(tree.parents)
    new_id.scatter_(1, keep, torch.arange(m, device=keep.device).expand(b, m) * real)
    new_id[:, 0] = 0

    def pick(x: Tensor) -> Tensor:
        return x.gather(1, keep) * real

    anc = tree.ancestors.gather(1, keep[..., None].expand(b, m, tree.nodes))
    anc = anc.gather(2, keep[:, None].expand(b, m, m)) & real[:, None]
    anc |= torch.eye(m, dtype=torch.bool, device=keep.device)
    anc[:, :, 0] = True
    values = None if tree.values is None else tree.values.gather(1, keep).masked_fill(~real, float("-inf"))
    parents = new_id.gather(1, tree.parents.gather(1, keep)) * real
    return TensorTree(pick(tree.tokens), parents, pick(tree.depths), count, anc, tree.deepest, values)


def best(
    values: Float[Tensor, "b n"], nodes: int, floor: float = 0.0, price: Price | None = None
) -> tuple[Tensor, Tensor]:
    """Ids of the `nodes` highest-valued nodes, ascending, and how many each row keeps.

    The sort is stable and values never rise along a path, so ties go to the shallower node and the result is connected.
    `floor` drops nodes whose value, a probability, lies below it (the root always stays). On the CPU, where looking is
    free, the places that no row needs go with them, so that nobody computes them; and `price` cuts the rows to the
    sizes that pay best.
    """
    m = min(nodes, values.shape[1])
    top = values.sort(dim=-1, stable=True, descending=True)
    good = top.values[:, :m] > (math.log(floor) if floor > 0 else float("-inf"))
    good[:, 0] = True
    if price is not None and values.device.type == "cpu":
        counts = price.most(top.values[:, :m].tolist())
        m = min(m, max(counts))
        good = good[:, :m] & (torch.arange(m) < torch.tensor(counts)[:, None])
    count = good.sum(-1)
    if floor > 0 and values.device.type == "cpu":
        m = int(count.max())
        good = good[:, :m]
    ids = torch.where(good, top.indices[:, :m], values.shape[1]).sort(-1).values
    return torch.where(ids < values.shape[1], ids, 0), count
