"""Speculative sampling with a draft model (Leviathan et al. 2023; Chen et al. 2023): any causal LM, or T5 for T5.

The draft model lives in a tree cache of its own, which holds the committed text only. Each round feeds it the tokens
it has not seen, then grows a tree over its own cache, one pass per depth (`_growth.py`). Beyond its own context it goes
on as far as its positions carry it; what it guesses there is judged like all else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..backends.torch import products, vocabulary
from ..core.protocols import Drafting, Round, Session, Target
from ..core.tree import chain
from ..core.types import Budget, DraftTree, Rows
from ..nets.compiled import runs
from ..params import InputError
from . import _ranks
from ._common import accepted
from ._growth import WIDEST, Growth
from ._text import TextDrafter
from ._words import WAYS, Same, Shared, Spelling, Words


@dataclass(frozen=True)
class ModelDrafter:
    """A draft model, and how its tokens stand to the target's."""

    model: Target
    words: Words
    growth: Growth
    taps: tuple[int, ...] = ()

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> ModelDrafting:
        slots = capacity * self.words.longest + 2 * sum(self.growth.shape) + (self.growth.width or WIDEST) * 16
        session = self.model.open(slots)
        for _ in session.prefill([self.words.read(p) for p in prompts]):
            pass
        return ModelDrafting(self, session, [[] for _ in prompts])


@dataclass
class ModelDrafting:
    """The draft model's session, and the tokens that it has not read yet."""

    drafter: ModelDrafter
    session: Session
    pending: list[list[int]]  # committed tokens that the draft model has not read, in its own words
    fed: Tensor | None = None  # [b, n] node -> index among the fed nodes of the last proposal, -1: not fed

    def observe(self, round: Round) -> None:
        read = self.drafter.words.read
        if self.fed is None:
            for row, tokens in zip(self.pending, round.tokens, strict=True):
                row.extend(read(tokens))
            return
        # Of the accepted path, the part that the draft model fed itself is in its cache already.
        fed, kept = accepted(self.fed, round)
        self.session.keep(fed.clamp(min=0), kept)
        self.pending = [read(tokens[k - 1 :]) for tokens, k in zip(round.tokens, kept.tolist(), strict=True)]
        self.fed = None

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        words, growth = self.drafter.words, self.drafter.growth
        tree, self.fed = growth.propose(rows, self._read(rows), self._step, budget, words.names, words.vocab)
        return tree

    def tell(self, settled: list[list[int]], tails: list[list[int]], rows: Rows, budget: Budget) -> DraftTree:
        """For `_text.py`: a temporary tree below tokens of its own; the state is taken back to `settled`."""
        texts = [p + s for p, s in zip(self.pending, settled, strict=True)]
        self.pending = [text + tail for text, tail in zip(texts, tails, strict=True)]
        lengths = [n + len(text) for n, text in zip(self.session.lengths.tolist(), texts, strict=True)]
        tree, _ = self.drafter.growth.propose(rows, self._read(rows), self._step, budget)
        self.session.rewind(lengths)
        self.pending = [[] for _ in lengths]
        return tree

    def candidates(self, rows: Rows, truth: Tensor, k: int) -> Tensor:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `tuning.py`."""
        first, self.pending = self._read(rows), [row[-1:] for row in self.pending]
        return _ranks.below(rows, first, self._step, truth, k, self.drafter.words.names)

    def select(self, index: Sequence[int]) -> None:
        self.session.select(index)
        self.pending = [list(self.pending[i]) for i in index]

    def join(self, other: Drafting) -> None:
        assert isinstance(other, ModelDrafting)
        self.session.join(other.session)
        self.pending += other.pending

    def _read(self, rows: Rows) -> Tensor:
        """Feed the pending tokens and the root as one chain, keep all but the root (it stays at node 0's slot)."""
        trunk = chain(self.pending, rows.root.device)
        logits = self.session.forward(trunk).logits
        last = trunk.size - 1
        index = torch.arange(trunk.nodes, device=last.device).expand(len(rows), -1)
        self.session.keep(index, last)
        return self.drafter.words.law(logits[torch.arange(len(rows), device=last.device), last][:, None])

    def _step(self, fed: DraftTree, since: int) -> Tensor:
        words = self.drafter.words
        fed = replace(fed, tokens=words.feed(fed.tokens))
        return words.law(self.session.forward(fed, since=since).logits)


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
    dtype: str = "auto",
    vocab: str = "same",
) -> ModelDrafter | TextDrafter:
    """A draft model by its name, as for a target; without one, the demo draft model.

    `vocab`: same (one tokenizer), shared (draft the tokens that both have) or text (draft text).
    """
    from ..backends.torch import HFTarget, SeqTarget, load_target, load_tokenizer

    growth = Growth(tree, shape, (), depth, width, top_k, 1 << 30, scale, replacement=replacement)
    if target is None:
        raise InputError("a draft model needs the target that it drafts for")
    where = "demo/draft" if path in (None, "demo") else str(path)
    check_way(vocab)
    if tokenizer is not None and vocab == "same":
        check_tokenizer(where, tokenizer, load_tokenizer(where))
    kind = _precision(target) if dtype == "auto" else dtype
    native = None if runs(target) else False
    draft = load_target(where, dtype=kind, device=str(target.device), native=native, drafting=vocab == "same")
    if draft.dtype == torch.float32 and not runs(draft):
        products.halve(draft.model)
    if isinstance(draft, SeqTarget) != isinstance(target, SeqTarget):
        raise InputError(f"{where} and the target are not of one kind: both must be encoder-decoder models, or neither")
    if isinstance(draft, HFTarget) and isinstance(target, HFTarget) and target.graphs is not None:
        draft.compile(target.graphs.patience)
        if target.graphs.patience == 0:
            draft.warm()
    if vocab == "same":
        return ModelDrafter(draft, same(draft.model, where, target), growth)
    if not isinstance(draft, HFTarget):
        raise InputError("another tokenizer is for decoder-only models; leave vocab out")
    check_whole(draft.model, where)
    return across(vocab, where, draft.vocab, target, tokenizer, lambda words: ModelDrafter(draft, words, growth))


