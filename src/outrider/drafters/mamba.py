"""Mamba drafters (Choi et al. 2025): a state-space model as draft model, whose memory is constant in the context.

A row's state after its committed text is all there is to remember. Each round the tokens that the drafter has not read,
the root last, advance it; then the tree grows by batch generation (section 3.2 of the paper): the nodes to expand begin
with their parents' states and take one step together, one forward pass per depth. Every node that was fed
keeps its state until the round ends, so after verification the accepted node's state is selected, and nothing is
computed again. Trees, noise and laws are those of all stepping drafters (`_growth.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..backends.torch import products, vocabulary
from ..checkpoints.files import folder_of
from ..checkpoints.mamba import original, read
from ..core.padding import padded
from ..core.protocols import Drafting, Round, Target
from ..core.types import Budget, DraftTree, Rows
from ..nets import mamba as ssm
from ..nets.compiled import code_for
from ..nets.compiled_mamba import CompiledMamba, compiled_mamba
from ..nets.wanted import Shape
from ..params import InputError
from . import _ranks, _weights
from ._common import accepted, whole
from ._growth import Growth
from ._text import TextDrafter
from ._words import Same, Words
from .model import across, check_tokenizer, check_way, check_whole, same

if TYPE_CHECKING:
    from ._hybrid import HybridDrafter

FEW = 4  # tokens that wait: these are read one by one
FIRST = 16  # states that a slab has room for at first, at most; it grows
PADDING = 512  # rows by which two vocabularies of one tokenizer may differ


@dataclass(frozen=True)
class MambaDrafter:
    """A Mamba or Mamba-2 of transformers, and how its tokens stand to the target's. `batch` bounds the states advanced
    in one pass."""

    net: Any
    words: Words
    growth: Growth
    batch: int = 1024
    taps: tuple[int, ...] = ()
    steps: ssm.Steps | None = None  # recorded, where the target's passes are
    compiled: CompiledMamba | None = None  # reading and whole trees, where the target's passes are compiled

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> MambaDrafting:
        return MambaDrafting(self, ssm.empty(self.net, len(prompts)), [self.words.read(p) for p in prompts])

    def advance(
        self, tokens: Int[Tensor, "b m"], state: ssm.State, count: Int[Tensor, " b"] | None = None
    ) -> tuple[Float[Tensor, "b v"], ssm.State]:
        """Logits over the words after each row's last token (the net's own), and the states there."""
        if self.steps is not None and tokens.shape[1] == 1 and count is None:
            logits, state = self.steps(tokens, state)
            return self.words.law(logits[:, 0]), state
        features, state = ssm.run(self.net, tokens, state, count)
        at = features[:, -1] if count is None else features[torch.arange(len(count), device=count.device), count - 1]
        return self.words.law(self.net.lm_head(at)), state


@dataclass
class Slab:
    """The states of one round's fed nodes: allocated once for a batch size, and reused."""

    conv: Float[Tensor, "l b n c w"]
    ssm: Float[Tensor, "l b n *s"]

    @classmethod
    def like(cls, state: ssm.State, nodes: int) -> Slab:
        def wide(t: Tensor) -> Tensor:
            return torch.empty(t.shape[0], t.shape[1], nodes, *t.shape[2:], dtype=t.dtype, device=t.device)

        with torch.inference_mode(False):  # written to in any mode
            return cls(wide(state.conv), wide(state.ssm))

    @property
    def nodes(self) -> int:
        return self.conv.shape[2]

    def take(self, nodes: Int[Tensor, "b w"]) -> ssm.State:
        """Copies of the states of w nodes of every row, along the batch."""
        b, n = self.conv.shape[1:3]
        index = (nodes + torch.arange(b, device=nodes.device)[:, None] * n).flatten()
        return ssm.State(self.conv.flatten(1, 2).index_select(1, index), self.ssm.flatten(1, 2).index_select(1, index))

    def put(self, state: ssm.State, since: int) -> None:
        """The states of the next nodes of every row, of which there are equally many."""
        b = self.conv.shape[1]
        w = state.conv.shape[1] // b
        for mine, new in ((self.conv, state.conv), (self.ssm, state.ssm)):
            mine[:, :, since : since + w] = new.unflatten(1, (b, w))

    def grown(self, nodes: int) -> Slab:
        """The same with room for more nodes."""
        new = Slab.like(ssm.State(self.conv[:, :, 0], self.ssm[:, :, 0]), max(nodes, 2 * self.nodes))
        new.conv[:, :, : self.nodes], new.ssm[:, :, : self.nodes] = self.conv, self.ssm
        return new


