"""Draft trees as four small tensors: building, pruning. Pure functions, batched and ragged.

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
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .padding import padded
from .price import Price
from .types import DraftTree, HostRow


def positions(tree: DraftTree, lengths: Int[Tensor, " b"]) -> Int[Tensor, "b n"]:
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


def root_only(root: Int[Tensor, " b"]) -> DraftTree:
    """No draft: every row is its root."""
    tree = DraftTree(root[:, None], *_alone(len(root), root.device), 0)
    if root.device.type == "cpu":  # sooner than reading all its tensors
        tree.__dict__["host"] = [([token], [0], [0.0]) for token in root.tolist()]
    return tree


@lru_cache(maxsize=64)
def _alone(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parents, depths, sizes and ancestors of roots alone."""
    with torch.inference_mode(False):
        zero = torch.zeros(rows, 1, dtype=torch.long, device=device)
        one = torch.ones(rows, dtype=torch.long, device=device)
        return zero, zero, one, one.bool()[:, None, None]


def chain(rows: Sequence[Sequence[int]], device: torch.device | str | None = None) -> DraftTree:
    """One chain per row, roots included: [[9, 5, 6], [4]] -> tokens [[9 5 6], [4 0 0]], size [3 1]."""
    tokens = padded(rows, device)
    size = torch.tensor([len(r) for r in rows], dtype=torch.long, device=device)
    return chain_of(tokens, size)


def chain_of(tokens: Int[Tensor, "b n"], size: Int[Tensor, " b"], matrix: bool = True) -> DraftTree:
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
    return DraftTree(tokens, (index - 1).clamp(min=0) * real, index * real, size, anc, n - 1)


@dataclass(frozen=True)
class Sketch:
    """A tree on the host alone: what a mix wants of a drafter that reads text. Tensors would cost it more time than the
    draft."""

    host: list[HostRow]  # with values

    @property
    def nodes(self) -> int:
        """Nodes of the widest row, the root included."""
        return max(len(tokens) for tokens, _, _ in self.host)

    def cut(self, price: Price | None) -> Sketch:
        """Rows, whose values fall, cut to the sizes that pay best."""
        if price is None:
            return self
        counts = price.most([values for _, _, values in self.host])
        return Sketch([(a[:n], b[:n], c[:n]) for (a, b, c), n in zip(self.host, counts, strict=True)])

    def tree(self, device: torch.device | str | None = None) -> DraftTree:
        """The same in tensors."""
        tokens, parents, values = zip(*self.host, strict=True)
        return from_lists(tokens, parents, values, device)


def from_lists(
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    values: Sequence[Sequence[float]] | None = None,
    device: torch.device | str | None = None,
) -> DraftTree:
    """A ragged batch from host lists (roots included), padded to the largest row."""
    b, n = len(tokens), max(map(len, tokens))
    depth, sees = [[0] * n for _ in range(b)], bytearray(b * n * n)  # the ancestor matrices, a byte for each pair
    for r, row in enumerate(parents):
        for i in range(n):
            up, at = row[i] if i < len(row) else 0, (r * n + i) * n
            sees[at : at + n] = sees[(r * n + up) * n : (r * n + up + 1) * n]
            sees[at] = sees[at + i] = 1
            if 0 < i < len(row):
                depth[r][i] = depth[r][up] + 1
    whole = torch.tensor([[[*row, *[0] * (n - len(row))] for row in rows] for rows in (tokens, parents, depth)])
    sizes, seen = torch.tensor([len(row) for row in tokens]), torch.frombuffer(sees, dtype=torch.bool).view(b, n, n)
    worth = None
    if values is not None:
        worth = torch.tensor([[*row, *[-math.inf] * (n - len(row))] for row in values]).to(device)
    names, ups, down = whole.to(device)
    tree = DraftTree(names, ups, down, sizes.to(device), seen.to(device), max(map(max, depth)), worth)
    logs = [[0.0] * len(row) for row in tokens] if values is None else values
    tree.__dict__["host"] = [tuple(map(list, row)) for row in zip(tokens, parents, logs, strict=True)]  # known already
    return tree


