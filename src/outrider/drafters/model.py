"""Speculative sampling with a draft model (Leviathan et al. 2023; Chen et al. 2023): any causal LM, or T5 for T5.

The draft model lives in a tree cache of its own, which holds the committed text only. Each round feeds it the tokens
it has not seen, then grows a tree over its own cache, one pass per depth (`_growth.py`). Beyond its own context it goes
on as far as its positions carry it; what it guesses there is judged like all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..backends.choose import PRECISIONS, readable
from ..backends.native.draft_vocab import ids_in
from ..backends.native.target import NativeTarget
from ..core.growth import Indices
from ..core.protocols import Drafting, Round, Session, Target
from ..core.tree import chain
from ..core.types import Array, Budget, DraftTree, Rows
from ..names import check_native, find, weights_of
from ..params import INTEGERS, InputError, check_weights
from . import _ranks
from ._common import accepted
from ._growth import WIDEST, Grown, Growth
from ._text import TextDrafter, across, check_tokenizer, check_way, tokenizer_of
from ._words import Same, Words, check_names

PIECE = 64  # tokens that are read at once when drafting begins again


@dataclass(frozen=True)
class ModelDrafter(Grown):
    """A draft model, and how its tokens stand to the target's."""

    model: Target
    words: Words
    growth: Growth

    @property
    def models(self) -> tuple[Target, ...]:
        """The draft model."""
        return (self.model,)

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> ModelDrafting:
        slots = capacity * self.words.longest + 2 * sum(self.growth.shape) + (self.growth.width or WIDEST) * 16
        session = self.model.open(slots)
        for _ in session.prefill([self.words.read(p) for p in prompts]):
            pass
        return ModelDrafting(self, session, [[] for _ in prompts])


@dataclass
class ModelDrafting(Drafting):
    """The draft model's session, and the tokens that it has not read yet."""

    drafter: ModelDrafter
    session: Session
    pending: list[list[int]]  # committed tokens that the draft model has not read, in its own words
    fed: Indices | None = None  # of the last proposal

    def observe(self, round: Round) -> None:
        read = self.drafter.words.read
        if self.fed is None:
            for row, tokens in zip(self.pending, round.tokens, strict=True):
                row.extend(read(tokens))
            return
        # Of the accepted path, the part that the draft model fed itself is in its cache already.
        kept = accepted(self.fed, round)
        self.session.keep(kept)
        self.pending = [read(tokens[len(path) - 1 :]) for tokens, path in zip(round.tokens, kept, strict=True)]
        self.fed = None

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        words, growth = self.drafter.words, self.drafter.growth
        tree, self.fed = growth.propose(rows, self._read(rows), self._step, budget, words.names, words.vocab)
        return tree

    def propose_after(self, settled: list[list[int]], tails: list[list[int]], rows: Rows, budget: Budget) -> DraftTree:
        """For `_text.py`: a temporary tree below tokens of its own; the state is taken back to `settled`."""
        texts = [p + s for p, s in zip(self.pending, settled, strict=True)]
        self.pending = [text + tail for text, tail in zip(texts, tails, strict=True)]
        lengths = [n + len(text) for n, text in zip(self.session.lengths, texts, strict=True)]
        tree, _ = self.drafter.growth.propose(rows, self._read(rows), self._step, budget)
        self.session.rewind(lengths)
        self.pending = [[] for _ in lengths]
        return tree

    def candidates(self, rows: Rows, truth: Array, k: int) -> Array:
        """The k candidates at each depth [b, d, k] below a path of known tokens: for `training/tree_tuning.py`."""
        first, self.pending = self._read(rows), [row[-1:] for row in self.pending]
        return _ranks.below(rows, first, self._step, truth, k, self.drafter.words.names)

    def select(self, index: Sequence[int]) -> None:
        self.session.select(index)
        self.pending = [list(self.pending[i]) for i in index]

    def join(self, other: Drafting) -> None:
        assert isinstance(other, ModelDrafting)
        self.session.join(other.session)
        self.pending += other.pending

    def _read(self, rows: Rows) -> Any:
        """Feed the pending tokens and the root as one chain, keep all but the root (it stays at node 0's slot). Many
        are fed in pieces, since the memory of a chain grows with its square."""
        while max(map(len, self.pending)) > PIECE:
            counts = [min(len(row) - 1, PIECE) for row in self.pending]
            self.session.forward(chain([row[: max(1, n)] for row, n in zip(self.pending, counts, strict=True)]))
            self.session.keep([list(range(n)) for n in counts])
            self.pending = [row[n:] for row, n in zip(self.pending, counts, strict=True)]
        logits = self.session.forward(chain(self.pending)).logits
        last = [len(row) - 1 for row in self.pending]
        self.session.keep([list(range(count)) for count in last])
        return self.drafter.words.restrict(logits[np.arange(len(rows)), last][:, None])

    def _step(self, fed: DraftTree, since: int) -> Any:
        words = self.drafter.words
        fed = replace(fed, tokens=words.feed(fed.tokens))
        return words.restrict(self.session.forward(fed, since=since).logits)


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
    weights: str = "auto",
) -> ModelDrafter | TextDrafter:
    """A draft model by its name, as for a target; without one, the demo draft model.

    `weights`: as for `outrider.load`. `vocab`: same (one tokenizer), shared (draft the tokens that both have) or text
    (draft text).
    """
    growth = Growth(tree, shape, (), depth, width, top_k, 1 << 30, scale, replacement=replacement)
    if target is None:
        raise InputError("a draft model needs the target that it drafts for")
    where = "demo/draft" if path in (None, "demo") else str(path)
    check_way(vocab)
    if tokenizer is not None and vocab == "same":
        check_tokenizer(where, tokenizer, tokenizer_of(where))
    made = _native(where, target, dtype, vocab, weights)
    if made is None and weights in INTEGERS:
        raise InputError(f"{weights} weights of a draft model need native passes, which do not serve {where} here")
    if made is None:
        from ._stock import draft_model

        made = draft_model(where, target, dtype, vocab != "same")
    draft, words = made
    if vocab == "same":
        return ModelDrafter(draft, words, growth)
    return across(vocab, where, draft.vocab, target, tokenizer, lambda words: ModelDrafter(draft, words, growth))


def _native(where: str, target: Target, dtype: str, vocab: str, weights: str) -> tuple[Target, Same] | None:
    """The draft model in passes of our own beside a target that has such, and its words if its tokenizer is the
    target's; None where torch must serve it.

    Its precision is the target's, or its own where the target's passes compute in float32 beside weights of 16 bits:
    this processor has no products of 16 bits then.
    """
    place = find(where)
    if check_weights(weights) == "native":
        check_native(place)
    if not isinstance(target, NativeTarget) or dtype not in PRECISIONS:
        return None
    if dtype == "auto" and not (target.halves and target.precision == "float32"):
        dtype = target.precision
    files = readable(place, "cpu", dtype)
    if files is None:
        return None
    names = ids_in(files.config)
    check_names(names, where, target.vocab, vocab == "same")
    draft = NativeTarget(files, dtype, weights_of(weights, place), names)
    return draft, Same(files.description.vocab, target.vocab, names)