@dataclass
class MambaDrafting:
    """Each row's state after its text, and the states of the nodes that were drafted last. What is committed waits
    until a draft is asked for, the prompt too, so that a text without one costs nothing."""

    drafter: MambaDrafter
    state: ssm.State  # after the text, without the pending tokens
    pending: list[list[int]]  # committed tokens that the drafter has not read, in its own words
    slab: Slab | None = field(default=None, repr=False)
    fed: Tensor | None = None  # [b, n] node -> place in the slab, -1: not fed

    def observe(self, round: Round) -> None:
        read = self.drafter.words.read
        if self.fed is None or self.slab is None:
            for row, tokens in zip(self.pending, round.tokens, strict=True):
                row.extend(read(tokens))
            return
        # Of the accepted path, the part that was fed has its states in the slab: the last of them is selected.
        fed, kept = accepted(self.fed, round)
        self.state = self.slab.take(fed.gather(1, kept[:, None] - 1))
        self.pending = [read(tokens[k - 1 :]) for tokens, k in zip(round.tokens, kept.tolist(), strict=True)]
        self.fed = None

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        words, growth, code = self.drafter.words, self.drafter.growth, self.drafter.compiled
        asked = None if code is None else growth.quick(rows, budget)
        if code is not None and asked is not None and len(rows) * asked[1].width <= self.drafter.batch:
            tree, self.fed = self._grow(code, rows, *asked)
            return tree
        tree, self.fed = growth.propose(rows, self._read(budget.nodes), self._step, budget, words.names, words.vocab)
        return tree

    def _grow(self, code: CompiledMamba, rows: Rows, budget: Budget, shape: Shape) -> tuple[DraftTree, Tensor]:
        """A tree in one call, which also reads the few tokens that wait."""
        slab = self._ready(1 + sum(min(shape.width, shape.top_k**depth) for depth in range(1, shape.depth)))
        return code.grow(slab, self.pending, rows, budget, shape, self.drafter.words.names)

    def _ready(self, slots: int) -> Slab:
        """The slab with room for so many states, the text's in the first; few tokens wait behind it."""
        if max(map(len, self.pending)) > FEW:
            self._shorten()
        if self.slab is None or slots > self.slab.nodes:
            self.slab = Slab.like(self.state, slots)
        self.slab.put(self.state, 0)
        return self.slab

    def tell(self, settled: list[list[int]], tails: list[list[int]], rows: Rows, budget: Budget) -> DraftTree:
        """For `_text.py`: a temporary tree below tokens of its own; the state is taken back to `settled`."""
        settled = [[*own, *more] for own, more in zip(self.pending, settled, strict=True)]  # the prompt first
        if any(settled):
            self.state = ssm.read(self.drafter.net, settled, self.state)
        self.pending, state = tails, self.state
        tree = self.drafter.growth.propose(rows, self._read(budget.nodes), self._step, budget)[0]
        self.state, self.pending = state, [[] for _ in tails]  # long tails were read into it
        return tree

    def candidates(self, rows: Rows, truth: Tensor, k: int) -> Tensor:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `tuning.py`."""
        first = self._read(1)
        assert self.slab is not None
        self.state, self.pending = self.slab.take(torch.zeros_like(rows.root)[:, None]), [[] for _ in self.pending]
        return _ranks.below(rows, first, self._step, truth, k, self.drafter.words.names)

    def select(self, index: Sequence[int]) -> None:
        self.state = self.state.select(torch.tensor(index, device=self.state.conv.device))
        self.pending, self.slab = [list(self.pending[i]) for i in index], None

    def join(self, other: Drafting) -> None:
        assert isinstance(other, MambaDrafting)
        self.state = ssm.State.join((self.state, other.state))
        self.pending, self.slab = self.pending + other.pending, None

    def _shorten(self) -> None:
        """Read all that waits but the root."""
        self.state = ssm.read(self.drafter.net, [row[:-1] for row in self.pending], self.state)
        self.pending = [row[-1:] for row in self.pending]

    @torch.no_grad()
    def _read(self, nodes: int) -> Float[Tensor, "b 1 v"]:
        """Read the pending tokens, the root last; its state is the slab's first, which has room for a draft's."""
        if (code := self.drafter.compiled) is not None:
            return code.read(self._ready(min(nodes, FIRST)), self.pending)[:, None]
        if max(map(len, self.pending)) > ssm.PIECE:
            self._shorten()
        longest, device = max(map(len, self.pending)), self.state.conv.device
        tokens = padded(self.pending, device)
        even = all(len(row) == longest for row in self.pending)
        count = None if even else torch.tensor([len(row) for row in self.pending], device=device)
        logits, state = self.drafter.advance(tokens, self.state, count)
        self.slab = self.slab or Slab.like(state, min(nodes, FIRST))
        self.slab.put(state, 0)
        return logits[:, None]

    @torch.no_grad()
    def _step(self, fed: DraftTree, since: int) -> Float[Tensor, "b w v"]:
        """Advance copies of the parents' states by the nodes from `since` on, all in one pass."""
        assert self.slab is not None
        (b, n), w = fed.tokens.shape, fed.nodes - since
        if b * w > self.drafter.batch:
            raise InputError(
                f"this tree advances {b * w} states in one pass, and at most {self.drafter.batch} are allowed; "
                "choose a narrower shape, fewer rows, or a larger batch="
            )
        if n > self.slab.nodes:
            self.slab = self.slab.grown(n)
        if (code := self.drafter.compiled) is not None:
            return code.step(self.slab, fed.tokens[:, since:], fed.parents[:, since:], since)
        state = self.slab.take(fed.parents[:, since:])
        tokens = self.drafter.words.feed(fed.tokens[:, since:])
        logits, state = self.drafter.advance(tokens.reshape(b * w, 1), state)
        self.slab.put(state, since)
        return logits.unflatten(0, (b, w))


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    tree: str = "dynamic",
    shape: tuple[int, ...] = (3, 2, 2, 1, 1),
    depth: int = 16,
    width: int = 0,
    top_k: int = 4,
    scale: float = 1.0,
    replacement: bool = False,
    batch: int = 1024,
    dtype: str = "auto",
    vocab: str = "same",
) -> MambaDrafter | HybridDrafter | TextDrafter:
    """A Mamba or Mamba-2 from a folder or hub id, in transformers' layout or that of `mamba_ssm`; without a path, the
    demo Mamba.

    `vocab`: same (one tokenizer), shared (draft the tokens that both have) or text (draft text).
    """
    from ..backends.torch import load_tokenizer

    if target is None:
        raise InputError("a draft model needs the target that it drafts for")
    growth = Growth(tree, shape, (), depth, width, top_k, 1 << 30, scale, replacement=replacement)
    most, states = whole("batch", batch), math.prod(shape[:-1])
    if growth.tree == "static" and states > most:
        raise InputError(
            f"the shape {shape} advances {states} states in one pass, and at most {most} are allowed; "
            "choose a narrower one, or a larger batch="
        )
    if dtype != "auto" and not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise InputError(f"there is no precision {dtype!r}; choose float64, float32, bfloat16, float16 or auto")
    check_way(vocab)
    path = _weights.placed(path or "demo", "mamba")
    folder = str(folder_of(path))
    net = _net(folder, target, dtype, vocab == "same")
    rows = int(net.config.vocab_size)

    def build(words: Words) -> MambaDrafter | HybridDrafter:
        return _built(net, words, growth, batch, target)

    if vocab != "same":
        check_whole(net, folder)
        return across(vocab, folder, rows, target, tokenizer, build)
    if tokenizer is not None and any(Path(folder).glob("tokenizer*")):  # the layout of mamba_ssm has none
        check_tokenizer(path, tokenizer, load_tokenizer(folder))
    elif abs(rows - target.vocab) > max(PADDING, target.vocab // 100):
        raise InputError(
            f"{path} has {rows} tokens and the target {target.vocab}, more apart than padding; "
            "a Mamba drafter needs the target's tokenizer"
        )
    return build(same(net, path, target))


def _built(net: Any, words: Words, growth: Growth, batch: int, target: Target) -> MambaDrafter | HybridDrafter:
    """Mamba and Mamba-2 have a forward of their own here; whatever else is recurrent, the stock one."""
    if net.config.model_type in ssm.KINDS:
        ssm.check(net)
        found = code_for(target, net.dtype)
        code = compiled_mamba(found, net) if found is not None and _plain(net, words) else None
        products.hasten(net, leave=("dt_proj",))  # whose parameters are read
        return MambaDrafter(net, words, growth, batch, (), ssm.Steps(net) if target.recorded else None, code)
    from . import _hybrid

    _hybrid.check(net)
    return _hybrid.HybridDrafter(net, words, growth, batch)


def _plain(net: Any, words: Words) -> bool:
    """Are the tokens that are read and drafted those that it is told of? (Where text is drafted they are its own.)"""
    columns = len(net.lm_head.weight)
    return isinstance(words, Same) and words.rows >= words.vocab and (words.names is not None or columns == words.vocab)


def _net(path: str, target: Target, dtype: str, drafting: bool) -> Any:
    from ..backends.torch.load import from_pretrained

    kind = target.dtype if dtype == "auto" else getattr(torch, dtype)
    net: Any = _original(path) if original(path) else from_pretrained(path, kind, str(target.device), False, {})
    net = net.to(device=target.device, dtype=kind)
    if drafting:
        vocabulary.cut(net)
    return net.requires_grad_(False).eval()


def _original(path: str) -> Any:
    """A model of transformers with the weights of a `mamba_ssm` folder."""
    from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

    config, tensors = read(path)
    kind = config.pop("model_type")

    def build() -> Any:
        return MambaForCausalLM(MambaConfig(**config)) if kind == "mamba" else Mamba2ForCausalLM(Mamba2Config(**config))

    return _weights.fill(build, tensors, path)