def from_paths(
    roots: Sequence[int],
    paths: Sequence[Sequence[Sequence[int]]],
    limit: int = 1 << 30,
    device: torch.device | str | None = None,
) -> tuple[DraftTree, list[list[list[int]]]]:
    """A trie per row: paths that share a prefix share its nodes; at most `limit` nodes, root included, in order.

    Returns the tree and, for each path, the node ids of its tokens (cut short where the limit was reached):
    roots [9], paths [[[5, 6], [5, 7], [8]]] -> the miniature above and [[[1, 2], [1, 3], [4]]].
    """
    all_tokens, all_parents, where = [], [], []
    for root, row in zip(roots, paths, strict=True):
        tokens, parents, ids = [root], [0], []
        child: dict[tuple[int, int], int] = {}
        for path in row:
            node, track = 0, []
            for token in path:
                following = child.get((node, token))
                if following is None:
                    if len(tokens) >= limit:
                        break
                    following = child[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = following
                track.append(node)
            ids.append(track)
        all_tokens.append(tokens)
        all_parents.append(parents)
        where.append(ids)
    return from_lists(all_tokens, all_parents, device=device), where


@lru_cache(maxsize=256)
def template(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Parents of the static tree (N1, ..., Ng) in breadth-first order: (2, 1) -> (0, 0, 0, 1, 2)."""
    parents, last = [0], [0]
    for width in shape:
        layer: list[int] = []
        for node in last:
            layer += range(len(parents), len(parents) + width)
            parents += [node] * width
        last = layer
    return tuple(parents)


def from_template(
    root: Int[Tensor, " b"], tokens: Int[Tensor, "b m"], parents: Sequence[int], **fields: object
) -> DraftTree:
    """A tree of fixed shape: `parents` of all nodes (root first), `tokens` of all nodes but the root."""
    b, n = root.shape[0], len(parents)
    par, depth, anc = _shape(tuple(parents), root.device)
    size = torch.full((b,), n, dtype=torch.long, device=root.device)
    return DraftTree(
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


def append(tree: DraftTree, tokens: Int[Tensor, "b k"], parents: Int[Tensor, "b k"]) -> DraftTree:
    """Add k nodes to every row of a full (unpadded) tree, carrying the ancestor matrix along."""
    assert tree.ancestors is not None
    (b, n), k = tree.tokens.shape, tokens.shape[1]
    old = torch.nn.functional.pad(tree.ancestors, (0, k))
    new = old.gather(1, parents[..., None].expand(b, k, n + k))
    new |= _eye(max(64, 1 << (n + k - 1).bit_length()), tokens.device)[n : n + k, : n + k]
    return DraftTree(
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


def prune(tree: DraftTree, keep: Int[Tensor, "b m"], count: Int[Tensor, " b"]) -> DraftTree:
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
    return DraftTree(pick(tree.tokens), parents, pick(tree.depths), count, anc, tree.deepest, values)


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


def best_of(values: Sequence[Sequence[float]], nodes: int, floor: float, price: Price | None) -> list[list[int]]:
    """`best` on the host: the ids of the nodes that each row keeps, ascending."""
    least, found = math.log(floor) if floor > 0 else -math.inf, []
    for row in values:
        order = sorted(range(len(row)), key=row.__getitem__, reverse=True)[:nodes]  # stable: the first of equals
        found.append([i for i in order if i == 0 or row[i] > least])
    if price is not None:
        counts = price.most([[row[i] for i in ids] for row, ids in zip(values, found, strict=True)])
        found = [ids[:n] for ids, n in zip(found, counts, strict=True)]
    return [sorted(ids) for ids in found]


def flaw(tree: DraftTree, root: Int[Tensor, " b"], vocab: int) -> str:
    """What is wrong with a tree that a drafter proposed; empty where nothing is.

    Every tree is looked over, since compiled code reads memory at its ids, parents and depths, and a wrong root or
    ancestor matrix would change the text. Lists on the host are looked at, which the round needs anyway: between two
    passes, with cold caches, a dozen operations on arrays would take longer. Away from the CPU this waits for the
    device.

    Args:
        root: the last committed tokens.
        vocab: of the target: ids are below it, those of padding too.
    """
    b, n, sees = len(root), tree.tokens.shape[-1], tree.ancestors
    numbers = tree.tokens, tree.parents, tree.depths
    if n == 0 or any(t.shape != (b, n) for t in numbers):
        return f"tokens, parents and depths are not all [{b}, nodes]"
    if tree.size.shape != (b,) or (tree.values is not None and tree.values.shape != (b, n)):
        return f"its size is not [{b}], or its values are not [{b}, {n}]"
    if any(t.dtype != torch.long for t in (*numbers, tree.size)):
        return "tokens, parents, depths and size are not all of int64"
    if sees is None or sees.shape != (b, n, n) or sees.dtype != torch.bool:
        return f"its ancestor matrix is not bool [{b}, {n}, {n}]"
    sizes = tree.size.tolist()
    if min(sizes) < 1 or max(sizes) > n:
        return f"a row has fewer than one node or more than {n}"
    if min(sizes) < n:
        for what, part, most in (("token", tree.tokens, vocab), ("parent", tree.parents, n), ("depth", tree.depths, n)):
            if not bool(((part >= 0) & (part < most)).all()):
                return f"the {what} of a node or of padding is not one of 0 to {most - 1}"
    seen, size = sees.cpu().numpy().tobytes(), n * n
    rows = zip(tree.host, tree.depths.tolist(), root.tolist(), strict=True)
    for r, ((ids, ups, values), levels, first) in enumerate(rows):
        if any(math.isnan(value) for value in values):
            return "its confidences are NaN, so its weights are damaged or too large for its precision"
        if min(ids) < 0 or max(ids) >= vocab:
            return f"a token lies outside the vocabulary of {vocab}"
        if ids[0] != first:
            return "its root is not the last token of the text"
        if wrong := _flaw_of_row(ups, levels, seen[r * size : r * size + len(ids) * n], tree.deepest):
            return wrong
    return ""


def _flaw_of_row(parents: list[int], depths: list[int], seen: bytes, deepest: int) -> str:
    """`flaw` of one row's nodes. `seen`: their lines of the ancestor matrix."""
    n = len(seen) // len(parents)
    lines = bytearray(len(seen))
    lines[0] = 1
    if parents[0] != 0 or depths[0] != 0:
        return "its root has a parent or a depth"
    for i in range(1, len(parents)):
        up = parents[i]
        if not 0 <= up < i:
            return "a node comes before its parent"
        if depths[i] != depths[up] + 1:
            return "a node's depth is not its parent's plus one"
        if depths[i] > deepest:
            return f"a node is deeper than the tree's deepest, {deepest}"
        lines[i * n : i * n + n] = lines[up * n : up * n + n]
        lines[i * n + i] = 1
    return "" if lines == seen else "its ancestor matrix does not follow from its parents"


def check(tree: DraftTree) -> None:
    """Raise AssertionError where a tree breaks an invariant (it looks at values: for tests and trees made by hand)."""
    b, n = tree.tokens.shape
    assert tree.ancestors is not None, "a proposed tree carries its ancestor matrix"
    assert tree.parents.shape == tree.depths.shape == (b, n), "tokens, parents and depths have one shape"
    assert tree.ancestors.shape == (b, n, n), "ancestors are [b, n, n]"
    index = torch.arange(n, device=tree.tokens.device)
    real = index < tree.size[:, None]
    assert bool(((tree.size >= 1) & (tree.size <= n)).all()), "every row has its root"
    assert bool(((tree.parents < index.clamp(min=1)) | ~real).all()), "parents come first"
    assert torch.equal(tree.depths * real, depths(tree.parents) * real), "depths follow from parents"
    assert torch.equal(tree.ancestors & real[..., None], ancestors(tree.parents) & real[..., None])
    assert int(tree.depths.max()) <= tree.deepest, "deepest bounds the depths"
    if tree.q is None or not tree.replacement:
        for tokens, parents, size in zip(tree.tokens.tolist(), tree.parents.tolist(), tree.size.tolist(), strict=True):
            pairs = list(zip(parents[1:size], tokens[1:size], strict=True))
            assert len(pairs) == len(set(pairs)), "siblings carry distinct tokens"
