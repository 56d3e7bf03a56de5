"""Draft trees: building, merging, pruning, checking. Pure functions of lists and numpy arrays, batched and ragged.

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

import numpy as np

from .price import Price
from .types import Array, DraftTree, HostRow


def root_only(roots: Sequence[int]) -> DraftTree:
    """No draft: every row is its root."""
    zero, one, alone = _alone(len(roots))
    lists: list[HostRow] = [([token], [0], [0.0]) for token in roots]
    return DraftTree(np.array(roots, np.int64)[:, None], zero, zero, one, alone, 0).holding(lists)


@lru_cache(maxsize=64)
def _alone(rows: int) -> tuple[Array, Array, Array]:
    """Parents (and depths), sizes and ancestors of roots alone."""
    return np.zeros((rows, 1), np.int64), np.ones(rows, np.int64), np.ones((rows, 1, 1), bool)


def padded(rows: Sequence[Sequence[int]], width: int = 0, fill: int = 0) -> Array:
    """Lists of integers as int64 rows [b, n], filled up on the right; n: the longest one's length, at least `width`."""
    n = max(width, max(map(len, rows), default=0))
    return np.array([[*row, *[fill] * (n - len(row))] for row in rows], np.int64).reshape(len(rows), n)


def chain(rows: Sequence[Sequence[int]], matrix: bool = True) -> DraftTree:
    """One chain per row, roots included: [[9, 5, 6], [4]] -> tokens [[9 5 6], [4 0 0]], size [3 1].

    `matrix=False` leaves the ancestor matrix out (prompts).
    """
    tokens, size = padded(rows), np.array([len(row) for row in rows], np.int64)
    n = tokens.shape[1]
    index = np.arange(n)
    real = index < size[:, None]
    ancestors = None
    if matrix:
        lower, alone = np.tri(n, dtype=bool), np.eye(n, dtype=bool)
        alone[:, 0] = True
        ancestors = np.where(real[..., None], lower, alone)
    return DraftTree(tokens, np.maximum(index - 1, 0) * real, index * real, size, ancestors, max(n - 1, 0))


def from_lists(rows: Sequence[HostRow], values: bool = True) -> DraftTree:
    """A ragged batch from rows of (tokens, parents, values), roots included, padded to the largest row.

    `values=False`: the rows' third lists are placeholders.
    """
    b, n = len(rows), max(len(tokens) for tokens, _, _ in rows)
    depths, sees = [[0] * n for _ in range(b)], bytearray(b * n * n)  # the ancestor matrices, a byte for each pair
    for r, (_, parents, _) in enumerate(rows):
        for i in range(n):
            up, at = parents[i] if i < len(parents) else 0, (r * n + i) * n
            sees[at : at + n] = sees[(r * n + up) * n : (r * n + up + 1) * n]
            sees[at] = sees[at + i] = 1
            if 0 < i < len(parents):
                depths[r][i] = depths[r][up] + 1
    tokens, parents_ = padded([row[0] for row in rows]), padded([row[1] for row in rows])
    worth = None
    if values:
        worth = np.array([[*row[2], *[-math.inf] * (n - len(row[2]))] for row in rows], np.float32)
    size = np.array([len(row[0]) for row in rows], np.int64)
    seen = np.frombuffer(sees, np.bool_).reshape(b, n, n)
    deepest = max(map(max, depths))
    return DraftTree(tokens, parents_, np.array(depths, np.int64), size, seen, deepest, worth).holding(list(rows))


def from_paths(
    roots: Sequence[int], paths: Sequence[Sequence[Sequence[int]]], limit: int = 1 << 30
) -> tuple[DraftTree, list[list[list[int]]]]:
    """A trie per row: paths that share a prefix share its nodes; at most `limit` nodes, root included, in order.

    Returns the tree and, for each path, the node ids of its tokens (cut short where the limit was reached):
    roots [9], paths [[[5, 6], [5, 7], [8]]] -> the miniature above and [[[1, 2], [1, 3], [4]]].
    """
    rows: list[HostRow] = []
    where = []
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
        rows.append((tokens, parents, [0.0] * len(tokens)))
        where.append(ids)
    return from_lists(rows, values=False), where


def template(shape: Sequence[int], most: int | None = None) -> list[int]:
    """Parents of the static tree (N1, ..., Ng) in breadth-first order: (2, 1) -> [0, 0, 0, 1, 2]; of its first `most`
    nodes."""
    parents, last = [0], [0]
    for width in shape:
        layer: list[int] = []
        for node in last:
            count = width if most is None else min(width, most - len(parents))
            layer += range(len(parents), len(parents) + count)
            parents += [node] * count
        last = layer
    return parents


def from_template(roots: Sequence[int], tokens: Array, parents: Sequence[int]) -> DraftTree:
    """A tree of fixed shape for every row: `parents` of all nodes (root first), `tokens` [b, m] of all but the root."""
    one, b = from_lists([([0] * len(parents), list(parents), [])], values=False), len(roots)
    assert one.ancestors is not None

    def every(part: Array) -> Array:
        return np.broadcast_to(part, (b, *part.shape[1:]))

    spelled = np.concatenate([np.array(roots, np.int64)[:, None], tokens], 1)
    size = np.full(b, len(parents), np.int64)
    return DraftTree(spelled, every(one.parents), every(one.depths), size, every(one.ancestors), one.deepest)


