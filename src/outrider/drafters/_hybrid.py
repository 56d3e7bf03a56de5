"""Recurrent models other than Mamba as draft models: hybrids with attention (Jamba, Zamba, Bamba, Falcon-H1, Granite 4,
Nemotron-H, Qwen3-Next, LFM2 and their like), and whatever else keeps a state that can be copied.

The stock forward and the stock cache are used, in the two ways that are right for all of them: a complete text from an
empty cache, or one token from a cached state. Several tokens from a cached state, and padding, are silently wrong for
some; so each row has a cache of its own, and texts of one length share a pass. The tree grows by batch generation, as
in `mamba.py`: a step copies the parents' caches along the batch, keys and values included, and every node that was fed
keeps its own until the round ends. The accepted node's is selected, and nothing is computed again.

No list of names says which models are right: `check` proves at load that copies decode as complete texts do.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..backends.torch.attention import switched
from ..backends.torch.carrier import carrier
from ..backends.torch.families import experts_of
from ..core.growth import Indices
from ..core.protocols import Drafting, Round
from ..core.types import Array, Budget, DraftTree, Rows
from ..params import InputError, first_line
from . import _ranks
from ._common import accepted
from ._growth import Grown, Growth
from ._words import Words

LONG = 32  # unread tokens beyond which one pass over the complete text is faster than a pass for each
FINE = torch.float64, torch.float32
ALLOWED = 0.01, 0.1  # of the distance of two texts; below float32. Stock Zamba-2 and Nemotron-H need 3e-4: over one
# token they leave out the lower bound of the time step, which they have over several


@dataclass(frozen=True)
class Memory:
    """What the model keeps after one text: its stock cache of batch 1, never written to, and the text's length."""

    cache: Any
    length: int


def mapped(caches: Sequence[Any], change: Callable[[list[Tensor]], Tensor]) -> Any:
    """A cache like the first, every tensor with a batch dimension made by `change` from those of all caches.

    Caches are nested objects of transformers, dicts, lists and tuples. A tensor of fewer than two dimensions is a
    counter, which caches of one length share; so are numbers and flags.
    """
    first = caches[0]
    if isinstance(first, Tensor):
        return change(list(caches)) if first.dim() > 1 else first.clone()
    if isinstance(first, list | tuple):
        return type(first)(mapped(parts, change) for parts in zip(*caches, strict=True))
    if isinstance(first, dict):
        return type(first)((key, mapped([c[key] for c in caches], change)) for key in first)
    if type(first).__module__.startswith("transformers.") and not hasattr(first, "model_type"):  # not a config
        made = copy.copy(first)
        vars(made).update(mapped([vars(c) for c in caches], change))
        return made
    return first


def stacked(caches: Sequence[Any]) -> Any:
    """Copies of caches of one length, side by side along the batch."""
    return mapped(caches, torch.cat)


def row_of(cache: Any, row: int) -> Any:
    """One row of a cache. It is a view of the cache, which must not be written to any more."""
    return mapped([cache], lambda parts: parts[0][row : row + 1])


