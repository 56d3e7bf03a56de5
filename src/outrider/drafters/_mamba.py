"""Mamba drafters in tensors, where no compiled code has them (`mamba.py` explains them), and other recurrent models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..backends.torch import vocabulary
from ..backends.torch.padding import padded
from ..backends.torch.tensors import dtype_of, tensor
from ..checkpoints.files import folder_of
from ..checkpoints.mamba import original, read
from ..core.growth import Indices
from ..core.protocols import Drafting, Target
from ..core.types import Budget, DraftTree, Rows
from ..nets import mamba as ssm
from . import _weights
from ._growth import Grown, Growth
from ._stock import check_whole, same
from ._text import TextDrafter, across
from ._words import Words
from .mamba import FIRST, MambaDrafting, Request

if TYPE_CHECKING:
    from ._hybrid import HybridDrafter


@dataclass(frozen=True)
class MambaDrafter(Grown):
    """A Mamba or Mamba-2 of transformers, and how its tokens stand to the target's. `batch` bounds the states advanced
    in one pass."""

    net: Any
    words: Words
    growth: Growth
    batch: int = 1024

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> TensorMambaDrafting:
        return TensorMambaDrafting(self, ssm.empty(self.net, len(prompts)), [self.words.read(p) for p in prompts])

    def advance(
        self, tokens: Int[Tensor, "b m"], state: ssm.State, count: Int[Tensor, " b"] | None = None
    ) -> tuple[Float[Tensor, "b v"], ssm.State]:
        """Logits over the words after each row's last token (the net's own), and the states there."""
        features, state = ssm.run(self.net, tokens, state, count)
        at = features[:, -1] if count is None else features[torch.arange(len(count), device=count.device), count - 1]
        return self.words.restrict(self.net.lm_head(at)), state


@dataclass
class StateBuffer:
    """The states of one round's fed nodes: allocated once for a batch size, and reused."""

    conv: Float[Tensor, "l b n c w"]
    ssm: Float[Tensor, "l b n *s"]

    @classmethod
    def like(cls, state: ssm.State, nodes: int) -> StateBuffer:
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

    def grown(self, nodes: int) -> StateBuffer:
        """The same with space for more nodes."""
        new = StateBuffer.like(ssm.State(self.conv[:, :, 0], self.ssm[:, :, 0]), max(nodes, 2 * self.nodes))
        new.conv[:, :, : self.nodes], new.ssm[:, :, : self.nodes] = self.conv, self.ssm
        return new


@dataclass
class TensorMambaDrafting(MambaDrafting):
    """Each row's state after its text, and the states of the nodes that were drafted last."""

    drafter: MambaDrafter
    state: ssm.State  # after the text, without the pending tokens
    pending: list[list[int]]
    buffer: StateBuffer | None = field(default=None, repr=False)
    fed: Indices | None = None

    def choose(self, slots: Sequence[int]) -> None:
        assert self.buffer is not None, "nodes were fed"
        self.state = self.buffer.take(torch.tensor(slots, device=self.state.conv.device)[:, None])

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        words, growth = self.drafter.words, self.drafter.growth
        tree, self.fed = growth.propose(rows, self._read(budget.nodes), self._step, budget, words.names, words.vocab)
        return tree

    def skip(self, tokens: Sequence[Sequence[int]]) -> None:
        if any(tokens):
            self.state = ssm.read(self.drafter.net, tokens, self.state)

    def select(self, index: Sequence[int]) -> None:
        self.state = self.state.select(torch.tensor(index, device=self.state.conv.device))
        self.pending, self.buffer = [list(self.pending[i]) for i in index], None

    def join(self, other: Drafting) -> None:
        assert isinstance(other, TensorMambaDrafting)
        self.state = ssm.State.join((self.state, other.state))
        self.pending, self.buffer = self.pending + other.pending, None

    def _shorten(self) -> None:
        """Read all that waits but the root."""
        self.state = ssm.read(self.drafter.net, [row[:-1] for row in self.pending], self.state)
        self.pending = [row[-1:] for row in self.pending]

    @torch.no_grad()
    def _read(self, nodes: int) -> Any:
        """Read the pending tokens, the root last; its state is the buffer's first, which has space for a draft's."""
        if max(map(len, self.pending)) > ssm.PIECE:
            self._shorten()
        longest, device = max(map(len, self.pending)), self.state.conv.device
        tokens = padded(self.pending, device)
        even = all(len(row) == longest for row in self.pending)
        count = None if even else torch.tensor([len(row) for row in self.pending], device=device)
        logits, state = self.drafter.advance(tokens, self.state, count)
        self.buffer = self.buffer or StateBuffer.like(state, min(nodes, FIRST))
        self.buffer.put(state, 0)
        return logits[:, None]

    @torch.no_grad()
    def _step(self, fed: DraftTree, since: int) -> Any:
        """Advance copies of the parents' states by the nodes from `since` on, all in one pass."""
        assert self.buffer is not None
        (b, n), w = fed.tokens.shape, fed.nodes - since
        self.check_width(b * w)
        if n > self.buffer.nodes:
            self.buffer = self.buffer.grown(n)
        device = self.state.conv.device
        state = self.buffer.take(tensor(fed.parents[:, since:], device))
        tokens = tensor(self.drafter.words.feed(fed.tokens[:, since:]), device)
        logits, state = self.drafter.advance(tokens.reshape(b * w, 1), state)
        self.buffer.put(state, since)
        return logits.unflatten(0, (b, w))


def load(target: Target, tokenizer: Any, path: str, request: Request) -> MambaDrafter | HybridDrafter | TextDrafter:
    """The drafter of a folder or hub id."""
    folder = str(folder_of(path))
    net = _net(folder, target, request.dtype, request.vocab == "same")
    rows = int(net.config.vocab_size)

    def build(words: Words) -> MambaDrafter | HybridDrafter:
        return _built(net, words, request, target)

    if request.vocab != "same":
        check_whole(net, folder)
        made: TextDrafter = across(request.vocab, folder, rows, target, tokenizer, build)
        return made
    request.check_rows(path, folder, rows, target, tokenizer)
    return build(same(net, path, target))


def _built(net: Any, words: Words, request: Request, target: Target) -> MambaDrafter | HybridDrafter:
    """Mamba and Mamba-2 have a forward of their own here; whatever else is recurrent, the stock one."""
    growth, batch = request.growth, request.batch
    if net.config.model_type in ssm.KINDS:
        ssm.check(net)
        return MambaDrafter(net, words, growth, batch)
    from . import _hybrid

    _hybrid.check(net)
    return _hybrid.HybridDrafter(net, words, growth, batch)


def _net(path: str, target: Target, dtype: str, drafting: bool) -> Any:
    from ..backends.torch.load import from_pretrained

    kind = dtype_of(target) if dtype == "auto" else getattr(torch, dtype)
    net: Any = _original(path) if original(path) else from_pretrained(path, kind, target.device, False, {})
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
