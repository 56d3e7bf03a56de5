"""No draft: plain decoding in the same loop. It is the baseline of every benchmark and what "never slower" falls to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.protocols import Drafter, Drafting, Round, Target
from ..core.tree import root_only
from ..core.types import Budget, DraftTree, Rows
from ._common import no_file


@dataclass(frozen=True)
class NoneDrafter(Drafter):
    """Drafts nothing: plain decoding."""

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> NoneDrafting:
        return NoneDrafting()


@dataclass
class NoneDrafting(Drafting):
    """It has no state, so there is nothing to select or join."""

    plain = True  # a budget has nothing to work out

    def observe(self, round: Round) -> None:
        pass

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        return root_only(rows.root)

    def select(self, index: Sequence[int]) -> None:
        pass

    def join(self, other: Drafting) -> None:
        assert isinstance(other, NoneDrafting)


def load(target: Target | None, tokenizer: Any = None, path: str | None = None) -> NoneDrafter:
    """Plain decoding; it has no options and no file."""
    no_file("none", path)
    return NoneDrafter()
