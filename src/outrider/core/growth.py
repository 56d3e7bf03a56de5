"""Growing draft trees by value (EAGLE-2, section 4): a node's value is the product of the confidences on its path."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .price import Price
from .tree import append, best, root_only
from .types import DraftTree

Expand = Callable[[DraftTree, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Found:
    """Every node there was to choose from, root first; and the part of them that the drafter was fed."""

    fed: DraftTree
    tokens: Int[Tensor, "b n"]
    below: Int[Tensor, "#b n"]  # a node's parent, counted among the fed
    level: Int[Tensor, "#b n"]  # depths
    values: Float[Tensor, "b n"]
    fed_as: Int[Tensor, "b n"]  # a node's place among the fed; -1: not chosen to be fed


def grow(
    root: Int[Tensor, " b"],
    expand: Expand,
    *,
    depth: int,
    width: int,
    nodes: int,
    floor: float = 0.0,
    reach: float = 0.0,
    price: Price | None = None,
    frontier: Literal["layer", "any"] = "layer",
    steps: int | None = None,
    value: bool = True,
    rerank: bool = True,
) -> tuple[DraftTree, Int[Tensor, "b m"]]:
    """A tree of at most `nodes` nodes, root included.

    `expand(fed, since)` feeds the nodes `fed.tokens[:, since:]` to the drafter and returns, for each, k candidate
    tokens and their log-confidences, both [b, fed - since, k]. Its first call has `since=0` and the root alone.

    `frontier="layer"` feeds the `width` best nodes of the last layer, `depth` times; `frontier="any"` (best-first)
    feeds the `width` best nodes not fed yet, whatever their depth, `steps` times. Then all nodes are ranked again and
    the best are kept. `reach` ends the growth once no row has a node to feed whose value lies above it (on the CPU,
    where looking costs no wait). `price` cuts the tree to the size that pays best.

    EAGLE-2's ablations: `value=False` feeds the nodes of highest own confidence (still ranking again by value);
    `rerank=False` keeps only the nodes that were chosen to be fed, those chosen from the last layer included.

    Returns the tree and each node's index among the fed nodes (-1: never fed, so not in the drafter's cache).
    """
    steps = depth if frontier == "layer" or steps is None else steps
    if frontier == "layer":
        found = _by_layer(root, expand, steps, width, floor, reach, value, rerank)
    else:
        found = _best_first(root, expand, depth, steps, width, floor, reach, value, rerank)
    values = found.values if rerank else found.values.masked_fill(found.fed_as < 0, -math.inf)
    ids, kept = best(values, nodes, floor, price)
    return _rewired(found, ids, kept)


def _by_layer(
    root: Int[Tensor, " b"],
    expand: Expand,
    steps: int,
    width: int,
    floor: float,
    reach: float,
    value: bool,
    rerank: bool,
) -> Found:
    """Only the layer at hand is looked at in each step, the rest is put together at the end."""
    b, device, fed = root.shape[0], root.device, root_only(root)
    tokens, values = [root[:, None]], [torch.zeros(b, 1, device=device)]
    chosen, live = [torch.zeros(b, 1, dtype=torch.long, device=device)], values[:1]  # fed nodes: ids, values
    shape: list[tuple[int, int, int]] = []
    since, first = 0, 1
    for step in range(steps):
        found, confidence = expand(fed, since)
        w, k = found.shape[1:]
        confidence = confidence.clamp(max=0)
        new = (live[-1][..., None] + confidence).flatten(1)  # -inf stays -inf: below nodes that a row does not have
        shape.append((since, w, k))
        tokens.append(found.flatten(1))
        values.append(new)
        if step + 1 == steps and rerank:
            break
        score = new if value else confidence.flatten(1).masked_fill(new == -math.inf, -math.inf)
        top = score.topk(min(width, w * k), -1).indices
        if value:
            top = top[:, : _worth(new.gather(1, top), floor)]
            if not top.shape[1]:
                break
        chosen.append(top + first)
        live.append(new.gather(1, top))
        since, first = fed.nodes, first + w * k
        if step + 1 == steps or (reach > 0 and device.type == "cpu" and float(live[-1].max()) < math.log(reach)):
            break  # chosen, and never fed
        fed = append(fed, tokens[-1].gather(1, top), top.div(k, rounding_mode="floor") + shape[-1][0])
    below, level = _layers(tuple(shape), device)
    everything, picked = torch.cat(values, 1), torch.cat(chosen, 1)
    place = torch.arange(picked.shape[1], device=device).masked_fill(torch.cat(live, 1) == -math.inf, -1)
    fed_as = torch.full(everything.shape, -1, dtype=torch.long, device=device).scatter_(1, picked, place)
    return Found(fed, torch.cat(tokens, 1), below, level, everything, fed_as)


def _worth(values: Float[Tensor, "b w"], floor: float) -> int:
    """How many of these nodes, best first, any row need feed: what lies below a node that falls to the floor falls too.

    All of them off the CPU, where looking would wait.
    """
    if floor <= 0 or values.device.type != "cpu":
        return values.shape[1]
    return int((values > math.log(floor)).sum(-1).max())


@lru_cache(maxsize=256)
def _layers(shape: tuple[tuple[int, int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Parents (among the fed) and depths of layers (first fed node, fed nodes, candidates of each), root first."""
    below, level = [0], [0]
    for depth, (since, w, k) in enumerate(shape, 1):
        below += [since + i for i in range(w) for _ in range(k)]
        level += [depth] * (w * k)
    with torch.inference_mode(False):
        return torch.tensor([below], device=device), torch.tensor([level], device=device)


