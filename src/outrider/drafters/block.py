"""Block drafters (DFlash, JetSpec, DSpark, DFlash 2): a whole tree from one pass over a block of future positions.

The network (`nets/block.py`) reads the committed text's features and one block of slots, and gives every slot's logits
at once. A small pair head corrects a slot's logits by the token above. The tree is the best part of the lattice of
candidates (`_lattice.py`): no second pass, whatever its depth.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..backends.torch import products, vocabulary
from ..backends.torch.compiled import embeddings
from ..core.padding import additive
from ..core.protocols import Drafting, Round, Target
from ..core.sampling import wide
from ..core.types import Budget, DraftTree, Rows
from ..nets.block import BlockConfig, BlockNet
from ..nets.compiled import code_for
from ..nets.compiled_block import CompiledBlock, compiled_block
from ..nets.grown import paired
from ..nets.kv_cache import KVCache
from ..nets.network import Network
from ..params import InputError
from . import _heads, _lattice, _ranks, _weights
from ._features import ends_of
from ._growth import Growth
from ._waiting import Pending, Waiting


@dataclass(frozen=True)
class BlockDrafter:
    """A trained block drafter for one target."""

    net: BlockNet
    target: Target
    config: BlockConfig
    growth: Growth
    names: Tensor | None  # target ids of the draft vocabulary; None: it is the target's own
    places: Tensor | None  # the draft vocabulary's index of every target id
    block_mask: Float[Tensor, "1 1 m m"]  # who sees whom inside the block
    mask: Float[Tensor, " h"]  # the embedding of the slots behind the anchor
    compiled: CompiledBlock | None = None  # its pass, and its trees, where the target's passes are compiled
    lattices: bool = True  # are trees those of the compiled code, where it knows them?

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> BlockDrafting:
        config, weight = self.config, self.net.fc.weight
        kind = weight.dtype if self.compiled is None else torch.float32
        with torch.inference_mode(False):
            last = torch.zeros(len(prompts), 1, config.layer.hidden, dtype=kind, device=weight.device)
        return BlockDrafting(self, KVCache(config.layer, len(prompts), capacity, weight, config.layers), last)

    def logits(self, hidden: Float[Tensor, "b m h"]) -> Float[Tensor, "b m vd"]:
        return self.target.head(hidden) if self.names is None else self.net.lm_head(hidden)


@dataclass
class BlockDrafting:
    """`cache` holds the context's keys and values of all layers, one slot per committed token before the root."""

    drafter: BlockDrafter
    cache: KVCache
    last: Float[Tensor, "b 1 h"]  # every row's last context vector
    waiting: Waiting = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = Waiting([0] * len(self.cache.host))

    def observe(self, round: Round) -> None:
        """Keep the features of what was committed."""
        features, compiled = [round.output.features[tap] for tap in self.drafter.taps], self.drafter.compiled
        self.waiting.put(_joined(round, features) if compiled is None else paired(round, features))
        if self.waiting.late:
            self._read()

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        drafter, growth = self.drafter, self.drafter.growth
        depth = max(0, min(growth.reach(budget, rows), drafter.config.drafts))
        code, asked = drafter.compiled, growth.whole(budget, depth)
        if code is not None and asked is not None and drafter.lattices and code.lattices:
            tree = code.grow(self.cache, self.last, self.waiting.listed(), rows, budget, asked)
            assert self.cache.host == list(rows.start), "one context slot for every token before the root"
            return tree
        hidden, logits = self._seen(rows, depth)
        corrected, scores = partial(self._corrected, hidden), partial(self._scores, rows, hidden)
        return _lattice.propose(rows, logits, budget, growth, drafter.names, drafter.target.vocab, corrected, scores)

    def candidates(self, rows: Rows, truth: Tensor, k: int) -> Tensor:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `tune-tree`."""
        hidden, logits = self._seen(rows, self.drafter.config.drafts)
        first, step = _lattice.steps(rows, logits, partial(self._corrected, hidden))
        return _ranks.below(rows, first, step, truth, k, self.drafter.names)

    def select(self, index: Sequence[int]) -> None:
        if list(index) == list(range(len(self.cache.host))):
            return
        wanted = torch.tensor(list(index), device=self.cache.keys.device)
        self.waiting.select(index, self.cache.keys.device)
        self.last = self.last[wanted]
        self.cache.select(index)

    def join(self, other: Drafting) -> None:
        assert isinstance(other, BlockDrafting)
        if self.drafter.compiled is None:
            self._read()
            other._read()
        self.waiting.join(other.waiting)
        self.last = torch.cat([self.last, other.last])
        self.cache.join(other.cache)

    def _read(self) -> None:
        """Write the waiting features' keys and values behind each row's text."""
        if self.waiting.pairs and self.drafter.compiled is not None:
            self.drafter.compiled.read(self.cache, self.last, self.waiting.listed())
        if (given := self.waiting.merged()) is None:
            return
        features, _, counts = given
        m, net, cache = max(counts), self.drafter.net, self.cache
        if m:
            context = net.context(features[:, :m])
            cache.place(m)(*net.keys_values(context, self._turn(m)))
            self.last = ends_of(context, counts, self.last)
            cache.advance(counts)

    def _seen(self, rows: Rows, depth: int) -> tuple[Float[Tensor, "b d h"], Float[Tensor, "b d vd"]]:
        """Normed hidden states and logits of the first `depth` slots that draft."""
        code = self.drafter.compiled
        if code is not None:
            return code.slots(self.cache, self.last, self.waiting.listed(), rows.root, depth)
        hidden = self._hidden(rows)[:, :depth]
        return hidden, self.drafter.logits(hidden)

    def _turn(self, m: int) -> Tensor:
        """Rotations of the m positions behind each row's text."""
        cache = self.cache
        table = self.drafter.net.rope.table(cache.longest + m, cache.keys.dtype, cache.keys.device)
        if cache.level:
            return table[cache.longest : cache.longest + m][None]
        return table[cache.lengths[:, None] + torch.arange(m, device=table.device)]

    def _hidden(self, rows: Rows) -> Float[Tensor, "b d h"]:
        """Every drafting slot's normed hidden state, by one pass over the block."""
        self._read()
        drafter, cache, config = self.drafter, self.cache, self.drafter.config
        assert cache.host == list(rows.start), "one context slot for every token before the root"
        x = drafter.net.slots(drafter.target.embed(rows.root[:, None]).to(cache.keys.dtype), drafter.mask, self.last)
        keys, values = (t[:, : cache.longest].transpose(1, 2) for t in (cache.keys, cache.values))
        hidden = drafter.net(x, self._turn(config.block), keys, values, self._mask())
        return hidden if config.sample_from_anchor else hidden[:, 1:]

    def _mask(self) -> Float[Tensor, "#b 1 m s"]:
        cache, own = self.cache, self.drafter.block_mask
        if cache.level:
            return torch.nn.functional.pad(own, (cache.longest, 0))
        text: Bool[Tensor, "b s"] = torch.arange(cache.longest, device=own.device) < cache.lengths[:, None]
        b, m = len(cache.host), own.shape[2]
        seen = additive(text, own.dtype)[:, None, None].expand(b, 1, m, -1)
        return torch.cat([seen, own.expand(b, -1, -1, -1)], -1)

    def _corrected(
        self, hidden: Float[Tensor, "b d h"], logits: Tensor, tokens: Int[Tensor, "b m"], depth: Int[Tensor, "b m"]
    ) -> Float[Tensor, "b m vd"]:
        """Logits below tokens of these depths, as the pair head corrects them."""
        at = hidden.gather(1, depth[..., None].expand(*depth.shape, hidden.shape[2]))
        return self.drafter.net.choice(logits, self.drafter.net.corrected(logits, tokens, at))

    def _scores(
        self, rows: Rows, hidden: Float[Tensor, "b d h"], tokens: Int[Tensor, "b d k"]
    ) -> Float[Tensor, "b d k k"] | None:
        """What the pair head says of every candidate below every candidate of the slot above."""
        if self.drafter.config.pair_head == "none":
            return None
        drafter, net, (b, _, k) = self.drafter, self.drafter.net, tokens.shape
        above = torch.cat([rows.root[:, None, None].expand(b, 1, k), tokens[:, :-1]], 1)
        inside = tokens if drafter.places is None else drafter.places[tokens]
        return wide(net.above(above, hidden[:, :, None])) @ wide(net.markov_w2.weight[inside]).transpose(-1, -2)


