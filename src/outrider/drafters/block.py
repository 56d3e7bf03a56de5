"""Block drafters (DFlash, JetSpec, DSpark, DFlash 2): a tree from one pass over a block of future positions.

The network (`nets/block.py`) reads the committed text's features and one block of slots, and gives every slot's logits
at once. A small pair head corrects a slot's logits by the token above. The tree is the best part of the lattice of
candidates (`_lattice.py`): no second pass, whatever its depth.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from ..backends.native.draft_vocab import ids_of
from ..backends.native.drafts import Weights, float32
from ..backends.native.lattice import Block, BlockParts, block
from ..core.protocols import Drafter, Drafting, Target
from ..core.types import Array, Budget, DraftTree, Rows
from ..nets.configs import OUT, BlockConfig
from ..params import InputError
from . import _lattice, _ranks
from ._compiled import PairDrafting
from ._growth import Grown, Growth
from ._trained import Method, Shapes, in_tensors, layer_shapes


@dataclass(frozen=True)
class Request:
    """The options of a SPEC. `scale` 0: the folder's. `causal` ("true" or "false") says whether a slot sees only the
    slots before it, where the folder's config contradicts itself. `pairs` false: trees of the slots' own distributions,
    without the pair head. The others are those of `Growth`."""

    tree: str = "dynamic"
    shape: tuple[int, ...] = ()
    depth: int = 16
    top_k: int = 10
    nodes: int = 60
    scale: float = 0.0
    replacement: bool = False
    causal: str = ""
    pairs: bool = True

    def __post_init__(self) -> None:
        if self.tree == "static" and not self.shape:
            raise InputError("tree=static of a block drafter needs a shape, as in shape=3,2,1; give one, or tree=chain")
        if self.causal not in ("", "true", "false"):
            raise InputError(f"causal must be true or false, not {self.causal!r}")
        _lattice.check(self.tree)

    @property
    def said(self) -> dict[str, Any]:
        """Fields of the config that the SPEC gives."""
        return {"causal": self.causal == "true"} if self.causal else {}

    def drafts(self, config: BlockConfig) -> BlockConfig:
        """The config that trees are made by."""
        return config if self.pairs else replace(config, pair_head="none")

    def growth(self, config: BlockConfig) -> Growth:
        """The growth of trees for a network of this config."""
        return Growth(
            self.tree, self.shape, depth=self.depth, top_k=self.top_k, nodes=self.nodes,
            scale=self.scale or config.scale, replacement=self.replacement,
        )  # fmt: skip


class BlockTrees(Drafting):
    """Trees of the slots of one pass."""

    drafter: Any  # its config, growth, names and vocab

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        drafter, growth = self.drafter, self.drafter.growth
        hidden, logits = self.seen(rows, self.depth(rows, budget))
        corrected, scores = partial(self.corrected, hidden), partial(self.scores, rows, hidden)
        return _lattice.propose(rows, logits, budget, growth, drafter.names, drafter.vocab, corrected, scores)

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `tune-tree`."""
        hidden, logits = self.seen(rows, self.drafter.config.drafts)
        first, step = _lattice.steps(rows, logits, partial(self.corrected, hidden))
        return _ranks.below(rows, first, step, truth, k, self.drafter.names)

    def depth(self, rows: Rows, budget: Budget) -> int:
        """How many slots draft."""
        return max(0, min(self.drafter.growth.reach(budget, rows), self.drafter.config.drafts))

    @abstractmethod
    def seen(self, rows: Rows, depth: int) -> tuple[Any, Any]:
        """Normed hidden states [b, d, h] and logits [b, d, vd] of the first `depth` slots that draft."""

    @abstractmethod
    def corrected(self, hidden: Any, logits: Any, tokens: Array, depth: Array) -> Any:
        """Logits [b, m, vd] below tokens [b, m] of these depths [b, m], as the pair head corrects them."""

    @abstractmethod
    def scores(self, rows: Rows, hidden: Any, candidates: Array) -> Any:
        """What the pair head adds for every candidate [b, d, k] below every candidate of the slot above, [b, d, k, k];
        None where there is none."""


@dataclass(frozen=True)
class PairHead:
    """What the pair head of a block drafter adds to a slot's logits below a token (`nets/block.py`), in float32."""

    left: Array  # W1 [vocab, r]
    right: Array  # W2 [vd, r]
    selector: Array | None  # H [r, hidden]; None: none
    top: int  # tokens of a slot that it chooses among; 0: all

    @cached_property
    def wide(self) -> Array:
        """W2 in float32."""
        return float32(self.right)

    def above(self, previous: Array, hidden: Array) -> Array:
        """What W2's rows are multiplied with below tokens [..] (target ids) in slots of these states [.., h]."""
        scores = float32(self.left[previous])
        return scores if self.selector is None else scores * (hidden @ float32(self.selector).T)

    def corrected(self, logits: Array, previous: Array, hidden: Array) -> Array:
        """Logits [.., vd] below the tokens `previous`; `OUT` for tokens that are not chosen among."""
        made: Array = logits + self.above(previous, hidden) @ self.wide.T
        if not 0 < self.top < logits.shape[-1]:
            return made
        least = np.partition(logits, -self.top)[..., -self.top, None]
        return np.where(logits < least, np.float32(OUT), made)

    def scores(self, above: Array, hidden: Array, columns: Array) -> Array:
        """[b, d, k, k] of the columns [b, d, k] below the tokens `above` [b, d, k]."""
        made: Array = self.above(above, hidden[:, :, None]) @ float32(self.right[columns]).swapaxes(-1, -2)
        return made


