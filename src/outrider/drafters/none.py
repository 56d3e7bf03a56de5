"""No draft: plain decoding in the same loop. It is the baseline of every benchmark and what "never slower" falls to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.protocols import Drafting, Round, Target
from ..core.tree import root_only
from ..core.types import Budget, DraftTree, Rows
from ._common import refuse


@dataclass(frozen=True)
class NoneDrafter:
    """Drafts nothing: plain decoding."""

    taps: tuple[int, ...] = ()
    reopens: bool = True

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> NoneDrafting:
        return NoneDrafting()


@dataclass
class NoneDrafting:
    """It has no state, so there is nothing to select or join."""

    plain: ClassVar[bool] = True  # a budget has nothing to work out

    def observe(self, round: Round) -> None:
        pass

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        return root_only(rows.root)

    def select(self, index: Sequence[int]) -> None:
        pass

    def join(self, other: Drafting) -> None:
        assert isinstance(other, NoneDrafting)


def load(target: Target | None, tokenizer: Any = None, path: str | None = None, **unknown: Any) -> NoneDrafter:
    """Plain decoding; it has no options and no file."""
    refuse("none", unknown, path)
    return NoneDrafter()