def _joined(round: Round, features: Sequence[Tensor]) -> Pending:
    """What a round committed, in tensors."""
    path, counts, spelled = round.path, round.count.tolist(), round.tree.tokens
    joined = torch.cat(list(features), -1)
    if round.tree.ancestors is not None:
        path = path[:, : max(counts)].clamp(min=0)
        spelled = spelled.gather(1, path)
        joined = joined.gather(1, path[..., None].expand(*path.shape, joined.shape[2]))
    return joined, spelled, counts


def drafter(net: BlockNet, target: Target, growth: Growth | None = None) -> BlockDrafter:
    """A drafter of a network in memory (of a copy, which is cast to the target's precision)."""
    net = _weights.placed_on(copy.deepcopy(net), target)
    return _drafter(net, target, growth or Growth(scale=net.config.scale))


def _drafter(net: BlockNet, target: Target, growth: Growth, where: object = "this block drafter") -> BlockDrafter:
    config, ids, weight = net.config, net.ids(), net.fc.weight
    _weights.fits(where, target, config.vocab, config.target_hidden, config.taps)
    _heads.check_embedding(target, config.target_hidden)
    places = None
    if ids is not None:
        vocabulary.check_ids(ids, config.vocab)
        places = vocabulary.places_of(ids, config.vocab)
    seen = torch.ones(config.block, config.block, dtype=torch.bool, device=weight.device)
    own = additive(seen.tril() if config.causal else seen, weight.dtype)[None, None]
    token = config.mask_token
    mask: Tensor = net.mask_embedding if token < 0 else target.embed(torch.tensor([token], device=weight.device))[0]
    code, found = None, code_for(target, weight.dtype)
    if found is not None:
        head = _heads.plain_rows(target, None) if ids is None else net.lm_head.weight.detach()
        code = compiled_block(found, net, head, embeddings(target, weight.dtype), mask, ids)
    if code is None:
        products.hasten(net, leave=("markov_w2",))  # whose rows are looked up
    return BlockDrafter(net, target, config, growth, ids, places, own, mask, code)


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    tree: str = "dynamic",
    shape: tuple[int, ...] = (),
    depth: int = 16,
    top_k: int = 10,
    nodes: int = 60,
    scale: float = 0.0,
    replacement: bool = False,
    causal: str = "",
    pairs: bool = True,
) -> BlockDrafter:
    """A trained block drafter from its folder.

    scale 0: the checkpoint's. `causal` ("true" or "false") says whether a slot sees only the slots before it, where the
    folder's config contradicts itself. `pairs` false: trees of the slots' own laws, without the pair head.
    """
    if causal not in ("", "true", "false"):
        raise InputError(f"causal must be true or false, not {causal!r}")
    _lattice.check(tree)
    net: BlockNet = _weights.network(path, "block", target, **({"causal": causal == "true"} if causal else {}))
    assert target is not None
    if not pairs:
        net.config = replace(net.config, pair_head="none")
    growth = Growth(
        tree, shape, depth=depth, top_k=top_k, nodes=nodes, scale=scale or net.config.scale, replacement=replacement
    )
    return _drafter(net, target, growth, path)


NETWORK = Network(BlockNet, BlockConfig)