@dataclass(frozen=True)
class CompiledBlock(Grown):
    """A trained block drafter in compiled code."""

    compiled: Block
    config: BlockConfig
    growth: Growth
    vocab: int  # the target's
    pairs: PairHead | None
    places: Array | None  # the draft vocabulary's index of every target id
    taps: tuple[int, ...] = ()

    @property
    def names(self) -> Array | None:
        """Token ids of the draft vocabulary; None: it is the target's own."""
        return self.compiled.names

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> CompiledBlockDrafting:
        zero = np.zeros((len(prompts), self.config.layer.hidden), np.float32)
        return CompiledBlockDrafting(self, self.compiled.cache(len(prompts), capacity), zero)


class CompiledBlockDrafting(BlockTrees, PairDrafting):
    """In compiled code: the best trees of one call, and slots for the others."""

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        drafter, shape = self.drafter, self.drafter.growth.compiled_lattice(budget, self.depth(rows, budget))
        if shape is None or drafter.config.pair_head == "selector":
            return super().propose(rows, budget)
        tree: DraftTree = drafter.compiled.grow(self.cache, self.last, self.taken(), rows, budget, shape)
        assert self.cache.host == list(rows.start), "one context slot for every token before the root"
        return tree

    def seen(self, rows: Rows, depth: int) -> tuple[Array, Array]:
        made: tuple[Array, Array] = self.drafter.compiled.slots(self.cache, self.last, self.taken(), rows.root, depth)
        return made

    def corrected(self, hidden: Array, logits: Array, tokens: Array, depth: Array) -> Array:
        pairs: PairHead | None = self.drafter.pairs
        if pairs is None:
            return logits
        return pairs.corrected(logits, tokens, hidden[np.arange(len(hidden))[:, None], depth])

    def scores(self, rows: Rows, hidden: Array, candidates: Array) -> Array | None:
        pairs, places, (b, _, k) = self.drafter.pairs, self.drafter.places, candidates.shape
        if pairs is None:
            return None
        roots = np.broadcast_to(np.array(rows.root)[:, None, None], (b, 1, k))
        above = np.concatenate([roots, candidates[:, :-1]], 1)
        made: Array = pairs.scores(above, hidden, candidates if places is None else places[candidates])
        return made


def _shapes(config: BlockConfig) -> Shapes | None:
    h, vd, rank = config.layer.hidden, config.draft_vocab, config.pair_rank
    shapes: Shapes = {"fc.weight": (h, len(config.taps) * config.target_hidden), "hidden_norm.weight": (h,)}
    for i in range(config.layers):
        at = f"layers.{i}."
        shapes |= layer_shapes(config.layer, at)
        shapes |= {f"{at}input_layernorm.weight": (h,)}
        shapes |= {f"{at}self_attn.{name}_norm.weight": (config.layer.head_dim,) for name in "qk"}
    shapes |= {"norm.weight": (h,)}
    shapes |= {"seed.weight": (config.block * h, 2 * h)} if config.seeded else {}
    shapes |= {"mask_embedding": (h,)} if config.mask_token < 0 else {}
    shapes |= {"lm_head.weight": (vd, h), "d2t": (vd,)} if vd < config.vocab else {}
    if config.pair_head != "none":
        shapes |= {"markov_w1.weight": (config.vocab, rank), "markov_w2.weight": (vd, rank)}
    shapes |= {"pair_hidden.weight": (rank, h)} if config.pair_head == "selector" else {}
    return shapes if config.causal and not config.conv and config.layer.inputs == h else None


METHOD: Method[BlockConfig] = Method("block", BlockConfig, _shapes, lambda config: config.taps)


def compiled(config: BlockConfig, weights: Weights, target: Target, growth: Growth) -> Drafter | None:
    """The drafter of a network in compiled code; None where that has no such network or target."""
    code, table, names, places = METHOD.code(config, target), target.embeddings, None, None
    if code is None or table is None or table.shape[1] != config.target_hidden:
        return None
    if config.draft_vocab < config.vocab:
        names = ids_of(weights["d2t"], config.vocab)
        places = np.full(config.vocab, -1)
        places[names] = np.arange(len(names))
    head = target.head_rows(None) if names is None else weights["lm_head.weight"]
    if head is None:
        return None
    pairs = None
    if config.pair_head != "none":
        selector = weights["pair_hidden.weight"] if config.pair_head == "selector" else None
        pairs = PairHead(weights["markov_w1.weight"], weights["markov_w2.weight"], selector, config.pair_top)
    mask = weights["mask_embedding"] if config.mask_token < 0 else table.rows(np.array([config.mask_token]))[0]
    parts = BlockParts(
        weights, config.layer, config.layers, len(config.taps), config.block - config.drafts,
        config.pair_head == "markov", head, table, mask, names, target.logit_cap if names is None else 0.0,
    )  # fmt: skip
    made = block(code, parts)
    return None if made is None else CompiledBlock(made, config, growth, target.vocab, pairs, places, config.taps)


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
) -> Drafter:
    """A trained block drafter from its folder. The options are the fields of `Request`.

    Raises:
        InputError: the folder is damaged, holds another drafter, or belongs to another target.
    """
    request = Request(tree, shape, depth, top_k, nodes, scale, replacement, causal, pairs)
    read = METHOD.opened(target, path, **request.said)
    made = None
    if target is not None and read is not None:
        made = compiled(request.drafts(read[0]), read[1], target, request.growth(read[0]))
    return in_tensors("block").load(target, path, request) if made is None else made


def __getattr__(name: str) -> Any:
    """The network and its drafter in tensors (`_block.py`), imported on first use."""
    return getattr(in_tensors("block"), name)