def _precision(target: Any) -> Any:
    """What a draft model is loaded in: the target's precision; or its own, where the target's passes compute in float32
    but read weights of 16 bits. (This processor has no 16-bit products then, so the draft model is loaded alike.)"""
    forward = target.native if runs(target) else None
    return target.dtype if forward is None or forward.weights.dtype == forward.kept else "auto"


def same(net: Any, where: str, target: Target) -> Same:
    """The words of a draft model that has the target's tokenizer, and perhaps a draft vocabulary."""
    ids = vocabulary.ids_named(net)
    if ids is None:
        return Same(int(net.get_output_embeddings().weight.shape[0]), target.vocab)
    if int(ids.max()) >= target.vocab:
        raise InputError(f"{where} drafts token {int(ids.max())} and the target has {target.vocab}; use its own target")
    return Same(int(net.get_input_embeddings().weight.shape[0]), target.vocab, ids)


def check_whole(net: Any, where: str) -> None:
    """Refuse a draft vocabulary where tokens are translated: what it leaves out was never learned."""
    ids = vocabulary.ids_named(net)
    if ids is not None:
        raise InputError(f"{where} learned to draft {len(ids)} of its tokens, with its own tokenizer; leave vocab out")


def across(way: str, where: str, rows: int, target: Target, tokenizer: Any, build: Callable[[Words], Any]) -> Any:
    """A drafter of `rows` tokens whose tokenizer is another than the target's: `build` makes it for its words."""
    from ..backends.torch import load_tokenizer

    theirs = load_tokenizer(where)
    if tokenizer is None or theirs is None:
        raise InputError(f"vocab={way} needs the tokenizers of the target and of {where}")
    here, there = Spelling.of(tokenizer, "the target"), Spelling.of(theirs, where)
    if way == "text":
        return TextDrafter(build(Same(rows, rows)), here, there, target.vocab)
    return build(Shared.of(here, there, rows, target.vocab, where, target.device))


def check_way(way: str) -> None:
    """Raise InputError for a way of translating vocabularies that there is not."""
    if way not in WAYS:
        raise InputError(f"vocab is {', '.join(WAYS)}, not {way!r}")


def check_tokenizer(where: str, target: Any, draft: Any) -> None:
    """Refuse a draft model whose tokens mean something else than the target's."""
    if target is None or draft is None:
        return
    a, b = target.get_vocab(), draft.get_vocab()
    same = all(b.get(token, index) == index for token, index in a.items())
    if not same or len(set(a) & set(b)) < 0.99 * min(len(a), len(b)):
        raise InputError(
            f"the tokenizer of {where} differs from the target's; give the same one, or say how to draft across: "
            "vocab=shared or vocab=text"
        )
