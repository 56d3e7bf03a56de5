"""Attention that sums by absolute position, so that a token's bits do not depend on what was drafted beside it.

A node at position p attends to positions 0 .. p in two parts, cut at start(p), a function of p alone (`exact.py`):

    head: [0, start(p)), committed text, read where it lies in the cache, one product for all nodes;
    tail: [start(p), start(p) + WINDOW), gathered along the node's own path and hidden beyond p; nodes of one path
        share it.

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
FAR = 60.0  # a part exp(FAR) times lighter than the other weighs nothing


@dataclass(frozen=True)
class Queries:
    """How many rows an attention product must have, so that a row's bits do not depend on the others."""

    least: int = 1
    multiple: bool = False  # a multiple of `least`, or just as many or more


@dataclass
class Plan:
    """Where a pass's keys lie, by position: computed once, used by all layers with the same window."""

    tail: Int[Tensor, "k window"]  # slots over the whole batch; k tails, each of `share` nodes
    seen: Float[Tensor, "k 1 share window"]  # 0, or -inf for what lies beyond a node
    extent: Tensor  # its length is that of the head
    hides: Float[Tensor, "#b 1 #m extent"] | None = None  # the same for the head, where some node sees less than all
    empty: Float[Tensor, "#b m 1 1"] | None = None  # -inf for nodes that see nothing of the head
    far: Int[Tensor, "bm extent"] | None = None  # very deep trees: the head's slots, for each node its own
    order: Int[Tensor, " k*share"] | None = None  # the nodes of each tail, counted over the batch; chunks: as they lie
    back: Int[Tensor, " bm"] | None = None  # where each node stands in that order
    lead: int = 0  # prompts that begin inside a block: the nodes that a first tail lacks
    queries: Queries = Queries()
    folded: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)  # masks by heads in a group

    @property
    def rare(self) -> bool:
        """Do few passes of a text take this course? Some nodes have a head and others none, or a tree is very deep."""
        return self.empty is not None or self.far is not None

    def masks(self, heads: int) -> tuple[Tensor, Tensor | None]:
        """`seen` and `hides` once for each head of a group; kept, since all layers share them."""
        if heads not in self.folded:
            both = [
                m if m is None or m.shape[2] == 1 else m.repeat_interleave(heads, 2) for m in (self.seen, self.hides)
            ]
            seen, hides = both
            assert seen is not None
            self.folded[heads] = seen, hides
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
        return Plan(tail, seen, extent, hides, empty, far, order, back, self.lead, self.queries)


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
    seen, hides = plan.masks(group)
    out, total = _tail(nodes, key, value, plan, seen, scale)
    if plan.extent.shape[0]:
        first, weight = _head(nodes, key, value, plan, hides, scale)
        out = _merged(first, weight, out, total, sinks)
    elif sinks is not None:
        out = _merged(None, None, out, total, sinks)
    return out[..., :width].to(query.dtype).flatten(2, 3)


def _tail(
    nodes: Tensor, key: Tensor, value: Tensor, plan: Plan, seen: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output [b, m, g, r, d] and log of the sum [b, m, g, r] of the gathered part."""
    k, m, group = plan.tail.shape[0], nodes.shape[1], int(nodes.shape[3])
    if plan.order is None:
        over = -(m + plan.lead) % int(plan.seen.shape[2])
        picked = torch.nn.functional.pad(nodes, (0, 0, 0, 0, 0, 0, plan.lead, over)).flatten(0, 1)
    else:
        picked = nodes.flatten(0, 1).index_select(0, plan.order)
    rows = picked.unflatten(0, (k, -1)).transpose(1, 2).flatten(2, 3)  # [k, g, share * r, d]
    found = _fused(rows, _taken(key, plan.tail), _taken(value, plan.tail), seen, scale)  # rows there are enough of
    out, total = (x.unflatten(2, (-1, group)).transpose(1, 2).flatten(0, 1) for x in found)  # [k * share, g, r, ...]
    b = nodes.shape[0]
    if plan.back is None:
        out, total = out.unflatten(0, (b, -1)), total.unflatten(0, (b, -1))
        return out[:, plan.lead : plan.lead + m], total[:, plan.lead : plan.lead + m]
    return out.index_select(0, plan.back).unflatten(0, (b, -1)), total.index_select(0, plan.back).unflatten(0, (b, -1))


def _head(
    nodes: Tensor, key: Tensor, value: Tensor, plan: Plan, hides: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The same of the part that is read in place."""
    b, extent, group = nodes.shape[0], plan.extent.shape[0], int(nodes.shape[3])
    if plan.far is not None:
        own = None if plan.hides is None else plan.hides.expand(b, 1, nodes.shape[1], -1).transpose(1, 2).flatten(0, 1)
        rows = nodes.flatten(0, 1)
        out, total = kernel(
            rows,
            _taken(key, plan.far),
            _taken(value, plan.far),
            own[:, None] if own is not None else None,
            scale,
            plan.queries,
        )
        out, total = out.unflatten(0, (b, -1)), total.unflatten(0, (b, -1))
    else:
        if key.shape[2] < extent:  # a first chunk that is shorter than the kernel wants
            pads = (0, 0, 0, extent - key.shape[2])
            key, value = torch.nn.functional.pad(key, pads), torch.nn.functional.pad(value, pads)
        rows = nodes.transpose(1, 2).flatten(2, 3)  # [b, g, m * r, d]
        out, total = kernel(rows, key.narrow(2, 0, extent), value.narrow(2, 0, extent), hides, scale, plan.queries)
        out = out.unflatten(2, (-1, group)).transpose(1, 2)
        total = total.unflatten(2, (-1, group)).transpose(1, 2)
    return out, total if plan.empty is None else total + plan.empty


def _taken(states: Float[Tensor, "b g cap d"], slots: Int[Tensor, "k w"]) -> Float[Tensor, "k g w d"]:
    """Keys or values of these slots, counted over the whole batch."""
    flat = states.transpose(1, 2).flatten(0, 1)
    return flat.index_select(0, slots.flatten()).unflatten(0, (slots.shape[0], -1)).transpose(1, 2)


def kernel(
    rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, queries: Queries
) -> tuple[Tensor, Tensor]:
    """torch's fused attention for CPUs: output and log of the sum. Rows that it lacks repeat those there are."""
    n, least = rows.shape[2], queries.least
    recording = queries.multiple and torch.jit.is_tracing()  # whose replays have other row counts
    if not recording and n >= least and not (queries.multiple and n % least):
        return _fused(rows, key, value, mask, scale)
    wanted = (n + least - 1) // least * least if queries.multiple else least
    at = torch.arange(wanted, device=rows.device) % n
    if mask is not None and mask.shape[2] > 1:
        mask = mask.index_select(2, at)
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
        ratio = (total - weight).clamp_(max=FAR).exp_()[..., None]
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
