"""Attention that sums by absolute position, so that a token's bits do not depend on what was drafted beside it.

A node at position p attends to positions 0 .. p in two parts, cut at start(p), a function of p alone (`exact.py`):

    head: [0, start(p)), committed text, read where it lies in the cache, one product for all nodes;
    tail: [start(p), start(p) + WINDOW), gathered along the node's own path and hidden beyond p; nodes of one path
        share it, and that of a node which is alone lies in the cache as it is wanted.

Each part is one call of torch's fused kernel for CPUs, which also returns the log of its sum; the parts are weighed by
these. Keys hidden at the end of a part change no bit, and no row changes another's: `probe.py` holds this machine's
kernels to that before the mode is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

PLAN = "outrider_plan"  # under this name a mask carries its plan through the model's own code
MOST = 2.0**86  # a part so many times lighter than the other weighs nothing: x * MOST / (MOST + 1) is x, bit for bit


@dataclass(frozen=True)
class Queries:
    """How many rows an attention product must have, so that a row's bits do not depend on the others."""

    least: int = 1
    multiple: bool = False  # a multiple of `least`, or just as many or more


@dataclass(frozen=True)
class Folded:
    """What the layers of one pass share, where so many heads read one key head."""

    heads: int
    seen: Tensor
    hides: Tensor | None
    rows: Tensor | None  # of the head's product, and of both for nodes that are alone: see `filled`


@dataclass
class Plan:
    """Where a pass's keys lie, by position: computed once, used by all layers with the same window."""

    # slots over the whole batch: k tails, each of `share` nodes; or tails that lie in the cache as they are wanted,
    # each from its row's slot `start` on, which is the length of this tensor
    tail: Int[Tensor, "k window"] | Int[Tensor, " start"]
    seen: Float[
        Tensor, "k 1 share window"
    ]  # 0, or -inf for what lies beyond a node; share 1: for all rows of a product
    extent: Tensor  # its length is that of the head: recordings follow lengths, and no numbers
    hides: Float[Tensor, "#b 1 #m extent"] | None = None  # the same for the head, where some node sees less than all
    empty: Float[Tensor, "#b m 1 1"] | None = None  # -inf for nodes that see nothing of the head
    far: Int[Tensor, "bm extent"] | None = None  # very deep trees: the head's slots, for each node its own
    order: Int[Tensor, " k*share"] | None = None  # the nodes of each tail, counted over the batch; None: as they lie
    back: Int[Tensor, " bm"] | None = None  # where each node stands in that order
    lead: int = 0  # prompts that begin inside a block: the nodes that a first tail lacks
    lone: bool = False  # one node a row that is read
    rare: bool = False  # few passes of a text take this course
    queries: Queries = Queries()
    folded: dict[int, Folded] = field(default_factory=dict)  # by heads in a group

    def fold(self, nodes: int, heads: int) -> Folded:
        """The masks once for each head of a group, and the rows of the head's product; kept, since all layers share
        them."""
        if heads not in self.folded:
            seen, hides = (
                m if m is None or m.shape[2] == 1 else m.repeat_interleave(heads, 2) for m in (self.seen, self.hides)
            )
            assert seen is not None
            rows = filled(nodes * heads, self.queries)
            if rows is not None and hides is not None and hides.shape[2] > 1:
                hides = hides.index_select(2, rows)
            self.folded[heads] = Folded(heads, seen, hides, rows)
        return self.folded[heads]

    def tensors(self) -> list[Tensor | None]:
        return [self.tail, self.seen, self.extent, self.hides, self.empty, self.far, self.order, self.back]

    def like(self, given: Iterator[Tensor]) -> Plan:
        """A plan with the same parts, which are the next of those given."""
        parts = [None if old is None else next(given) for old in self.tensors()]
        tail, seen, extent, hides, empty, far, order, back = parts
        assert tail is not None
        assert seen is not None
        assert extent is not None
        return Plan(tail, seen, extent, hides, empty, far, order, back, self.lead, self.lone, self.rare, self.queries)