def append(tree: DraftTree, tokens: Array, parents: Array) -> DraftTree:
    """Add k nodes to every row of a tree without padding: `tokens` and `parents` are int64 [b, k]."""
    assert tree.ancestors is not None
    (b, n), k = tree.tokens.shape, tokens.shape[1]
    sees = np.zeros((b, n + k, n + k), bool)
    sees[:, :n, :n] = tree.ancestors
    sees[:, n:, :n] = np.take_along_axis(tree.ancestors, parents[..., None], 1)
    sees[:, range(n, n + k), range(n, n + k)] = True
    return DraftTree(
        np.concatenate([tree.tokens, tokens], 1),
        np.concatenate([tree.parents, parents], 1),
        np.concatenate([tree.depths, np.take_along_axis(tree.depths, parents, 1) + 1], 1),
        tree.size + k,
        sees,
        tree.deepest + 1,
    )


def best_of(values: Sequence[Sequence[float]], nodes: int, floor: float, price: Price | None) -> list[list[int]]:
    """The ids of the `nodes` highest-valued nodes that each row keeps, ascending.

    The sort is stable and values never rise along a path, so ties go to the shallower node and the result is connected.
    `floor` drops nodes whose value, a probability, lies below it (the root always stays), and `price` cuts the rows to
    the sizes that pay best.
    """
    least, kept = math.log(floor) if floor > 0 else -math.inf, []
    for row in values:
        order = sorted(range(len(row)), key=row.__getitem__, reverse=True)[:nodes]  # stable: the first of equals
        kept.append([i for i in order if i == 0 or row[i] > least])
    if price is not None:
        counts = price.most([[row[i] for i in ids] for row, ids in zip(values, kept, strict=True)])
        kept = [ids[:n] for ids, n in zip(kept, counts, strict=True)]
    return [sorted(ids) for ids in kept]


def priced(rows: Sequence[HostRow], price: Price | None) -> list[HostRow]:
    """Rows, whose values fall, cut to the sizes that pay best."""
    if price is None:
        return list(rows)
    counts = price.most([values for _, _, values in rows])
    return [(a[:n], b[:n], c[:n]) for (a, b, c), n in zip(rows, counts, strict=True)]


def flaw(tree: DraftTree, roots: Sequence[int], vocab: int) -> str:
    """What is wrong with a tree that a drafter proposed; empty where nothing is.

    Every tree is checked, since compiled code reads memory at its ids, parents and depths, and a wrong root or ancestor
    matrix would change the text. Lists are looked at, which the round needs anyway: between two passes, with cold
    caches, a dozen operations on arrays would take longer.

    Args:
        roots: the last committed tokens.
        vocab: of the target: ids are below it, those of padding too.
    """
    b, n, sees = len(roots), tree.tokens.shape[-1], tree.ancestors
    numbers = tree.tokens, tree.parents, tree.depths
    if n == 0 or any(t.shape != (b, n) for t in numbers):
        return f"tokens, parents and depths are not all [{b}, nodes]"
    if tree.size.shape != (b,) or (tree.values is not None and tree.values.shape != (b, n)):
        return f"its size is not [{b}], or its values are not [{b}, {n}]"
    if any(t.dtype != np.int64 for t in (*numbers, tree.size)):
        return "tokens, parents, depths and size are not all of int64"
    if sees is None or sees.shape != (b, n, n) or sees.dtype != np.bool_:
        return f"its ancestor matrix is not bool [{b}, {n}, {n}]"
    sizes = tree.size.tolist()
    if min(sizes) < 1 or max(sizes) > n:
        return f"a row has fewer than one node or more than {n}"
    if min(sizes) < n:
        for what, part, most in (("token", tree.tokens, vocab), ("parent", tree.parents, n), ("depth", tree.depths, n)):
            if not ((part >= 0) & (part < most)).all():
                return f"the {what} of a node or of padding is not one of 0 to {most - 1}"
    seen, square = sees.tobytes(), n * n
    rows = zip(tree.host, tree.depths.tolist(), roots, strict=True)
    for r, ((ids, ups, values), levels, first) in enumerate(rows):
        if any(math.isnan(value) for value in values):
            return "its confidences are NaN, so its weights are damaged or too large for its precision"
        if min(ids) < 0 or max(ids) >= vocab:
            return f"a token lies outside the vocabulary of {vocab}"
        if ids[0] != first:
            return "its root is not the last token of the text"
        if wrong := _flaw_of_row(ups, levels, seen[r * square : r * square + len(ids) * n], tree.deepest):
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
    """Raise AssertionError where a tree breaks an invariant, a repeated sibling included (for tests)."""
    wrong = flaw(tree, tree.tokens[:, 0].tolist(), int(tree.tokens.max()) + 1)
    assert not wrong, wrong
    if tree.q is None or not tree.replacement:
        for tokens, parents, _ in tree.host:
            pairs = list(zip(parents[1:], tokens[1:], strict=True))
            assert len(pairs) == len(set(pairs)), "siblings carry distinct tokens"
