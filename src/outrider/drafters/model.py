"""Speculative sampling with a draft model (Leviathan et al. 2023; Chen et al. 2023): any causal LM, or T5 for T5.

The draft model lives in a tree cache of its own, which holds the committed text only. Each round feeds it the tokens
it has not seen, then grows a tree over its own cache, one pass per depth (`_growth.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..tree import chain
from ..types import Budget, Drafting, DraftTree, InputError, Round, Rows, Session, Target
from . import _ranks
from ._common import accepted, fitted
from ._growth import WIDEST, Growth


@dataclass(frozen=True)
class ModelDrafter:
    """A draft model. `vocab` is the target's: rows that pad either vocabulary are cut or filled."""

    model: Target
    vocab: int
    growth: Growth
    taps: tuple[int, ...] = ()

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> ModelDrafting:
        session = self.model.open(capacity + 2 * sum(self.growth.shape) + (self.growth.width or WIDEST) * 16)
        limit = self.model.vocab - 1
        for _ in session.prefill([[min(t, limit) for t in p] for p in prompts]):
            pass
        return ModelDrafting(self, session, [[] for _ in prompts])


@dataclass
class ModelDrafting:
    drafter: ModelDrafter
    session: Session
    pending: list[list[int]]  # committed tokens that the draft model has not read
    fed: Tensor | None = None  # [b, n] node -> index among the fed nodes of the last proposal, -1: not fed

    def observe(self, round: Round) -> None:
        if self.fed is None:
            for row, tokens in zip(self.pending, round.tokens, strict=True):
                row.extend(tokens)
            return
        # Of the accepted path, the part that the draft model fed itself is in its cache already.
        fed, kept = accepted(self.fed, round)
        self.session.keep(fed.clamp(min=0), kept)
        self.pending = [tokens[k - 1 :] for tokens, k in zip(round.tokens, kept.tolist(), strict=True)]
        self.fed = None

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        tree, self.fed = self.drafter.growth.propose(rows, self._read(rows), self._step, budget)
        return tree

    def candidates(self, rows: Rows, truth: Tensor, k: int) -> Tensor:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `tuning.py`."""
        first, self.pending = self._read(rows), [row[-1:] for row in self.pending]
        return _ranks.below(rows, first, self._step, truth, k)

    def select(self, index: Sequence[int]) -> None:
        self.session.select(index)
        self.pending = [list(self.pending[i]) for i in index]

    def join(self, other: Drafting) -> None:
        assert isinstance(other, ModelDrafting)
        self.session.join(other.session)
        self.pending += other.pending

    def _read(self, rows: Rows) -> Tensor:
        """Feed the pending tokens and the root as one chain, keep all but the root (it stays at node 0's slot)."""
        limit = self.drafter.model.vocab - 1
        trunk = chain([[min(t, limit) for t in row] for row in self.pending], rows.root.device)
        logits = self.session.forward(trunk).logits
        last = trunk.size - 1
        index = torch.arange(trunk.nodes, device=last.device).expand(len(rows), -1)
        self.session.keep(index, last)
        return fitted(logits[torch.arange(len(rows), device=last.device), last][:, None], self.drafter.vocab)

    def _step(self, fed: DraftTree, since: int) -> Tensor:
        limit = self.drafter.model.vocab - 1
        if self.drafter.vocab > self.drafter.model.vocab:
            fed = replace(fed, tokens=fed.tokens.clamp(max=limit))
        return fitted(self.session.forward(fed, since=since).logits, self.drafter.vocab)


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    tree: str = "dynamic",
    shape: tuple[int, ...] = (3, 2, 2, 1, 1),
    depth: int = 16,
    width: int = 0,
    kids: int = 4,
    scale: float = 1.0,
    replacement: bool = False,
    dtype: str = "auto",
) -> ModelDrafter:
    """A draft model from a folder or hub id; without a path, the demo draft model."""
    from ..targets import HFTarget, load_target, load_tokenizer

    growth = Growth(tree, shape, (), depth, width, kids, 1 << 30, scale, replacement=replacement)
    if target is None:
        raise InputError("a draft model needs the target that it drafts for")
    where = path if path is not None else _demo_path()
    if tokenizer is not None:
        check_tokenizer(where, tokenizer, load_tokenizer(where))
    model = getattr(target, "model", None)
    device = "auto" if model is None else str(model.device)
    draft = load_target(where, dtype=_dtype_like(target) if dtype == "auto" else dtype, device=device)
    if type(draft) is not type(target) and model is not None:
        raise InputError(f"{where} and the target are not of one kind: both must be encoder-decoder models, or neither")
    if isinstance(draft, HFTarget) and getattr(target, "graphs", None) is not None:
        draft.compile()
        draft.warm()
    return ModelDrafter(draft, target.vocab, growth)


def check_tokenizer(where: str, target: Any, draft: Any) -> None:
    """Refuse a draft model whose tokens mean something else than the target's."""
    if target is None or draft is None:
        return
    a, b = target.get_vocab(), draft.get_vocab()
    same = all(b.get(token, index) == index for token, index in a.items())
    if not same or len(set(a) & set(b)) < 0.99 * min(len(a), len(b)):
        raise InputError(f"the tokenizer of {where} differs from the target's; a draft model needs the same tokenizer")


def _demo_path() -> str:
    from importlib.resources import files

    return str(files("outrider") / "demo" / "draft")


def _dtype_like(target: Target) -> str:
    """The draft model computes in the target's own precision."""
    model = getattr(target, "model", None)
    return "auto" if model is None else str(next(model.parameters()).dtype).removeprefix("torch.")