def carry(plan: Plan) -> Tensor:
    """The plan as the mask that a model hands to its attention."""
    plan.seen.__dict__[PLAN] = plan
    return plan.seen


def plan_of(mask: Any) -> Plan | None:
    """The plan that a mask carries; None where it carries none."""
    return mask.__dict__.get(PLAN) if isinstance(mask, Tensor) else None


def attend(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b g cap d"],
    value: Float[Tensor, "b g cap e"],
    plan: Plan,
    scale: float | None = None,
    sinks: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "b m h e"]:
    """Attention of each node to the positions of its own path; keys and values are those of all slots.

    `sinks`: a logit for each head that takes weight and gives nothing.
    """
    width, group = int(value.shape[3]), int(query.shape[1]) // int(key.shape[1])
    if width < int(key.shape[3]):  # the kernel wants one width
        value = torch.nn.functional.pad(value, (0, int(key.shape[3]) - width))
    nodes = query.transpose(1, 2).unflatten(2, (-1, group))  # [b, m, g, r, d]
    folded = plan.fold(1 if plan.lone else nodes.shape[1], group)
    if plan.lone:  # the rows of both products, [b, g, r, d] and as many more as they must have
        nodes = nodes[:, 0] if folded.rows is None else nodes[:, 0].index_select(2, folded.rows)
    out, total = _tail(nodes, key, value, plan, folded, scale)
    first = weight = None
    if plan.extent.shape[0]:
        first, weight = _head(nodes, key, value, plan, folded, scale)
    if first is not None or sinks is not None:
        out = _merged(first, weight, out, total, sinks)
    made = out[..., :width].to(query.dtype).flatten(2, 3)
    return made.expand(-1, query.shape[2], -1, -1) if plan.lone else made


