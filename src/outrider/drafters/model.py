"""Speculative sampling with a draft model (Leviathan et al. 2023; Chen et al. 2023): any causal LM, or T5 for T5.

The draft model lives in a tree cache of its own, which holds the committed text only. Each round feeds it the tokens
it has not seen, then grows a tree over its own cache, one pass per depth:

    dynamic  EAGLE-2's growth: expand the `width` best nodes of the last layer, re-rank, keep the best
    best     the same, best first: expand the `width` best nodes that were not expanded yet, whatever their depth
    static   a fixed shape (N1, ..., Ng); a chain of gamma tokens is (1, 1, ..., 1)

Under `coupled` candidates are ranked by the shared noise of their positions. Under `rejection` a static shape is
sampled and keeps its laws q; a dynamic tree offers deterministic children, judged as point masses (a sampled tree must
never be re-ranked or cut by its own scores).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .. import sampling
from ..tree import append, chain, from_template, grow, root_only, template
from ..types import Budget, Drafting, DraftTree, InputError, Round, Rows, Session, Target


@dataclass(frozen=True)
class ModelDrafter:
    """A draft model. `vocab` is the target's: rows that pad either vocabulary are cut or filled."""

    model: Target
    vocab: int
    tree: str = "dynamic"  # dynamic | best | static | chain
    shape: tuple[int, ...] = (3, 2, 2, 1, 1)
    depth: int = 16  # at most; the budget decides below it
    width: int = 4
    kids: int = 4
    scale: float = 1.0  # s of the confidences softmax(r / s)
    replacement: bool = False
    taps: tuple[int, ...] = ()

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> ModelDrafting:
        session = self.model.open(capacity + 2 * sum(self.shape) + self.width * 16)
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
        fed = self.fed.gather(1, round.path.clamp(min=0)).masked_fill(round.path < 0, -1)
        inside = torch.arange(fed.shape[1], device=fed.device) < round.count[:, None]
        kept = ((fed >= 0) & inside).long().cumprod(1).sum(1)
        self.session.keep(fed.clamp(min=0), kept)
        self.pending = [tokens[k - 1 :] for tokens, k in zip(round.tokens, kept.tolist(), strict=True)]
        self.fed = None

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        logits = self._read(rows)
        depth = min(budget.depth, self.drafter.depth, max(rows.room) - 1)
        shape = self._shape(budget, depth, rows)
        if shape is None:
            return self._dynamic(rows, logits, budget, depth)
        return self._static(rows, logits, shape)

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
        return self._fit(logits[torch.arange(len(rows), device=last.device), last][:, None])

    def _fit(self, logits: Tensor) -> Tensor:
        """Logits [b, w, draft vocab] over the target's vocabulary."""
        missing = self.drafter.vocab - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[..., : self.drafter.vocab]

    def _shape(self, budget: Budget, depth: int, rows: Rows) -> tuple[int, ...] | None:
        """The static shape of this round, fixed before anything is drawn; None asks for a dynamic tree."""
        if budget.shape is not None:
            return budget.shape[:depth]
        if self.drafter.tree in ("dynamic", "best"):
            return None
        shape = (1,) * depth if self.drafter.tree == "chain" else self.drafter.shape[:depth]
        while shape and len(template(shape)) > budget.nodes:
            shape = shape[:-1]
        return shape

    def _step(self, fed: DraftTree, since: int) -> Tensor:
        limit = self.drafter.model.vocab - 1
        if self.drafter.vocab > self.drafter.model.vocab:
            fed = replace(fed, tokens=fed.tokens.clamp(max=limit))
        return self._fit(self.session.forward(fed, since=since).logits)

    def _dynamic(self, rows: Rows, first: Tensor, budget: Budget, depth: int) -> DraftTree:
        drafter = self.drafter

        def expand(fed: DraftTree, since: int) -> tuple[Tensor, Tensor]:
            logits = self._step(fed, since) if since else first
            below = fed.depths[:, since:] + 1 if drafter.tree == "best" else fed.deepest + 1
            return sampling.rank(logits, rows, below, drafter.kids, drafter.scale)

        floor, reach = (budget.floor, budget.reach) if rows.rule == "coupled" else (0.0, 0.0)
        frontier: Literal["layer", "any"] = "any" if drafter.tree == "best" else "layer"
        tree, self.fed = grow(
            rows.root,
            expand,
            depth=depth,
            width=drafter.width,
            nodes=budget.nodes,
            floor=floor,
            reach=reach,
            frontier=frontier,
        )
        return tree

    def _static(self, rows: Rows, logits: Tensor, shape: tuple[int, ...]) -> DraftTree:
        sampled = rows.rule in ("rejection", "block") and rows.hot
        fed, since, tokens = root_only(rows.root), 0, []
        laws: list[Tensor] = []
        for depth, n in enumerate(shape, 1):
            logits = self._step(fed, since) if since else logits
            children = self._children(rows, logits, depth, n, since, laws if sampled else None)
            tokens.append(children.flatten(1))
            if depth < len(shape):
                parents = torch.arange(since, fed.nodes, device=children.device).repeat_interleave(n)
                since = fed.nodes
                fed = append(fed, tokens[-1], parents.expand(len(rows), -1))
        parents_of = template(shape)
        index = torch.arange(len(parents_of), device=rows.root.device).expand(len(rows), -1)
        self.fed = index.masked_fill(index >= fed.nodes, -1)
        flat = torch.cat(tokens, 1) if tokens else rows.root.new_empty(len(rows), 0)
        q = torch.cat(laws, 1) if laws else None
        return from_template(rows.root, flat, parents_of, q=q, replacement=self.drafter.replacement and q is not None)

    def _children(
        self, rows: Rows, logits: Tensor, depth: int, n: int, first: int, laws: list[Tensor] | None
    ) -> Tensor:
        """n children of each node [b, w, n]: drawn from q, whose laws are kept, or the best n by shared noise."""
        if laws is None:
            return sampling.rank(logits, rows, depth, n, self.drafter.scale, warp=n == 1)[0]
        q = torch.stack([sampling.law(logits[i], s) for i, s in enumerate(rows.sampling)])
        laws.append(q)
        return sampling.sample(q, n, rows, first, self.drafter.replacement)


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    tree: str = "dynamic",
    shape: tuple[int, ...] = (3, 2, 2, 1, 1),
    depth: int = 16,
    width: int = 4,
    kids: int = 4,
    scale: float = 1.0,
    replacement: bool = False,
    dtype: str = "auto",
) -> ModelDrafter:
    """A draft model from a folder or hub id; without a path, the demo draft model."""
    from ..targets import load_target, load_tokenizer

    if tree not in ("dynamic", "best", "static", "chain"):
        raise InputError(f"tree must be dynamic, best, static or chain, not {tree!r}")
    if min(shape, default=0) < 1 or min(depth, width, kids) < 1 or not 0 < scale < float("inf"):
        raise InputError("the shape, depth, width, kids and scale of a draft model must be positive")
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
    return ModelDrafter(draft, target.vocab, tree, shape, depth, width, kids, scale, replacement)


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
