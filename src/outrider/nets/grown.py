"""Trees of a compiled drafter, grown in one call: what `core/growth.py` and `drafters/_growth.py` do in tensors. The
same call first feeds what was committed since the last one.

Only the common kind: layer by layer, by value, ranked again at the end (EAGLE-2). Logs of confidences differ from those
of tensors by rounding, which may change a draft and never a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..backends.native.abi import MAX_FED_PAIRS, Struct, address, struct
from ..backends.native.arrays import addresses, integers
from ..backends.native.workspace import Workspace
from ..core.protocols import Round
from ..core.types import Budget, DraftTree, Rows
from .compiled import CompiledLayer
from .kv_cache import KVCache
from .wanted import KNOTS, SLOPES, Seconds, Shape, Wanted

LISTS = "token", "parent", "level", "fed", "chosen"  # of all candidates


class Pairs(NamedTuple):
    """What a round committed: of each row the nodes whose features count, and the token behind each of them.
    `features`: of each layer that is read; `rows`: where each row lies in them. (A tuple: one is made every round.)"""

    features: Sequence[Float[Tensor, "r m h"]]
    nodes: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    rows: Sequence[int]

    def select(self, index: Sequence[int]) -> Pairs:
        """Row i := old row index[i]."""
        nodes, tokens = ([part[i] for i in index] for part in (self.nodes, self.tokens))
        return Pairs(self.features, nodes, tokens, [self.rows[i] for i in index])

    def beside(self, before: int, behind: int) -> Pairs:
        """With so many rows before and behind these, which committed nothing."""
        nodes, tokens = ([*[()] * before, *part, *[()] * behind] for part in (self.nodes, self.tokens))
        return Pairs(self.features, nodes, tokens, [*[0] * before, *self.rows, *[0] * behind])


def paired(round: Round, features: Sequence[Float[Tensor, "b m h"]]) -> Pairs:
    """What a round committed, on the host: of each row the nodes and the tokens behind them."""
    if round.tree.ancestors is not None:
        if round.tree.nodes == 1:
            return Pairs(features, [(0,)[: len(t)] for t in round.tokens], round.tokens, range(len(round.tokens)))
        paths = round.path.tolist()
        nodes = [path[: len(tokens)] for path, tokens in zip(paths, round.tokens, strict=True)]
        return Pairs(features, nodes, round.tokens, range(len(nodes)))
    tokens = []
    for row, count, upcoming in zip(round.tree.tokens.tolist(), round.count.tolist(), round.next.tolist(), strict=True):
        tokens.append([*row[1:count], max(0, upcoming)] if count else [])
    return Pairs(features, [range(len(row)) for row in tokens], tokens, range(len(tokens)))


@dataclass(frozen=True)
class Places:
    """How much room a call needs: rows of the batch; of a row the nodes fed, its candidates, the nodes fed at once, and
    the pairs that wait."""

    rows: int = 0
    fed: int = 1
    candidates: int = 1
    width: int = 1
    waits: int = 1

    def both(self, old: Places) -> Places:
        """For batches of these rows, room for the old sizes as well."""
        sizes = "fed", "candidates", "width", "waits"
        return replace(self, **{name: max(getattr(self, name), getattr(old, name)) for name in sizes})


@dataclass
class Grower:
    """A compiled layer's trees. `embeddings`: of the target's tokens, in the drafter's precision. `names`: token ids of
    the head's columns."""

    net: CompiledLayer
    embeddings: Float[Tensor, "v h"]
    names: Int[Tensor, " vd"] | None
    places: Places = field(default=Places(), init=False)  # that the structures of a call have room for
    pass_: Struct = field(init=False)
    draft: Struct = field(init=False)

    def __post_init__(self) -> None:
        self.workspace, self.seconds = Workspace(self.net.code, self.net.step), Seconds()

    def read(self, cache: KVCache, last: Float[Tensor, "b 1 h"], pairs: Sequence[Pairs]) -> None:
        """Feed pairs alone, as `grow` does first."""
        with self.net.lock:
            self._call(cache, last, pairs, Places(len(cache.host), 0), {"depth": 0})

    def grow(
        self,
        cache: KVCache,
        last: Float[Tensor, "b 1 h"],
        pairs: Sequence[Pairs],
        rows: Rows,
        budget: Budget,
        shape: Shape,
    ) -> DraftTree:
        """A tree for every row.

        Args:
            cache: the layer's keys and values of the text; what is fed for the tree lasts for this call.
            last: in float32, the vectors behind every row's last pair, which the candidates below the roots come from;
                written here where a row has pairs to be fed.
            pairs: what is fed first.
            rows: as a drafter's `propose` has them.
            budget: its floor, reach and price.
        """
        with self.net.lock:
            wanted = Wanted(rows, budget, shape, self.net.step.vocab, self.seconds, self.workspace)
            fed = (shape.depth - 1) * shape.width
            places = Places(len(rows), fed, 1 + wanted.most * (1 + fed), shape.width)
            return wanted.tree(self._call(cache, last, pairs, places, wanted.told))

    def _call(
        self,
        cache: KVCache,
        last: Tensor,
        pairs: Sequence[Pairs],
        places: Places,
        told: Mapping[str, Any],
    ) -> int:
        """The call itself; `told`: what else the structure of the draft holds. Returns the nodes of the widest row."""
        net, b = self.net, places.rows
        counts, features, behind = listed(pairs, b)
        slots = cache.longest + (waits := max(counts)) + places.fed
        self._fit(replace(places, waits=waits) if waits > 1 else places)
        cache.reserve(slots)
        pass_, draft, turns = self.pass_, self.draft, net.turned(slots)
        waiting, lengths, tokens, vectors = (
            integers(counts),
            integers(cache.host),
            integers(behind),
            addresses(features),
        )
        pointers = addresses((cache.keys.data_ptr(), cache.values.data_ptr()))
        pass_.capacity, pass_.cache = cache.keys.shape[1], pointers
        pass_.rope, pass_.rope_positions = address(turns), len(turns)
        self.workspace.use_threads(pass_, self.places.rows * max(self.places.width, self.places.waits))
        draft.most_pending, draft.pending, draft.lengths = waits, waiting, lengths
        draft.features, draft.next_tokens, draft.last_hidden = vectors, tokens, address(last)
        for name, value in told.items():
            setattr(draft, name, value)
        net.drafts(net.step, net.end, pass_, draft)
        if waits:
            cache.advance(counts)
        return int(draft.widest)

    def _fit(self, places: Places) -> None:
        """Make structures with room for this, unless there are; they are kept from call to call."""
        if (places := places.both(self.places)) == self.places:
            return
        self.places, net, room, hidden = places, self.net, self.workspace, self.net.step.hidden
        b, columns, fed, candidates = places.rows, net.step.vocab, places.fed, places.rows * places.candidates
        together, most = b * max(places.width, places.waits), max(fed, min(MAX_FED_PAIRS, places.waits))
        nodes = torch.arange(places.width, out=room.of("logit nodes of a step", places.width, torch.long))
        self.pass_ = struct(
            "Pass", rows=b, logit_nodes=address(nodes),
            tap_layers=address(room.of("tap", 1, torch.long).fill_(1)), **room.of_pass(together, fed),
            **room.split(
                "a step", torch.float32, inputs=together * net.step.input_dim, hidden_states=together * hidden,
                tapped=together * hidden, logits=b * places.width * columns,
            ),
        )  # fmt: skip
        self.draft = struct(
            "Draft", fuse=net.fuse, taps=net.taps, feature_dim=net.wide,
            embeddings=address(self.embeddings), embedding_rows=len(self.embeddings), token_ids=address(self.names),
            knots=address(KNOTS), slopes=address(SLOPES), max_candidates=places.candidates,
            ancestors=address(room.of("ancestors", b * fed * fed, torch.uint8)),
            **room.split(
                "fed", torch.long, positions=b * most, fed_candidate=b * fed,
                last_features=b * net.taps, last_tokens=b, last_pending=b,
            ),
            **room.split("candidates", torch.long, **dict.fromkeys(LISTS, candidates)),
            **room.split("values", torch.float32, value=candidates, hidden_states=b * fed * hidden),
        )  # fmt: skip


def listed(pairs: Sequence[Pairs], rows: int) -> tuple[list[int], list[int], list[int]]:
    """How many pairs each row has; addresses of their features, a pair's side by side, and their tokens, row by row."""
    counts, features, behind = [0] * rows, list[int](), list[int]()
    for r in range(rows):
        for given in pairs:
            nodes, tokens = given.nodes[r], given.tokens[r]
            parts = [(part.data_ptr(), *part.stride()[:2], part.element_size()) for part in given.features]
            at = given.rows[r]
            features += [start + size * (at * row + node * step) for node in nodes for start, row, step, size in parts]
            behind += tokens
            counts[r] += len(nodes)
    return counts, features, behind
