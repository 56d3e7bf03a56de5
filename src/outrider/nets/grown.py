"""Trees of a compiled drafter, grown in one call: what `core/growth.py` and `drafters/_growth.py` do in tensors.

Only the common kind: layer by layer, by value, ranked again at the end (EAGLE-2). Logs of confidences differ from those
of tensors by rounding, which may change a draft and never a text.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.noise import keys, tables
from ..core.sampling import POOL, POOLED
from ..native.parts import DraftPart, PassPart
from ..types import Budget, DraftTree, Rows
from .compiled import CompiledLayer
from .kv_cache import KVCache

KNOTS, SLOPES = tables()
LISTS = "token", "below", "level", "fed", "chosen"  # of all candidates


@dataclass(frozen=True)
class Shape:
    """Of a tree: `depth` layers, the `width` best nodes of each are fed, at most `nodes` are kept, the root included;
    `top_k` candidates below a node, confidences softmax(r / scale)."""

    depth: int
    width: int
    nodes: int
    top_k: int
    scale: float


@dataclass
class Grower:
    """A compiled layer's trees. `embeddings`: of the target's tokens, in the precision of the code. `names`: token ids
    of the head's columns."""

    net: CompiledLayer
    embeddings: Float[Tensor, "v h"]
    names: Int[Tensor, " vd"] | None

    def grow(self, cache: KVCache, last: Float[Tensor, "b 1 h"], rows: Rows, budget: Budget, shape: Shape) -> DraftTree:
        """A tree for every row.

        Args:
            cache: the layer's keys and values of the text; what is fed lasts for this call.
            last: the vectors that the candidates below the roots come from.
            rows: as a drafter's `propose` has them.
            budget: its floor, reach and price.
        """
        depth, width, nodes = shape.depth, shape.width, shape.nodes
        net, b, room, price = self.net, len(rows), self.net.room, budget.price
        hidden, columns = int(net.step.hidden), int(net.step.vocabulary)
        most, fed = min(shape.top_k, columns), max(1, (depth - 1) * width)
        candidates = 1 + most * (1 + (depth - 1) * width)
        cache.reserve(cache.longest + fed)
        root, vectors, temperature = rows.root.contiguous(), last.float().contiguous(), rows.temperature
        noise = _keys(rows, depth) if rows.rule == "coupled" and rows.hot else None
        seconds = torch.tensor(price.seconds if price else (0.0,), dtype=torch.float64)
        pointers = (ctypes.c_void_p * 2)(cache.keys.data_ptr(), cache.values.data_ptr())
        with torch.inference_mode(False):
            found, worth = torch.empty(b * (3 * nodes + 1), dtype=torch.long), torch.empty(b * nodes)
            sees = torch.empty(b * nodes * nodes, dtype=torch.bool)
        parts = [found[b * (1 + i * nodes) :] for i in range(3)]  # tokens, parents, depths
        with net.lock:
            turns, ask = net.turned(cache.longest + fed), net.counted(width)
            asks = PassPart(
                rows=b, capacity=cache.keys.shape[1], lengths=cache.lengths.data_ptr(),
                cache=ctypes.addressof(pointers), turns=turns.data_ptr(), positions=len(turns), ask=ask.data_ptr(),
                tap=room.of("tap", 1, torch.long).fill_(1).data_ptr(), threads=torch.get_num_threads(),
                **room.addresses(b * width, fed), **room.cut(
                    "a step", torch.float32, given=b * width * int(net.step.joined), states=b * width * hidden,
                    tapped=b * width * hidden, logits=b * width * columns,
                ),
            )  # fmt: skip
            wants = DraftPart(
                depth=depth, width=width, most=most, pool=max(POOL, most) if columns > POOLED else columns,
                scale=shape.scale, floor=_log(budget.floor), reach=_log(budget.reach), nodes=nodes,
                sizes=len(price.seconds) if price else 0, summed=int(price.summed) if price else 0,
                seconds=seconds.data_ptr(),
                trust=price.trust if price else 1.0, embeddings=self.embeddings.data_ptr(),
                names=None if self.names is None else self.names.data_ptr(), temperature=temperature.data_ptr(),
                keys=None if noise is None else noise.data_ptr(), knots=KNOTS.data_ptr(), slopes=SLOPES.data_ptr(),
                root=root.data_ptr(), last=vectors.data_ptr(), candidates=candidates,
                ancestors=room.of("ancestors", b * fed * fed, torch.uint8).data_ptr(),
                size=found.data_ptr(), values=worth.data_ptr(), sees=sees.data_ptr(),
                tokens=parts[0].data_ptr(), parents=parts[1].data_ptr(), depths=parts[2].data_ptr(),
                **room.cut("fed", torch.long, spots=b * fed, place=b * fed),
                **room.cut("candidates", torch.long, **dict.fromkeys(LISTS, b * candidates)),
                **room.cut(
                    "values", torch.float32, value=b * candidates, vectors=b * fed * hidden, raced=b * width * columns
                ),
            )  # fmt: skip
            net.drafts(*map(ctypes.byref, (net.step, net.end, asks, wants)))
        n = int(wants.kept)
        tokens, parents, depths = (part[: b * n].view(b, n) for part in parts)
        seen = sees[: b * n * n].view(b, n, n)
        return DraftTree(tokens, parents, depths, found[:b], seen, depth, worth[: b * n].view(b, n))


def _keys(rows: Rows, depth: int) -> Tensor:
    """Of the noise at every row's next positions, [b * depth, 2]."""
    seeds = [seed for seed in rows.seeds for _ in range(depth)]
    return keys(seeds, [start + d for start in rows.start for d in range(1, depth + 1)])


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