def _tail(
    nodes: Tensor, key: Tensor, value: Tensor, plan: Plan, folded: Folded, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output [b, m, g, r, d] and log of the sum [b, m, g, r] of the last part."""
    share, width = (int(n) for n in plan.seen.shape[2:])
    keys, values = _taken(key, plan.tail, width), _taken(value, plan.tail, width)
    if plan.lone:
        return _first(_fused(nodes, keys, values, folded.seen, scale), folded.heads)
    k, m, group = plan.tail.shape[0], nodes.shape[1], folded.heads
    if plan.order is None:
        over = -(m + plan.lead) % share
        picked = torch.nn.functional.pad(nodes, (0, 0, 0, 0, 0, 0, plan.lead, over)).flatten(0, 1)
    else:
        picked = nodes.flatten(0, 1).index_select(0, plan.order)
    rows = picked.unflatten(0, (k, -1)).transpose(1, 2).flatten(2, 3)  # [k, g, share * r, d]
    found = _fused(rows, keys, values, folded.seen, scale)  # rows there are enough of
    out, total = (x.unflatten(2, (-1, group)).transpose(1, 2).flatten(0, 1) for x in found)  # [k * share, g, r, ...]
    b = nodes.shape[0]
    if plan.back is None:
        out, total = out.unflatten(0, (b, -1)), total.unflatten(0, (b, -1))
        return out[:, plan.lead : plan.lead + m], total[:, plan.lead : plan.lead + m]
    return out.index_select(0, plan.back).unflatten(0, (b, -1)), total.index_select(0, plan.back).unflatten(0, (b, -1))


def _head(
    nodes: Tensor, key: Tensor, value: Tensor, plan: Plan, folded: Folded, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The same of the part that is read in place."""
    extent, hides = plan.extent.shape[0], folded.hides
    if plan.far is not None:
        return _far(nodes, key, value, plan, scale)
    if key.shape[2] < extent:  # a first chunk that is shorter than the kernel wants
        pads = (0, 0, 0, extent - key.shape[2])
        key, value = torch.nn.functional.pad(key, pads), torch.nn.functional.pad(value, pads)
    keys, values = key.narrow(2, 0, extent), value.narrow(2, 0, extent)
    if plan.lone:
        out, total = _first(_fused(nodes, keys, values, hides, scale), folded.heads)
    else:
        rows = nodes.transpose(1, 2).flatten(2, 3)  # [b, g, m * r, d]
        out, total = kernel(rows, keys, values, hides, scale, folded.rows)
        out, total = (x.unflatten(2, (-1, folded.heads)).transpose(1, 2) for x in (out, total))
    return out, total if plan.empty is None else total + plan.empty


def _far(nodes: Tensor, key: Tensor, value: Tensor, plan: Plan, scale: float | None) -> tuple[Tensor, Tensor]:
    """The same, gathered for each node."""
    assert plan.far is not None
    (b, m), hides, rows = nodes.shape[:2], plan.hides, nodes.flatten(0, 1)
    own = None if hides is None else hides.expand(b, 1, m, -1).transpose(1, 2).flatten(0, 1)[:, None]
    keys, values = (_taken(states, plan.far, 0) for states in (key, value))
    out, total = kernel(rows, keys, values, own, scale, filled(rows.shape[2], plan.queries))
    out, total = out.unflatten(0, (b, -1)), total.unflatten(0, (b, -1))
    return out, total if plan.empty is None else total + plan.empty


def _taken(states: Float[Tensor, "b g cap d"], slots: Int[Tensor, "*slots"], width: int) -> Float[Tensor, "n g w d"]:
    """Keys or values of the slots of a plan's `tail`, of which there are `width` where they lie in the cache."""
    if slots.dim() == 1:
        return states.narrow(2, slots.shape[0], width)
    flat = states.transpose(1, 2).flatten(0, 1)
    return flat.index_select(0, slots.flatten()).unflatten(0, (slots.shape[0], -1)).transpose(1, 2)


def _first(found: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Of the rows [b, g, n, ...] of nodes that are alone, those of the nodes themselves: [b, 1, g, r, ...]."""
    out, total = found
    return out[:, None, :, :heads], total[:, None, :, :heads]


def filled(rows: int, queries: Queries) -> Int[Tensor, " n"] | None:
    """The rows of a product that has as many as it must: those there are, and some of them again. None: as they are."""
    least = queries.least
    if least == 1 or (not queries.multiple and rows >= least):
        return None
    if queries.multiple and rows % least == 0 and not torch.jit.is_tracing():  # whose replays have other row counts
        return None
    return torch.arange((rows + least - 1) // least * least if queries.multiple else least) % rows


def kernel(
    rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, at: Tensor | None
) -> tuple[Tensor, Tensor]:
    """torch's fused attention for CPUs, over rows `filled` so (the mask's are already): output and log of the sum."""
    if at is None:
        return _fused(rows, key, value, mask, scale)
    n = rows.shape[2]
    out, total = _fused(rows.index_select(2, at), key, value, mask, scale)
    return out[:, :, :n], total[:, :, :n]


def _fused(rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, total = fused(rows, key, value, 0.0, False, attn_mask=mask, scale=scale)
    return out, total


def _merged(first: Tensor | None, weight: Tensor | None, last: Tensor, total: Tensor, sinks: Tensor | None) -> Tensor:
    """Both parts, each weighed by its sum; all in float32, elementwise."""
    if sinks is None:
        assert first is not None
        assert weight is not None
        ratio = (total - weight).exp_().clamp_(max=MOST)[..., None]
        return (last * ratio).add_(first).div_(ratio + 1)
    sink = sinks.float().view(total.shape[2:])
    most = torch.maximum(total, sink)
    if first is None or weight is None:
        tail = (total - most).exp()
        return last * (tail / (tail + (sink - most).exp()))[..., None]
    most = torch.maximum(most, weight)
    head, tail = (weight - most).exp(), (total - most).exp()
    both = first * head[..., None] + last * tail[..., None]
    return both / (head + tail + (sink - most).exp())[..., None]