def forward(net: Any, tokens: list[list[int]], cache: Any, start: int) -> tuple[Float[Tensor, "b v"], Any]:
    """Logits after the last of these tokens, which stand at position `start` and on, and the cache there."""
    named = inspect.signature(net.forward).parameters
    name = carrier(net)
    if name is None:
        raise ValueError("its forward takes none")
    ids = torch.tensor(tokens, device=net.device)
    more: dict[str, Any] = {name: cache}
    if "position_ids" in named:  # some count from 0 where a cache is given and positions are not
        more["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device).expand_as(ids)
    if "logits_to_keep" in named:
        more["logits_to_keep"] = 1
    with switched(net.config, None, experts_of(net)):
        out = net(input_ids=ids, use_cache=True, return_dict=True, **more)
    if getattr(out, name, None) is None:
        raise ValueError("its forward returns none")
    return out.logits[:, -1], out[name]


def read(net: Any, text: Sequence[int]) -> tuple[Float[Tensor, " v"], Memory]:
    """Logits and state after a complete text, from an empty cache in one pass."""
    logits, cache = forward(net, [list(text)], None, 0)
    return logits[0], Memory(cache, len(text))


def step(
    net: Any, memories: Sequence[Memory], tokens: Sequence[int], most: int = 1 << 30
) -> tuple[Float[Tensor, "m v"], list[Memory]]:
    """Logits and memories after one more token each: a pass for the memories of every length, `most` in one pass."""
    lengths = [m.length for m in memories]
    logits: list[Any] = [None] * len(memories)
    after: list[Any] = [None] * len(memories)
    for length in sorted(set(lengths)):
        places = [i for i, other in enumerate(lengths) if other == length]
        if len(places) > most:
            raise InputError(
                f"this tree advances {len(places)} states in one pass, and at most {most} are allowed; "
                "choose a narrower shape, fewer rows, or a larger batch="
            )
        rows, cache = forward(net, [[tokens[i]] for i in places], stacked([memories[i].cache for i in places]), length)
        for at, i in enumerate(places):
            logits[i], after[i] = rows[at], Memory(row_of(cache, at), length + 1)
    return torch.stack(logits), after


@dataclass(frozen=True)
class HybridDrafter(Grown):
    """A recurrent model of transformers, and how its tokens stand to the target's. `batch` bounds the states advanced
    in one pass."""

    net: Any
    words: Words
    growth: Growth
    batch: int = 1024

    @torch.no_grad()
    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> HybridDrafting:
        texts = [self.words.read(p) for p in prompts]
        return HybridDrafting(self, texts, [read(self.net, t)[1] for t in texts], [[] for _ in texts])


@dataclass
class HybridDrafting(Drafting):
    """The state of a hybrid model: what it has read of each text, and its memory after it."""

    drafter: HybridDrafter
    texts: list[list[int]]  # what was read, in the drafter's own words
    memories: list[Memory]  # after these texts
    pending: list[list[int]]  # committed tokens that the drafter has not read, in its own words
    nodes: list[list[Memory]] = field(default_factory=list, repr=False)  # of each row: after the fed nodes, root first
    fed: Indices | None = None  # of the last proposal

    def observe(self, round: Round) -> None:
        read = self.drafter.words.read
        if self.fed is None:
            for row, tokens in zip(self.pending, round.tokens, strict=True):
                row.extend(read(tokens))
            return
        # Of the accepted path, the part that was fed has its memories: the last of them is selected.
        for i, (tokens, path) in enumerate(zip(round.tokens, accepted(self.fed, round), strict=True)):
            accepted_tokens, rest = tokens[: len(path) - 1], tokens[len(path) - 1 :]
            self.texts[i] += self.pending[i] + read(accepted_tokens)
            self.memories[i], self.pending[i] = self.nodes[i][path[-1]], read(rest)
        self.fed, self.nodes = None, []

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        words, growth = self.drafter.words, self.drafter.growth
        tree, self.fed = growth.propose(rows, self._read(), self._step, budget, words.names, words.vocab)
        return tree

    def propose_after(self, settled: list[list[int]], tails: list[list[int]], rows: Rows, budget: Budget) -> DraftTree:
        """For `_text.py`: a temporary tree below the drafter's own tokens; the memory is rewound to the settled."""
        self.memories = [self._after(i, tokens)[1] for i, tokens in enumerate(settled)]
        self.texts = [text + tokens for text, tokens in zip(self.texts, settled, strict=True)]
        self.pending = tails
        return self.drafter.growth.propose(rows, self._read(), self._step, budget)[0]

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `training/tree_tuning.py`."""
        first = self._read()
        self.memories = [nodes[0] for nodes in self.nodes]
        self.texts = [text + row for text, row in zip(self.texts, self.pending, strict=True)]
        self.pending = [[] for _ in self.pending]
        return _ranks.below(rows, first, self._step, truth, k, self.drafter.words.names)

    def select(self, index: Sequence[int]) -> None:
        self.memories = [self.memories[i] for i in index]
        self.texts, self.pending = ([list(rows[i]) for i in index] for rows in (self.texts, self.pending))

    def join(self, other: Drafting) -> None:
        assert isinstance(other, HybridDrafting)
        self.texts, self.pending = self.texts + other.texts, self.pending + other.pending
        self.memories = self.memories + other.memories

    @torch.no_grad()
    def _after(self, row: int, tokens: list[int]) -> tuple[Any, Memory]:
        """Logits and memory of a row after more tokens; no logits without a token."""
        net, last, memory = self.drafter.net, None, self.memories[row]
        if len(tokens) > LONG:  # rounds without a draft left them
            return read(net, self.texts[row] + tokens)
        for token in tokens:
            (last,), (memory,) = step(net, [memory], [token])
        return last, memory

    def _read(self) -> Float[Tensor, "b 1 v"]:
        """Read the pending tokens, the root last; its memory is that of the first node."""
        read = [self._after(row, tokens) for row, tokens in enumerate(self.pending)]
        self.nodes = [[memory] for _, memory in read]
        return self.drafter.words.restrict(torch.stack([last for last, _ in read])[:, None])

    @torch.no_grad()
    def _step(self, fed: DraftTree, since: int) -> Float[Tensor, "b w v"]:
        """Advance copies of the parents' memories by the nodes from `since` on, all of one length in one pass."""
        words, width = self.drafter.words, fed.nodes - since
        parents = fed.parents[:, since:].tolist()
        above = [self.nodes[row][place] for row, places in enumerate(parents) for place in places]
        tokens = words.feed(fed.tokens[:, since:]).ravel().tolist()
        logits, after = step(self.drafter.net, above, tokens, self.drafter.batch)
        for row, nodes in enumerate(self.nodes):
            nodes.extend(after[row * width : (row + 1) * width])
        return words.restrict(logits.unflatten(0, (-1, width)))


def check(net: Any) -> None:
    """Refuse a model whose copies do not decode as complete texts do, and one that keeps no recurrent state."""
    kind = net.config.model_type
    try:
        apart, control = proof(net)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError) as error:
        raise InputError(f"the state of {kind} cannot be cloned ({first_line(error)})") from error
    if not apart <= ALLOWED[net.dtype not in FINE] * control:
        hint = "" if net.dtype in FINE else "; try dtype=float32: if the difference stays, the state is wrong"
        raise InputError(
            f"the state of {kind} cannot be cloned: a copy's logits are {apart:.1e} off those of its text, and "
            f"those of another text {control:.1e}{hint}"
        )
    if not recurrent(net):
        raise InputError(f"mamba:DIR is for models with a recurrent state, not {kind}; model:DIR is for those")