def _best_first(
    root: Int[Tensor, " b"],
    expand: Expand,
    depth: int,
    steps: int,
    width: int,
    floor: float,
    reach: float,
    value: bool,
    rerank: bool,
) -> Found:
    b, device, fed = root.shape[0], root.device, root_only(root)
    tokens, below = root[:, None], root.new_zeros(b, 1)
    values = own = worth = torch.zeros(b, 1, device=device)  # own: confidences; worth: values of the fed
    level, fed_as = below, below
    since = 0
    for step in range(steps):
        found, confidence = expand(fed, since)
        w, k = found.shape[1:]
        confidence = confidence.clamp(max=0)
        parents = torch.arange(since, since + w, device=device).repeat_interleave(k).expand(b, w * k)
        tokens, below = torch.cat([tokens, found.flatten(1)], 1), torch.cat([below, parents], 1)
        values = torch.cat([values, (worth[:, since:, None] + confidence).flatten(1)], 1)
        own = torch.cat([own, confidence.flatten(1)], 1)
        fed_as = torch.nn.functional.pad(fed_as, (0, w * k), value=-1)
        level = torch.cat([level, fed.depths.gather(1, parents) + 1], 1)
        if step + 1 == steps and rerank:
            break
        open_ = (fed_as < 0) & (level < depth) & (values > -math.inf)
        score = (values if value else own)[:, 1:].masked_fill(~open_[:, 1:], -math.inf)
        top = score.topk(min(width, score.shape[1]), -1)
        chosen = top.indices[:, : _worth(top.values, floor) if value else None] + 1
        if not chosen.shape[1]:
            break
        since, live = fed.nodes, open_.gather(1, chosen)
        index = torch.arange(since, since + chosen.shape[1], device=device)
        fed_as = fed_as.scatter(1, chosen, torch.where(live, index, fed_as.gather(1, chosen)))
        picked = values.gather(1, chosen).masked_fill(~live, -math.inf)  # a row may have nothing left to feed
        if step + 1 == steps or (reach > 0 and device.type == "cpu" and float(picked.max()) < math.log(reach)):
            break
        fed = append(fed, tokens.gather(1, chosen), below.gather(1, chosen))
        worth = torch.cat([worth, picked], 1)
    return Found(fed, tokens, below, level, values, fed_as)


def _rewired(found: Found, ids: Int[Tensor, "b m"], kept: Int[Tensor, " b"]) -> tuple[DraftTree, Int[Tensor, "b m"]]:
    """The tree of the nodes `ids[:, :kept]` (ascending, closed under parents), and where they are among the fed."""
    fed, (b, m), device = found.fed, ids.shape, ids.device
    assert fed.ancestors is not None
    index = torch.arange(m, device=device)
    real = index < kept[:, None]
    where = found.fed_as.gather(1, ids).masked_fill(~real, -1)
    where = where.masked_fill(where >= fed.nodes, -1)  # chosen last, and never fed
    inside = where >= 0
    below = found.below.expand(b, -1).gather(1, ids) * real
    node_of = torch.zeros(b, fed.nodes + 1, dtype=torch.long, device=device)
    node_of.scatter_(1, where.masked_fill(~inside, fed.nodes), index.expand(b, m))
    anc = fed.ancestors.gather(1, below[..., None].expand(b, m, fed.nodes))
    anc = anc.gather(2, where.clamp(min=0)[:, None].expand(b, m, m)) & inside[:, None]
    anc |= torch.eye(m, dtype=torch.bool, device=device)
    anc[:, :, 0] = True
    tree = DraftTree(
        found.tokens.gather(1, ids) * real,
        node_of.gather(1, below),
        found.level.expand(b, -1).gather(1, ids) * real,
        kept,
        anc,
        fed.deepest + 1,
        found.values.gather(1, ids).masked_fill(~real, -math.inf),
    )
    return tree, where
