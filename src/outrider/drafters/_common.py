"""What the drafters share: corpora, the depth that is of use, forking the state of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..core.protocols import Round
from ..core.types import Budget, Rows
from ..params import InputError


def no_file(drafter: str, path: str | None) -> None:
    """Refuse a path where none is read."""
    if path is not None:
        raise InputError(f"the drafter {drafter} reads no file; leave out {path!r}")


def corpus(drafter: str, path: str, tokenizer: Any) -> list[int]:
    """The tokens of a UTF-8 text file."""
    if tokenizer is None:
        raise InputError(f"{drafter}:{path} needs the target's tokenizer to read the corpus")
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"the corpus {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"the corpus {path} is not UTF-8 text (byte {error.start}); convert it first") from None
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if not tokens:
        raise InputError(f"the corpus {path} is empty; give a file with text, or no file")
    return list(tokens)


def useful(rows: Rows, budget: Budget) -> list[int]:
    """How deep a draft may go in each row: within the budget, and one less than remains, for the target's own token."""
    depth = budget.depth if budget.nodes > 1 else 0
    return [max(0, min(depth, remaining - 1)) for remaining in rows.remaining]


def accepted(fed: Sequence[Sequence[int]], round: Round) -> list[list[int]]:
    """Each row's accepted path from the root on, as far as the drafter fed it, in the indices of the fed nodes.
    `fed`: of each node of its tree, -1 for one that it did not feed."""
    paths = []
    for row, path in zip(fed, round.paths, strict=True):
        places = [row[node] if node >= 0 else -1 for node in path]
        paths.append(list(takewhile(lambda place: place >= 0, places)))
    return paths


@runtime_checkable
class Forks(Protocol):
    """A state that can be copied for a row that is split."""

    def fork(self: S) -> S: ...


S = TypeVar("S", bound=Forks)


def selected(states: list[S], index: Sequence[int]) -> list[S]:
    """State i := old state index[i]. The first use moves it; repeats are forks that share nothing mutable."""
    seen: set[int] = set()
    out = []
    for i in index:
        out.append(states[i].fork() if i in seen else states[i])
        seen.add(i)
    return out