@torch.no_grad()
def proof(net: Any) -> tuple[float, float]:
    """How far copies are from complete texts, at most, and how far two texts are from one another, at least.

    Two texts begin and the first is forked; the three advance side by side and change places at every step. All of
    that twice, from the same beginnings: the first time must not have written to them.
    """
    dice = torch.Generator().manual_seed(0)
    a, b = torch.randint(0, int(net.config.vocab_size), (2, 7), generator=dice).tolist()
    apart, control = 0.0, float("inf")
    for since in (1, 5):  # shorter and longer than a convolution
        texts = [a, b, a[:since] + b[since:]]
        truth = [[read(net, text[:n])[0] for n in range(since + 1, len(a) + 1)] for text in texts]
        control = min(control, distance(truth[0][-1], truth[1][-1]))
        begun = [read(net, text[:since])[1] for text in (a, b)]
        for _ in range(2):
            memories, order = [begun[0], begun[1], begun[0]], [0, 1, 2]
            for n in range(since, len(a)):
                logits, memories = step(net, memories, [texts[i][n] for i in order])
                distances = [distance(row, truth[i][n - since]) for row, i in zip(logits, order, strict=True)]
                apart = max(apart, *distances)
                memories, order = memories[1:] + memories[:1], order[1:] + order[:1]
    return apart, control


def distance(a: Float[Tensor, " v"], b: Float[Tensor, " v"]) -> float:
    """Root mean square over the vocabulary, of log-probabilities."""
    apart = float((a.double().log_softmax(-1) - b.double().log_softmax(-1)).square().mean().sqrt())
    return apart if apart == apart else float("inf")  # a NaN is as far off as can be


@torch.no_grad()
def recurrent(net: Any) -> bool:
    """Does anything that the model keeps stay of one size while the text grows?"""
    sizes: list[list[torch.Size]] = []
    for text in ([1] * 5, [1] * 6):
        shapes: list[torch.Size] = []

        def seen(parts: list[Tensor], shapes: list[torch.Size] = shapes) -> Tensor:
            shapes.append(parts[0].shape)
            return parts[0]

        mapped([read(net, text)[1].cache], seen)
        sizes.append(shapes)
    return any(short == long for short, long in zip(*sizes, strict=True))
